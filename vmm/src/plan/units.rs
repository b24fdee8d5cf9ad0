//! Sizes and alignments that several steps of the plan share.

/// A GPU and a hypervisor both map memory best in pieces of this size.
pub(super) const HUGE_PAGE: u64 = 1 << 30;
/// Least window of a bridge and its unit (PCI-to-PCI Bridge 1.2, 3.2.5.8).
pub(super) const BRIDGE_UNIT: u64 = 1 << 20;
/// A BAR never shares a host page with another: it can then be mapped into the guest.
pub(super) const PAGE: u64 = 4 << 10;
/// Size of the 64-bit window when neither BARs nor the configuration require more: space for hot-plug.
const LEAST_WINDOW64: u64 = 64 << 30;

/// How a slice of `size` bytes is aligned so that huge mappings survive in it; 0 when it is too small for one.
pub(crate) const fn huge_alignment(size: u64) -> u64 {
    if size >= HUGE_PAGE { HUGE_PAGE } else { 0 }
}

/// Size of a window for `needed` bytes of BARs, with room for a quarter more.
pub(super) fn with_spare(needed: u64) -> u64 {
    let roomy = needed.saturating_add(needed / 4).checked_next_power_of_two();
    roomy.unwrap_or(1 << 63).max(LEAST_WINDOW64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_has_room_for_a_quarter_more_in_the_next_power_of_two() {
        let gib = |needed: u64| with_spare(needed << 30) >> 30;
        assert_eq!([0, 51, 52, 100, 103].map(gib), [64, 64, 128, 128, 256]);
        assert_eq!([1 << 63, u64::MAX].map(with_spare), [1 << 63; 2]);
    }
}
