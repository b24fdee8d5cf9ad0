//! Rows of devices.

use super::Usual::{Flag, Nothing, Number, Words};
use super::{Row, derived, honoured, refused};

/// The rows that every PCI device has.
macro_rules! address {
    ($device:literal) => {
        &[
            honoured(concat!($device, ".id"), "devices[].id", "name of the device"),
            refused(
                concat!($device, ".iommu"),
                Flag(false),
                "cannot put the device behind an IOMMU: no machine has one",
                "leave iommu out",
            ),
            derived(concat!($device, ".pci_segment"), Number(0), "the plan puts every device into segment 0"),
            refused(
                concat!($device, ".pci_device_id"),
                Nothing,
                "cannot choose the device's address: the plan does",
                "leave pci_device_id out, and take the address from egm-vmm plan",
            ),
        ]
    };
}

pub(super) const ROWS: &[&[Row]] = &[
    DISKS,
    address!("disks[]"),
    NETS,
    address!("net[]"),
    FUNCTIONS,
    address!("devices[]"),
    SERVERS,
    address!("user_devices[]"),
    VSOCK,
    address!("vsock"),
    RNG,
    address!("rng"),
    OTHERS,
];

const DISKS: &[Row] = &[
    honoured("disks[].path", "devices[].path", "a raw image or a block device").but(
        "cannot serve a disk without a path: nothing is read",
        "name a raw image or a block device in path",
    ),
    honoured("disks[].readonly", "devices[].read_only", "whether writes are refused"),
    refused(
        "disks[].image_type",
        Words(&["Raw", "Unknown"]),
        "cannot read an image of this format: a disk is a raw image",
        "convert it: qemu-img convert -O raw FILE DISK",
    ),
    refused(
        "disks[].direct",
        Flag(false),
        "cannot bypass the host's page cache: disks are read and written through it",
        "leave direct out; what the guest flushes is durable",
    ),
    honoured("disks[].serial", "devices[].id", "a disk's serial number is its id").but(
        "cannot give the disk this serial number: its id is another",
        "write the same text in id and serial, or leave serial out",
    ),
    derived("disks[].num_queues", Number(1), "a disk has one queue"),
    derived("disks[].queue_size", Number(128), "the queue has 256 entries"),
    derived("disks[].sparse", Flag(true), "the guest may give space back in any case"),
    derived(
        "disks[].lock_granularity",
        Words(&["ByteRange"]),
        "the whole file is locked against other machines of ours",
    ),
    derived("disks[].disable_io_uring", Flag(false), "the device uses io_uring where the kernel offers it"),
    derived("disks[].disable_aio", Flag(false), "the device does not use Linux AIO"),
    refused(
        "disks[].backing_files",
        Flag(false),
        "cannot read an image over other images: a disk is a raw image",
        "convert it: qemu-img convert -O raw FILE DISK",
    ),
    refused(
        "disks[].vhost_user",
        Flag(false),
        VHOST_USER,
        "leave vhost_user out, and name the image in path",
    ),
    refused(
        "disks[].vhost_socket",
        Nothing,
        VHOST_USER,
        "leave vhost_socket out, and name the image in path",
    ),
    refused("disks[].rate_limit_group", Nothing, RATE, DISK_RATE_HELP),
    refused("disks[].rate_limiter_config", Nothing, RATE, DISK_RATE_HELP),
    refused(
        "disks[].queue_affinity",
        Nothing,
        "cannot pin the queue: its thread runs where the process may",
        "leave queue_affinity out, and start egm-vmm under taskset",
    ),
    refused("rate_limit_groups", Nothing, RATE, DISK_RATE_HELP),
];

const VHOST_USER: &str = "cannot use a vhost-user server: virtio devices are egm-vmm's own";
const RATE: &str = "cannot limit the rate of a device: no device counts";
const DISK_RATE_HELP: &str = "leave it out, and limit the process by the cgroup's io.max";
const NET_RATE_HELP: &str =
    "leave it out, and limit the tap: tc qdisc add dev TAP root tbf rate 1gbit burst 1mb latency 50ms";

const NETS: &[Row] = &[
    honoured("net[].tap", "devices[].tap", "a tap interface that exists").but(
        "cannot choose the tap: a network device uses one that exists, by its name or by descriptors, not both",
        "name it in tap (ip tuntap add NAME mode tap makes one), or leave tap out and pass descriptors with vm.add-net",
    ),
    honoured(
        "net[].mac",
        "devices[].mac",
        "the guest's hardware address; without it, one made from the names of machine and device",
    ),
    honoured("net[].num_queues", "devices[].queue_pairs", "two queues for each pair").but(
        "cannot divide the queues into pairs: their number is odd, 0 or too large",
        "write an even number from 2 to 32",
    ),
    derived("net[].queue_size", Number(256), "each queue has 256 entries"),
    refused(
        "net[].ip",
        Nothing,
        "cannot give the tap an address: its owner does",
        "leave ip out: ip addr add ADDRESS dev TAP",
    ),
    refused(
        "net[].mask",
        Nothing,
        "cannot give the tap an address: its owner does",
        "leave mask out: ip addr add ADDRESS dev TAP",
    ),
    refused(
        "net[].host_mac",
        Nothing,
        "cannot set the tap's hardware address: its owner does",
        "leave host_mac out: ip link set TAP address MAC",
    ),
    refused(
        "net[].mtu",
        Nothing,
        "cannot report an MTU to the guest: the device has no such feature",
        "leave mtu out, and set it on both sides: ip link set DEVICE mtu N",
    ),
    refused("net[].offload_tso", Flag(true), OFFLOAD, OFFLOAD_HELP),
    refused("net[].offload_ufo", Flag(true), OFFLOAD, OFFLOAD_HELP),
    refused("net[].offload_csum", Flag(true), OFFLOAD, OFFLOAD_HELP),
    refused("net[].vhost_user", Flag(false), VHOST_USER, "leave vhost_user out, and name a tap"),
    refused("net[].vhost_socket", Nothing, VHOST_USER, "leave vhost_socket out, and name a tap"),
    refused("net[].vhost_mode", Words(&["Client"]), VHOST_USER, "leave vhost_mode out, and name a tap"),
    refused(
        "net[].fds",
        Nothing,
        "cannot use these descriptors: their numbers have no meaning in another process",
        "leave fds out, and name the interface in tap, or pass descriptors with vm.add-net (SCM_RIGHTS)",
    ),
    refused("net[].rate_limiter_config", Nothing, RATE, NET_RATE_HELP),
];

const OFFLOAD: &str = "cannot switch an offload off: the tap's are the device's";
const OFFLOAD_HELP: &str = "leave it out, and switch it off in the guest: ethtool -K DEVICE tso off tx off";

const FUNCTIONS: &[Row] = &[
    honoured("devices[].path", "devices[].function", "folder of a PCI function in /sys").but(
        "cannot find a PCI function: the path is no folder of one in /sys",
        "name its folder: /sys/bus/pci/devices/0000:41:00.0",
    ),
    honoured(
        "devices[].x_nv_gpudirect_clique",
        "devices[].clique",
        "0 to 15; without it, GPUs behind one switch have one number",
    ),
    refused(
        "devices[].fd",
        Nothing,
        "cannot use this descriptor: its number has no meaning in another process",
        "name the function's folder in path",
    ),
    refused(
        "devices[].x_exclude_mmap_bars",
        Nothing,
        "cannot leave BARs unmapped: each access would leave the guest",
        "leave x_exclude_mmap_bars out",
    ),
];

const SERVERS: &[Row] =
    &[honoured("user_devices[].socket", "devices[].socket", "socket of a vfio-user server")];

const VSOCK: &[Row] = &[
    honoured("vsock.cid", "devices[].cid", "the guest's context id"),
    honoured("vsock.socket", "devices[].socket", "Unix socket of the host's side"),
];

const RNG: &[Row] = &[refused(
    "rng.src",
    Words(&["/dev/urandom", "/dev/random"]),
    "cannot read entropy from this file: the device takes the kernel's",
    "write /dev/urandom; the kernel mixes a hardware generator in by itself",
)];

const OTHERS: &[Row] = &[
    refused(
        "balloon",
        Nothing,
        "cannot take memory back from the guest: the machine has no balloon",
        "leave balloon out",
    ),
    refused(
        "fs",
        Nothing,
        "cannot share a folder: the machine has no virtio-fs",
        "put the files on a disk; kata-containers: shared_fs = \"none\"",
    ),
    refused(
        "pmem",
        Nothing,
        "cannot offer persistent memory: the machine has no virtio-pmem",
        "name the file in disks, with readonly",
    ),
    refused(
        "generic_vhost_user",
        Nothing,
        VHOST_USER,
        "leave generic_vhost_user out; a vfio-user server is taken in user_devices",
    ),
    refused(
        "vdpa",
        Nothing,
        "cannot use vDPA: virtio devices are egm-vmm's own",
        "assign a virtual function in devices, or use a tap",
    ),
    refused(
        "rtc",
        Nothing,
        "cannot offer a clock by virtio: the machine has no such device",
        "leave rtc out",
    ),
    refused("tpm", Nothing, "cannot offer a TPM: the machine has none", "leave tpm out"),
    refused(
        "pvmemcontrol",
        Nothing,
        "cannot let the guest control its memory: the machine has no such device",
        "leave pvmemcontrol out",
    ),
    refused(
        "ivshmem",
        Nothing,
        "cannot share memory by ivshmem: the machine has no such device",
        "serve the memory by vfio-user, and name the socket in user_devices",
    ),
];
