//! Rules of ordinary memory and of EGM slices.

use std::collections::{BTreeMap, BTreeSet};

use egm_address::{ByteSize, CpuSet};

use super::error::{Fault, Rule, at_most, in_range, name, not_empty};
use super::file::{EgmFile, MemoryFile, NodeFile, OneOrMore};
use super::pages::PageSize;
use super::rules::{MAX_BYTES, MAX_REGIONS, MemoryRule};
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

/// Ordinary memory for `vcpus` vCPUs; distances and access figures follow when all nodes are known.
pub(super) fn resolve(file: &MemoryFile, vcpus: u32) -> Result<Memory, Fault> {
    let page_size = file.page_size.unwrap_or(PageSize::Auto);
    let prefault = file.prefault.unwrap_or(false);
    let unit = page_size.bytes();
    let Some(written) = &file.nodes else {
        let size = file.size.ok_or_else(|| Rule::MissingKey { key: "size" }.here())?;
        let size = sized(size, unit).map_err(|rule| rule.at("size"))?;
        let cpus = (0..vcpus).collect();
        let node =
            Node { id: 0, size, cpus, host_nodes: None, distances: BTreeMap::new(), access: Vec::new() };
        return Ok(Memory { size, page_size, prefault, nodes: vec![node] });
    };
    let mut nodes: Vec<Node> = Vec::with_capacity(written.len());
    let mut sum: u64 = 0;
    for (index, one) in written.iter().enumerate() {
        let node = node(one, unit).map_err(|fault| fault.inside(&format!("nodes[{index}]")))?;
        if let Some(first) = nodes.iter().position(|other| other.id == node.id) {
            let rule = MemoryRule::DuplicateNode { id: node.id, first: format!("memory.nodes[{first}]") };
            return Err(Rule::from(rule).at(format!("nodes[{index}].id")));
        }
        sum = sum.saturating_add(node.size.get());
        nodes.push(node);
    }
    let sum = ByteSize::new(sum);
    let size = match file.size.unwrap_or(sum) {
        ZERO if sum == ZERO => ZERO, // slices may be the memory of all nodes
        size => sized(size, unit).map_err(|rule| rule.at("size"))?,
    };
    if sum != size {
        return Err(Rule::from(MemoryRule::Sum { sum, size }).at("size"));
    }
    place_vcpus(&nodes, vcpus)?;
    nodes.sort_by_key(|node| node.id);
    Ok(Memory { size, page_size, prefault, nodes })
}

fn node(file: &NodeFile, unit: u64) -> Result<Node, Fault> {
    let id = in_range(file.id, 0, MAX_NODES - 1).map_err(|rule| rule.at("id"))?;
    let size = match file.size {
        None | Some(ZERO) => ZERO,
        Some(size) => sized(size, unit).map_err(|rule| rule.at("size"))?,
    };
    let cpus = file.cpus.clone().unwrap_or_default();
    if size == ZERO && cpus.is_empty() {
        return Err(Rule::from(MemoryRule::EmptyNode { id }).here());
    }
    let host_nodes = not_empty(file.host_nodes.clone()).map_err(|rule| rule.at("host_nodes"))?;
    Ok(Node { id, size, cpus, host_nodes, distances: BTreeMap::new(), access: Vec::new() })
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

/// The slices; distances and access figures follow when all nodes are known.
pub(super) fn resolve_egm(files: &[EgmFile], memory: &Memory) -> Result<Vec<EgmSlice>, Fault> {
    at_most(files.len(), MAX_SLICES).map_err(|rule| rule.at("egm"))?;
    let mut owners: BTreeMap<u32, String> = BTreeMap::new();
    let mut slices = Vec::with_capacity(files.len());
    for (index, file) in files.iter().enumerate() {
        let here = format!("egm[{index}]");
        let slice = slice(file).and_then(|slice| beside(slice, file, memory));
        let slice = slice.map_err(|fault| fault.inside(&here))?;
        if slice.form == EgmForm::Memory
            && let Some(first) = owners.insert(slice.node, here.clone())
        {
            let rule = MemoryRule::DuplicateNode { id: slice.node, first };
            return Err(Rule::from(rule).at(format!("{here}.node")));
        }
        slices.push(slice);
    }
    if memory.size == ZERO && memory.nodes.iter().all(|node| !owners.contains_key(&node.id)) {
        return Err(Rule::from(MemoryRule::Empty).at("memory.size"));
    }
    Ok(slices)
}

/// `slice` beside the nodes of `memory`. It is the memory of a node without any, and that node has its distances.
fn beside(slice: EgmSlice, file: &EgmFile, memory: &Memory) -> Result<EgmSlice, Fault> {
    let id = slice.node;
    let of_node = |node: &&Node| slice.form == EgmForm::Memory && node.id == id;
    let Some(node) = memory.nodes.iter().find(of_node) else { return Ok(slice) };
    if node.size != ZERO || node.host_nodes.is_some() {
        return Err(Rule::from(MemoryRule::OrdinaryMemory { id }).at("node"));
    }
    let wrong = [(file.distances.is_some(), "distances"), (file.access.is_some(), "access")];
    match wrong.iter().find(|(broken, _)| *broken) {
        Some((_, key)) => Err(Rule::from(MemoryRule::DescribedElsewhere { id }).at(*key)),
        None => Ok(slice),
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

fn slice(file: &EgmFile) -> Result<EgmSlice, Fault> {
    let regions = regions(&file.region)?;
    let page_size = file.page_size.unwrap_or(PageSize::Auto);
    let size = sized(file.size, page_size.bytes().max(EGM_ALIGNMENT)).map_err(|rule| rule.at("size"))?;
    let node = in_range(file.node, 0, MAX_NODES - 1).map_err(|rule| rule.at("node"))?;
    let form = file.form.unwrap_or(EgmForm::Memory);
    let host_nodes: Option<CpuSet> =
        not_empty(file.host_nodes.clone()).map_err(|rule| rule.at("host_nodes"))?;
    let pool = regions.iter().any(|region| POOLS.contains(&region.as_str()));
    let wrong =
        [(!pool && file.page_size.is_some(), "page_size"), (!pool && host_nodes.is_some(), "host_nodes")];
    if let Some((_, key)) = wrong.iter().find(|(broken, _)| *broken) {
        return Err(Rule::from(MemoryRule::NotLocal { region: regions.join("\", \"") }).at(*key));
    }
    let wrong = [
        (form == EgmForm::Device && file.distances.is_some(), "distances"),
        (form == EgmForm::Device && file.access.is_some(), "access"),
    ];
    if let Some((_, key)) = wrong.iter().find(|(broken, _)| *broken) {
        return Err(Rule::from(MemoryRule::NotMemory).at(*key));
    }
    let (distances, access) = (BTreeMap::new(), Vec::new());
    Ok(EgmSlice { regions, size, node, form, page_size, host_nodes, distances, access })
}
