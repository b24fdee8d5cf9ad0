//! Deterministic placement: requests in, addresses out, or which one did not fit and by how much.
//!
//! Largest alignment first, then largest size, then the order of the requests; each goes to the lowest
//! free address. The same requests give the same answer on every machine, so a plan can be reviewed
//! without the hardware and compared byte for byte.

use crate::size::align_up;
use crate::span::{Address, Span};
use crate::span_set::SpanSet;

/// One thing to place.
#[derive(Debug, Clone)]
pub struct Request<T> {
    /// Tag by which the caller recognises it.
    pub tag: T,
    /// Bytes, at least 1.
    pub size: u64,
    /// Alignment in bytes; 0 and 1 mean none.
    pub align: u64,
}

/// A request that was placed.
#[derive(Debug)]
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct Placement<T, S> {
    pub tag: T,
    pub span: Span<S>,
}

/// The request that found no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot place {size:#x} bytes aligned to {align:#x}: the largest usable gap is {largest:#x} bytes, {short_by:#x} too few"
)]
pub struct PlacerError<T> {
    /// Tag of the failed request.
    pub tag: T,
    /// Requested size, in bytes.
    pub size: u64,
    /// Requested alignment, in bytes.
    pub align: u64,
    /// The most bytes that any gap offers at that alignment.
    pub largest: u64,
    /// Bytes that the largest gap lacks: `size - largest`.
    pub short_by: u64,
}

/// Free address space that shrinks as things are placed in it.
#[derive(Debug)]
pub struct Placer<S> {
    free: SpanSet<S>,
}

impl<S> Placer<S> {
    /// All of `window` but `reserved`.
    pub fn new(window: &SpanSet<S>, reserved: &SpanSet<S>) -> Self {
        Self { free: window.minus(reserved) }
    }

    /// Addresses that are still free.
    pub fn free(&self) -> &SpanSet<S> {
        &self.free
    }

    /// Places one request at the lowest address that fits.
    ///
    /// # Errors
    /// [`PlacerError`] when no gap is large enough; nothing is taken then.
    pub fn place<T>(&mut self, request: Request<T>) -> Result<Placement<T, S>, PlacerError<T>> {
        let Request { tag, size, align } = request;
        let usable = |gap: Span<S>| {
            align_up(gap.start().get(), align).and_then(|start| Span::between(Address::new(start), gap.end()))
        };
        let fits = |usable: Span<S>| Span::new(usable.start(), size).ok().filter(|span| usable.covers(*span));
        let found = self.free.iter().filter_map(usable).find_map(fits);
        let Some(span) = found else {
            let largest = self.free.iter().filter_map(usable).map(Span::size).max().unwrap_or(0);
            return Err(PlacerError { tag, size, align, largest, short_by: size.saturating_sub(largest) });
        };
        self.free = self.free.minus(&SpanSet::from_iter([span]));
        Ok(Placement { tag, span })
    }

    /// Places all requests, or none; the placements come back in the order of the requests.
    ///
    /// # Errors
    /// [`PlacerError`] for the first request, in placing order, that finds no gap.
    pub fn place_all<T>(
        &mut self,
        requests: Vec<Request<T>>,
    ) -> Result<Vec<Placement<T, S>>, PlacerError<T>> {
        let mut order: Vec<(usize, Request<T>)> = requests.into_iter().enumerate().collect();
        order.sort_by_key(|(index, r)| (std::cmp::Reverse((r.align, r.size)), *index));
        let before = self.free.clone();
        let mut placed = Vec::with_capacity(order.len());
        for (index, request) in order {
            match self.place(request) {
                Ok(placement) => placed.push((index, placement)),
                Err(error) => {
                    self.free = before;
                    return Err(error);
                }
            }
        }
        placed.sort_by_key(|(index, _)| *index);
        Ok(placed.into_iter().map(|(_, placement)| placement).collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::span::{Gpa, Guest};

    fn window(start: u64, size: u64) -> SpanSet<Guest> {
        SpanSet::from_iter([Span::new(Gpa::new(start), size).unwrap()])
    }

    #[test]
    fn a_request_that_does_not_fit_states_by_how_much() {
        let mut placer = Placer::new(&window(0x1000, 0x3000), &window(0x2000, 0x1000));
        let error = placer.place(Request { tag: "bar", size: 0x1800, align: 0x1000 }).unwrap_err();
        assert_eq!((error.largest, error.short_by), (0x1000, 0x800));
    }

    #[test]
    fn placements_come_back_in_the_order_of_the_requests_and_leave_the_rest_free() {
        let mut placer = Placer::new(&window(0x1000, 0x3000), &SpanSet::EMPTY);
        let requests =
            [("small", 0x100), ("large", 0x1000)].map(|(tag, size)| Request { tag, size, align: size });
        let placed = placer.place_all(requests.to_vec()).unwrap();
        let found: Vec<_> = placed.iter().map(|p| (p.tag, p.span.start().get())).collect();
        assert_eq!(found, [("small", 0x2000), ("large", 0x1000)]);
        assert_eq!(placer.free(), &window(0x2100, 0x1f00));
        assert!(
            placer
                .place_all([0x100, 0x2000].map(|size| Request { tag: (), size, align: 1 }).to_vec())
                .is_err()
        );
        assert_eq!(placer.free(), &window(0x2100, 0x1f00));
    }

    proptest! {
        #[test]
        fn placements_are_aligned_disjoint_inside_and_deterministic(
            sizes in prop::collection::vec((1u64..0x4000, 0u32..14), 1..20), hole in 0u64..0x8000,
        ) {
            let reserved = window(0x1_0000 + hole, 0x1000);
            let requests = || sizes.iter().enumerate()
                .map(|(tag, &(size, shift))| Request { tag, size, align: 1 << shift }).collect::<Vec<_>>();
            let place = || Placer::new(&window(0x1_0000, 0x2_0000), &reserved).place_all(requests());
            if let Ok(placed) = place() {
                for (i, p) in placed.iter().enumerate() {
                    prop_assert_eq!(p.tag, i);
                    prop_assert_eq!(p.span.size(), sizes[i].0);
                    prop_assert!(p.span.start().is_aligned(1 << sizes[i].1));
                    prop_assert!(window(0x1_0000, 0x2_0000).minus(&reserved).iter().any(|g| g.covers(p.span)));
                    prop_assert!(placed[..i].iter().all(|q| !q.span.overlaps(p.span)));
                }
                let again = place().unwrap();
                prop_assert!(again.iter().zip(&placed).all(|(a, b)| a.span == b.span));
            }
        }
    }
}
