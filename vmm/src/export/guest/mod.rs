//! A machine on a host: where each piece of memory comes from, and the nodes with what NVIDIA's driver needs of them.

mod distances;
mod notes;
mod placement;

use std::collections::BTreeMap;
use std::path::PathBuf;

use egm_address::{CpuSet, PciAddress};
use egm_config::{Access, DeviceKind, EgmForm, PageSize, Spec, VfioBackend};
use egm_report::{Blame, Remedy, Report};

use crate::export::load::{LoadError, plain};
use egm_device::carve::plan::PlacementError;
use egm_device::region::{Region, RegionKind, Slice, Survey};

/// Nodes that the driver of one coherent GPU brings its memory up in: one for each possible instance of MIG.
const INITIATORS: u32 = 8;
/// A machine on a host.
#[derive(Debug, Clone)]
pub(crate) struct Guest {
    pub(crate) machine: Spec,
    /// Its devices; slices that are devices are the last.
    pub(crate) devices: Vec<Placed>,
    /// Memory, ordinary nodes first.
    pub(crate) memory: Vec<MemoryPiece>,
    /// NUMA nodes by ascending id: those written, then eight for each coherent GPU.
    pub(crate) nodes: Vec<NumaNode>,
    /// `distances[i][j]` from `nodes[i]` to `nodes[j]`; `None` where the configuration has none.
    pub(crate) distances: Option<Vec<Vec<u8>>>,
    /// Settings that no monitor gets, and steps that must come first.
    pub(crate) notes: Vec<String>,
    /// Where "egm-device serve" shows slices that are devices.
    sockets: PathBuf,
}

/// A device and its place among the nodes.
#[derive(Debug, Clone)]
pub(crate) struct Placed {
    /// Name of the device, unique in the machine.
    pub id: String,
    /// Whether it sits behind a root port of its own.
    pub root_port: bool,
    /// Kind and parameters of the device.
    pub kind: DeviceKind,
    /// The node that its host bridge belongs to.
    pub near: Option<u32>,
    /// First of its `INITIATORS` nodes, of a coherent GPU.
    pub initiators: Option<u32>,
}

/// A piece of guest memory, all of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemoryPiece {
    /// Name for messages and the monitor: `node0`, `egm0`.
    pub id: String,
    pub node: u32,
    /// Size of the piece, in bytes.
    pub size: u64,
    /// Where its bytes come from.
    pub source: Source,
}

/// Where bytes come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// Memory of the monitor's own.
    Own {
        /// Host pages that the configuration asks for.
        page_size: PageSize,
        /// Host nodes that they come from.
        host_nodes: Option<CpuSet>,
        /// Whether they are touched before the guest starts.
        prefault: bool,
    },
    /// A character device, mapped shared and never touched beforehand: EGM has no `struct page` to populate.
    File {
        path: String,
        offset: u64,
        /// Bytes of its pages.
        page: u64,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NumaNode {
    pub id: u32,
    /// Indexes of its vCPUs; a node may have none.
    pub cpus: CpuSet,
    /// Index into [`Guest::memory`]; `None` for a node without memory.
    pub memory: Option<usize>,
    /// Index into [`Guest::devices`] of the GPU that has this generic initiator.
    pub initiator: Option<usize>,
    /// Figures of its memory.
    pub access: Vec<Access>,
}

/// Why a host cannot give a slice to a monitor that opens it by itself.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GuestError {
    /// The host has no such region.
    #[error("egm[{index}]: this host has none of {}", regions.join(", "))]
    NoRegion {
        /// Index of the slice.
        index: usize,
        /// The regions that it names.
        regions: Vec<String>,
    },
    /// The region is too small, or this machine's other slices fill it.
    #[error("egm[{index}]: no place")]
    NoPlacement {
        /// Index of the slice.
        index: usize,
        source: Box<PlacementError>,
    },
    /// More nodes than ACPI's tables are made for.
    #[error("{nodes} nodes, of which {INITIATORS} for each GPU on EGM: 256 are the most")]
    Nodes { nodes: u32 },
    /// The folder of servers' sockets cannot be an argument.
    #[error("--sockets")]
    Sockets(#[source] LoadError),
    /// A path is no Unicode.
    #[error("region {region}: its device has no name that an argument can hold")]
    Device { region: String },
}

impl Report for GuestError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::NoRegion { .. } => Blame::Host.help(
                "\"egm-device regions\" lists them; for another host, record it there with\n\
                 \"egm-vmm facts > facts.json\" and name the file with --facts; only egm-vmm and the\n\
                 broker make files of fsdax slices, so another monitor takes them from \"egm-device serve\"",
            ),
            Self::NoPlacement { .. } => Blame::Host.help("ask for less, or for a list of regions"),
            Self::Nodes { .. } => Blame::Configuration.help("pass fewer GPUs"),
            Self::Sockets(error) => error.remedy(),
            Self::Device { .. } => Blame::Host.help("rename the device"),
        }
    }
}

impl Guest {
    /// `machine`, as [`load`](super::load()) gives it, on the host of `survey`; slices that
    /// are devices are served in the folder `sockets`.
    ///
    /// # Errors
    /// [`GuestError`], for instance for a slice that the host has no place for.
    pub(crate) fn new(machine: Spec, survey: &Survey, mut sockets: PathBuf) -> Result<Self, GuestError> {
        plain(&mut sockets).map_err(GuestError::Sockets)?;
        let mut guest = Self {
            memory: ordinary(&machine),
            devices: Vec::new(),
            nodes: Vec::new(),
            distances: None,
            notes: Vec::new(),
            sockets,
            machine,
        };
        let homes = guest.place_slices(survey)?;
        guest.place_devices(&homes, survey);
        guest.number_nodes()?;
        guest.distances = guest.measure();
        Ok(guest)
    }

    /// Where a server shows the slice that is the device called `id`.
    #[must_use]
    pub(crate) fn socket(&self, id: &str) -> PathBuf {
        self.sockets.join(format!("{}-{id}.sock", self.machine.name))
    }

    /// Whether host functions are opened by iommufd.
    #[must_use]
    pub(crate) fn iommufd(&self) -> bool {
        let wants =
            |placed: &Placed| matches!(placed.kind, DeviceKind::Vfio { backend: VfioBackend::Iommufd, .. });
        self.devices.iter().any(wants)
    }

    /// Bytes of all memory.
    #[must_use]
    pub(crate) fn size(&self) -> u64 {
        self.memory.iter().fold(0, |sum, memory| memory.size.saturating_add(sum))
    }

    /// Gives each slice its memory or its device; returns the node of each region that became memory.
    fn place_slices(&mut self, survey: &Survey) -> Result<BTreeMap<String, u32>, GuestError> {
        let mut homes = BTreeMap::new();
        let mut taken: BTreeMap<String, Vec<Slice>> = BTreeMap::new();
        for (index, slice) in self.machine.egm.clone().iter().enumerate() {
            let id = format!("egm{index}");
            if slice.form == EgmForm::Device {
                self.notes.push(self.serve(slice, &id));
                continue;
            }
            let (source, region) = placement::source(index, slice, survey, &mut taken)?;
            if let (Source::File { offset, .. }, Some(region)) = (&source, region) {
                homes.entry(region.name.clone()).or_insert(slice.node);
                self.notes.extend(placement::notes(&id, region, *offset, slice.size.get()));
            }
            self.memory.push(MemoryPiece { id, node: slice.node, size: slice.size.get(), source });
        }
        Ok(homes)
    }

    /// A function that a region of EGM names is a GPU on it: its bridge belongs to the node that the region became.
    fn place_devices(&mut self, homes: &BTreeMap<String, u32>, survey: &Survey) {
        for device in &self.machine.devices {
            let region = function(&device.kind).and_then(|function| {
                let egm = |region: &&Region| matches!(region.kind, RegionKind::Egm { .. });
                survey.regions.iter().filter(egm).find(|region| region.functions.contains(&function))
            });
            let near = match device.kind {
                DeviceKind::Egm { node, .. } => {
                    self.machine.memory.nodes.iter().map(|ordinary| ordinary.id).find(|id| *id == node)
                }
                _ => region.and_then(|region| homes.get(&region.name)).copied(),
            };
            // Numbered when all nodes that were written are known.
            let initiators = region.map(|_| 0);
            let (id, kind) = (device.id.clone(), device.kind.clone());
            self.devices.push(Placed { id, root_port: device.root_port, kind, near, initiators });
        }
        for region in survey.regions.iter().filter(|region| homes.contains_key(&region.name)) {
            let ours =
                |function| self.machine.devices.iter().any(|d| self::function(&d.kind) == Some(function));
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
        self.notes.extend(self.bind());
        self.notes.extend(notes::unsaid(&self.machine));
    }

    fn number_nodes(&mut self) -> Result<(), GuestError> {
        let at = |id: u32| self.memory.iter().position(|memory| memory.node == id);
        let mut nodes: Vec<NumaNode> = Vec::new();
        for node in &self.machine.memory.nodes {
            let (cpus, access) = (node.cpus.clone(), node.access.clone());
            nodes.push(NumaNode { id: node.id, cpus, memory: at(node.id), initiator: None, access });
        }
        for slice in self.machine.nodes_of_slices() {
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
}

/// The host function that a device is.
const fn function(kind: &DeviceKind) -> Option<PciAddress> {
    match kind {
        DeviceKind::Vfio { function, .. } => Some(*function),
        _ => None,
    }
}

fn ordinary(machine: &Spec) -> Vec<MemoryPiece> {
    let nodes = machine.memory.nodes.iter().filter(|node| node.size.get() > 0);
    let memory = nodes.map(|node| MemoryPiece {
        id: format!("node{}", node.id),
        node: node.id,
        size: node.size.get(),
        source: Source::Own {
            page_size: machine.memory.page_size,
            host_nodes: node.host_nodes.clone(),
            prefault: machine.memory.prefault,
        },
    });
    memory.collect()
}
