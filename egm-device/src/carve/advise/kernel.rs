//! Splits that the kernel's command line makes.

use std::path::PathBuf;

use egm_address::{ByteSize, Host, Span, SpanSet};

use crate::carve::advise::ram::{self, NodeRam, share};
use crate::carve::advise::{
    AdviseError, HiddenPiece, NodeSplit, Split, SplitMethod, SplitPart, SplitRequest, is_x86, memparse,
};
use crate::region::{HostFacts, Node, ReservedSpan, words};

/// `mem=`, `memmap=nn$ss` (reserved) and `memmap=nn!ss` (persistent memory), one or several.
pub(super) fn map(
    facts: &HostFacts,
    request: &SplitRequest,
    parts: &[SplitPart],
) -> Result<Split, AdviseError> {
    if let Some(part) = parts.iter().find(|part| part.how != SplitMethod::Mem && !is_x86(facts)) {
        let needs = "the command line word memmap=, which only x86_64 has";
        return Err(AdviseError::Unsupported { how: part.how.name(), needs, is: facts.arch.clone() });
    }
    let by_limit = parts.iter().any(|part| part.how == SplitMethod::Mem);
    let hidden = if by_limit { below_a_limit(facts, request)? } else { node_by_node(facts, request)? };
    let nodes = hidden.nodes.into_iter().map(|node| node.split(parts)).collect::<Result<Vec<_>, _>>()?;
    let limit = hidden.limit.map(|limit| format!("mem={}", memparse(limit)));
    let memmap = nodes.iter().flat_map(|node| &node.hidden).filter_map(HiddenPiece::memmap);
    let words = limit.into_iter().chain(memmap).collect();
    let (regions, commands) = (regions(facts, &nodes), commands(&nodes));
    Ok(Split { commands, regions, ..by_words(facts, words, nodes) })
}

/// Memory that the command line hides.
struct HiddenMemory {
    /// The value of `mem=`.
    limit: Option<u64>,
    nodes: Vec<HiddenRam>,
}

/// The RAM of a node, and the part of it that is hidden.
struct HiddenRam {
    ram: NodeRam,
    hidden: Vec<Span<Host>>,
}

impl HiddenRam {
    /// The split of this node, with its hidden memory in `parts`.
    fn split(self, parts: &[SplitPart]) -> Result<NodeSplit, AdviseError> {
        if self.hidden.is_empty() {
            return Ok(node_split(&self.ram, Vec::new()));
        }
        let has = self.hidden.iter().map(|span| span.size()).sum();
        let pieces = deal(self.hidden, parts).ok_or_else(|| {
            let sizes = parts.iter().filter_map(|part| part.size);
            let wants = sizes.fold(0, |sum: u64, size| sum.saturating_add(size.get()));
            AdviseError::Short { node: self.ram.node, has: ByteSize::new(has), wants: ByteSize::new(wants) }
        })?;
        Ok(node_split(&self.ram, pieces))
    }
}

impl HiddenPiece {
    /// The word of the command line that hides it; `None` below `mem=`.
    fn memmap(&self) -> Option<String> {
        let sign = match self.how {
            SplitMethod::Memmap => '$',
            SplitMethod::Dax => '!',
            _ => return None,
        };
        let (size, start) = (memparse(self.span.size()), memparse(self.span.start().get()));
        Some(format!("memmap={size}{sign}{start}"))
    }
}

/// One limit for all nodes: an address on x86, a number of bytes on Arm; either way what is above is not seen.
fn below_a_limit(facts: &HostFacts, request: &SplitRequest) -> Result<HiddenMemory, AdviseError> {
    let all = ram::all(facts)?;
    let nodes = ram::by_node(facts).or_else(|error| match error {
        // The limit needs no nodes; the node of the hidden memory stays unknown.
        AdviseError::NoAffinity { .. } => Ok(vec![NodeRam { node: 0, spans: all.clone() }]),
        other => Err(other),
    })?;
    if request.per_node && nodes.len() > 1 {
        return Err(AdviseError::OneLimit { keeps: request.hypervisor, nodes: nodes.len() });
    }
    let hidden = ram::hidden(&all, request.hypervisor.get());
    let Some(first) = hidden.first() else {
        let node = nodes.first().map_or(0, |ram| ram.node);
        return Err(nothing_left(node, all.size(), request.hypervisor.get()));
    };
    let below = all.iter().filter_map(|span| Span::between(span.start(), span.end().min(first.start())));
    let limit = if is_x86(facts) { first.start().get() } else { below.map(Span::size).sum() };
    let hidden: SpanSet<Host> = hidden.into_iter().collect();
    let nodes = nodes.into_iter().map(|ram| {
        // A span that crosses from node to node is cut there.
        let here = hidden.minus(&hidden.minus(&ram.spans));
        HiddenRam { ram, hidden: here.iter().collect() }
    });
    Ok(HiddenMemory { limit: Some(limit), nodes: nodes.collect() })
}

/// Each node keeps its share.
fn node_by_node(facts: &HostFacts, request: &SplitRequest) -> Result<HiddenMemory, AdviseError> {
    let rams = ram::by_node(facts)?;
    let keep = share(request.hypervisor, request.per_node, rams.len(), 1 << 30);
    let mut nodes = Vec::new();
    for ram in rams {
        let hidden = ram::hidden(&ram.spans, keep);
        if hidden.is_empty() {
            return Err(nothing_left(ram.node, ram.spans.size(), keep));
        }
        nodes.push(HiddenRam { ram, hidden });
    }
    Ok(HiddenMemory { limit: None, nodes })
}

/// Gives each of `parts` its size from the lowest address up, and the last one the rest; `None` when that is nothing.
fn deal(hidden: Vec<Span<Host>>, parts: &[SplitPart]) -> Option<Vec<HiddenPiece>> {
    let mut left: SpanSet<Host> = hidden.into_iter().collect();
    let mut pieces = Vec::new();
    for part in parts {
        let mut wanted = part.size.map_or(u64::MAX, ByteSize::get);
        let mut taken = Vec::new();
        for span in left.iter() {
            let piece = Span::new(span.start(), span.size().min(wanted)).ok();
            taken.extend(piece);
            wanted = wanted.saturating_sub(span.size());
        }
        // A part that gets less than its size leaves nothing to the last one.
        if taken.is_empty() {
            return None;
        }
        left = left.minus(&taken.iter().copied().collect());
        pieces.extend(taken.into_iter().map(|span| HiddenPiece { how: part.how, span }));
    }
    Some(pieces)
}

/// A region for each piece that `/dev/mem` reaches, named by its method, with a number where there are several.
fn regions(facts: &HostFacts, nodes: &[NodeSplit]) -> Vec<ReservedSpan> {
    let mut regions: Vec<ReservedSpan> = Vec::new();
    for how in [SplitMethod::Memmap, SplitMethod::Mem] {
        let first = regions.len();
        for node in nodes {
            for piece in node.hidden.iter().filter(|piece| piece.how == how) {
                let number = regions.len().saturating_sub(first);
                regions.push(ReservedSpan {
                    name: format!("{}{number}", how.name()),
                    base: piece.span.start(),
                    size: ByteSize::new(piece.span.size()),
                    node: Some(node.node),
                    page_size: None,
                    // Without a map of the firmware, it is the RAM of a kernel from which no memory is hidden yet.
                    trusted: facts.firmware.is_empty(),
                    device: PathBuf::from("/dev/mem"),
                });
            }
        }
        if let Some([only]) = regions.get_mut(first..) {
            how.name().clone_into(&mut only.name);
        }
    }
    regions
}

/// Commands that make device-DAX of persistent memory. The kernel numbers its namespaces by address.
fn commands(nodes: &[NodeSplit]) -> Vec<String> {
    let pieces = nodes.iter().flat_map(|node| &node.hidden);
    let mut spans: Vec<Span<Host>> =
        pieces.filter(|piece| piece.how == SplitMethod::Dax).map(|piece| piece.span).collect();
    spans.sort_unstable_by_key(|span| span.start());
    spans.iter().enumerate().map(|(number, span)| create_namespace(number, *span)).collect()
}

fn create_namespace(number: usize, span: Span<Host>) -> String {
    let align = if span.start().is_aligned(1 << 30) && span.size() >> 30 > 1 { "1G" } else { "2M" };
    format!(
        "ndctl create-namespace --force --reconfig=namespace{number}.0 --mode=devdax --map=mem --align={align}"
    )
}

/// Pages of 1 GiB, or of 2 MiB where the processor has no larger ones.
pub(super) fn hugetlb(facts: &HostFacts, request: &SplitRequest) -> Result<Split, AdviseError> {
    let with_memory: Vec<&Node> = facts.nodes.iter().filter(|node| node.total.get() > 0).collect();
    let pools = |node: &&Node| node.pools.last().map(|pool| pool.page_size.get());
    let page = with_memory.iter().filter_map(pools).min().ok_or_else(|| AdviseError::Unsupported {
        how: "hugetlb",
        needs: "a kernel with pages of 2 MiB or 1 GiB",
        is: "one without".to_owned(),
    })?;
    let keep = share(request.hypervisor, request.per_node, with_memory.len(), page);
    let mut nodes = Vec::new();
    let mut counts = Vec::new();
    for node in &with_memory {
        let pages = node.total.get().saturating_sub(keep) / page;
        if pages == 0 {
            return Err(nothing_left(node.id, node.total.get(), keep));
        }
        let guests = pages.saturating_mul(page);
        let keeps = ByteSize::new(node.total.get().saturating_sub(guests));
        nodes.push(NodeSplit { node: node.id, keeps, guests: ByteSize::new(guests), hidden: Vec::new() });
        counts.push(if with_memory.len() == 1 { pages.to_string() } else { format!("{}:{pages}", node.id) });
    }
    let size = memparse(page);
    let words = vec![
        format!("default_hugepagesz={size}"),
        format!("hugepagesz={size}"),
        format!("hugepages={}", counts.join(",")),
    ];
    Ok(by_words(facts, words, nodes))
}

fn nothing_left(node: u32, has: u64, keeps: u64) -> AdviseError {
    AdviseError::NothingLeft { node, has: ByteSize::new(has), keeps: ByteSize::new(keeps) }
}

fn node_split(ram: &NodeRam, hidden: Vec<HiddenPiece>) -> NodeSplit {
    let guests: u64 = hidden.iter().map(|piece| piece.span.size()).sum();
    NodeSplit {
        node: ram.node,
        keeps: ByteSize::new(ram.spans.size().saturating_sub(guests)),
        guests: ByteSize::new(guests),
        hidden,
    }
}

/// A split by `words` alone.
fn by_words(facts: &HostFacts, words: Vec<String>, nodes: Vec<NodeSplit>) -> Split {
    let old = words::parse(&facts.command_line).into_iter().map(|word| word.text);
    let remove = old.filter(|word| !words.contains(word)).collect();
    Split { remove, words, nodes, ..Split::default() }
}
