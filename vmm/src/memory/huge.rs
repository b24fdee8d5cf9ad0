//! How much of the guest's memory is in huge pages of the host, as `/proc/self/smaps` counts it.

use std::fs;
use std::ops::Range;

use egm_address::{align_down, align_up};
use egm_report::show::size;

use super::{Piece, Planned};
use crate::plan::BackingPlan;

/// Less than this part of what the plan promised is worth a warning, in percent.
const LEAST_PERCENT: u64 = 95;
/// Pages of at least this size are huge.
const HUGE: u64 = 2 << 20;
/// Fields of `/proc/PID/smaps` that count huge pages (Documentation/filesystems/proc.rst).
const FIELDS: [&str; 5] =
    ["AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"];

/// Memory that was touched before the guest starts, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Present {
    pub total: u64,
    /// In huge pages, as `/proc/self/smaps` counts them.
    pub huge: u64,
    /// In huge pages according to the plan.
    pub promised: u64,
}

impl Present {
    pub(super) fn of(pieces: &[Planned<'_>]) -> Self {
        let bytes = |piece: &Piece| u64::try_from(piece.mapping.size()).unwrap_or(u64::MAX);
        let range = |piece: &Piece| {
            let start = piece.mapping.as_ptr().addr();
            start..start.saturating_add(piece.mapping.size())
        };
        let ranges: Vec<Range<usize>> = pieces.iter().map(|planned| range(planned.piece)).collect();
        let total = pieces.iter().map(|planned| bytes(planned.piece)).fold(0, u64::saturating_add);
        let promises =
            pieces.iter().map(|Planned { piece, backing }| promised(backing, piece.gpa.get(), bytes(piece)));
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let huge = huge_bytes(&smaps, &ranges).min(total);
        Self { total, huge, promised: promises.fold(0, u64::saturating_add) }
    }

    /// For a person: how much is in huge pages.
    pub fn line(&self) -> String {
        format!("memory: {} of {} present in huge pages of the host", size(self.huge), size(self.total))
    }

    /// For a person, where it is less than the plan promised.
    pub fn warning(&self) -> Option<String> {
        let least = self.promised / 100 * LEAST_PERCENT;
        (self.huge < least).then(|| {
            format!(
                "the plan has {} of guest memory in huge pages, and the host gave {}: its free memory is in small pieces \
                 (echo 1 > /proc/sys/vm/compact_memory), or \"page_size\": \"2M\" reserves them",
                size(self.promised),
                size(self.huge)
            )
        })
    }
}

/// Bytes in whole huge pages, as `plan` has them, of `size` bytes at guest address `gpa`.
fn promised(plan: &BackingPlan, gpa: u64, size: u64) -> u64 {
    let Some(page) = plan.pages.as_ref().map(|pages| pages.size.get()).filter(|page| *page >= HUGE) else {
        return 0;
    };
    if plan.page_size.is_hugetlb() {
        return size; // an edge is inside a page that is mapped whole
    }
    let start = align_up(gpa, page).unwrap_or(u64::MAX);
    align_down(gpa.saturating_add(size), page).saturating_sub(start)
}

/// Bytes in huge pages of the mappings in `smaps` that overlap one of `ranges`.
fn huge_bytes(smaps: &str, ranges: &[Range<usize>]) -> u64 {
    let mut bytes: u64 = 0;
    let mut counts = false;
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        if let Some((start, end)) = first.split_once('-') {
            let number = |text| usize::from_str_radix(text, 16).ok();
            let (Some(start), Some(end)) = (number(start), number(end)) else { continue };
            counts = ranges.iter().any(|range| range.start < end && start < range.end);
        } else if counts && FIELDS.contains(&first) {
            let kib: u64 = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
            bytes = bytes.saturating_add(kib.saturating_mul(1024));
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0040000000 rw-s 00000000 00:2a 2          /egm-vmm (deleted)
Size:            1048576 kB
ShmemPmdMapped:  1046528 kB
AnonHugePages:         0 kB
VmFlags: rd wr sh mr mw me ms dd
7f0080000000-7f0080200000 rw-p 00000000 00:00 0
AnonHugePages:      2048 kB
7f00c0000000-7f0100000000 rw-s 00000000 00:0f 9          /memfd:egm-vmm (deleted)
Private_Hugetlb: 1048576 kB
";

    #[test]
    fn huge_pages_of_the_guests_mappings_count_and_others_do_not() {
        let (first, hugetlb) = (0x7f00_0000_0000..0x7f00_4000_0000, 0x7f00_c00c_0000..0x7f01_0000_0000);
        let heap = 0x7f00_8000_0000..0x7f00_8020_0000;
        assert_eq!(huge_bytes(SMAPS, std::slice::from_ref(&first)), 1022 << 20);
        assert_eq!(huge_bytes(SMAPS, &[first, hugetlb]), 2046 << 20);
        assert_eq!(huge_bytes(SMAPS, &[heap]), 2 << 20);
        assert_eq!(huge_bytes("", &[]), 0);
    }

    #[test]
    fn less_than_the_plan_promised_is_a_warning() {
        let present = |huge: u64| Present { total: 1 << 30, huge: huge << 20, promised: 1022 << 20 };
        assert_eq!(present(1022).line(), "memory: 1022 MiB of 1 GiB present in huge pages of the host");
        assert_eq!(present(1000).warning(), None);
        assert!(present(512).warning().is_some_and(|text| text.contains("has 1022 MiB of guest memory")));
        assert_eq!(Present { promised: 0, ..present(0) }.warning(), None);
    }
}
