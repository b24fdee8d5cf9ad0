//! The JSON form of a machine, as `egm-vmm schema` describes it: what other monitors are told too, and the keys beside.

use std::collections::BTreeMap;

use egm_address::{ByteSize, CpuSet, PciAddress};
use serde::Deserialize;

use super::machine::{Access, Architecture, Backend, Form, PageSize};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    #[serde(rename = "$schema")]
    pub(super) _schema: Option<String>,
    #[serde(rename = "description")]
    pub(super) _description: Option<String>,
    pub(super) name: Option<String>,
    pub(super) arch: Option<Architecture>,
    #[serde(default)]
    pub(super) cpus: CpusFile,
    pub(super) memory: MemoryFile,
    pub(super) boot: BootFile,
    #[serde(default)]
    pub(super) egm: Vec<EgmFile>,
    #[serde(default)]
    pub(super) devices: Vec<DeviceFile>,
    pub(super) console: Option<ConsoleFile>,
    #[serde(default)]
    pub(super) pcie: PcieFile,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CpusFile {
    pub(super) count: Option<u32>,
    #[serde(default)]
    pub(super) topology: TopologyFile,
    pub(super) affinity: Option<OneOrMore<CpuSet>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TopologyFile {
    pub(super) sockets: Option<u32>,
    pub(super) cores: Option<u32>,
    pub(super) threads: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected one, or an array of them")]
pub(super) enum OneOrMore<T> {
    One(T),
    More(Vec<T>),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MemoryFile {
    pub(super) size: Option<ByteSize>,
    #[serde(default)]
    pub(super) page_size: PageSize,
    #[serde(default)]
    pub(super) prefault: bool,
    pub(super) nodes: Option<Vec<NodeFile>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NodeFile {
    pub(super) id: u32,
    #[serde(default)]
    pub(super) size: ByteSize,
    #[serde(default)]
    pub(super) cpus: CpuSet,
    pub(super) host_nodes: Option<CpuSet>,
    #[serde(default)]
    pub(super) distances: BTreeMap<u32, u8>,
    #[serde(default)]
    pub(super) access: Vec<Access>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BootFile {
    pub(super) kernel: String,
    pub(super) initramfs: Option<String>,
    #[serde(default)]
    pub(super) cmdline: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EgmFile {
    pub(super) region: OneOrMore<String>,
    pub(super) size: ByteSize,
    pub(super) node: u32,
    #[serde(rename = "as", default)]
    pub(super) form: Form,
    #[serde(default)]
    pub(super) page_size: PageSize,
    pub(super) host_nodes: Option<CpuSet>,
    #[serde(default)]
    pub(super) distances: BTreeMap<u32, u8>,
    #[serde(default)]
    pub(super) access: Vec<Access>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case", rename_all_fields = "snake_case", deny_unknown_fields)]
pub(super) enum DeviceFile {
    VirtioBlk {
        id: Option<String>,
        root_port: Option<bool>,
        path: String,
        #[serde(default)]
        read_only: bool,
    },
    VirtioNet {
        id: Option<String>,
        root_port: Option<bool>,
        tap: String,
        mac: Option<String>,
        queue_pairs: Option<u16>,
        vhost: Option<bool>,
    },
    VirtioVsock {
        id: Option<String>,
        root_port: Option<bool>,
        cid: u32,
        socket: Option<String>,
    },
    VirtioRng {
        id: Option<String>,
        root_port: Option<bool>,
    },
    Vfio {
        id: Option<String>,
        root_port: Option<bool>,
        function: PciAddress,
        #[serde(default)]
        backend: Backend,
        #[serde(default)]
        clique: CliqueFile,
        #[serde(default)]
        bars: BarsFile,
        p2p: Option<bool>,
    },
    VfioUser {
        id: Option<String>,
        root_port: Option<bool>,
        socket: String,
    },
}

impl DeviceFile {
    /// What every device has, and the start of the id of one that has none.
    pub(super) fn common(&self) -> (Option<&str>, Option<bool>, &'static str) {
        let (id, root_port, prefix) = match self {
            Self::VirtioBlk { id, root_port, .. } => (id, root_port, "blk"),
            Self::VirtioNet { id, root_port, .. } => (id, root_port, "net"),
            Self::VirtioVsock { id, root_port, .. } => (id, root_port, "vsock"),
            Self::VirtioRng { id, root_port } => (id, root_port, "rng"),
            Self::Vfio { id, root_port, .. } => (id, root_port, "vfio"),
            Self::VfioUser { id, root_port, .. } => (id, root_port, "user"),
        };
        (id.as_deref(), *root_port, prefix)
    }
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected \"auto\", \"off\" or a number from 0 to 15")]
pub(super) enum CliqueFile {
    Name(String),
    Number(u8),
}

impl Default for CliqueFile {
    fn default() -> Self {
        Self::Name("auto".to_owned())
    }
}

/// Where BARs lie: a word, or places by register, of which no other monitor can be told.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected \"guest\", \"host\" or an object")]
pub(super) enum BarsFile {
    All(String),
    Each(#[expect(dead_code, reason = "only that there are some counts")] BTreeMap<String, String>),
}

impl Default for BarsFile {
    fn default() -> Self {
        Self::All("guest".to_owned())
    }
}

/// A name alone stands for an object with that "type".
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a name, or an object with a \"type\"")]
pub(super) enum ConsoleFile {
    Name(String),
    Object(ConsoleObject),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ConsoleObject {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) path: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PcieFile {
    pub(super) window64: Option<ByteSize>,
    #[serde(default)]
    pub(super) topology: Topology,
    pub(super) spare: Option<SpareFile>,
}

/// Root ports with nothing behind them. The sizes of their windows are checked; other monitors choose their own.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SpareFile {
    pub(super) ports: u8,
    #[serde(rename = "window64")]
    _window64: Option<ByteSize>,
    #[serde(rename = "window32")]
    _window32: Option<ByteSize>,
}

/// Whether the guest sees the host's switches: other monitors are given one root port for each device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Topology {
    #[default]
    Mirror,
    Flat,
}
