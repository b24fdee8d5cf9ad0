//! Placement of slices: arithmetic over the spans of a region. No file, no lock, no clock.
//!
//! A slice is one span of its region, so an offset in it and an offset in the region differ by a constant (the guest's
//! EGM driver needs that). Retired pages inside stay as holes: [`Request::size`] counts them, and the usable size is
//! the size less the holes.
//!
//! A place is an aligned span of free bytes that are not all retired. The lowest place of the first of these kinds wins:
//! 1. without a hole, and clean: the owner gets all of it, at once;
//! 2. without a hole;
//! 3. clean but for its holes;
//! 4. any.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use egm_address::{ByteSize, InRegion, Offset, Span, SpanSet, align_up};
use egm_report::show::{self, exact};

use crate::owner::Owner;
use crate::region::{Region, Slice};

/// A request for memory of a region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Bytes from first to last, holes included: a multiple of the region's page size.
    pub size: u64,
    /// Alignment in bytes of the first one's host physical address (of its offset, where that is not known): a power
    /// of two. The region's page size is the least, so 0 asks for that.
    pub align: u64,
    /// Owner of the slice.
    pub owner: Owner,
    /// Offset in the region that it must have, if any.
    pub at: Option<u64>,
}

impl Request {
    /// `size` bytes anywhere for `owner`.
    #[must_use]
    pub const fn new(size: u64, owner: Owner) -> Self {
        Self { size, align: 0, owner, at: None }
    }
}

/// A request that a region cannot serve.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot place {} aligned to {} in region {region}: {cause}", exact(*size), exact(*align))]
pub struct PlacementError {
    /// Name of the region.
    pub region: String,
    /// Requested size in bytes.
    pub size: u64,
    /// Alignment that the place must have.
    pub align: u64,
    /// Reason that no place fits.
    pub cause: Cause,
}

/// The shortage, and its amount.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum Cause {
    #[error("its pages have {}: ask for {}", show::size(*page), exact(*instead))]
    Size { page: u64, instead: u64 },
    #[error("an alignment is a power of two: write one, as 2MiB")]
    Align,
    #[error("it has {} in all, {} too few: ask for less", show::size(*size), show::size(*short_by))]
    Region { size: u64, short_by: u64 },
    #[error(
        "{} are granted, {} free, {} too few: ask for less, or wait until a slice is returned",
        show::size(*granted), show::size(*free), show::size(*short_by)
    )]
    Granted { granted: u64, free: u64, short_by: u64 },
    #[error(
        "{} are free, but the largest aligned piece has {}, {} too few: ask for {}, or return a slice that splits them",
        show::size(*free), show::size(*largest), show::size(*short_by), exact(*largest)
    )]
    Fragmented { free: u64, largest: u64, short_by: u64 },
    /// Every free place of that size is bad memory from end to end.
    #[error(
        "{} are free, {} of them retired, and no place has another byte: ask for a larger size",
        show::size(*free), show::size(*retired)
    )]
    Retired { free: u64, retired: u64 },
    #[error("offset {at:#x} is not aligned: the next that is, is {next:#x}")]
    Unaligned { at: u64, next: u64 },
    #[error("from offset {at:#x} on it has {} too few: ask for less, or for a lower offset", show::size(*short_by))]
    End { at: u64, short_by: u64 },
    #[error(
        "at offset {at:#x} {} are granted, from {first} on: choose another offset, or none", show::size(*short_by)
    )]
    Taken { at: u64, first: Offset, short_by: u64 },
}

/// The lowest best place for `request` in `region`, of which `busy` bytes are held and `clean` bytes need no scrub.
///
/// # Errors
/// [`PlacementError`] names what was short and by how much.
pub fn place(
    region: &Region,
    busy: &SpanSet<InRegion>,
    clean: &SpanSet<InRegion>,
    request: &Request,
) -> Result<Slice, PlacementError> {
    Carver::new(region, busy, clean).place(request)
}

/// A region from which slices are taken in turn: keeps the free runs that [`place`] computes anew each time.
#[derive(Debug)]
pub struct Carver<'a> {
    region: &'a Region,
    /// Free runs for the four kinds of place, best first; the last is all that is free.
    kinds: [SpanPieces; 4],
}

impl<'a> Carver<'a> {
    /// `region`, of which `busy` bytes are held and `clean` bytes need no scrub. Bytes outside are ignored.
    #[must_use]
    pub fn new(region: &'a Region, busy: &SpanSet<InRegion>, clean: &SpanSet<InRegion>) -> Self {
        let all: SpanSet<InRegion> = Span::new(Offset::new(0), region.size.get()).into_iter().collect();
        let retired = region.retired.spans();
        let free = if egm_address::fault!("two-grants-overlap") { all } else { all.minus(busy) };
        let whole = free.minus(retired);
        let whole_dirty = whole.minus(clean);
        let kinds = [whole.minus(&whole_dirty), whole.clone(), free.minus(&whole_dirty), free];
        Self { region, kinds: kinds.map(|kind| SpanPieces::new(&kind)) }
    }

    /// Takes the lowest best place for `request`.
    ///
    /// # Errors
    /// [`PlacementError`] names what was short and by how much; nothing is taken then.
    pub fn place(&mut self, request: &Request) -> Result<Slice, PlacementError> {
        let region = self.region;
        let align = request.align.max(region.page_size.get()).max(1);
        let found = self.check(request, align).and_then(|()| match request.at {
            Some(at) => self.at(at, request.size, align),
            None => self.lowest(request.size, align).ok_or_else(|| self.why(request.size, align)),
        });
        let span = found.map_err(|cause| PlacementError {
            region: region.name.clone(),
            size: request.size,
            align,
            cause,
        })?;
        for kind in &mut self.kinds {
            kind.take(span);
        }
        let (offset, size) = (span.start().get(), ByteSize::new(span.size()));
        Ok(Slice { region: region.name.clone(), offset, size })
    }

    /// The checks that need no search.
    fn check(&self, request: &Request, align: u64) -> Result<(), Cause> {
        let (size, page, have) = (request.size, self.region.page_size.get().max(1), self.region.size.get());
        if size == 0 || !size.is_multiple_of(page) {
            return Err(Cause::Size { page, instead: align_up(size.max(1), page).unwrap_or(page) });
        }
        if !align.is_power_of_two() {
            return Err(Cause::Align);
        }
        if size > have {
            return Err(Cause::Region { size: have, short_by: size.saturating_sub(have) });
        }
        let free = self.free().size;
        if size > free {
            let granted = have.saturating_sub(free);
            return Err(Cause::Granted { granted, free, short_by: size.saturating_sub(free) });
        }
        Ok(())
    }

    fn at(&self, at: u64, size: u64, align: u64) -> Result<Span<InRegion>, Cause> {
        let next = self.aligned(at, align).unwrap_or(at);
        if next != at {
            return Err(Cause::Unaligned { at, next });
        }
        let left = self.region.size.get().saturating_sub(at);
        let end = Cause::End { at, short_by: size.saturating_sub(left) };
        let Some(span) = Span::new(Offset::new(at), size).ok().filter(|_| left >= size) else {
            return Err(end);
        };
        let taken: SpanSet<InRegion> = SpanSet::from_iter([span]).minus(&self.free().iter().collect());
        if let Some(first) = taken.iter().next() {
            return Err(Cause::Taken { at, first: first.start(), short_by: taken.size() });
        }
        if self.hole_over(span).is_some() {
            return Err(self.retired());
        }
        Ok(span)
    }

    fn lowest(&self, size: u64, align: u64) -> Option<Span<InRegion>> {
        self.kinds.iter().find_map(|kind| kind.lowest(size, |run| self.fit(run, size, align)))
    }

    /// The lowest place of `size` bytes in a run.
    fn fit(&self, run: Span<InRegion>, size: u64, align: u64) -> Option<Span<InRegion>> {
        let mut from = run.start().get();
        loop {
            let span = Span::new(Offset::new(self.aligned(from, align)?), size).ok()?;
            if !run.covers(span) {
                return None;
            }
            match self.hole_over(span) {
                // The next place reaches at least one byte over the hole.
                Some(hole) => from = hole.end().get().checked_sub(size)?.checked_add(1)?,
                None => return Some(span),
            }
        }
    }

    /// The retired span that covers all of `span`. Retired spans are merged, so one span covers it or none does.
    fn hole_over(&self, span: Span<InRegion>) -> Option<Span<InRegion>> {
        self.region.retired.spans().overlapping(span).filter(|hole| hole.covers(span))
    }

    /// The first offset from `from` on that is aligned in host memory.
    fn aligned(&self, from: u64, align: u64) -> Option<u64> {
        let base = self.region.base.map_or(0, egm_address::Hpa::get);
        align_up(base.checked_add(from)?, align)?.checked_sub(base)
    }

    fn free(&self) -> &SpanPieces {
        let [.., free] = &self.kinds;
        free
    }

    /// The reason that no run has a place although enough is free.
    fn why(&self, size: u64, align: u64) -> Cause {
        let room = |run: Span<InRegion>| {
            self.aligned(run.start().get(), align).and_then(|start| run.end().get().checked_sub(start))
        };
        let largest = self.free().iter().filter_map(room).max().unwrap_or(0);
        if largest >= size {
            return self.retired();
        }
        Cause::Fragmented { free: self.free().size, largest, short_by: size.saturating_sub(largest) }
    }

    fn retired(&self) -> Cause {
        let [_, whole, _, free] = &self.kinds;
        Cause::Retired { free: free.size, retired: free.size.saturating_sub(whole.size) }
    }
}

/// Sorted, disjoint spans, in pieces small enough that a search skips most of them and a change moves few.
#[derive(Debug, Default)]
struct SpanPieces {
    /// In ascending order; none of them is empty.
    pieces: Vec<SpanPiece>,
    /// Bytes in all of them.
    size: u64,
}

#[derive(Debug)]
struct SpanPiece {
    runs: Vec<Span<InRegion>>,
    /// Bytes of the longest run.
    longest: u64,
}

impl SpanPieces {
    /// Runs in a piece at first: near the square root of 10,000, the retired pages of a bad region.
    const PIECE: usize = 128;

    fn new(set: &SpanSet<InRegion>) -> Self {
        let runs: Vec<_> = set.iter().collect();
        Self {
            pieces: runs.chunks(Self::PIECE).map(|runs| SpanPiece::new(runs.to_vec())).collect(),
            size: set.size(),
        }
    }

    fn iter(&self) -> impl Iterator<Item = Span<InRegion>> {
        self.pieces.iter().flat_map(|piece| &piece.runs).copied()
    }

    fn lowest<T>(&self, size: u64, fit: impl Fn(Span<InRegion>) -> Option<T>) -> Option<T> {
        let pieces = self.pieces.iter().filter(|piece| piece.longest >= size);
        pieces.flat_map(|piece| &piece.runs).filter(|run| run.size() >= size).find_map(|run| fit(*run))
    }

    fn take(&mut self, taken: Span<InRegion>) {
        let first = self.pieces.partition_point(|piece| piece.ends_before(taken));
        let mut emptied = false;
        for piece in self.pieces.iter_mut().skip(first).take_while(|piece| !piece.begins_after(taken)) {
            self.size = self.size.saturating_sub(piece.take(taken));
            emptied |= piece.runs.is_empty();
        }
        if emptied {
            self.pieces.retain(|piece| !piece.runs.is_empty());
        }
    }
}

impl SpanPiece {
    fn new(runs: Vec<Span<InRegion>>) -> Self {
        let longest = runs.iter().map(|run| run.size()).max().unwrap_or(0);
        Self { runs, longest }
    }

    fn ends_before(&self, span: Span<InRegion>) -> bool {
        self.runs.last().is_some_and(|run| run.end() <= span.start())
    }

    fn begins_after(&self, span: Span<InRegion>) -> bool {
        self.runs.first().is_some_and(|run| run.start() >= span.end())
    }

    /// Takes `taken` out of the runs; returns how many bytes of it they had.
    fn take(&mut self, taken: Span<InRegion>) -> u64 {
        let first = self.runs.partition_point(|run| run.end() <= taken.start());
        let last = self.runs.partition_point(|run| run.start() < taken.end());
        let Some(hit) = self.runs.get(first..last).filter(|hit| !hit.is_empty()) else { return 0 };
        let gone = hit.iter().filter_map(|run| run.intersection(taken)).map(Span::size).sum();
        let below = hit.first().and_then(|run| Span::between(run.start(), taken.start()));
        let above = hit.last().and_then(|run| Span::between(taken.end(), run.end()));
        self.runs.splice(first..last, below.into_iter().chain(above));
        self.longest = self.runs.iter().map(|run| run.size()).max().unwrap_or(0);
        gone
    }
}
