//! From what was written to what was meant: the rules that an export rests on.
//!
//! `egm-vmm plan` knows more rules, and where each key was written. These are the ones without which a monitor would be
//! told something else than the file says.

use std::collections::{BTreeMap, BTreeSet};

use egm_address::{ByteSize, CpuSet};

use super::file::{
    BarsFile, CliqueFile, ConsoleFile, CpusFile, DeviceFile, EgmFile, File, MemoryFile, NodeFile, OneOrMore,
    Topology,
};
use super::machine::{
    Architecture, Boot, Console, Cpus, Device, DeviceKind, EgmSlice, Form, Machine, Node, PageSize,
};

const MAX_VCPUS: u64 = 254;
const MAX_NODES: u32 = 256;
const MAX_NAME: usize = 64;
/// Slices are multiples of this.
const EGM_UNIT: u64 = 2 << 20;

/// What can be wrong with a machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum Rule {
    #[error("{name:?} cannot be a name: write 1 to {MAX_NAME} of A-Z a-z 0-9 . _ -")]
    Name { name: String },
    #[error("{text:?} has a control character, or is no Unicode")]
    Text { text: String },
    #[error("{count} vCPUs: sockets, cores and threads make {product}, and {MAX_VCPUS} are the most")]
    Topology { count: u64, product: u64 },
    #[error("{lists} CPU lists for {count} vCPUs: write one list for all, or one for each")]
    Affinity { count: u32, lists: usize },
    #[error("{size} is not a multiple of {unit}, or is 0")]
    Size { size: ByteSize, unit: ByteSize },
    #[error("the nodes add up to {sum}, not to {size}")]
    Sum { sum: ByteSize, size: ByteSize },
    #[error("node {id} is there twice, or beyond the last, {}", MAX_NODES - 1)]
    Node { id: u32 },
    #[error("there is no node 0 with vCPU 0")]
    NoNodeZero,
    #[error("vCPU {vcpu} is in no node, in two, or there is none")]
    Vcpu { vcpu: u32 },
    #[error("node {to} is not there, or {distance} is not a distance from 11 to 254")]
    Distance { to: u32, distance: u8 },
    #[error("node {node} has no vCPUs that could look")]
    NoProcessor { node: u32 },
    #[error("id {id} is there twice")]
    Id { id: String },
    #[error("{word:?} is not known")]
    Word { word: String },
    #[error("no name is written")]
    Empty,
}

type Broken = (String, Rule);

/// The machine of `file`, called `stem` where it has no name.
pub(super) fn resolve(file: File, stem: &str) -> Result<Machine, Broken> {
    let at = |key: &str| {
        let key = key.to_owned();
        move |rule| (key, rule)
    };
    let cpus = cpus(file.cpus).map_err(at("cpus"))?;
    let nodes = nodes(&file.memory, cpus.count).map_err(at("memory"))?;
    let slices = file.egm.into_iter().map(slice).collect::<Result<Vec<_>, _>>().map_err(at("egm"))?;
    link(&nodes, &slices)?;
    let name = name(file.name.unwrap_or_else(|| stem.to_owned())).map_err(at("name"))?;
    let devices = devices(file.devices, &name).map_err(at("devices"))?;
    Ok(Machine {
        name,
        arch: file.arch.map_or_else(own_architecture, Ok).map_err(at("arch"))?,
        page_size: file.memory.page_size,
        prefault: file.memory.prefault,
        devices,
        boot: Boot {
            kernel: text(file.boot.kernel).map_err(at("boot.kernel"))?,
            initramfs: file.boot.initramfs.map(text).transpose().map_err(at("boot.initramfs"))?,
            cmdline: text(file.boot.cmdline).map_err(at("boot.cmdline"))?,
        },
        console: console(file.console).map_err(at("console"))?,
        window64: file.pcie.window64,
        spare_ports: file.pcie.spare.map_or(0, |spare| spare.ports),
        mirror: file.pcie.topology == Topology::Mirror,
        cpus,
        nodes,
        slices,
    })
}

fn own_architecture() -> Result<Architecture, Rule> {
    match std::env::consts::ARCH {
        "x86_64" => Ok(Architecture::X86_64),
        "aarch64" => Ok(Architecture::Aarch64),
        other => Err(Rule::Word { word: other.to_owned() }),
    }
}

fn name(name: String) -> Result<String, Rule> {
    let good = (1..=MAX_NAME).contains(&name.len())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
    if good { Ok(name) } else { Err(Rule::Name { name }) }
}

/// Text that an argument can hold and a terminal can show.
fn text(text: String) -> Result<String, Rule> {
    let bad = text.contains(|c: char| c.is_control() || c == char::REPLACEMENT_CHARACTER);
    if bad { Err(Rule::Text { text }) } else { Ok(text) }
}

fn cpus(file: CpusFile) -> Result<Cpus, Rule> {
    let sockets = file.topology.sockets.unwrap_or(1);
    let threads = file.topology.threads.unwrap_or(1);
    let left = |count: u32| count.checked_div(sockets.saturating_mul(threads)).unwrap_or(0).max(1);
    let cores = file.topology.cores.or_else(|| file.count.map(left)).unwrap_or(1);
    let product = [cores, threads].iter().fold(u64::from(sockets), |p, n| p.saturating_mul(u64::from(*n)));
    let count = file.count.map_or(product, u64::from);
    let wrong = Rule::Topology { count, product };
    let count = u32::try_from(count).map_err(|_| wrong.clone())?;
    if u64::from(count) != product || !(1..=MAX_VCPUS).contains(&product) {
        return Err(wrong);
    }
    let vcpus = usize::try_from(count).unwrap_or(usize::MAX);
    let affinity = match file.affinity {
        None => Vec::new(),
        Some(OneOrMore::One(all)) => vec![all; vcpus],
        Some(OneOrMore::More(each)) => each,
    };
    if !affinity.is_empty() && (affinity.len() != vcpus || affinity.iter().any(CpuSet::is_empty)) {
        return Err(Rule::Affinity { count, lists: affinity.len() });
    }
    Ok(Cpus { count, sockets, cores, threads, affinity })
}

fn sized(size: ByteSize, unit: u64) -> Result<ByteSize, Rule> {
    let good = size.get() > 0 && size.get().is_multiple_of(unit);
    if good { Ok(size) } else { Err(Rule::Size { size, unit: ByteSize::new(unit) }) }
}

fn nodes(file: &MemoryFile, vcpus: u32) -> Result<Vec<Node>, Rule> {
    let unit = file.page_size.bytes();
    let Some(written) = &file.nodes else {
        let size = sized(file.size.unwrap_or_default(), unit)?;
        let (distances, access) = (BTreeMap::new(), Vec::new());
        return Ok(vec![Node {
            id: 0,
            size,
            cpus: (0..vcpus).collect(),
            host_nodes: None,
            distances,
            access,
        }]);
    };
    let mut homeless: BTreeSet<u32> = (0..vcpus).collect();
    for vcpu in written.iter().flat_map(|node| node.cpus.iter()) {
        if !homeless.remove(&vcpu) {
            return Err(Rule::Vcpu { vcpu });
        }
    }
    if let Some(&vcpu) = homeless.first() {
        return Err(Rule::Vcpu { vcpu });
    }
    let node = |file: &NodeFile| {
        let empty = file.size.get() == 0 && !file.cpus.is_empty();
        Ok(Node {
            id: file.id,
            size: if empty { file.size } else { sized(file.size, unit)? },
            cpus: file.cpus.clone(),
            host_nodes: file.host_nodes.clone(),
            distances: file.distances.clone(),
            access: file.access.clone(),
        })
    };
    let mut nodes = written.iter().map(node).collect::<Result<Vec<_>, Rule>>()?;
    nodes.sort_by_key(|node| node.id);
    let sum = ByteSize::new(nodes.iter().fold(0, |sum, node| node.size.get().saturating_add(sum)));
    let size = sized(file.size.unwrap_or(sum), unit)?;
    if sum != size {
        return Err(Rule::Sum { sum, size });
    }
    match nodes.first() {
        Some(first) if first.id == 0 && first.cpus.contains(0) => Ok(nodes),
        _ => Err(Rule::NoNodeZero),
    }
}

fn slice(file: EgmFile) -> Result<EgmSlice, Rule> {
    let regions = match file.region {
        OneOrMore::One(region) => vec![region],
        OneOrMore::More(regions) => regions,
    };
    if regions.is_empty() {
        return Err(Rule::Empty);
    }
    Ok(EgmSlice {
        regions: regions.into_iter().map(name).collect::<Result<_, _>>()?,
        size: sized(file.size, EGM_UNIT.max(file.page_size.bytes()))?,
        node: file.node,
        form: file.form,
        page_size: file.page_size,
        host_nodes: file.host_nodes,
        distances: file.distances,
        access: file.access,
    })
}

/// Rules between nodes, those of slices included.
fn link(nodes: &[Node], slices: &[EgmSlice]) -> Result<(), Broken> {
    let memory = slices.iter().filter(|slice| slice.form == Form::Memory);
    let all = nodes
        .iter()
        .map(|node| ("memory.nodes", node.id, &node.distances, &node.access))
        .chain(memory.map(|slice| ("egm", slice.node, &slice.distances, &slice.access)));
    let all: Vec<_> = all.collect();
    let mut ids = BTreeSet::new();
    for &(key, id, _, _) in &all {
        if !ids.insert(id) || id >= MAX_NODES {
            return Err((key.to_owned(), Rule::Node { id }));
        }
    }
    for &(key, id, distances, access) in &all {
        let bad = |(to, distance): &(&u32, &u8)| {
            let good = if **to == id { **distance == 10 } else { (11..=254).contains(*distance) };
            !good || !ids.contains(to)
        };
        if let Some((&to, &distance)) = distances.iter().find(bad) {
            return Err((format!("{key}.distances"), Rule::Distance { to, distance }));
        }
        let looks = |from: u32| nodes.iter().any(|node| node.id == from && !node.cpus.is_empty());
        if let Some(access) = access.iter().find(|access| !looks(access.from)) {
            return Err((format!("{key}.access"), Rule::NoProcessor { node: access.from }));
        }
    }
    Ok(())
}

/// Ids as written, and for the rest the first free of `blk0`, `blk1`, …
fn devices(files: Vec<DeviceFile>, machine: &str) -> Result<Vec<Device>, Rule> {
    let mut used = BTreeSet::new();
    for id in files.iter().filter_map(|file| file.common().0) {
        if !used.insert(name(id.to_owned())?) {
            return Err(Rule::Id { id: id.to_owned() });
        }
    }
    let mut device = |file: DeviceFile| {
        let (id, root_port, prefix) = file.common();
        let id = id.map(str::to_owned).unwrap_or_else(|| {
            let free = (0_usize..).map(|n| format!("{prefix}{n}")).find(|id| !used.contains(id));
            free.unwrap_or_default()
        });
        used.insert(id.clone());
        let behind = matches!(file, DeviceFile::Vfio { .. } | DeviceFile::VfioUser { .. });
        Ok(Device {
            root_port: root_port.unwrap_or(behind),
            kind: kind(file, &format!("{machine}/{id}"))?,
            id,
        })
    };
    files.into_iter().map(&mut device).collect()
}

/// `seed` decides the hardware address where none is written.
fn kind(file: DeviceFile, seed: &str) -> Result<DeviceKind, Rule> {
    Ok(match file {
        DeviceFile::VirtioBlk { path, read_only, .. } => {
            DeviceKind::VirtioBlk { path: text(path)?, read_only }
        }
        DeviceFile::VirtioNet { tap, mac, queue_pairs, vhost, .. } => DeviceKind::VirtioNet {
            tap: text(tap)?,
            mac: mac.map_or_else(|| Ok(own_mac(seed)), |mac| unicast(&mac))?,
            queue_pairs: queue_pairs.unwrap_or(1).max(1),
            vhost,
        },
        DeviceFile::VirtioVsock { cid, socket, .. } => {
            DeviceKind::VirtioVsock { cid, socket: socket.map(text).transpose()? }
        }
        DeviceFile::VirtioRng { .. } => DeviceKind::VirtioRng,
        DeviceFile::Vfio { function, backend, clique, bars, p2p, .. } => DeviceKind::Vfio {
            function,
            backend,
            clique: match clique {
                CliqueFile::Number(number @ 0..=15) => Some(number),
                CliqueFile::Number(number) => return Err(Rule::Word { word: number.to_string() }),
                CliqueFile::Name(word) if word == "auto" || word == "off" => None,
                CliqueFile::Name(word) => return Err(Rule::Word { word }),
            },
            bars_placed: match bars {
                BarsFile::All(word) if word == "guest" => false,
                BarsFile::All(word) if word != "host" => return Err(Rule::Word { word }),
                BarsFile::All(_) | BarsFile::Each(_) => true,
            },
            p2p: p2p.unwrap_or(true),
        },
        DeviceFile::VfioUser { socket, .. } => DeviceKind::VfioUser { socket: text(socket)? },
    })
}

fn unicast(text: &str) -> Result<[u8; 6], Rule> {
    let wrong = || Rule::Word { word: text.to_owned() };
    let bytes = text.split(':').map(|part| u8::from_str_radix(part, 16).ok().filter(|_| part.len() == 2));
    let mac: [u8; 6] =
        bytes.collect::<Option<Vec<u8>>>().and_then(|b| b.try_into().ok()).ok_or_else(wrong)?;
    if mac[0] & 1 == 0 { Ok(mac) } else { Err(wrong()) }
}

/// The address that egm-vmm gives the same device: FNV-1a of `seed`, locally administered, unicast.
fn own_mac(seed: &str) -> [u8; 6] {
    let hash = seed
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let [a, b, c, d, e, f, ..] = hash.to_le_bytes();
    [a & 0xfc | 2, b, c, d, e, f]
}

fn console(file: Option<ConsoleFile>) -> Result<Console, Rule> {
    let (kind, path) = match file {
        None => return Ok(Console::Stdio),
        Some(ConsoleFile::Name(kind)) => (kind, None),
        Some(ConsoleFile::Object(object)) => (object.kind, object.path),
    };
    match (kind.as_str(), path) {
        ("stdio", None) => Ok(Console::Stdio),
        ("pty", None) => Ok(Console::Pty),
        ("null", None) => Ok(Console::Null),
        ("file", Some(path)) => text(path).map(Console::File),
        ("socket", Some(path)) => text(path).map(Console::Socket),
        _ => Err(Rule::Word { word: kind }),
    }
}

/// The page of a pool whose pages have `bytes`.
pub(super) fn pool_page(bytes: u64) -> PageSize {
    if bytes == 1 << 30 { PageSize::Size1G } else { PageSize::Size2M }
}
