//! Memory and NUMA: `memory-backend-*`, `-numa`.

use egm_address::CpuSet;

use super::{Qemu, value};
use crate::export::figures::{Figure, figures};
use crate::export::guest::{Guest, MemoryPiece, NumaNode, Source};

const MIB: u64 = 1 << 20;

/// The option that makes `memory` an object.
pub(crate) fn backend(memory: &MemoryPiece) -> String {
    let MemoryPiece { id, size, source, .. } = memory;
    match source {
        Source::Own { page_size, host_nodes, prefault } => {
            let pages = page_size
                .hugetlb()
                .map_or_else(String::new, |page| format!(",hugetlb=on,hugetlbsize={page}"));
            let mut nodes: String =
                host_nodes.iter().flat_map(ranges).map(|range| format!(",host-nodes={range}")).collect();
            if !nodes.is_empty() {
                nodes.push_str(",policy=bind");
            }
            let prealloc = if *prefault { ",prealloc=on" } else { "" };
            format!("memory-backend-memfd,id={id},size={size},share=on{pages}{nodes}{prealloc}")
        }
        Source::File { path, offset, page } => {
            let offset = if *offset > 0 { format!(",offset={offset}") } else { String::new() };
            let path = value(path);
            // Memory without struct page cannot be populated, and a mapping is only as aligned as it is asked to be.
            let align = page.max(&(2 * MIB));
            format!(
                "memory-backend-file,id={id},mem-path={path},size={size},share=on,prealloc=off,align={align}{offset}"
            )
        }
    }
}

impl Qemu<'_> {
    pub(super) fn memory(&mut self) {
        self.command.option("-m", format!("size={}M", self.guest.size() / MIB));
        for memory in &self.guest.memory {
            self.command.option("-object", backend(memory));
            if let Source::File { path, .. } = &memory.source {
                self.notes.push(format!(
                    "{}: QEMU makes a file of RAM where {path} is missing: look with \"test -c {path}\" before",
                    memory.id
                ));
            }
        }
        let guest = self.guest;
        let nodes = guest.nodes.iter().map(|node| self::node(guest, node));
        for numa in nodes.chain(distances(guest, |_| true)).chain(figure_options(guest)) {
            self.command.option("-numa", numa);
        }
    }
}

/// The option that makes `node`.
pub(crate) fn node(guest: &Guest, node: &NumaNode) -> String {
    let cpus: String = ranges(&node.cpus).iter().map(|range| format!(",cpus={range}")).collect();
    let memory = node.memory.and_then(|index| guest.memory.get(index));
    let memory = memory.map_or_else(String::new, |memory| format!(",memdev={}", memory.id));
    format!("node,nodeid={}{cpus}{memory}", node.id)
}

/// Options for the distances between nodes of which one is `wanted`. Once there is one, QEMU wants all; where both
/// directions agree, one is enough.
pub(crate) fn distances(guest: &Guest, wanted: impl Fn(&NumaNode) -> bool) -> Vec<String> {
    let Some(rows) = &guest.distances else { return Vec::new() };
    let mut options = Vec::new();
    for (at, (from, row)) in guest.nodes.iter().zip(rows).enumerate() {
        for ((to, &there), back) in guest.nodes.iter().zip(row).zip(rows) {
            let second = from.id > to.id && back.get(at) == Some(&there);
            if from.id != to.id && !second && (wanted(from) || wanted(to)) {
                options.push(format!("dist,src={},dst={},val={there}", from.id, to.id));
            }
        }
    }
    options
}

pub(crate) fn figure_options(guest: &Guest) -> Vec<String> {
    let options = |figure: Figure| {
        let Figure { from, target, latency, bandwidth } = figure;
        let pair = format!("hmat-lb,initiator={from},target={target},hierarchy=memory");
        [
            format!("{pair},data-type=access-latency,latency={latency}"),
            format!("{pair},data-type=access-bandwidth,bandwidth={bandwidth}M"),
        ]
    };
    figures(guest).into_iter().flat_map(options).collect()
}

/// `0-3`, `8`: a key for each.
fn ranges(set: &CpuSet) -> Vec<String> {
    set.to_string().split(',').filter(|range| !range.is_empty()).map(str::to_owned).collect()
}
