//! A machine on a host: where each piece of memory comes from, and the nodes with what NVIDIA's driver needs of them.

use std::collections::BTreeMap;

use egm_address::{CpuSet, Offset, PciAddress, Span, SpanSet};

use super::machine::{Access, Backend, Device, DeviceKind, EgmSlice, Form, Machine, PageSize};
use super::rules::pool_page;
use crate::carve::plan::{Request, Short, place};
use crate::owner::Owner;
use crate::region::{Region, RegionKind, Slice, Survey};
use crate::report::{Blame, Report};

/// Nodes that the driver of one coherent GPU brings its memory up in: one for each possible instance of MIG.
const INITIATORS: u32 = 8;
/// A node's distance to itself, and the one that is assumed where none is written (ACPI 6.5, 5.2.17).
const LOCAL: u8 = 10;
const REMOTE: u8 = 20;
/// Published distances of a Grace guest: between a GPU's nodes, to another GPU's, and from memory and processors to a
/// GPU of the same and of another socket.
const SAME_GPU: u8 = 11;
const OTHER_GPU: u8 = 40;
const NEAR_GPU: u8 = 80;
const FAR_GPU: u8 = 120;

/// A machine on a host.
#[derive(Debug, Clone)]
pub struct Guest {
    /// What was written.
    pub machine: Machine,
    /// Its devices, and those that its slices become.
    pub devices: Vec<Placed>,
    /// Memory, ordinary nodes first.
    pub memory: Vec<Memory>,
    /// NUMA nodes by ascending id: those written, then eight for each coherent GPU.
    pub nodes: Vec<NumaNode>,
    /// `distances[i][j]` from `nodes[i]` to `nodes[j]`; `None` where nobody wrote one.
    pub distances: Option<Vec<Vec<u8>>>,
    /// What no monitor is told, or what has to be done first.
    pub notes: Vec<String>,
}

/// A device and its place among the nodes.
#[derive(Debug, Clone)]
pub struct Placed {
    /// The device.
    pub device: Device,
    /// The node that its host bridge belongs to.
    pub near: Option<u32>,
    /// First of its [`INITIATORS`] nodes, of a coherent GPU.
    pub initiators: Option<u32>,
}

/// A piece of guest memory, all of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    /// `node0`, `egm0`.
    pub id: String,
    /// Its node.
    pub node: u32,
    /// Bytes.
    pub size: u64,
    /// Where its bytes come from.
    pub source: Source,
}

/// Where bytes come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Memory of the monitor's own.
    Own {
        /// Host pages.
        page_size: PageSize,
        /// Host nodes that they come from.
        host_nodes: Option<CpuSet>,
        /// Whether they are touched before the guest starts.
        prefault: bool,
    },
    /// A character device, mapped shared and never touched beforehand: EGM has no `struct page` to populate.
    File {
        /// The device.
        path: String,
        /// First byte.
        offset: u64,
        /// Bytes of its pages.
        page: u64,
    },
}

/// A NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNode {
    /// Its number.
    pub id: u32,
    /// vCPUs.
    pub cpus: CpuSet,
    /// Index into [`Guest::memory`].
    pub memory: Option<usize>,
    /// Index into [`Guest::devices`] of the GPU whose generic initiator it is.
    pub initiator: Option<usize>,
    /// Figures of its memory.
    pub access: Vec<Access>,
}

/// Why a host cannot give a slice to a monitor that opens it by itself.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The host has no such region.
    #[error("egm[{index}]: this host has none of {}", regions.join(", "))]
    NoRegion {
        /// Which slice.
        index: usize,
        /// What it asked for.
        regions: Vec<String>,
    },
    /// The region is too small, or this machine's other slices fill it.
    #[error("egm[{index}]: no place")]
    NoPlace {
        /// Which slice.
        index: usize,
        /// What was short.
        source: Box<Short>,
    },
    /// More nodes than ACPI's tables are made for.
    #[error("{nodes} nodes, of which {INITIATORS} for each GPU on EGM: 256 are the most")]
    Nodes {
        /// How many.
        nodes: u32,
    },
    /// A path is no Unicode.
    #[error("region {region}: its device has no name that an argument can hold")]
    Device {
        /// The region.
        region: String,
    },
}

impl Report for GuestError {
    fn blame(&self) -> Blame {
        match self {
            Self::Nodes { .. } => Blame::Configuration,
            Self::NoRegion { .. } | Self::NoPlace { .. } | Self::Device { .. } => Blame::Host,
        }
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            Self::NoRegion { .. } => {
                "\"egm-device regions\" lists them; for another host, record it there with\n\
                 \"egm-device regions --json > host.json\" and name the file with --recorded"
                    .to_owned()
            }
            Self::NoPlace { .. } => "ask for less, or for a list of regions".to_owned(),
            Self::Nodes { .. } => "pass fewer GPUs".to_owned(),
            Self::Device { .. } => "rename the device".to_owned(),
        })
    }
}

impl Guest {
    /// `machine` on the host of `survey`; slices that become devices are served in the folder `sockets`.
    ///
    /// # Errors
    /// [`GuestError`] says which slice the host has no place for.
    pub fn new(machine: Machine, survey: &Survey, sockets: &str) -> Result<Self, GuestError> {
        let mut guest = Self {
            memory: ordinary(&machine),
            devices: Vec::new(),
            nodes: Vec::new(),
            distances: None,
            notes: Vec::new(),
            machine,
        };
        let homes = guest.place_slices(survey, sockets)?;
        guest.place_devices(&homes, survey);
        guest.number_nodes()?;
        guest.distances = guest.measure();
        Ok(guest)
    }

    /// Whether a server behind a socket maps the guest's memory.
    #[must_use]
    pub fn shares_memory(&self) -> bool {
        self.devices.iter().any(|placed| matches!(placed.device.kind, DeviceKind::VfioUser { .. }))
    }

    /// Whether host functions are opened by iommufd.
    #[must_use]
    pub fn iommufd(&self) -> bool {
        let wants = |placed: &Placed| {
            matches!(placed.device.kind, DeviceKind::Vfio { backend: Backend::Iommufd, .. })
        };
        self.devices.iter().any(wants)
    }

    /// Bytes of all memory.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.memory.iter().fold(0, |sum, memory| memory.size.saturating_add(sum))
    }

    /// Gives each slice its memory or its device; returns the node of each region that became memory.
    fn place_slices(&mut self, survey: &Survey, sockets: &str) -> Result<BTreeMap<String, u32>, GuestError> {
        let mut homes = BTreeMap::new();
        let mut taken: BTreeMap<String, Vec<Slice>> = BTreeMap::new();
        for (index, slice) in self.machine.slices.clone().iter().enumerate() {
            let id = format!("egm{index}");
            if slice.form == Form::Device {
                self.serve(slice, &id, sockets);
                continue;
            }
            let (source, region) = source(index, slice, survey, &mut taken)?;
            if let (Source::File { .. }, Some(region)) = (&source, region) {
                homes.entry(region.name.clone()).or_insert(slice.node);
                self.notes.extend(retired(&id, region, &source, slice.size.get()));
            }
            self.memory.push(Memory { id, node: slice.node, size: slice.size.get(), source });
        }
        Ok(homes)
    }

    /// A slice that a server shows as a device.
    fn serve(&mut self, slice: &EgmSlice, id: &str, sockets: &str) {
        let socket = format!("{sockets}/{}-{id}.sock", self.machine.name);
        self.notes.push(format!(
            "{id} is a device: \"egm-device serve\" gives {} of {} at {socket} before the machine starts",
            slice.size,
            slice.regions.join(" or ")
        ));
        let kind = DeviceKind::VfioUser { socket };
        let near = self.machine.nodes.iter().any(|node| node.id == slice.node).then_some(slice.node);
        let device = Device { id: id.to_owned(), root_port: true, kind };
        self.devices.push(Placed { device, near, initiators: None });
    }

    /// A function that a region of EGM names is a GPU on it: its bridge belongs to the node that the region became.
    fn place_devices(&mut self, homes: &BTreeMap<String, u32>, survey: &Survey) {
        let mut devices = Vec::with_capacity(self.machine.devices.len());
        for device in &self.machine.devices {
            let region = function(device).and_then(|function| {
                let egm = |region: &&Region| matches!(region.kind, RegionKind::Egm { .. });
                survey.regions.iter().filter(egm).find(|region| region.functions.contains(&function))
            });
            let near = region.and_then(|region| homes.get(&region.name)).copied();
            // Numbered when all nodes that were written are known.
            let initiators = region.map(|_| 0);
            devices.push(Placed { device: device.clone(), near, initiators });
        }
        for region in survey.regions.iter().filter(|region| homes.contains_key(&region.name)) {
            let ours = |function| self.machine.devices.iter().any(|d| self::function(d) == Some(function));
            let missing: Vec<String> =
                region.functions.iter().filter(|f| !ours(**f)).map(ToString::to_string).collect();
            if !missing.is_empty() {
                self.notes.push(format!(
                    "{}: {} reach it too; NVIDIA supports a machine that has all GPUs of a socket with all of its EGM",
                    region.name,
                    missing.join(" and ")
                ));
            }
        }
        self.notes.extend(unsaid(&self.machine));
        devices.append(&mut self.devices);
        self.devices = devices;
    }

    fn number_nodes(&mut self) -> Result<(), GuestError> {
        let at = |id: u32| self.memory.iter().position(|memory| memory.node == id);
        let mut nodes: Vec<NumaNode> = Vec::new();
        for node in &self.machine.nodes {
            let (cpus, access) = (node.cpus.clone(), node.access.clone());
            nodes.push(NumaNode { id: node.id, cpus, memory: at(node.id), initiator: None, access });
        }
        for slice in self.machine.slices.iter().filter(|slice| slice.form == Form::Memory) {
            let (cpus, access) = (CpuSet::default(), slice.access.clone());
            nodes.push(NumaNode { id: slice.node, cpus, memory: at(slice.node), initiator: None, access });
        }
        nodes.sort_by_key(|node| node.id);
        let mut next = nodes.last().map_or(0, |node| node.id.saturating_add(1));
        for (index, placed) in self.devices.iter_mut().enumerate() {
            let Some(first) = &mut placed.initiators else { continue };
            *first = next;
            next = next.saturating_add(INITIATORS);
            nodes.extend((*first..next).map(|id| NumaNode {
                id,
                cpus: CpuSet::default(),
                memory: None,
                initiator: Some(index),
                access: Vec::new(),
            }));
        }
        self.nodes = nodes;
        if next > 256 { Err(GuestError::Nodes { nodes: next }) } else { Ok(()) }
    }

    fn measure(&self) -> Option<Vec<Vec<u8>>> {
        let mut written = BTreeMap::new();
        let nodes = self.machine.nodes.iter().map(|node| (node.id, &node.distances));
        for (from, distances) in nodes.chain(self.machine.slices.iter().map(|s| (s.node, &s.distances))) {
            written.extend(distances.iter().map(|(&to, &distance)| ((from, to), distance)));
        }
        if written.is_empty() && self.nodes.iter().all(|node| node.initiator.is_none()) {
            return None;
        }
        let plain = |from: u32, to: u32| {
            let there = written.get(&(from, to)).or_else(|| written.get(&(to, from)));
            if from == to { LOCAL } else { there.copied().unwrap_or(REMOTE) }
        };
        let distance = |from: &NumaNode, to: &NumaNode| match (from.initiator, to.initiator) {
            (None, None) => plain(from.id, to.id),
            _ if from.id == to.id => LOCAL,
            (Some(a), Some(b)) => {
                if a == b {
                    SAME_GPU
                } else {
                    OTHER_GPU
                }
            }
            (None, Some(gpu)) | (Some(gpu), None) => {
                let other = if from.initiator.is_none() { from } else { to };
                if self.is_near(other, gpu, &plain) { NEAR_GPU } else { FAR_GPU }
            }
        };
        Some(self.nodes.iter().map(|from| self.nodes.iter().map(|to| distance(from, to)).collect()).collect())
    }

    /// Whether `node` is of the GPU's socket: it is the GPU's EGM, or no processors are nearer to that.
    fn is_near(&self, node: &NumaNode, gpu: usize, distance: &impl Fn(u32, u32) -> u8) -> bool {
        let Some(home) = self.devices.get(gpu).and_then(|placed| placed.near) else { return true };
        let processors = self.nodes.iter().filter(|node| !node.cpus.is_empty());
        let nearest = processors.map(|node| distance(node.id, home)).min().unwrap_or(LOCAL);
        distance(node.id, home) <= nearest
    }
}

/// The host function that a device is.
fn function(device: &Device) -> Option<PciAddress> {
    match device.kind {
        DeviceKind::Vfio { function, .. } => Some(function),
        _ => None,
    }
}

fn ordinary(machine: &Machine) -> Vec<Memory> {
    let nodes = machine.nodes.iter().filter(|node| node.size.get() > 0);
    let memory = nodes.map(|node| Memory {
        id: format!("node{}", node.id),
        node: node.id,
        size: node.size.get(),
        source: Source::Own {
            page_size: machine.page_size,
            host_nodes: node.host_nodes.clone(),
            prefault: machine.prefault,
        },
    });
    memory.collect()
}

/// The first of a slice's wishes that the host can give, and the region that it comes from.
fn source<'s>(
    index: usize,
    slice: &EgmSlice,
    survey: &'s Survey,
    taken: &mut BTreeMap<String, Vec<Slice>>,
) -> Result<(Source, Option<&'s Region>), GuestError> {
    let own = |page_size, host_nodes| Source::Own { page_size, host_nodes, prefault: false };
    let mut short = None;
    for wanted in &slice.regions {
        if wanted == "local" || wanted == "memfd" {
            return Ok((own(slice.page_size, slice.host_nodes.clone()), None));
        }
        let called = |region: &&Region| region.name == *wanted || region.kind.word() == wanted;
        for region in survey.regions.iter().filter(called) {
            match &region.kind {
                RegionKind::Hugetlb => {
                    let nodes = region.node.map(|node| [node].into_iter().collect());
                    return Ok((own(pool_page(region.page_size.get()), nodes), Some(region)));
                }
                RegionKind::Memfd => return Ok((own(slice.page_size, slice.host_nodes.clone()), None)),
                RegionKind::GuestMemfd => {}
                RegionKind::Egm { device }
                | RegionKind::Reserved { device }
                | RegionKind::Devdax { device } => {
                    let path = device.to_str().map(str::to_owned);
                    let path = path.ok_or_else(|| GuestError::Device { region: region.name.clone() })?;
                    match find(region, slice, taken) {
                        Ok(offset) => {
                            let offset = file_offset(region, offset);
                            let page = region.page_size.get();
                            return Ok((Source::File { path, offset, page }, Some(region)));
                        }
                        Err(error) => short = short.or(Some(error)),
                    }
                }
            }
        }
    }
    Err(match short {
        Some(source) => GuestError::NoPlace { index, source: Box::new(source) },
        None => GuestError::NoRegion { index, regions: slice.regions.clone() },
    })
}

/// Offsets of `/dev/mem` are host physical addresses.
fn file_offset(region: &Region, offset: u64) -> u64 {
    let base = match (&region.kind, region.base) {
        (RegionKind::Reserved { .. }, Some(base)) => base.get(),
        _ => 0,
    };
    base.saturating_add(offset)
}

/// The offset in its region of a slice, past those that this machine has of it already.
fn find(region: &Region, slice: &EgmSlice, taken: &mut BTreeMap<String, Vec<Slice>>) -> Result<u64, Short> {
    let ours = taken.entry(region.name.clone()).or_default();
    let busy = ours.iter().filter_map(|s| Span::new(Offset::new(s.offset), s.size.get()).ok()).collect();
    // Whose it is does not change where it goes.
    let owner = Owner { name: String::new(), uid: 0, pid: 0, started: 0 };
    let request = Request::new(slice.size.get(), owner);
    let huge = Request { align: 1 << 30, ..request.clone() };
    let found = place(region, &busy, &SpanSet::EMPTY, &huge)
        .or_else(|_| place(region, &busy, &SpanSet::EMPTY, &request))?;
    let offset = found.offset;
    ours.push(found);
    Ok(offset)
}

/// Bad pages of a slice, which only egm-vmm and a device leave out of what the guest has.
fn retired(id: &str, region: &Region, source: &Source, size: u64) -> Option<String> {
    let Source::File { offset, .. } = source else { return None };
    let first = offset.saturating_sub(file_offset(region, 0));
    let slice: SpanSet<_> = Span::new(Offset::new(first), size).into_iter().collect();
    let left = slice.minus(region.retired.spans());
    let bad = slice.size().saturating_sub(left.size());
    (bad > 0).then(|| {
        format!(
            "{id}: {bad:#x} bytes of it are retired, and this monitor cannot leave holes: the guest may touch bad \
             memory; write \"as\": \"device\", or run the machine with egm-vmm"
        )
    })
}

/// What the configuration says and no monitor here is told.
fn unsaid(machine: &Machine) -> Vec<String> {
    let passed = |device: &&Device| matches!(device.kind, DeviceKind::Vfio { .. });
    let mut notes = Vec::new();
    if machine.mirror && machine.devices.iter().filter(passed).count() > 1 {
        notes.push(
            "the host's PCI Express switches are not shown: each function has a root port or slot of its own"
                .to_owned(),
        );
    }
    for device in &machine.devices {
        let DeviceKind::Vfio { bars_placed, p2p, .. } = device.kind else { continue };
        if bars_placed {
            notes.push(format!("{}: \"bars\" is left out, the guest's firmware places them", device.id));
        }
        if !p2p {
            notes.push(format!(
                "{}: \"p2p\" is left out, other functions of the machine reach its BARs",
                device.id
            ));
        }
    }
    notes
}
