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
    let (limit, hidden) =
        if by_limit { below_a_limit(facts, request)? } else { node_by_node(facts, request)? };
    let deal = |(ram, hidden): (NodeRam, Vec<Span<Host>>)| {
        let has = hidden.iter().map(|span| span.size()).sum();
        let pieces = if hidden.is_empty() { Some(Vec::new()) } else { deal(hidden, parts) };
        let wants =
            parts.iter().filter_map(|part| part.size).fold(0, |sum: u64, n| sum.saturating_add(n.get()));
        let (has, wants) = (ByteSize::new(has), ByteSize::new(wants));
        pieces.map(|pieces| node_split(&ram, pieces)).ok_or(AdviseError::Short { node: ram.node, has, wants })
    };
    let nodes: Vec<NodeSplit> = hidden.into_iter().map(deal).collect::<Result<_, _>>()?;
    let pieces: Vec<(u32, &HiddenPiece)> =
        nodes.iter().flat_map(|node| node.hidden.iter().map(|piece| (node.node, piece))).collect();
    let memmap = |(_, piece): &(u32, &HiddenPiece)| {
        let sign = match piece.how {
            SplitMethod::Memmap => '$',
            SplitMethod::Dax => '!',
            _ => return None,
        };
        let (size, start) = (memparse(piece.span.size()), memparse(piece.span.start().get()));
        Some(format!("memmap={size}{sign}{start}"))
    };
    let limit = limit.map(|limit| format!("mem={}", memparse(limit)));
    let words = limit.into_iter().chain(pieces.iter().filter_map(memmap)).collect();
    let (regions, commands) = (regions(facts, &pieces), commands(&pieces));
    Ok(Split { commands, regions, ..by_words(facts, words, nodes) })
}

/// Memory of each node, and the hidden part of it.
type HiddenByNode = Vec<(NodeRam, Vec<Span<Host>>)>;

/// One limit for all nodes: an address on x86, a number of bytes on Arm; either way what is above is not seen.
fn below_a_limit(
    facts: &HostFacts,
    request: &SplitRequest,
) -> Result<(Option<u64>, HiddenByNode), AdviseError> {
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
    let here = |ram: NodeRam| {
        // A span that crosses from node to node is cut there.
        let here = hidden.minus(&hidden.minus(&ram.spans));
        (ram, here.iter().collect())
    };
    Ok((Some(limit), nodes.into_iter().map(here).collect()))
}

/// Each node keeps its share.
fn node_by_node(
    facts: &HostFacts,
    request: &SplitRequest,
) -> Result<(Option<u64>, HiddenByNode), AdviseError> {
    let rams = ram::by_node(facts)?;
    let keep = share(request.hypervisor, request.per_node, rams.len(), 1 << 30);
    let split = |ram: NodeRam| {
        let hidden = ram::hidden(&ram.spans, keep);
        if hidden.is_empty() {
            Err(nothing_left(ram.node, ram.spans.size(), keep))
        } else {
            Ok((ram, hidden))
        }
    };
    Ok((None, rams.into_iter().map(split).collect::<Result<_, _>>()?))
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

/// A region for each piece that `/dev/mem` reaches, named by its way, with a number where there are several.
fn regions(facts: &HostFacts, pieces: &[(u32, &HiddenPiece)]) -> Vec<ReservedSpan> {
    let of = |how: SplitMethod| {
        let alike: Vec<_> = pieces.iter().filter(|(_, piece)| piece.how == how).collect();
        let one = alike.len() == 1;
        let region = move |(i, (node, piece)): (usize, &(u32, &HiddenPiece))| ReservedSpan {
            name: if one { how.name().to_owned() } else { format!("{}{i}", how.name()) },
            base: piece.span.start(),
            size: ByteSize::new(piece.span.size()),
            node: Some(*node),
            page_size: None,
            // Without a map of the firmware, it is the RAM of a kernel from which no memory is hidden yet.
            trusted: facts.firmware.is_empty(),
            device: PathBuf::from("/dev/mem"),
        };
        alike.into_iter().enumerate().map(region).collect::<Vec<_>>()
    };
    [SplitMethod::Memmap, SplitMethod::Mem].into_iter().flat_map(of).collect()
}

/// Commands that make device-DAX of persistent memory. The kernel numbers its namespaces by address.
fn commands(pieces: &[(u32, &HiddenPiece)]) -> Vec<String> {
    let mut spans: Vec<_> = pieces
        .iter()
        .filter(|(_, piece)| piece.how == SplitMethod::Dax)
        .map(|(_, piece)| piece.span)
        .collect();
    spans.sort_unstable_by_key(|span| span.start());
    let command = |(i, span): (usize, Span<Host>)| {
        let align = if span.start().is_aligned(1 << 30) && span.size() >> 30 > 1 { "1G" } else { "2M" };
        format!(
            "ndctl create-namespace --force --reconfig=namespace{i}.0 --mode=devdax --map=mem --align={align}"
        )
    };
    spans.into_iter().enumerate().map(command).collect()
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
    let split = |node: &&Node| {
        let pages = node.total.get().saturating_sub(keep) / page;
        if pages == 0 {
            return Err(nothing_left(node.id, node.total.get(), keep));
        }
        let guests = pages.saturating_mul(page);
        let keeps = ByteSize::new(node.total.get().saturating_sub(guests));
        let split = NodeSplit { node: node.id, keeps, guests: ByteSize::new(guests), hidden: Vec::new() };
        Ok((split, pages))
    };
    let nodes: Vec<(NodeSplit, u64)> = with_memory.iter().map(split).collect::<Result<_, _>>()?;
    let count = match nodes.as_slice() {
        [(_, pages)] => pages.to_string(),
        several => {
            let each = several.iter().map(|(split, pages)| format!("{}:{pages}", split.node));
            each.collect::<Vec<_>>().join(",")
        }
    };
    let size = memparse(page);
    let words = vec![
        format!("default_hugepagesz={size}"),
        format!("hugepagesz={size}"),
        format!("hugepages={count}"),
    ];
    let nodes = nodes.into_iter().map(|(split, _)| split).collect();
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
