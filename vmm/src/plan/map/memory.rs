//! RAM and EGM slices: their guest addresses and the memory behind them.
//!
//! Nodes take RAM in node order from the lowest free address. A node that reaches a hole (the one below 4 GiB, a range
//! that the host reserves) goes on after it, at an address that is congruent to its offset in the node's memory modulo
//! the page size, at least 2 MiB: a huge page of the host is then a huge page of the guest. A slice that is the memory
//! of a node with processors is taken in that order too, in one piece; other slices are above all.

use egm_address::{Gpa, Guest, Span, SpanSet, align_down, align_up};

use crate::arch::Layout;
use crate::config::{EgmForm, EgmSlice, Node, Spec};
use crate::plan::demand::Demand;
use crate::plan::demand::regions::huge_alignment;
use crate::plan::map::retired::{Slice, without_retired};
use crate::plan::map::space::Space;
use crate::plan::{MemoryKind, MemoryPlan, PlanError};

const LARGE_PAGE: u64 = 2 << 20;

pub(super) struct PlacedMemory {
    /// Guest RAM, ascending and disjoint.
    pub(super) pieces: Vec<MemoryPlan>,
    /// Notes on good memory that slices lose beside retired pages.
    pub(super) notes: Vec<String>,
}

/// A slice that is memory of the guest, and its place.
struct PlacedSlice {
    index: usize,
    span: Span<Guest>,
}

/// The memory of the machine; `space.top` is above it afterwards.
pub(super) fn plan(demand: &Demand<'_>, space: &mut Space) -> Result<PlacedMemory, PlanError> {
    let spec = demand.spec;
    check_first(spec, space.layout)?;
    let mut pieces = Vec::new();
    let mut placed = Vec::new();
    let mut ram = Ram::new(space);
    let mut backing = 0;
    for node in &spec.memory.nodes {
        if let Some((index, slice)) = spec.slice_of(node.id) {
            let span = ram.whole(slice.size.get()).ok_or_else(|| ram.no_place(index, slice, space))?;
            placed.push(PlacedSlice { index, span });
        }
        if node.size.get() > 0 {
            pieces.extend(ram.node(spec, node, backing, space)?);
            backing += 1;
        }
    }
    let high = space.layout.ram.last().map_or(Gpa::new(0), |ram| ram.start());
    let ends =
        pieces.iter().map(|m: &MemoryPlan| m.span.end()).chain(placed.iter().map(|slice| slice.span.end()));
    space.top = ends.fold(high, Ord::max);
    for (index, slice) in spec.egm.iter().enumerate() {
        let of_node = placed.iter().any(|placed| placed.index == index);
        if slice.form == EgmForm::Memory && !of_node {
            placed.push(PlacedSlice { index, span: place_slice(index, slice, space)? });
        }
    }
    let first_slice = backing;
    let slice = |placed: &PlacedSlice| {
        let source = demand.sources.get(placed.index)?;
        let node = spec.egm.get(placed.index)?.node;
        Some(Slice { span: placed.span, source, node, backing: first_slice.saturating_add(placed.index) })
    };
    let slices: Vec<Slice<'_>> = placed.iter().filter_map(slice).collect();
    check_tables(&pieces, &slices, first_slice, space.layout)?;
    let rest = without_retired(&slices, pieces.len(), space.layout);
    pieces.extend(rest.pieces);
    pieces.sort_by_key(|piece| piece.span);
    Ok(PlacedMemory { pieces: without_hole(pieces, space.layout.ram_hole), notes: rest.notes })
}

/// Checks that the first node with memory has room for the guest's tables.
fn check_first(spec: &Spec, layout: &Layout) -> Result<(), PlanError> {
    let slice = |node: &Node| spec.slice_of(node.id).map_or(0, |(_, slice)| slice.size.get());
    let sizes = spec.memory.nodes.iter().map(|node| (node.id, node.size.get().max(slice(node))));
    let (node, size) = sizes.clone().find(|(_, size)| *size > 0).unwrap_or_default();
    let least = layout.min_memory;
    if size < least { Err(PlanError::FirstNode { node, size, least }) } else { Ok(()) }
}

/// The guest's tables have memory, and where that is a slice, good pages.
fn check_tables(
    ram: &[MemoryPlan],
    slices: &[Slice<'_>],
    first_slice: usize,
    layout: &Layout,
) -> Result<(), PlanError> {
    let start = layout.ram.first().map(|ram| ram.start());
    let tables = start.and_then(|start| Span::between(start, layout.firmware.end()));
    let tables = tables.ok_or(PlanError::Internal("the layout has no place for tables"))?;
    let index = |slice: &Slice<'_>| slice.backing.saturating_sub(first_slice);
    if ram.iter().any(|piece| piece.span.overlaps(tables)) {
        return Ok(());
    }
    let Some(slice) = slices.iter().find(|slice| slice.span.overlaps(tables)) else {
        let first = slices.first().ok_or(PlanError::Internal("the guest has no memory for tables"))?;
        let (slice, size) = (index(first), first.span.size());
        return Err(PlanError::FirstSlice { slice, size, at: tables.start() });
    };
    match slice.retired(tables) {
        Some(offset) => {
            let region = slice.source.region.clone().unwrap_or_default();
            Err(PlanError::RetiredTables { slice: index(slice), region, offset })
        }
        None => Ok(()),
    }
}

/// A span of guest memory.
struct Piece {
    span: Span<Guest>,
    /// Offset of its first byte in the memory of its node.
    offset: u64,
}

/// Free RAM addresses, lowest first.
struct Ram {
    free: Vec<Span<Guest>>, // descending: the next one is the last
    page: u64,
    /// Bytes of a transparent huge page of the host.
    huge_page: u64,
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
        Self { free, page: space.layout.page, huge_page: space.huge_page }
    }

    /// The host's transparent huge page, where `size` bytes have one.
    const fn huge_page(&self, size: u64) -> u64 {
        if size >= self.huge_page { self.huge_page } else { 0 }
    }

    /// The memory of `node`, which is backing `backing`.
    fn node(
        &mut self,
        spec: &Spec,
        node: &Node,
        backing: usize,
        space: &Space,
    ) -> Result<Vec<MemoryPlan>, PlanError> {
        let (size, page) = (node.size.get(), space.layout.page);
        if !size.is_multiple_of(page) {
            return Err(PlanError::NodeSize { node: node.id, size, page });
        }
        let unit = spec.memory.page_size.bytes().max(LARGE_PAGE).max(self.huge_page(size));
        let pieces = self.take(size, unit).map_err(|short_by| PlanError::AddressSpace {
            what: format!("memory of node {}", node.id),
            limit: space.limit,
            bits: space.bits,
            short_by,
            key: "memory.size",
        })?;
        let (kind, node) = (MemoryKind::Ram, node.id);
        let ram = |Piece { span, offset }| MemoryPlan { span, kind, node, backing, offset };
        Ok(pieces.into_iter().map(ram).collect())
    }

    /// The lowest span for a slice of `size` bytes.
    fn whole(&mut self, size: u64) -> Option<Span<Guest>> {
        let align = huge_alignment(size).max(LARGE_PAGE);
        let fits = |gap: &Span<Guest>| {
            let start = Gpa::new(align_up(gap.start().get(), align)?);
            Span::new(start, size).ok().filter(|span| gap.covers(*span))
        };
        let (at, span) = self.free.iter().enumerate().rev().find_map(|(at, gap)| Some((at, fits(gap)?)))?;
        let gap = self.free.remove(at);
        let left = [Span::between(span.end(), gap.end()), Span::between(gap.start(), span.start())];
        self.free.splice(at..at, left.into_iter().flatten());
        Some(span)
    }

    fn no_place(&self, index: usize, slice: &EgmSlice, space: &Space) -> PlanError {
        let largest = self.free.iter().map(|gap| gap.size()).max().unwrap_or(0);
        no_place(index, slice, largest, space)
    }

    /// Pieces of `size` bytes, which are whole pages; `start - offset` is a multiple of `unit` for all of them.
    ///
    /// # Errors
    /// The number of bytes that found no address.
    fn take(&mut self, size: u64, unit: u64) -> Result<Vec<Piece>, u64> {
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
            let bytes = align_down(usable.size().min(left), self.page);
            let Ok(span) = Span::new(usable.start(), bytes) else { continue };
            pieces.push(Piece { span, offset });
            offset += bytes;
            self.free.extend(Span::between(span.end(), gap.end()));
        }
        Ok(pieces)
    }
}

/// The parts of `memory` outside `hole`.
fn without_hole(memory: Vec<MemoryPlan>, hole: Span<Guest>) -> Vec<MemoryPlan> {
    let hole = SpanSet::from_iter([hole]);
    let left = |piece: MemoryPlan| {
        let parts: Vec<_> = SpanSet::from_iter([piece.span]).minus(&hole).iter().collect();
        parts.into_iter().map(move |span| {
            let cut = span.start().offset_from(piece.span.start()).unwrap_or(0);
            MemoryPlan { span, offset: piece.offset.saturating_add(cut), ..piece }
        })
    };
    memory.into_iter().flat_map(left).collect()
}

/// A slice is one span, because a GPU finds a byte of EGM by its distance from the slice's start.
fn place_slice(index: usize, slice: &EgmSlice, space: &mut Space) -> Result<Span<Guest>, PlanError> {
    let size = slice.size.get();
    let align = huge_alignment(size).max(LARGE_PAGE);
    space.place_at_top(size, align).ok_or_else(|| {
        let largest = space.placer_at_top().free().iter().map(Span::size).max().unwrap_or(0);
        no_place(index, slice, largest, space)
    })
}

fn no_place(index: usize, slice: &EgmSlice, largest: u64, space: &Space) -> PlanError {
    let size = slice.size.get();
    let align = huge_alignment(size).max(LARGE_PAGE);
    PlanError::AddressSpace {
        what: format!("EGM slice {index}"),
        limit: space.limit,
        bits: space.bits,
        short_by: size.saturating_sub(align_down(largest, align)),
        key: "egm.size",
    }
}
