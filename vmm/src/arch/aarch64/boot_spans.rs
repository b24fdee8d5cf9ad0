//! Pieces of memory that a kernel and its initramfs go into. Pure.
//!
//! The first memory may be a slice of EGM with retired pages in it, so the pieces behind the firmware window can be small.

use egm_address::{Gpa, Guest, Span, SpanSet, align_up};

use super::layout::LAYOUT;
use crate::plan::Plan;

/// A kernel starts on such a boundary (booting.rst).
const KERNEL: u64 = 2 << 20;
/// The largest pages that a kernel has.
const PAGE: u64 = 64 << 10;
/// An initramfs lies in one aligned piece of this size with its kernel (booting.rst).
const REACH: u64 = 32 << 30;

/// The lowest free span for a kernel of `needed` bytes, or else the largest aligned for a kernel.
pub fn kernel(plan: &Plan, needed: u64) -> Option<Span<Guest>> {
    choose(pieces(plan), needed, KERNEL)
}

/// The lowest free span for an initramfs of `size` bytes beside `kernel`, or else the largest.
pub fn initramfs(plan: &Plan, kernel: Span<Guest>, size: u64) -> Option<Span<Guest>> {
    let kernel = SpanSet::from_iter([kernel]);
    let left = |piece| SpanSet::from_iter([piece]).minus(&kernel).iter().collect::<Vec<_>>();
    choose(pieces(plan).flat_map(left), size, PAGE)
}

/// Memory within an initramfs's reach, ascending.
fn pieces(plan: &Plan) -> impl Iterator<Item = Span<Guest>> {
    let end = Gpa::new(LAYOUT.firmware.start().get().saturating_add(REACH));
    plan.memory.iter().filter_map(move |piece| Span::between(piece.span.start(), piece.span.end().min(end)))
}

fn choose(pieces: impl Iterator<Item = Span<Guest>>, size: u64, align: u64) -> Option<Span<Guest>> {
    let aligned =
        |piece: Span<Guest>| Span::between(Gpa::new(align_up(piece.start().get(), align)?), piece.end());
    let spans: Vec<_> = pieces.filter_map(aligned).collect();
    let fits = spans.iter().find(|span| span.size() >= size);
    fits.or_else(|| spans.iter().max_by_key(|span| span.size())).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::egm_first;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_kernel_and_its_initramfs_go_where_nothing_is_retired() {
        // Retired pages at 6 MiB and at 80 MiB of the first memory.
        let plan = egm_first(&[6 * MIB, 80 * MIB]);
        let start = LAYOUT.firmware.start().get();
        let at = |span: Option<Span<Guest>>| span.map(|span| span.start().get() - start);
        assert_eq!(at(kernel(&plan, 4 * MIB)), Some(2 * MIB));
        assert_eq!(at(kernel(&plan, 64 * MIB)), Some(8 * MIB), "2 MiB boundaries");
        assert_eq!(at(kernel(&plan, 73 * MIB)), Some(82 * MIB));
        let none = kernel(&plan, 1 << 40).unwrap();
        assert!(none.size() < 1 << 40, "the largest is returned when none is large enough");
        let taken = Span::new(Gpa::new(start + 8 * MIB), 64 * MIB).unwrap();
        assert_eq!(at(initramfs(&plan, taken, MIB)), Some(2 * MIB));
        assert_eq!(at(initramfs(&plan, taken, 5 * MIB)), Some(72 * MIB));
        assert_eq!(at(initramfs(&plan, taken, 9 * MIB)), Some(80 * MIB + PAGE));
        let plan = egm_first(&[]);
        let end = initramfs(&plan, taken, 33 << 30).unwrap().end().get() - start;
        assert!(end <= REACH, "{end:#x}");
    }

    #[test]
    fn beside_a_kernel_that_takes_all_memory_no_span_is_left_for_an_initramfs() {
        let plan = egm_first(&[]);
        let all = Span::new(LAYOUT.firmware.start(), REACH).unwrap();
        assert_eq!(initramfs(&plan, all, 1), None);
    }
}
