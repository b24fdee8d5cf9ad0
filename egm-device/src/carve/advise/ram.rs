//! The RAM of each node, and the part of it that the hypervisor keeps.

use egm_address::{ByteSize, Host, Hpa, Span, SpanSet, align_down, align_up};

use crate::carve::advise::AdviseError;
use crate::region::{HostFacts, words};

/// The RAM of a node, hidden memory included.
pub(super) struct NodeRam {
    pub(super) node: u32,
    pub(super) spans: SpanSet<Host>,
}

/// All RAM. The kernel's map shows all of it only as long as no RAM is hidden from the kernel.
pub(super) fn all(facts: &HostFacts) -> Result<SpanSet<Host>, AdviseError> {
    if !facts.firmware.is_empty() {
        return Ok(facts.firmware.iter().copied().collect());
    }
    if facts.iomem.is_empty() {
        return Err(AdviseError::IomemHidden);
    }
    let hiding = words::parse(&facts.command_line).into_iter().filter(|word| !word.effects.is_empty());
    let words: Vec<String> = hiding.map(|word| word.text).collect();
    if words.is_empty() { Ok(facts.system_ram()) } else { Err(AdviseError::AlreadySplit { words }) }
}

/// RAM by node; nodes without any are left out.
pub(super) fn by_node(facts: &HostFacts) -> Result<Vec<NodeRam>, AdviseError> {
    let all = all(facts)?;
    if let [only] = facts.nodes.as_slice() {
        return Ok(vec![NodeRam { node: only.id, spans: all }]);
    }
    let of = |id: u32| {
        let here: SpanSet<Host> =
            facts.affinity.iter().filter(|affinity| affinity.node == id).map(|a| a.span).collect();
        NodeRam { node: id, spans: all.minus(&all.minus(&here)) }
    };
    let nodes = facts.nodes.iter().map(|node| of(node.id)).filter(|ram| !ram.spans.is_empty());
    let nodes: Vec<NodeRam> = nodes.collect();
    if nodes.is_empty() { Err(AdviseError::NoAffinity { nodes: facts.nodes.len() }) } else { Ok(nodes) }
}

/// Bytes that each of `nodes` keeps: `hypervisor`, or its share of it in whole pages of `page`.
pub(super) fn share(hypervisor: ByteSize, per_node: bool, nodes: usize, page: u64) -> u64 {
    let nodes = if per_node { 1 } else { u64::try_from(nodes).unwrap_or(u64::MAX).max(1) };
    align_up(hypervisor.get().div_ceil(nodes), page).unwrap_or(u64::MAX)
}

/// The lowest multiple of `align` below which at least `keep` bytes of `ram` lie; `None` when that is not inside it.
fn boundary(ram: &SpanSet<Host>, keep: u64, align: u64) -> Option<Hpa> {
    let mut left = keep;
    for span in ram.iter() {
        if left < span.size() {
            let address = align_up(span.start().get().checked_add(left)?, align)?;
            return Some(Hpa::new(address));
        }
        left = left.saturating_sub(span.size());
    }
    None
}

/// The part of `ram` that can be hidden when `keep` bytes stay: whole pieces of 1 GiB, or of 2 MiB if there are none. A
/// 64th less may stay: kernel page structures use as much, and the holes below 1 MiB must not cost a whole GiB.
pub(super) fn hidden(ram: &SpanSet<Host>, keep: u64) -> Vec<Span<Host>> {
    let keep = keep.saturating_sub(keep / 64);
    let pieces = |align: u64| -> Vec<Span<Host>> {
        let Some(from) = boundary(ram, keep, align) else { return Vec::new() };
        let inside = |span: Span<Host>| {
            let start = align_up(span.start().max(from).get(), align)?;
            Span::between(Hpa::new(start), Hpa::new(align_down(span.end().get(), align)))
        };
        ram.iter().filter_map(inside).collect()
    };
    Some(pieces(1 << 30)).filter(|found| !found.is_empty()).unwrap_or_else(|| pieces(2 << 20))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_hypervisor_keeps_what_it_asked_for_and_the_rest_is_aligned() {
        // A PC of 16 GiB: 3 GiB below the PCI hole.
        let ram: SpanSet<Host> = [(0x1000, 0xbfff_f000), (4 << 30, 13 << 30)]
            .map(|(start, size)| Span::new(Hpa::new(start), size).unwrap())
            .into_iter()
            .collect();
        let spans = hidden(&ram, 4 << 30);
        assert_eq!(spans, [Span::new(Hpa::new(5 << 30), 12 << 30).unwrap()]);
        assert!(hidden(&ram, 17 << 30).is_empty());
    }

    proptest! {
        #[test]
        fn nothing_that_the_hypervisor_keeps_is_hidden(
            raw in prop::collection::vec((0u64..64, 1u64..16), 1..6),
            keep in 0u64..64,
        ) {
            let ram: SpanSet<Host> =
                raw.iter().map(|(s, n)| Span::new(Hpa::new(s << 28), n << 28).unwrap()).collect();
            let spans = hidden(&ram, keep << 28);
            let set: SpanSet<Host> = spans.iter().copied().collect();
            prop_assert!(set.minus(&ram).is_empty());
            prop_assert!(set.is_empty() || ram.size() - set.size() >= (keep << 28) / 64 * 63);
            prop_assert!(spans.iter().all(|s| s.start().is_aligned(2 << 20) && s.size() % (2 << 20) == 0));
        }
    }
}
