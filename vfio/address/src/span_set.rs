//! Sets of addresses as sorted, disjoint, non-touching spans.

use crate::span::Span;

/// A set of addresses; its spans are sorted, disjoint and never touch, so equal sets are equal values.
#[derive(Debug)]
pub struct SpanSet<S> {
    spans: Vec<Span<S>>,
}

impl<S> Default for SpanSet<S> {
    fn default() -> Self {
        Self { spans: Vec::new() }
    }
}
impl<S> Clone for SpanSet<S> {
    fn clone(&self) -> Self {
        Self { spans: self.spans.clone() }
    }
}
impl<S> PartialEq for SpanSet<S> {
    fn eq(&self, other: &Self) -> bool {
        self.spans == other.spans
    }
}
impl<S> Eq for SpanSet<S> {}

impl<S> FromIterator<Span<S>> for SpanSet<S> {
    /// The union of the spans, in any order, overlapping or not.
    fn from_iter<I: IntoIterator<Item = Span<S>>>(iter: I) -> Self {
        let mut sorted: Vec<Span<S>> = iter.into_iter().collect();
        sorted.sort_unstable();
        let mut spans: Vec<Span<S>> = Vec::with_capacity(sorted.len());
        for span in sorted {
            match spans.last_mut() {
                Some(last) if span.start() <= last.end() => {
                    let end = last.end().max(span.end());
                    *last = Span::between(last.start(), end).unwrap_or(*last);
                }
                _ => spans.push(span),
            }
        }
        Self { spans }
    }
}

impl<S> SpanSet<S> {
    /// The set without any address.
    pub const EMPTY: Self = Self { spans: Vec::new() };

    /// Iterates over the spans in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = Span<S>> + '_ {
        self.spans.iter().copied()
    }

    /// Whether the set has no address.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Bytes in the set.
    pub fn size(&self) -> u64 {
        self.spans.iter().fold(0, |sum, span| sum.saturating_add(span.size()))
    }

    /// The first span that shares a byte with `span`.
    pub fn overlapping(&self, span: Span<S>) -> Option<Span<S>> {
        let from = self.spans.partition_point(|s| s.end() <= span.start());
        self.spans.get(from).copied().filter(|s| s.overlaps(span))
    }

    /// The addresses of `self` that are not in `other`.
    #[must_use]
    pub fn minus(&self, other: &Self) -> Self {
        let mut out = Vec::new();
        for whole in self.iter() {
            let mut from = whole.start();
            let first = other.spans.partition_point(|s| s.end() <= whole.start());
            for hole in other.spans.iter().skip(first).take_while(|s| s.start() < whole.end()) {
                out.extend(Span::between(from, hole.start()));
                from = hole.end();
            }
            out.extend(Span::between(from, whole.end()));
        }
        Self { spans: out }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::span::{Gpa, Guest};

    fn bytes(set: &SpanSet<Guest>) -> BTreeSet<u64> {
        set.iter().flat_map(|s| s.start().get()..s.end().get()).collect()
    }

    fn any_set() -> impl Strategy<Value = (SpanSet<Guest>, BTreeSet<u64>)> {
        prop::collection::vec((0u64..200, 1u64..20), 0..12).prop_map(|raw| {
            let model = raw.iter().flat_map(|&(start, size)| start..start + size).collect();
            (raw.iter().map(|&(start, size)| Span::new(Gpa::new(start), size).unwrap()).collect(), model)
        })
    }

    /// Units of a small universe, which has 256 sets.
    const UNITS: u64 = 8;

    fn has(mask: usize, unit: u64) -> bool {
        (mask >> unit) & 1 == 1
    }

    /// The set with the units of each mask, in the order of the masks.
    fn small_sets() -> Vec<SpanSet<Guest>> {
        let units = |mask: usize| (0..UNITS).filter(move |&unit| has(mask, unit));
        let span = |unit: u64| Span::new(Gpa::new(unit), 1).unwrap();
        (0..1_usize << UNITS).map(|mask| units(mask).map(span).collect()).collect()
    }

    /// The spans of a mask, unit by unit: start and end of each run of ones.
    fn runs(mask: usize) -> Vec<(u64, u64)> {
        let mut runs = Vec::new();
        let mut start = None;
        for unit in 0..=UNITS {
            match (start, has(mask, unit)) {
                (None, true) => start = Some(unit),
                (Some(first), false) => {
                    runs.push((first, unit));
                    start = None;
                }
                _ => {}
            }
        }
        runs
    }

    /// 256 sets, and 36 spans for each.
    #[test]
    fn every_small_set_agrees_with_its_bit_mask() {
        for (mask, set) in small_sets().iter().enumerate() {
            let spans: Vec<_> = set.iter().map(|s| (s.start().get(), s.end().get())).collect();
            assert_eq!(spans, runs(mask));
            assert_eq!((set.size(), set.is_empty()), (u64::from(mask.count_ones()), mask == 0));
            for (start, end) in (0..UNITS).flat_map(|start| (start + 1..=UNITS).map(move |end| (start, end)))
            {
                let probe = Span::new(Gpa::new(start), end - start).unwrap();
                let found = set.overlapping(probe).map(|s| (s.start().get(), s.end().get()));
                let first = spans.iter().copied().find(|&(from, to)| from < end && start < to);
                assert_eq!(found, first, "mask {mask:#b}, {start}..{end}");
            }
        }
    }

    /// 65,536 pairs.
    #[test]
    fn every_pair_of_small_sets_agrees_with_bit_masks() {
        let sets = small_sets();
        for (a_mask, a) in sets.iter().enumerate() {
            for (b_mask, b) in sets.iter().enumerate() {
                let difference = a.minus(b);
                assert_eq!(difference, sets[a_mask & !b_mask], "{a_mask:#b} minus {b_mask:#b}");
                assert_eq!(a.minus(&difference), sets[a_mask & b_mask], "{a_mask:#b} and {b_mask:#b}");
                let union: SpanSet<Guest> = b.iter().chain(a.iter()).collect();
                assert_eq!(union, sets[a_mask | b_mask], "{a_mask:#b} or {b_mask:#b}");
                assert_eq!(a == b, a_mask == b_mask);
            }
        }
    }

    proptest! {
        #[test]
        fn union_and_difference_agree_with_a_byte_by_byte_model((a, a_bytes) in any_set(), (b, b_bytes) in any_set()) {
            prop_assert_eq!(bytes(&a), a_bytes.clone());
            prop_assert_eq!((a.size(), a.is_empty()), (a_bytes.len() as u64, a_bytes.is_empty()));
            prop_assert_eq!(a == b, a_bytes == b_bytes);
            prop_assert_eq!(&a.clone(), &a);
            prop_assert_eq!(bytes(&a.minus(&b)), &a_bytes - &b_bytes);
            let canonical: SpanSet<Guest> = a.minus(&b).iter().collect();
            prop_assert_eq!(a.minus(&b), canonical);
            for (start, size) in [(0, 1), (50, 7), (199, 3)] {
                let probe = Span::new(Gpa::new(start), size).unwrap();
                prop_assert_eq!(a.overlapping(probe).is_some(), (start..start + size).any(|x| a_bytes.contains(&x)));
            }
        }
    }
}
