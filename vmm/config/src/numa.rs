//! Rules between NUMA nodes: distances (ACPI SLIT) and access figures (ACPI HMAT).

use std::collections::BTreeMap;

use super::distance::{self, LOCAL};
use super::error::{Rule, in_range};
use super::faults::Faults;
use super::file::{EgmFile, MemoryFile};
use super::rules::NumaRule;
use super::slot::Slot;
use super::spec::{Access, EgmForm, EgmSlice, Memory};

/// Largest distance; 255 means "unreachable".
const MAX_DISTANCE: u8 = 254;
/// HMAT entries are 16 bits, of which 0 and 0xffff are taken (ACPI 6.5, 5.2.27.4).
const MAX_ENTRY: u32 = 0xfffe;
/// HMAT bandwidth has a base unit; up to here it is at most 1000 MB/s.
const MAX_BANDWIDTH: u32 = MAX_ENTRY * 1000;

/// A node and its distances and access figures, as written.
struct Domain<'f> {
    key: String,
    id: u32,
    has_cpus: bool,
    distances: Option<&'f BTreeMap<String, u8>>,
    access: &'f [Access],
}

/// Writes distances and access figures into `memory` and `egm`, which were made from the files in that order. What is
/// wrong with them is noted.
pub(super) fn link(
    memory_file: &MemoryFile,
    memory: &mut Memory,
    egm_files: &[&EgmFile],
    egm: &mut [EgmSlice],
    faults: &mut Faults,
) {
    let domains = domains(memory_file, memory, egm_files, egm);
    let written = written_distances(&domains, faults);
    for domain in &domains {
        check_access(domain, &domains, faults);
    }
    for (index, slice) in egm.iter().enumerate() {
        if domains.iter().all(|domain| domain.id != slice.node) {
            faults.note(no_such_node(slice.node, &domains).at(format!("egm[{index}].node")));
        }
    }
    let row = |from: u32| {
        let distance = |to: u32| {
            let there = written.get(&(from, to)).or_else(|| written.get(&(to, from)));
            there.copied().unwrap_or_else(|| distance::assumed(from, to))
        };
        domains.iter().map(|to| (to.id, distance(to.id))).collect::<BTreeMap<u32, u8>>()
    };
    let access = |id: u32| domains.iter().find(|d| d.id == id).map_or_else(Vec::new, |d| d.access.to_vec());
    for node in &mut memory.nodes {
        (node.distances, node.access) = (row(node.id), access(node.id));
    }
    for slice in egm.iter_mut().filter(|slice| slice.form == EgmForm::Memory) {
        (slice.distances, slice.access) = (row(slice.node), access(slice.node));
    }
}

fn domains<'f>(
    memory_file: &'f MemoryFile,
    memory: &Memory,
    egm_files: &[&'f EgmFile],
    egm: &[EgmSlice],
) -> Vec<Domain<'f>> {
    let Some(nodes) = &memory_file.nodes else {
        let only = Domain { key: "memory".to_owned(), id: 0, has_cpus: true, distances: None, access: &[] };
        return std::iter::once(only).chain(slices(memory, egm_files, egm)).collect();
    };
    let ordinary = nodes.iter().filter_map(Slot::get).enumerate().map(|(index, file)| Domain {
        key: format!("memory.nodes[{index}]"),
        id: file.id,
        has_cpus: memory.nodes.iter().any(|node| node.id == file.id && !node.cpus.is_empty()),
        distances: file.distances.as_ref(),
        access: file.access.as_deref().unwrap_or_default(),
    });
    ordinary.chain(slices(memory, egm_files, egm)).collect()
}

/// Slices with nodes of their own; others are described with their nodes.
fn slices<'f>(memory: &Memory, files: &[&'f EgmFile], egm: &[EgmSlice]) -> impl Iterator<Item = Domain<'f>> {
    let own = |slice: &EgmSlice| {
        slice.form == EgmForm::Memory && memory.nodes.iter().all(|node| node.id != slice.node)
    };
    files.iter().zip(egm).enumerate().filter(move |(_, (_, slice))| own(slice)).map(
        |(index, (file, slice))| Domain {
            key: format!("egm[{index}]"),
            id: slice.node,
            has_cpus: false,
            distances: file.distances.as_ref(),
            access: file.access.as_deref().unwrap_or_default(),
        },
    )
}

fn no_such_node(node: impl ToString, domains: &[Domain<'_>]) -> Rule {
    NumaRule::NoSuchNode { node: node.to_string(), known: domains.iter().map(|d| d.id).collect() }.into()
}

/// Distances by (from, to), those that are written.
fn written_distances(domains: &[Domain<'_>], faults: &mut Faults) -> BTreeMap<(u32, u32), u8> {
    let mut written = BTreeMap::new();
    for domain in domains {
        for (text, &distance) in domain.distances.into_iter().flatten() {
            let key = format!("{}.distances.{text}", domain.key);
            let id = text.parse::<u32>().ok().filter(|id| domains.iter().any(|other| other.id == *id));
            let Some(to) = id else {
                faults.note(no_such_node(text, domains).at(key));
                continue;
            };
            check_distance(to == domain.id, distance, key, faults);
            written.insert((domain.id, to), distance);
        }
    }
    written
}

/// Checks the `distance` at `key`, from a node `to_itself` or to another one.
fn check_distance(to_itself: bool, distance: u8, key: String, faults: &mut Faults) {
    if to_itself && distance != LOCAL {
        faults.note(Rule::from(NumaRule::ToItself { distance }).at(key));
    } else if !to_itself {
        faults.value(key, in_range(distance, LOCAL + 1, MAX_DISTANCE));
    }
}

/// Notes distances and access figures that are outside their ranges, where the nodes to [`link`] are not known.
pub(super) fn check_ranges(memory: Option<&MemoryFile>, egm: &[Slot<EgmFile>], faults: &mut Faults) {
    let nodes = memory.and_then(|memory| memory.nodes.as_deref()).unwrap_or_default();
    let nodes = nodes.iter().enumerate().filter_map(|(index, node)| {
        let node = node.get()?;
        Some((format!("memory.nodes[{index}]"), node.id, node.distances.as_ref(), node.access.as_deref()))
    });
    let slices = egm.iter().enumerate().filter_map(|(index, slice)| {
        let slice = slice.get().filter(|slice| slice.form != Some(EgmForm::Device))?;
        Some((format!("egm[{index}]"), slice.node, slice.distances.as_ref(), slice.access.as_deref()))
    });
    for (key, id, distances, access) in nodes.chain(slices) {
        for (text, &distance) in distances.into_iter().flatten() {
            if let Ok(to) = text.parse::<u32>() {
                check_distance(to == id, distance, format!("{key}.distances.{text}"), faults);
            }
        }
        check_figures(&key, access.unwrap_or_default(), faults);
    }
}

/// Notes figures in `access` of the node at `key` that are outside their ranges.
fn check_figures(key: &str, access: &[Access], faults: &mut Faults) {
    for (index, access) in access.iter().enumerate() {
        let key = |name: &str| format!("{key}.access[{index}].{name}");
        faults.value(key("latency_ns"), in_range(access.latency_ns, 1, MAX_ENTRY));
        faults.value(key("bandwidth_mbps"), in_range(access.bandwidth_mbps, 1, MAX_BANDWIDTH));
    }
}

fn check_access(domain: &Domain<'_>, domains: &[Domain<'_>], faults: &mut Faults) {
    for (index, access) in domain.access.iter().enumerate() {
        let node = access.from;
        let is_twice = domain.access.iter().take(index).any(|earlier| earlier.from == node);
        let rule = match domains.iter().find(|other| other.id == node) {
            None => Some(no_such_node(node, domains)),
            Some(looker) if !looker.has_cpus => Some(NumaRule::NoProcessor { node }.into()),
            Some(_) if is_twice => Some(NumaRule::AccessTwice { node }.into()),
            Some(_) => None,
        };
        let key = format!("{}.access[{index}].from", domain.key);
        rule.into_iter().for_each(|rule| faults.note(rule.at(key.as_str())));
    }
    check_figures(&domain.key, domain.access, faults);
}
