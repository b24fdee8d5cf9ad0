//! Rules of ordinary memory and of EGM slices.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use egm_address::ByteSize;

use super::error::{Fault, Rule, at_most, in_range, name, not_empty};
use super::faults::Faults;
use super::file::{EgmFile, MemoryFile, NodeFile, OneOrMore};
use super::pages::PageSize;
use super::rules::{MAX_BYTES, MAX_REGIONS, MemoryRule};
use super::slot::Slot;
use super::spec::{EgmForm, EgmSlice, MAX_NODES, Memory, Node};

/// More slices than this have no node of their own.
const MAX_SLICES: usize = 255;
/// An EGM slice is a multiple of this, so that the guest can map it with large pages.
const EGM_ALIGNMENT: u64 = 2 << 20;
/// Words for memory that the kernel hands out page by page, of a size and from nodes that the slice chooses.
const POOLS: [&str; 3] = [LOCAL, "memfd", "hugetlb"];
const ZERO: ByteSize = ByteSize::new(0);
/// The region that is memory of the process itself.
pub const LOCAL: &str = "local";
/// The region, and kind, that is memory of the machine's own VM.
pub const GUEST_MEMFD: &str = "guest-memfd";

/// A size that is not 0, not absurd, and a multiple of `unit`.
pub(super) fn sized(size: ByteSize, unit: u64) -> Result<ByteSize, Rule> {
    let bytes = size.get();
    let rule = if bytes == 0 {
        MemoryRule::Empty
    } else if bytes > MAX_BYTES {
        MemoryRule::TooLarge { size }
    } else if !bytes.is_multiple_of(unit) {
        let rounded = ByteSize::new(bytes.next_multiple_of(unit));
        MemoryRule::Multiple { size, unit: ByteSize::new(unit), rounded }
    } else {
        return Ok(size);
    };
    Err(rule.into())
}

/// Ordinary memory for `vcpus` vCPUs; `None` when it breaks a rule, which is noted. Distances and access figures follow
/// when all nodes are known.
pub(super) fn resolve(file: &MemoryFile, vcpus: Option<u32>, faults: &mut Faults) -> Option<Memory> {
    let page_size = file.page_size.unwrap_or(PageSize::Auto);
    let prefault = file.prefault.unwrap_or(false);
    let unit = page_size.bytes();
    let Some(written) = &file.nodes else {
        let size = file.size.ok_or_else(|| Rule::MissingKey { key: "size" }.at("memory"));
        let size = faults.keep(size)?;
        let size = faults.value("memory.size", sized(size, unit))?;
        let cpus = (0..vcpus?).collect();
        let node =
            Node { id: 0, size, cpus, host_nodes: None, distances: BTreeMap::new(), access: Vec::new() };
        return Some(Memory { size, page_size, prefault, nodes: vec![node] });
    };
    let mut nodes = nodes(written, unit, faults);
    if let Some(size) = file.size.filter(|size| *size != ZERO) {
        faults.value("memory.size", sized(size, unit));
    }
    if faults.are_in("memory") {
        return None;
    }
    let sum = nodes.iter().fold(0_u64, |sum, node| sum.saturating_add(node.size.get()));
    let sum = ByteSize::new(sum);
    let size = match file.size.unwrap_or(sum) {
        ZERO if sum == ZERO => ZERO, // slices may be the memory of all nodes
        size => faults.value("memory.size", sized(size, unit))?,
    };
    let sum = if sum == size { Ok(()) } else { Err(MemoryRule::Sum { sum, size }.into()) };
    let sum = faults.value("memory.size", sum);
    faults.keep(place_vcpus(&nodes, vcpus?).map_err(|fault| fault.inside("memory")))?;
    sum?;
    nodes.sort_by_key(|node| node.id);
    Some(Memory { size, page_size, prefault, nodes })
}

/// The nodes that break no rule of their own, in the order written.
fn nodes(written: &[Slot<NodeFile>], unit: u64, faults: &mut Faults) -> Vec<Node> {
    let mut nodes: Vec<Node> = Vec::with_capacity(written.len());
    let mut owners: BTreeMap<u32, usize> = BTreeMap::new();
    for (index, file) in written.iter().enumerate() {
        let here = format!("memory.nodes[{index}]");
        let Some(node) = file.get().and_then(|file| node(file, unit, &here, faults)) else { continue };
        if let Some(first) = owners.get(&node.id) {
            let rule = MemoryRule::DuplicateNode { id: node.id, first: format!("memory.nodes[{first}]") };
            faults.note(Rule::from(rule).at(format!("{here}.id")));
            continue;
        }
        owners.insert(node.id, index);
        nodes.push(node);
    }
    nodes
}

fn node(file: &NodeFile, unit: u64, here: &str, faults: &mut Faults) -> Option<Node> {
    let id = faults.value(format!("{here}.id"), in_range(file.id, 0, MAX_NODES - 1));
    let size = match file.size {
        None | Some(ZERO) => Some(ZERO),
        Some(size) => faults.value(format!("{here}.size"), sized(size, unit)),
    };
    let cpus = file.cpus.clone().unwrap_or_default();
    if size == Some(ZERO) && cpus.is_empty() {
        faults.note(Rule::from(MemoryRule::EmptyNode { id: file.id }).at(here));
    }
    let host_nodes = faults.value(format!("{here}.host_nodes"), not_empty(file.host_nodes.clone()));
    Some(Node {
        id: id?,
        size: size?,
        cpus,
        host_nodes: host_nodes?,
        distances: BTreeMap::new(),
        access: Vec::new(),
    })
}

/// Every vCPU is in exactly one node, vCPU 0 in node 0. `nodes` are in the order written.
fn place_vcpus(nodes: &[Node], count: u32) -> Result<(), Fault> {
    let mut home = BTreeMap::new();
    for (index, node) in nodes.iter().enumerate() {
        let broken = |rule: MemoryRule| Err(Rule::from(rule).at(format!("nodes[{index}].cpus")));
        for vcpu in node.cpus.iter() {
            if vcpu >= count {
                return broken(MemoryRule::NoSuchVcpu { vcpu, count });
            }
            if let Some(first) = home.insert(vcpu, node.id) {
                return broken(MemoryRule::VcpuTwice { vcpu, first });
            }
        }
    }
    let broken = |rule: MemoryRule| Err(Rule::from(rule).at("nodes"));
    if nodes.iter().all(|node| node.id != 0) {
        return broken(MemoryRule::NoNodeZero);
    }
    if let Some(vcpu) = (0..count).find(|vcpu| !home.contains_key(vcpu)) {
        return broken(MemoryRule::VcpuNowhere { vcpu });
    }
    match home.get(&0) {
        Some(&node) if node != 0 => broken(MemoryRule::FirstVcpu { node }),
        _ => Ok(()),
    }
}

/// The slices; `None` when one breaks a rule, which is noted. Distances and access figures follow when all nodes are
/// known.
pub(super) fn resolve_egm(
    files: &[Slot<EgmFile>],
    memory: Option<&Memory>,
    faults: &mut Faults,
) -> Option<Vec<EgmSlice>> {
    faults.value("egm", at_most(files.len(), MAX_SLICES))?;
    let mut owners: BTreeMap<u32, String> = BTreeMap::new();
    let mut slices = Vec::with_capacity(files.len());
    for (index, file) in files.iter().enumerate() {
        let here = format!("egm[{index}]");
        let Some(file) = file.get() else { continue };
        let Some(slice) = slice(file, &here, faults) else { continue };
        if let Some(memory) = memory {
            faults.keep(beside(&slice, file, memory).map_err(|fault| fault.inside(&here)));
        }
        if slice.form == EgmForm::Memory {
            let key = format!("{here}.node");
            match owners.entry(slice.node) {
                Entry::Vacant(place) => {
                    place.insert(here);
                }
                Entry::Occupied(first) => {
                    let rule = MemoryRule::DuplicateNode { id: slice.node, first: first.get().clone() };
                    faults.note(Rule::from(rule).at(key));
                }
            }
        }
        slices.push(slice);
    }
    if faults.are_in("egm") {
        return None;
    }
    let is_without = |memory: &Memory| memory.nodes.iter().all(|node| !owners.contains_key(&node.id));
    if memory.is_some_and(|memory| memory.size == ZERO && is_without(memory)) {
        faults.note(Rule::from(MemoryRule::Empty).at("memory.size"));
    }
    Some(slices)
}

/// `slice` beside the nodes of `memory`. It is the memory of a node without any, and that node has its distances.
fn beside(slice: &EgmSlice, file: &EgmFile, memory: &Memory) -> Result<(), Fault> {
    let id = slice.node;
    let of_node = |node: &&Node| slice.form == EgmForm::Memory && node.id == id;
    let Some(node) = memory.nodes.iter().find(of_node) else { return Ok(()) };
    if node.size != ZERO || node.host_nodes.is_some() {
        return Err(Rule::from(MemoryRule::OrdinaryMemory { id }).at("node"));
    }
    let wrong = [(file.distances.is_some(), "distances"), (file.access.is_some(), "access")];
    match wrong.iter().find(|(broken, _)| *broken) {
        Some((_, key)) => Err(Rule::from(MemoryRule::DescribedElsewhere { id }).at(*key)),
        None => Ok(()),
    }
}

fn regions(file: &OneOrMore) -> Result<Vec<String>, Fault> {
    let list = match file {
        OneOrMore::One(region) => return Ok(vec![name(region).map_err(|rule| rule.at("region"))?]),
        OneOrMore::More(list) => list,
    };
    let each =
        |(index, region): (usize, &String)| name(region).map_err(|rule| rule.at(format!("region[{index}]")));
    let regions: Vec<String> = list.iter().enumerate().map(each).collect::<Result<_, _>>()?;
    let different: BTreeSet<&String> = regions.iter().collect();
    if regions.is_empty() || regions.len() > MAX_REGIONS || different.len() != regions.len() {
        return Err(Rule::from(MemoryRule::RegionList).at("region"));
    }
    Ok(regions)
}

/// The slice of `file` at `here`; `None` when it breaks a rule, which is noted. Distances and access figures stay empty.
pub(super) fn slice(file: &EgmFile, here: &str, faults: &mut Faults) -> Option<EgmSlice> {
    let regions = faults.keep(regions(&file.region).map_err(|fault| fault.inside(here)));
    let page_size = file.page_size.unwrap_or(PageSize::Auto);
    let size = sized(file.size, page_size.bytes().max(EGM_ALIGNMENT));
    let size = faults.value(format!("{here}.size"), size);
    let node = faults.value(format!("{here}.node"), in_range(file.node, 0, MAX_NODES - 1));
    let form = file.form.unwrap_or(EgmForm::Memory);
    let host_nodes = faults.value(format!("{here}.host_nodes"), not_empty(file.host_nodes.clone()));
    let regions = regions?;
    let pool = regions.iter().any(|region| POOLS.contains(&region.as_str()));
    let wrong = [
        (!pool && file.page_size.is_some(), "page_size"),
        (!pool && file.host_nodes.is_some(), "host_nodes"),
    ];
    for (_, key) in wrong.iter().filter(|(broken, _)| *broken) {
        let rule = MemoryRule::NotLocal { region: regions.join("\", \"") };
        faults.note(Rule::from(rule).at(format!("{here}.{key}")));
    }
    let wrong = [
        (form == EgmForm::Device && file.distances.is_some(), "distances"),
        (form == EgmForm::Device && file.access.is_some(), "access"),
    ];
    for (_, key) in wrong.iter().filter(|(broken, _)| *broken) {
        faults.note(Rule::from(MemoryRule::NotMemory).at(format!("{here}.{key}")));
    }
    Some(EgmSlice {
        regions,
        size: size?,
        node: node?,
        form,
        page_size,
        host_nodes: host_nodes?,
        distances: BTreeMap::new(),
        access: Vec::new(),
    })
}
