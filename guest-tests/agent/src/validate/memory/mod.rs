//! Memory of every node keeps what is written, on pages of every size, and how fast it is.

mod bandwidth;
mod huge;
mod latency;
mod node_memory;
mod pattern;
mod ratio;

use super::Validation;

pub(super) static ALL: &[Validation] = &[
    Validation {
        name: "memory.pattern",
        claim: "memory of every node keeps what several processors write, read by others",
        run: pattern::run,
    },
    Validation {
        name: "memory.transparent_hugepages",
        claim: "memory of every node comes in huge pages where a program asks for them, and keeps what is written",
        run: huge::transparent,
    },
    Validation {
        name: "memory.hugetlb",
        claim: "every free huge page that a node has set aside, up to --size, lies there and keeps what is written",
        run: huge::hugetlb,
    },
    Validation {
        name: "memory.bandwidth",
        claim: "reads, writes and copies by the nearest processors give right bytes; bandwidth by size",
        run: bandwidth::run,
    },
    Validation {
        name: "memory.latency",
        claim: "a chain of addresses leads through all of a buffer; time of one step by size",
        run: latency::run,
    },
    Validation {
        name: "memory.egm",
        claim: "memory of nodes without processors (EGM) beside ordinary memory: figures, no verdict",
        run: ratio::run,
    },
];

/// Rounds of each measurement unless the argument `memory.rounds` sets another number.
const ROUNDS: u32 = 5;
/// The smallest size measured, in bytes.
const SMALLEST: usize = 4096;

/// The sizes of a curve: 4 KiB, four times as much each, and the largest itself.
fn sizes(most: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(SMALLEST), |size| size.checked_mul(4));
    powers.take_while(|size| *size < most).chain([most.max(SMALLEST)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_go_up_to_the_largest() {
        assert_eq!(sizes(1 << 16), [4096, 16384, 65536]);
        assert_eq!(sizes(100_000), [4096, 16384, 65536, 100_000]);
        assert_eq!(sizes(0), [4096]);
    }
}
