//! Splits that the kernel's command line makes.

use std::path::PathBuf;

use egm_address::{ByteSize, Host, Span, SpanSet};

use crate::carve::advise::ram::{self, NodeRam, share};
use crate::carve::advise::{AdviseError, How, NodeSplit, SPLIT_VERSION, Split, Wish, is_x86, memparse};
use crate::region::{HostFacts, Node, ReservedSpan, words};

/// `mem=`: an address on x86, a number of bytes on Arm; either way what is above is not seen.
pub(super) fn mem(facts: &HostFacts, wish: &Wish) -> Result<Split, AdviseError> {
    let all = ram::all(facts)?;
    let nodes = ram::by_node(facts).or_else(|error| match error {
        // The limit needs no nodes; whose memory is hidden stays unknown.
        AdviseError::NoAffinity { .. } => Ok(vec![NodeRam { node: 0, spans: all.clone() }]),
        other => Err(other),
    })?;
    if wish.per_node && nodes.len() > 1 {
        return Err(AdviseError::OneLimit { keeps: wish.hypervisor, nodes: nodes.len() });
    }
    let hidden = ram::hidden(&all, wish.hypervisor.get());
    let Some(first) = hidden.first() else {
        let node = nodes.first().map_or(0, |ram| ram.node);
        return Err(nothing_left(node, all.size(), wish.hypervisor.get()));
    };
    let below = all.iter().filter_map(|span| Span::between(span.start(), span.end().min(first.start())));
    let limit = if is_x86(facts) { first.start().get() } else { below.map(Span::size).sum() };
    let hidden: SpanSet<Host> = hidden.into_iter().collect();
    let nodes = nodes.iter().map(|ram| {
        // A span that crosses from node to node is cut there.
        let here = hidden.minus(&hidden.minus(&ram.spans));
        node_split(ram, here.iter().collect())
    });
    let words = vec![format!("mem={}", memparse(limit))];
    Ok(named(facts, How::Mem, words, nodes.collect()))
}

/// `memmap=nn$ss` (reserved) or `memmap=nn!ss` (persistent memory), a word for each piece of hidden memory.
pub(super) fn memmap(facts: &HostFacts, wish: &Wish, sign: char) -> Result<Split, AdviseError> {
    let how = if sign == '!' { How::Dax } else { How::Memmap };
    if !is_x86(facts) {
        let how = if sign == '!' { "dax" } else { "memmap" };
        let needs = "the command line word memmap=, which only x86_64 has";
        return Err(AdviseError::Unsupported { how, needs, is: facts.arch.clone() });
    }
    let rams = ram::by_node(facts)?;
    let keep = share(wish.hypervisor, wish.per_node, rams.len(), 1 << 30);
    let split = |ram: &NodeRam| {
        let hidden = ram::hidden(&ram.spans, keep);
        if hidden.is_empty() {
            return Err(nothing_left(ram.node, ram.spans.size(), keep));
        }
        Ok(node_split(ram, hidden))
    };
    let nodes: Vec<NodeSplit> = rams.iter().map(split).collect::<Result<_, _>>()?;
    let spans = nodes.iter().flat_map(|node| &node.hidden);
    let word =
        |span: &Span<Host>| format!("memmap={}{sign}{}", memparse(span.size()), memparse(span.start().get()));
    let words = spans.clone().map(word).collect();
    if how == How::Memmap {
        return Ok(named(facts, how, words, nodes));
    }
    let command = |(i, span): (usize, &Span<Host>)| {
        let align = if span.start().is_aligned(1 << 30) && span.size() >> 30 > 1 { "1G" } else { "2M" };
        format!(
            "ndctl create-namespace --force --reconfig=namespace{i}.0 --mode=devdax --map=mem --align={align}"
        )
    };
    let commands = spans.enumerate().map(command).collect();
    Ok(Split { commands, regions: Vec::new(), ..named(facts, how, words, nodes) })
}

/// Pages of 1 GiB, or of 2 MiB where the processor has no larger ones.
pub(super) fn hugetlb(facts: &HostFacts, wish: &Wish) -> Result<Split, AdviseError> {
    let with_memory: Vec<&Node> = facts.nodes.iter().filter(|node| node.total.get() > 0).collect();
    let pools = |node: &&Node| node.pools.last().map(|pool| pool.page_size.get());
    let page = with_memory.iter().filter_map(pools).min().ok_or_else(|| AdviseError::Unsupported {
        how: "hugetlb",
        needs: "a kernel with pages of 2 MiB or 1 GiB",
        is: "one without".to_owned(),
    })?;
    let keep = share(wish.hypervisor, wish.per_node, with_memory.len(), page);
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
    Ok(Split { regions: Vec::new(), ..named(facts, How::Hugetlb, words, nodes) })
}

fn nothing_left(node: u32, has: u64, keeps: u64) -> AdviseError {
    AdviseError::NothingLeft { node, has: ByteSize::new(has), keeps: ByteSize::new(keeps) }
}

fn node_split(ram: &NodeRam, hidden: Vec<Span<Host>>) -> NodeSplit {
    let guests: u64 = hidden.iter().map(|span| span.size()).sum();
    NodeSplit {
        node: ram.node,
        keeps: ByteSize::new(ram.spans.size().saturating_sub(guests)),
        guests: ByteSize::new(guests),
        hidden,
    }
}

/// A split by `words`, with a region for each hidden span: `hidden0`, `hidden1`, …
fn named(facts: &HostFacts, how: How, words: Vec<String>, nodes: Vec<NodeSplit>) -> Split {
    let spans = nodes.iter().flat_map(|node| node.hidden.iter().map(|span| (node.node, *span)));
    let region = |(i, (node, span)): (usize, (u32, Span<Host>))| ReservedSpan {
        name: format!("hidden{i}"),
        base: span.start(),
        size: ByteSize::new(span.size()),
        node: Some(node),
        page_size: None,
        device: PathBuf::from("/dev/mem"),
    };
    let regions = spans.enumerate().map(region).collect();
    let old = words::parse(&facts.command_line).into_iter().map(|word| word.text);
    let remove = old.filter(|word| !words.contains(word)).collect();
    let (settings, commands) = (Vec::new(), Vec::new());
    Split { version: SPLIT_VERSION, how, remove, words, settings, commands, regions, nodes }
}
