//! Memory: zones without a file are memory of nodes, zones of `/dev/egmN` are slices.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use egm_address::{ByteSize, CpuSet};
use egm_config::{EgmFile, MemoryFile, NodeFile, OneOrMore, PageSize, Slot};

use super::super::document::{MemoryConfig, MemoryZoneConfig, NumaConfig, NumaDistance};
use super::context::{Context, cpu_set};

/// Nodes and slices of our file while they are made.
#[derive(Default)]
struct NodesAndSlices {
    nodes: Vec<Slot<NodeFile>>,
    slices: Vec<Slot<EgmFile>>,
}

/// Memory, nodes and slices of a machine with `vcpus` vCPUs.
pub(super) fn translate(
    memory: &MemoryConfig,
    numa: &[NumaConfig],
    vcpus: u32,
    context: &mut Context,
) -> (MemoryFile, Vec<Slot<EgmFile>>) {
    let zones = memory.zones.as_deref().unwrap_or_default();
    let page_size = pages(memory, zones, context);
    let prefault = memory.prefault || zones.iter().any(|zone| zone.prefault);
    let real: Vec<(usize, &NumaConfig)> =
        numa.iter().enumerate().filter(|(_, node)| !is_of_device(node)).collect();
    let is_divided = !zones.is_empty() || !real.is_empty();
    if is_divided && memory.size != 0 {
        context.refuse("memory.size");
    }
    for (index, _) in numa.iter().enumerate().filter(|(_, node)| is_of_device(node)) {
        context.note(&format!("numa[{index}].device_id"));
    }
    let zones = Zones::new(zones, context);
    let mut parts = NodesAndSlices::default();
    if real.is_empty() && is_divided {
        zones.in_one_node(vcpus, &mut parts, context);
    }
    let left_out: BTreeSet<u32> =
        numa.iter().filter(|node| is_of_device(node)).map(|node| node.guest_numa_id).collect();
    for &(index, node) in &real {
        zones.in_node(index, node, &left_out, &mut parts, context);
    }
    if !real.is_empty() {
        zones.are_placed(&real, context);
        context.origins.add("memory.nodes", "numa");
    }
    let memory = MemoryFile {
        size: (!is_divided).then(|| ByteSize::new(memory.size)),
        page_size,
        prefault: prefault.then_some(true),
        nodes: is_divided.then_some(parts.nodes),
    };
    (memory, parts.slices)
}

/// Whether `node` has a device, and neither processors nor memory.
fn is_of_device(node: &NumaConfig) -> bool {
    let is_empty =
        node.cpus.iter().flatten().next().is_none() && node.memory_zones.iter().flatten().next().is_none();
    node.device_id.is_some() && is_empty
}

/// Name of the EGM region with the device `path`.
fn region(path: &Path) -> Option<&str> {
    let name = path.file_name()?.to_str()?;
    let number = name.strip_prefix("egm")?;
    let is_number = !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit());
    (path.parent() == Some(Path::new("/dev")) && is_number).then_some(name)
}

/// Size of the host pages of all memory; `None` for the default.
fn pages(memory: &MemoryConfig, zones: &[MemoryZoneConfig], context: &mut Context) -> Option<PageSize> {
    let base = pool(memory.hugepages, memory.hugepage_size, "memory", context);
    let mut common = base.map(Some);
    for (index, zone) in zones.iter().enumerate() {
        let at = format!("memory.zones[{index}]");
        let pages = pool(zone.hugepages, zone.hugepage_size, &at, context);
        let wanted = if zone.file.is_some() { None } else { *common.get_or_insert(pages) };
        if pages != wanted {
            context.refuse(format!("{at}.hugepages"));
        }
    }
    common.flatten().or_else(|| (!memory.thp).then_some(PageSize::Size4K))
}

/// Page size of the pool that `hugepages` and `hugepage_size` of the object `at` name.
fn pool(hugepages: bool, size: Option<u64>, at: &str, context: &mut Context) -> Option<PageSize> {
    let pool = size.map_or(Some(PageSize::Size2M), PageSize::of_pool);
    match (hugepages, size) {
        (false, None) => return None,
        (true, _) if pool.is_some() => {}
        _ => context.refuse(format!("{at}.hugepage_size")),
    }
    pool
}

/// The document's zones by their names.
struct Zones<'d> {
    all: &'d [MemoryZoneConfig],
    by_id: BTreeMap<&'d str, usize>,
}

impl<'d> Zones<'d> {
    fn new(all: &'d [MemoryZoneConfig], context: &mut Context) -> Self {
        let mut by_id = BTreeMap::new();
        for (index, zone) in all.iter().enumerate() {
            if by_id.insert(zone.id.as_str(), index).is_some() {
                context.refuse(format!("memory.zones[{index}].id"));
            }
            if zone.file.as_deref().is_some_and(|file| region(file).is_none()) {
                context.refuse(format!("memory.zones[{index}].file"));
            }
            if zone.file.is_some() && zone.host_numa_node.is_some() {
                context.refuse(format!("memory.zones[{index}].host_numa_node"));
            }
        }
        Self { all, by_id }
    }

    /// Without nodes, all zones are memory of node 0. A slice needs a node that names it.
    fn in_one_node(&self, vcpus: u32, parts: &mut NodesAndSlices, context: &mut Context) {
        for (index, zone) in self.all.iter().enumerate() {
            if zone.file.is_some() {
                context.refuse(format!("memory.zones[{index}].id"));
            }
        }
        let (size, host_nodes) = self.sum(0..self.all.len(), context);
        let cpus = cpu_set((0..vcpus).map(u64::from));
        let node = NodeFile { id: 0, size: Some(size), cpus, host_nodes, distances: None, access: None };
        parts.nodes.push(Slot::new(node));
        context.origins.add("memory.nodes", "memory.zones");
    }

    /// Adds the node `node` of the document, which is entry `index`, with its zones.
    fn in_node(
        &self,
        index: usize,
        node: &NumaConfig,
        left_out: &BTreeSet<u32>,
        parts: &mut NodesAndSlices,
        context: &mut Context,
    ) {
        if node.device_id.is_some() {
            context.refuse(format!("numa[{index}].device_id"));
        }
        let named: Vec<Option<usize>> =
            node.memory_zones.iter().flatten().map(|id| self.by_id.get(id.as_str()).copied()).collect();
        let zones: Vec<usize> = named.iter().copied().flatten().collect();
        let (slices, plain): (Vec<usize>, Vec<usize>) = zones
            .iter()
            .copied()
            .partition(|zone| self.all.get(*zone).is_some_and(|zone| zone.file.is_some()));
        if zones.len() < named.len() || slices.len() > 1 || (!slices.is_empty() && !plain.is_empty()) {
            context.refuse(format!("numa[{index}].memory_zones"));
        }
        let distances = distances(index, node.distances.as_deref().unwrap_or_default(), left_out, context);
        let id = node.guest_numa_id;
        let cpus = cpu_set(node.cpus.iter().flatten().copied().map(u64::from));
        if cpus.is_none() {
            context.refuse(format!("numa[{index}].cpus"));
        }
        let cpus = cpus.filter(|cpus| !cpus.is_empty());
        // A slice that is all of a node has the node's distances.
        let is_slice_alone = cpus.is_none() && !slices.is_empty();
        for &zone in &slices {
            let own = is_slice_alone.then(|| distances.clone()).flatten();
            self.slice(zone, id, own, parts, context);
        }
        if is_slice_alone {
            return;
        }
        let (size, host_nodes) = self.sum(plain.iter().copied(), context);
        let size = (size.get() > 0).then_some(size);
        context.origins.add(format!("memory.nodes[{}]", parts.nodes.len()), &format!("numa[{index}]"));
        parts.nodes.push(Slot::new(NodeFile { id, size, cpus, host_nodes, distances, access: None }));
    }

    /// Adds the slice of zone `zone` as memory of node `node`.
    fn slice(
        &self,
        zone: usize,
        node: u32,
        distances: Option<BTreeMap<String, u8>>,
        parts: &mut NodesAndSlices,
        context: &mut Context,
    ) {
        let Some(MemoryZoneConfig { size, file: Some(file), .. }) = self.all.get(zone) else { return };
        let Some(region) = region(file) else { return };
        context.origins.add(format!("egm[{}]", parts.slices.len()), &format!("memory.zones[{zone}]"));
        parts.slices.push(Slot::new(EgmFile {
            region: OneOrMore::One(region.to_owned()),
            size: ByteSize::new(*size),
            node,
            form: None,
            page_size: None,
            host_nodes: None,
            distances,
            access: None,
        }));
    }

    /// Size and host node of `zones` together.
    fn sum(&self, zones: impl Iterator<Item = usize>, context: &mut Context) -> (ByteSize, Option<CpuSet>) {
        let (mut size, mut host): (u64, Option<Option<u32>>) = (0, None);
        for (index, zone) in zones.filter_map(|index| Some((index, self.all.get(index)?))) {
            size = size.saturating_add(zone.size);
            let host = *host.get_or_insert(zone.host_numa_node);
            let node = zone.host_numa_node;
            if node != host || node.is_some_and(|node| cpu_set([node.into()]).is_none()) {
                context.refuse(format!("memory.zones[{index}].host_numa_node"));
            }
        }
        (ByteSize::new(size), host.flatten().and_then(|node| cpu_set([node.into()])))
    }

    /// Refuses zones that no entry of `nodes` names, and entries that name a zone of another.
    fn are_placed(&self, nodes: &[(usize, &NumaConfig)], context: &mut Context) {
        let mut placed = BTreeSet::new();
        for (index, node) in nodes {
            for id in node.memory_zones.iter().flatten() {
                if !placed.insert(id.as_str()) {
                    context.refuse(format!("numa[{index}].memory_zones"));
                }
            }
        }
        for (index, zone) in self.all.iter().enumerate() {
            if !placed.contains(zone.id.as_str()) {
                context.refuse(format!("memory.zones[{index}].id"));
            }
        }
    }
}

/// The distances of the entry `index`, without those to nodes that are left out.
fn distances(
    index: usize,
    written: &[NumaDistance],
    left_out: &BTreeSet<u32>,
    context: &mut Context,
) -> Option<BTreeMap<String, u8>> {
    let mut distances = BTreeMap::new();
    for (number, NumaDistance { destination, distance }) in written.iter().enumerate() {
        if !left_out.contains(destination) && distances.insert(destination.to_string(), *distance).is_some() {
            context.refuse(format!("numa[{index}].distances[{number}].destination"));
        }
    }
    (!distances.is_empty()).then_some(distances)
}
