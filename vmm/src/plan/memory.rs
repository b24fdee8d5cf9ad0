//! RAM and EGM slices: where the guest sees them and what is behind them.
//!
//! Nodes take RAM in node order from the lowest free address. A node that meets a hole (the one below 4 GiB, a range
//! that the host reserves) goes on after it, at an address whose offset in the node's memory is congruent to it modulo
//! the page size, at least 2 MiB: a huge page of the host is then a huge page of the guest.

use egm_address::{Gpa, Guest, Span, SpanSet, align_down, align_up};

use crate::config::{EgmForm, EgmSlice, Node, Spec};
use crate::plan::regions::Source;
use crate::plan::retired::{Slice, without_retired};
use crate::plan::space::Space;
use crate::plan::{BackingPlan, MemoryKind, MemoryPlan, PlanError};

const LARGE_PAGE: u64 = 2 << 20;
/// A GPU and a hypervisor both map memory best in pieces of this size.
pub(super) const HUGE_PAGE: u64 = 1 << 30;

/// Backings, memory, and what a person should know of it.
pub(super) type Planned = (Vec<BackingPlan>, Vec<MemoryPlan>, Vec<String>);

/// The memory of the machine; `space.top` is above it afterwards.
pub(super) fn plan(spec: &Spec, sources: &[Source], space: &mut Space) -> Result<Planned, PlanError> {
    let mut backings = Vec::new();
    let mut memory = Vec::new();
    let mut ram = Ram::new(space);
    let least = space.layout.min_memory;
    let with_memory = || spec.memory.nodes.iter().filter(|node| node.size.get() > 0);
    let (node, size) = with_memory().next().map_or((0, 0), |first| (first.id, first.size.get()));
    if size < least {
        return Err(PlanError::FirstNode { node, size, least });
    }
    let page = space.layout.page;
    for node in with_memory() {
        if !node.size.get().is_multiple_of(page) {
            return Err(PlanError::NodeSize { node: node.id, size: node.size.get(), page });
        }
        let unit = spec.memory.page_size.bytes().max(LARGE_PAGE);
        let pieces = ram.take(node.size.get(), unit).map_err(|short_by| PlanError::AddressSpace {
            what: format!("memory of node {}", node.id),
            limit: space.limit,
            bits: space.bits,
            short_by,
            key: "memory.size",
        })?;
        memory.extend(without_hole(&pieces, space.layout.ram_hole, node.id, backings.len()));
        backings.push(node_backing(spec, node));
    }
    let high = space.layout.ram.last().map_or(Gpa::new(0), |ram| ram.start());
    space.top = memory.last().map_or(high, |m| m.span.end().max(high));
    let mut slices = Vec::new();
    for (index, (slice, source)) in spec.egm.iter().zip(sources).enumerate() {
        if slice.form == EgmForm::Memory {
            let span = place_slice(index, slice, space)?;
            slices.push(Slice { span, source, node: slice.node, backing: backings.len() });
        }
        backings.push(slice_backing(spec, index, slice, source));
    }
    let (pieces, notes) = without_retired(&slices, memory.len(), space.layout);
    memory.extend(pieces);
    memory.sort_by_key(|m| m.span);
    Ok((backings, memory, notes))
}

/// Free RAM addresses, lowest first.
struct Ram {
    free: Vec<Span<Guest>>, // descending: the next one is the last
    page: u64,
}

impl Ram {
    fn new(space: &Space) -> Self {
        let limit = Gpa::new(space.limit);
        let all: SpanSet<Guest> = space
            .layout
            .ram
            .iter()
            .filter_map(|ram| Span::between(ram.start(), ram.end().min(limit)))
            .collect();
        let mut free: Vec<_> = all.minus(&space.blocked()).iter().collect();
        free.reverse();
        Self { free, page: space.layout.page }
    }

    /// Spans for `size` bytes, with the offset of each; `start - offset` is a multiple of `unit` for all of them.
    ///
    /// # Errors
    /// The number of bytes that found no address.
    fn take(&mut self, size: u64, unit: u64) -> Result<Vec<(Span<Guest>, u64)>, u64> {
        let mut pieces = Vec::new();
        let mut offset = 0;
        while offset < size {
            let left = size - offset;
            let Some(gap) = self.free.pop() else { return Err(left) };
            let phase = offset % unit;
            let start =
                align_up(gap.start().get().saturating_sub(phase), unit).and_then(|s| s.checked_add(phase));
            let Some(usable) = start.and_then(|start| Span::between(Gpa::new(start), gap.end())) else {
                continue;
            };
            let bytes = if usable.size() < left { align_down(usable.size(), self.page) } else { left };
            let Ok(span) = Span::new(usable.start(), bytes) else { continue };
            pieces.push((span, offset));
            offset += bytes;
            self.free.extend(Span::between(span.end(), gap.end()));
        }
        Ok(pieces)
    }
}

/// What is left of `pieces` as RAM outside `hole`.
fn without_hole(
    pieces: &[(Span<Guest>, u64)],
    hole: Span<Guest>,
    node: u32,
    backing: usize,
) -> Vec<MemoryPlan> {
    let hole = SpanSet::from_iter([hole]);
    let ram = |(piece, offset): &(Span<Guest>, u64)| {
        let (piece, offset) = (*piece, *offset);
        let parts: Vec<_> = SpanSet::from_iter([piece]).minus(&hole).iter().collect();
        parts.into_iter().map(move |span| MemoryPlan {
            span,
            kind: MemoryKind::Ram,
            node,
            backing,
            offset: offset + span.start().offset_from(piece.start()).unwrap_or(0),
        })
    };
    pieces.iter().flat_map(ram).collect()
}

fn node_backing(spec: &Spec, node: &Node) -> BackingPlan {
    let page_size = spec.memory.page_size;
    BackingPlan {
        id: format!("node{}", node.id),
        region: None,
        guest_memfd: false,
        device: false,
        offset: 0,
        hpa: None,
        size: align_up(node.size.get(), page_size.bytes()).unwrap_or(u64::MAX),
        page_size,
        small_pages: false,
        host_nodes: node.host_nodes.clone(),
        prefault: spec.memory.prefault,
    }
}

/// How a slice of `size` bytes is aligned so that huge mappings survive in it; 0 when it is too small for one.
pub(crate) const fn huge_alignment(size: u64) -> u64 {
    if size >= HUGE_PAGE { HUGE_PAGE } else { 0 }
}

/// A slice is one span, because a GPU finds a byte of EGM by its distance from the slice's start.
fn place_slice(index: usize, slice: &EgmSlice, space: &mut Space) -> Result<Span<Guest>, PlanError> {
    let size = slice.size.get();
    let align = huge_alignment(size).max(LARGE_PAGE);
    space.place_at_top(size, align).ok_or_else(|| {
        let largest = space.placer_at_top().free().iter().map(Span::size).max().unwrap_or(0);
        PlanError::AddressSpace {
            what: format!("EGM slice {index}"),
            limit: space.limit,
            bits: space.bits,
            short_by: size.saturating_sub(align_down(largest, align)),
            key: "egm.size",
        }
    })
}

fn slice_backing(spec: &Spec, index: usize, slice: &EgmSlice, source: &Source) -> BackingPlan {
    BackingPlan {
        id: format!("egm{index}"),
        region: source.region.clone(),
        guest_memfd: source.guest_memfd,
        device: slice.form == EgmForm::Device,
        offset: source.offset,
        hpa: source.hpa,
        size: align_up(slice.size.get(), source.page_size.bytes()).unwrap_or(u64::MAX),
        page_size: source.page_size,
        small_pages: false,
        host_nodes: slice.host_nodes.clone(),
        prefault: spec.memory.prefault,
    }
}
