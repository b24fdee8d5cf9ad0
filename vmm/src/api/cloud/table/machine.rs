//! Rows of the machine: processors, payload, consoles, platform, memory and nodes.

use super::Usual::{Flag, Judged, Nothing, Number, Words};
use super::{Row, derived, honoured, refused};

pub(super) const ROWS: &[&[Row]] = &[CPUS, PAYLOAD, CONSOLES, PLATFORM];
pub(super) const MEMORY: &[&[Row]] = &[ALL_MEMORY, ZONES, NODES];

const CPUS: &[Row] = &[
    honoured("cpus.boot_vcpus", "cpus.count", "vCPUs of the guest"),
    derived(
        "cpus.max_vcpus",
        Judged,
        "no vCPU is added to a running guest, which keeps the boot_vcpus that it starts with",
    )
    .but("cannot start boot_vcpus: max_vcpus is less", "raise max_vcpus to boot_vcpus"),
    honoured("cpus.topology.threads_per_core", "cpus.topology.threads", "threads in a core"),
    honoured(
        "cpus.topology.cores_per_die",
        "cpus.topology.cores",
        "cores in a socket; where max_vcpus is above boot_vcpus, as many as boot_vcpus leaves",
    )
    .but(
        "cannot arrange the vCPUs: threads, cores, dies and packages multiplied are not max_vcpus",
        "change the topology or max_vcpus",
    ),
    refused(
        "cpus.topology.dies_per_package",
        Number(1),
        "cannot divide a package into dies: the guest's topology has none",
        "write 1, and all cores of a package in cores_per_die",
    ),
    honoured("cpus.topology.packages", "cpus.topology.sockets", "sockets"),
    refused(
        "cpus.kvm_hyperv",
        Flag(false),
        "cannot emulate Hyper-V: guests are Linux",
        "leave kvm_hyperv out",
    ),
    derived("cpus.max_phys_bits", Number(46), "the guest has the host's number of address bits"),
    honoured("cpus.affinity[].vcpu", "cpus.affinity[]", "every vCPU has an entry, or none has").but(
        "cannot pin these vCPUs: each from 0 to boot_vcpus - 1 needs one entry",
        "write one entry for each vCPU, or leave affinity out",
    ),
    honoured("cpus.affinity[].host_cpus", "cpus.affinity[]", "host CPUs that the vCPU may run on")
        .but("cannot pin a vCPU to this host CPU: numbers end at 8191", "name CPUs that the host has"),
    refused(
        "cpus.features.amx",
        Flag(false),
        "cannot offer AMX: the process does not request its state from the kernel",
        "leave amx out",
    ),
    refused(
        "cpus.nested",
        Flag(true),
        "cannot hide virtualization from the guest: it has the host's processor",
        "leave nested out, and load kvm_intel or kvm_amd with nested=0 on the host",
    ),
    refused(
        "cpus.core_scheduling",
        Words(&["Vm", "Off"]),
        "cannot keep each vCPU on a core of its own: vCPU threads have no core-scheduling cookie",
        "pin the vCPUs by affinity, or switch SMT off on the host",
    ),
    derived("cpus.profile", Words(&["Host"]), "the guest has the host's processor"),
];

const PAYLOAD: &[Row] = &[
    honoured("payload.kernel", "boot.kernel", "the kernel; a path is relative to the working directory").but(
        "cannot start a machine without a kernel: payload names none",
        "set \"payload\": { \"kernel\": \"FILE\" }",
    ),
    honoured("payload.cmdline", "boot.cmdline", "the command line").but(
        "cannot show the console hvc0: the machine has a serial port and no virtio console",
        "write console=ttyS0 (x86_64) or console=ttyAMA0 (aarch64)",
    ),
    honoured("payload.initramfs", "boot.initramfs", "the initial RAM disk"),
    refused(
        "payload.firmware",
        Nothing,
        "cannot start firmware: a machine starts a Linux kernel",
        "name the kernel in payload.kernel",
    ),
    refused(
        "payload.igvm",
        Nothing,
        "cannot start an IGVM image: guests are not confidential",
        "name the kernel in payload.kernel",
    ),
    refused(
        "payload.host_data",
        Nothing,
        "cannot attest host_data: guests are not confidential",
        "leave host_data out",
    ),
    refused(
        "payload.mrconfigid",
        Nothing,
        "cannot attest mrconfigid: guests are not confidential",
        "leave mrconfigid out",
    ),
    refused(
        "payload.fw_cfg_config",
        Nothing,
        "cannot offer files by fw_cfg: the machine has no such device",
        "put the files into the initramfs",
    ),
];

const CONSOLES: &[Row] = &[
    honoured("serial.mode", "console.type", "the machine's console; with Off the port exists, and its output is discarded"),
    honoured("serial.file", "console.path", "file of the mode File")
        .but("cannot use the file of the serial port: its mode is not File, or names no file", "write both, or neither"),
    honoured("serial.socket", "console.path", "socket of the mode Socket")
        .but("cannot use the socket of the serial port: its mode is not Socket, or names none", "write both, or neither"),
    refused(
        "serial.iommu",
        Flag(false),
        "cannot put the serial port behind an IOMMU: it is no PCI device",
        "leave iommu out",
    ),
    honoured(
        "console.mode",
        "console.type",
        "where serial is Off or Null, the serial port has this mode; beside another output only Off, Null and Tty are taken; if both are Pty, they are one terminal",
    )
    .but(
        "cannot show a second console: the machine has one serial port, and serial has an output",
        "set serial or console to Off",
    ),
    honoured("console.file", "console.path", "file of the mode File")
        .but("cannot use the file of the console: its mode is not File, or names no file", "write both, or neither"),
    honoured("console.socket", "console.path", "socket of the mode Socket")
        .but("cannot use the socket of the console: its mode is not Socket, or names none", "write both, or neither"),
    derived("console.id", Nothing, "the console is the serial port, which has no id"),
    refused(
        "console.iommu",
        Flag(false),
        "cannot put the console behind an IOMMU: it is no PCI device",
        "leave iommu out",
    ),
    derived("console.pci_segment", Number(0), "the console is the serial port, which has no PCI address"),
    derived("console.pci_device_id", Nothing, "the console is the serial port, which has no PCI address"),
    refused(
        "debug_console.mode",
        Words(&["Off"]),
        "cannot offer a debug console: the machine has one serial port",
        "leave debug_console out, and use serial",
    ),
    refused(
        "debug_console.file",
        Nothing,
        "cannot write the debug console: the machine has one serial port",
        "leave debug_console out, and use serial",
    ),
    refused(
        "debug_console.iobase",
        Number(0xe9),
        "cannot place the debug console: the machine has one serial port",
        "leave debug_console out, and use serial",
    ),
];

const PLATFORM: &[Row] = &[
    derived(
        "platform.num_pci_segments",
        Number(1),
        "the plan puts every device into segment 0, with a host bridge for each node",
    ),
    refused(
        "platform.iommu_segments",
        Nothing,
        "cannot give the guest an IOMMU: no machine has one",
        "leave iommu_segments out",
    ),
    refused(
        "platform.iommu_address_width_bits",
        Number(64),
        "cannot give the guest an IOMMU: no machine has one",
        "leave iommu_address_width_bits out",
    ),
    refused("platform.system_serial_number", Nothing, SMBIOS, SMBIOS_HELP),
    refused("platform.system_uuid", Nothing, SMBIOS, SMBIOS_HELP),
    refused("platform.oem_strings", Nothing, SMBIOS, SMBIOS_HELP),
    refused("platform.system_manufacturer", Nothing, SMBIOS, SMBIOS_HELP),
    refused("platform.system_product_name", Nothing, SMBIOS, SMBIOS_HELP),
    refused("platform.system_version", Nothing, SMBIOS, SMBIOS_HELP),
    refused("platform.system_family", Nothing, SMBIOS, SMBIOS_HELP),
    refused("platform.system_sku_number", Nothing, SMBIOS, SMBIOS_HELP),
    refused("platform.chassis_asset_tag", Nothing, SMBIOS, SMBIOS_HELP),
    refused("platform.tdx", Flag(false), CONFIDENTIAL, "leave tdx out"),
    refused("platform.sev_snp", Flag(false), CONFIDENTIAL, "leave sev_snp out"),
    honoured(
        "platform.iommufd",
        "devices[].backend",
        "\"iommufd\" for every host function; without it the plan chooses",
    ),
    refused(
        "platform.iommufd_fd",
        Nothing,
        "cannot use this descriptor: its number has no meaning in another process",
        "set iommufd, and leave iommufd_fd out",
    ),
    honoured("platform.vfio_p2p_dma", "devices[].p2p", "whether host functions reach the BARs of each other"),
    derived("pci_segments", Nothing, "the plan sizes the windows by the devices"),
    refused("iommu", Flag(false), "cannot give the guest an IOMMU: no machine has one", "leave iommu out"),
    refused(
        "watchdog",
        Flag(false),
        "cannot watch the guest: the machine has no watchdog",
        "leave watchdog out",
    ),
    derived("pvpanic", Flag(false), "every machine has pvpanic, by which a panic of the guest ends it"),
    refused("gdb", Flag(false), "cannot serve a debugger: no machine stops for one", "leave gdb out"),
    refused(
        "landlock_enable",
        Flag(false),
        "cannot put a machine of a document into a sandbox: egm-vmm serve has none",
        "leave landlock_enable out; egm-vmm run FILE --sandbox strict confines a machine of egm-vmm's own file",
    ),
    refused(
        "landlock_rules",
        Nothing,
        "cannot put a machine of a document into a sandbox: egm-vmm serve has none",
        "leave landlock_rules out; egm-vmm run FILE --sandbox strict confines a machine of egm-vmm's own file",
    ),
];

const SMBIOS: &str = "cannot set this text of SMBIOS: the machine's own name is its serial number";
const SMBIOS_HELP: &str = "leave it out";
const CONFIDENTIAL: &str = "cannot encrypt the guest's memory: guests are not confidential";

const ALL_MEMORY: &[Row] = &[
    honoured("memory.size", "memory.size", "memory of a machine without zones").but(
        "cannot give this memory to a node: with zones or nodes, all memory is in zones that nodes name",
        "write 0, and the memory as zones",
    ),
    honoured("memory.hugepages", "memory.page_size", "\"2M\" unless hugepage_size names another size"),
    honoured("memory.hugepage_size", "memory.page_size", "2 MiB or 1 GiB").but(
        "cannot use host pages of this size: hugepages is not set, or no pool has them",
        "set hugepages, and write 2097152 or 1073741824",
    ),
    honoured("memory.thp", "memory.page_size", "\"4K\" if thp is false and hugepages is not set"),
    honoured("memory.prefault", "memory.prefault", "whether every page is present before the guest starts"),
    derived("memory.shared", Flag(false), "memory has a descriptor where a device needs one"),
    derived("memory.hotplug_method", Words(&["Acpi"]), NO_HOTPLUG),
    derived("memory.hotplug_size", Nothing, NO_HOTPLUG),
    refused("memory.hotplugged_size", Nothing, ADDED, ADDED_HELP),
    refused("memory.mergeable", Flag(false), MERGED, MERGED_HELP),
    refused("memory.reserve", Flag(false), RESERVED, RESERVED_HELP),
];

const NO_HOTPLUG: &str = "no memory is added to a running guest, which keeps the size that it starts with";
const ADDED: &str = "cannot start with added memory: no memory is added to a guest";
const ADDED_HELP: &str = "add it to size";
const MERGED: &str =
    "cannot merge equal pages of guests: the time of a write would show what another guest has";
const MERGED_HELP: &str = "leave mergeable out";
const RESERVED: &str = "cannot reserve swap space: memory is not accounted in advance";
const RESERVED_HELP: &str = "set prefault, which makes every page present before the guest starts";

const ZONES: &[Row] = &[
    honoured("memory.zones[].id", "memory.nodes[].size", "name by which one entry of numa has the zone").but(
        "cannot place the zone: its id is another zone's, or no entry of numa names it",
        "give it an id of its own, and name it in memory_zones of one entry of numa",
    ),
    honoured(
        "memory.zones[].size",
        "memory.nodes[].size",
        "memory of the node that has the zone; of a slice, its size",
    ),
    honoured("memory.zones[].file", "egm[].region", "/dev/egmN: a slice of that size from the region egmN")
        .but(
            "cannot map this file as memory: only a region of EGM, /dev/egmN, is taken",
            "name /dev/egmN, or leave file out",
        ),
    honoured("memory.zones[].hugepages", "memory.page_size", "one size for all zones without a file").but(
        "cannot give this zone other host pages than memory and the zones before it, or a slice any",
        "write the same hugepages and hugepage_size in all zones without a file",
    ),
    honoured("memory.zones[].hugepage_size", "memory.page_size", "2 MiB or 1 GiB").but(
        "cannot use host pages of this size: hugepages is not set, or no pool has them",
        "set hugepages, and write 2097152 or 1073741824",
    ),
    honoured("memory.zones[].host_numa_node", "memory.nodes[].host_nodes", "host node of the memory").but(
        "cannot bind this zone: zones of one node have one host node, and a slice has its region's",
        "write the same host_numa_node in all zones of a node, and none beside a file",
    ),
    honoured("memory.zones[].prefault", "memory.prefault", "all memory is prefaulted when one zone is"),
    derived("memory.zones[].shared", Flag(false), "memory has a descriptor where a device needs one"),
    derived("memory.zones[].hotplug_size", Nothing, NO_HOTPLUG),
    refused("memory.zones[].hotplugged_size", Nothing, ADDED, ADDED_HELP),
    refused("memory.zones[].mergeable", Flag(false), MERGED, MERGED_HELP),
    refused("memory.zones[].reserve", Flag(false), RESERVED, RESERVED_HELP),
];

const NODES: &[Row] = &[
    honoured("numa[].guest_numa_id", "memory.nodes[].id", "number of the node"),
    honoured("numa[].cpus", "memory.nodes[].cpus", "vCPUs of the node; each vCPU is in one node")
        .but("cannot place this vCPU: numbers end at 8191", "name vCPUs that the guest has"),
    honoured("numa[].distances[].destination", "memory.nodes[].distances", "the other node")
        .but("cannot set this distance: the node has another entry for it", "leave one of the two out"),
    honoured("numa[].distances[].distance", "memory.nodes[].distances", "distance to the other node, 11 to 254"),
    honoured("numa[].memory_zones", "memory.nodes[].size", "zones that are the node's memory: without a file, or one slice").but(
        "cannot give the node this memory: a zone does not exist, has another node, or is a slice beside other memory",
        "name zones without a file, or one slice alone",
    ),
    derived("numa[].pci_segments", Nothing, "the plan gives a host function the guest node with the memory nearest to it"),
    derived("numa[].device_id", Judged, "a node of a device alone is left out: the plan gives a coherent GPU its own eight nodes")
        .but("cannot add a device to a node of processors or memory", "leave device_id out"),
];
