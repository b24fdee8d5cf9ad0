//! The JSON form of a configuration, as written, before its meaning is checked.
//!
//! The doc comments here become the descriptions of the JSON Schema: they address the author of a file.
//!
//! A program makes a [`File`] too, from another monitor's document; [`File::to_json`] writes what an author would.

use std::collections::BTreeMap;
use std::path::PathBuf;

use egm_address::{ByteSize, CpuSet, PciAddress};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::on_reset::OnReset;
use super::pages::PageSize;
use super::schema::{
    BarPlacesText, BarsText, CliqueText, CmdlineText, CpuListText, DistancesText, MacText, NameText,
    PathText, PciText, RegionText, SizeText, SocketText, SomeSizeText, name_alone_too,
};
use super::slot::Slot;
use super::spec::{Access, Architecture, BootTables, EgmForm, MAX_VCPUS, PciTopology, VfioBackend};
use super::tap::TapFile;

/// A virtual machine for egm-vmm. Paths are relative to the file that names them.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "egm-vmm configuration", rename = "Configuration")]
pub struct File {
    /// For editors: this schema.
    #[serde(rename = "$schema")]
    pub(super) _schema: Option<String>,
    /// Another configuration file that this one builds on. Objects are merged key by key; arrays and other
    /// values written here replace those written there.
    #[serde(rename = "extends")]
    pub(super) _extends: Option<String>,
    /// What hardware or use this configuration is for.
    pub description: Option<String>,
    /// Name of the virtual machine: 1 to 64 of A-Z a-z 0-9 . _ -. Default: the file's name without ".json".
    #[schemars(with = "Option<NameText>")]
    pub name: Option<String>,
    /// Instruction set of the guest. Default: this machine's.
    pub arch: Option<Architecture>,
    /// Virtual processors. Default: one.
    pub cpus: Option<CpusFile>,
    /// Ordinary memory and its NUMA nodes. A machine has some, here or in a file that this one extends.
    pub memory: Option<MemoryFile>,
    /// Kernel, initial RAM disk and command line.
    pub boot: Option<BootFile>,
    /// Slices of Extended GPU Memory that the machine owns.
    #[schemars(with = "Option<Vec<EgmFile>>", length(max = 255))]
    pub egm: Option<Vec<Slot<EgmFile>>>,
    /// PCI devices of the machine, 255 at most.
    #[schemars(with = "Option<Vec<DeviceFile>>", length(max = 255))]
    pub devices: Option<Vec<Slot<DeviceFile>>>,
    /// Where the serial console goes. Default: "stdio".
    pub console: Option<ConsoleFile>,
    /// PCI Express address windows and tree.
    pub pcie: Option<PcieFile>,
    /// What a reset by the guest does: "exit" ends the machine, "reboot" starts the guest again in the same machine, with
    /// its slices and devices. Default: "exit" with egm-vmm run, "reboot" with egm-vmm serve.
    pub on_reset: Option<OnReset>,
}

/// Virtual processors and the host CPUs that they run on.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CpusFile {
    /// How many, 1 to 254. Default: the product of the topology.
    #[schemars(range(min = 1, max = MAX_VCPUS))]
    pub count: Option<u32>,
    /// Sockets, cores in each, threads in each core. Default: one socket, one thread a core.
    pub topology: Option<TopologyFile>,
    /// Host CPUs that the vCPUs may run on: one list for all ("0-3,8") or one list for each.
    pub affinity: Option<AffinityFile>,
}

/// Sockets × cores × threads is the number of vCPUs.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TopologyFile {
    /// Sockets in the machine. Default: 1.
    #[schemars(range(min = 1, max = MAX_VCPUS))]
    pub sockets: Option<u32>,
    /// Cores in a socket. Default: what the count leaves.
    #[schemars(range(min = 1, max = MAX_VCPUS))]
    pub cores: Option<u32>,
    /// Threads in a core. Default: 1.
    #[schemars(range(min = 1, max = MAX_VCPUS))]
    pub threads: Option<u32>,
}

/// One list of host CPUs for all vCPUs, or a list for each.
#[expect(missing_docs, reason = "a description here would be in the schema twice")]
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum AffinityFile {
    All(#[schemars(with = "CpuListText")] CpuSet),
    Each(#[schemars(with = "Vec<CpuListText>")] Vec<CpuSet>),
}

/// Ordinary memory and its NUMA nodes.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MemoryFile {
    /// All of it, EGM not counted. Default: what the nodes add up to.
    #[schemars(with = "Option<SizeText>")]
    pub size: Option<ByteSize>,
    /// Host pages behind it: "auto" (transparent huge pages where the host has them), or "4K", or hugetlb
    /// pages of "2M", or of "1G", which Arm kernels with pages of 64 KiB lack. Default: "auto".
    pub page_size: Option<PageSize>,
    /// Touch every page before the guest starts. Default: false.
    pub prefault: Option<bool>,
    /// NUMA nodes. Default: node 0 with all memory and all vCPUs.
    #[schemars(with = "Option<Vec<NodeFile>>", length(min = 1))]
    pub nodes: Option<Vec<Slot<NodeFile>>>,
}

/// A NUMA node with processors, memory or both.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeFile {
    /// Node number, 0 to 255; node 0 exists and has vCPU 0.
    #[schemars(range(max = 255))]
    pub id: u32,
    /// Ordinary memory. Default: none, for processors alone or beside a slice.
    #[schemars(with = "Option<SizeText>")]
    pub size: Option<ByteSize>,
    /// vCPUs, for instance "0-3,8"; each vCPU is in one node. Default: none.
    #[schemars(with = "Option<CpuListText>")]
    pub cpus: Option<CpuSet>,
    /// Host NUMA nodes that its pages come from, for instance "0". Default: any.
    #[schemars(with = "Option<CpuListText>")]
    pub host_nodes: Option<CpuSet>,
    /// ACPI SLIT distance to other nodes by number: 11 to 254. Default: the other node's distance to this one,
    /// or 20.
    #[schemars(with = "Option<DistancesText>")]
    pub distances: Option<BTreeMap<String, u8>>,
    /// ACPI HMAT latency and bandwidth of this memory, by the node of the processors that use it.
    pub access: Option<Vec<Access>>,
}

/// What is booted. Command-line options of `egm-vmm run` take precedence.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BootFile {
    /// Kernel. x86_64: a bzImage, or an ELF vmlinux with a 64-bit or PVH entry; aarch64: an uncompressed Image.
    #[schemars(with = "Option<PathText>")]
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk. Default: none.
    #[schemars(with = "Option<PathText>")]
    pub initramfs: Option<PathBuf>,
    /// Kernel command line, at most 2047 bytes.
    #[schemars(with = "Option<CmdlineText>")]
    pub cmdline: Option<String>,
    /// Form of the description of the machine for its kernel; "device-tree" on aarch64 only. Default: "acpi".
    pub tables: Option<BootTables>,
}

/// A word or a list of words.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a name, or a list of names")]
pub enum OneOrMore {
    /// A word, written without a list.
    One(String),
    /// Several, the preferred one first.
    More(Vec<String>),
}

/// A slice of Extended GPU Memory.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EgmFile {
    /// The host's region by its name, or by its kind: "egm", "reserved", "devdax", "fsdax", "hugetlb"; a list is
    /// tried in its order. "guest-memfd" is memory of the machine's own VM, from Linux 6.18 on. "local", of the kind "memfd",
    /// is memory of the process itself, which every host has.
    #[schemars(with = "RegionText")]
    pub region: OneOrMore,
    /// Bytes: a multiple of its page size and of 2 MiB.
    #[schemars(with = "SomeSizeText")]
    pub size: ByteSize,
    /// Guest NUMA node of the slice: one of its own, or one of "memory"."nodes" without "size", where distances and
    /// access are then set. For a device: the nearest node.
    #[schemars(range(max = 255))]
    pub node: u32,
    /// "memory": RAM of a NUMA node. "device": a PCI function with the slice as its BAR. Default: "memory".
    #[serde(rename = "as")]
    pub form: Option<EgmForm>,
    /// Host pages behind a "local" slice. Default: "auto".
    pub page_size: Option<PageSize>,
    /// Host NUMA nodes that the pages of a "local" slice come from. Default: any.
    #[schemars(with = "Option<CpuListText>")]
    pub host_nodes: Option<CpuSet>,
    /// ACPI SLIT distance to other nodes by number: 11 to 254. Default: 20.
    #[schemars(with = "Option<DistancesText>")]
    pub distances: Option<BTreeMap<String, u8>>,
    /// ACPI HMAT latency and bandwidth of this memory, by the node of the processors that use it.
    pub access: Option<Vec<Access>>,
}

/// A PCI device. Its id, for messages, is unique; the default counts: "blk0", "blk1". A device behind a root
/// port of its own has "root_port": true, the default for vfio and vfio-user.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", rename_all_fields = "snake_case", deny_unknown_fields)]
#[schemars(tag = "type")]
#[expect(missing_docs, reason = "keys of all devices are described above, once")]
pub enum DeviceFile {
    /// virtio block device over a raw file or block device.
    VirtioBlk {
        #[schemars(with = "Option<NameText>")]
        id: Option<String>,
        root_port: Option<bool>,
        /// A raw file or block device.
        #[schemars(with = "PathText")]
        path: PathBuf,
        /// Refuse writes. Default: false.
        read_only: Option<bool>,
    },
    /// virtio network device over a tap interface.
    VirtioNet {
        #[schemars(with = "Option<NameText>")]
        id: Option<String>,
        root_port: Option<bool>,
        /// The host's tap interface, or numbers of descriptors of it that egm-vmm inherits, one for each queue pair.
        tap: TapFile,
        /// The guest's hardware address, unicast. Default: made from the names of machine and device.
        #[schemars(with = "Option<MacText>")]
        mac: Option<String>,
        /// Queue pairs, 1 to 16. Default: the number of descriptors in "tap", or 1.
        #[schemars(range(min = 1, max = 16))]
        queue_pairs: Option<u16>,
        /// Let the kernel's vhost-net move the packets. Default: when the host has it.
        vhost: Option<bool>,
    },
    /// virtio socket device, AF_VSOCK in the guest.
    VirtioVsock {
        #[schemars(with = "Option<NameText>")]
        id: Option<String>,
        root_port: Option<bool>,
        /// The guest's context id, 3 to 4294967294.
        #[schemars(range(min = 3, max = 4_294_967_294_u32))]
        cid: u32,
        /// Unix socket of the userspace form. Default: the kernel's vhost-vsock.
        #[schemars(with = "Option<SocketText>")]
        socket: Option<PathBuf>,
    },
    /// virtio entropy device, with random bytes of the host.
    VirtioRng {
        #[schemars(with = "Option<NameText>")]
        id: Option<String>,
        root_port: Option<bool>,
    },
    /// A PCI function of the host.
    Vfio {
        #[schemars(with = "Option<NameText>")]
        id: Option<String>,
        root_port: Option<bool>,
        /// Address on the host, for instance "0009:01:00.0".
        #[schemars(with = "PciText")]
        function: PciAddress,
        /// Interface of the kernel: "legacy" (a container with type 1) or "iommufd". Default: "auto", by the
        /// host and the machine's memory; "egm-vmm plan" prints which and why.
        backend: Option<VfioBackend>,
        /// Which GPUs an NVIDIA GPU's driver reaches by PCI Express: a number from 0 to 15 that they share, or
        /// "off". Default: "auto", one number for GPUs behind one switch of the host.
        clique: Option<CliqueFile>,
        /// Where 64-bit prefetchable BARs lie: "guest", where the plan puts them; "host", at their host physical
        /// addresses, which Data Direct needs; or an object with "host" or an address for single BARs:
        /// { "2": "host", "4": "0x200000000000" }. Default: "guest".
        bars: Option<BarsFile>,
        /// Whether the machine's other assigned devices reach its BARs. Default: true.
        p2p: Option<bool>,
    },
    /// A device that another process serves.
    VfioUser {
        #[schemars(with = "Option<NameText>")]
        id: Option<String>,
        root_port: Option<bool>,
        /// The server's Unix socket.
        #[schemars(with = "SocketText")]
        socket: PathBuf,
    },
}

/// "auto", "off" or a number.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum CliqueFile {
    /// "auto": one number for GPUs behind one switch of the host. "off": none.
    Name(#[schemars(with = "CliqueText")] String),
    /// A number from 0 to 15 that GPUs share.
    Number(#[schemars(range(max = 15))] u64),
}

/// "guest", "host", or where single BARs lie.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum BarsFile {
    /// "guest": where the plan puts them. "host": at their host physical addresses.
    All(#[schemars(with = "BarsText")] String),
    /// "host" or an address, by register number.
    Each(#[schemars(with = "BarPlacesText")] BTreeMap<String, String>),
}

/// Where the serial console goes; a name alone stands for an object with that "type".
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[schemars(tag = "type", transform = name_alone_too)]
pub enum ConsoleFile {
    /// Standard input and output.
    Stdio,
    /// Output is appended to a file; no input.
    File {
        /// The file, made with mode 0600 when missing; a pipe needs a reader, links and devices are refused.
        #[schemars(with = "PathText")]
        path: PathBuf,
    },
    /// A pseudo-terminal; its name is printed.
    Pty,
    /// A Unix stream socket for one client at a time.
    Socket {
        /// The socket, made at start with mode 0600 and removed at the end.
        #[schemars(with = "SocketText")]
        path: PathBuf,
    },
    /// Output is discarded; no input.
    Null,
}

/// PCI Express address windows and tree.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PcieFile {
    /// Size of the window for 64-bit BARs. Default: what the devices need.
    #[schemars(with = "Option<SomeSizeText>")]
    pub window64: Option<ByteSize>,
    /// "mirror": host functions that share a PCI Express switch share one in the guest, by which NCCL and drivers
    /// choose paths. "flat": each has a root port of its own. Default: "mirror".
    pub topology: Option<PciTopology>,
    /// Root ports with nothing behind them, for devices that are plugged in while the guest runs. Default: none.
    pub spare: Option<SpareFile>,
}

/// Root ports with nothing behind them.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SpareFile {
    /// How many, 1 to 30.
    #[schemars(range(min = 1, max = 30))]
    pub ports: Option<u64>,
    /// Addresses of each for 64-bit prefetchable BARs, a power of two of at least 1 MiB. Default: 1 GiB.
    #[schemars(with = "Option<SomeSizeText>")]
    pub window64: Option<ByteSize>,
    /// Addresses of each for other BARs, a power of two of at least 1 MiB. Default: 16 MiB.
    #[schemars(with = "Option<SomeSizeText>")]
    pub window32: Option<ByteSize>,
}

impl DeviceFile {
    /// The keys that every device has: its id and whether it sits behind a root port.
    pub(super) fn common(&self) -> (Option<&str>, Option<bool>) {
        let (Self::VirtioBlk { id, root_port, .. }
        | Self::VirtioNet { id, root_port, .. }
        | Self::VirtioVsock { id, root_port, .. }
        | Self::VirtioRng { id, root_port }
        | Self::Vfio { id, root_port, .. }
        | Self::VfioUser { id, root_port, .. }) = self;
        (id.as_deref(), *root_port)
    }
}
