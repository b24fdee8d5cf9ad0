//! `/proc/PID/smaps`: memory of a process without the memory of its guest. Pure.

/// KiB of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    /// Proportional set size: pages shared with other processes count in part.
    pub(crate) pss: u64,
    /// The anonymous part, which no other process shares.
    pub(crate) anonymous: u64,
}

/// Mappings that are the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GuestMemory {
    /// Mappings with this in the name of their file.
    Named(&'static str),
    /// Mappings without a file of this many KiB or more. The kernel merges neighbours: a mapping of the same kind
    /// next to the guest's memory counts as the guest's.
    AtLeast {
        /// KiB of the guest's memory.
        kib: u64,
    },
}

impl GuestMemory {
    /// Whether a mapping with this first line is the guest's.
    fn has(self, line: &str) -> bool {
        match self {
            Self::Named(name) => line.contains(name),
            Self::AtLeast { kib } => {
                let words: Vec<_> = line.split_whitespace().collect();
                let bound = |text: &str| u64::from_str_radix(text, 16).ok();
                let range = words.first().and_then(|range| range.split_once('-'));
                let size = range.and_then(|(from, to)| bound(to)?.checked_sub(bound(from)?));
                words.len() < 6 && size.is_some_and(|size| size >> 10 >= kib)
            }
        }
    }
}

/// Adds up all mappings but those of `guest`.
pub(crate) fn beside_guest(smaps: &str, guest: GuestMemory) -> Cost {
    let (mut cost, mut counts) = (Cost::default(), true);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let Some(first) = words.next() else { continue };
        if !first.ends_with(':') {
            // A mapping: addresses, rights, offset, device, inode, and perhaps a name.
            counts = !guest.has(line);
            continue;
        }
        let Some(kib) = words.next().and_then(|word| word.parse::<u64>().ok()).filter(|_| counts) else {
            continue;
        };
        match first {
            "Pss:" => cost.pss = cost.pss.saturating_add(kib),
            "Anonymous:" => cost.anonymous = cost.anonymous.saturating_add(kib),
            _ => {}
        }
    }
    cost
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_but_the_guest_counts() {
        let smaps = "\
5555-5556 rw-p 00000000 00:00 0                          [heap]
Size:                136 kB
Pss:                  68 kB
Anonymous:            60 kB
VmFlags: rd wr
7f00-7f01 rw-s 00000000 00:01 2065                       /memfd:egm-vmm (deleted)
Pss:             1000000 kB
Anonymous:             7 kB
7f02-7f03 rw-p 00000000 00:00 0
Pss:                   8 kB
Pss_Dirty:             8 kB
Anonymous:             8 kB
";
        let named = GuestMemory::Named;
        assert_eq!(beside_guest(smaps, named("egm-vmm (deleted)")), Cost { pss: 76, anonymous: 68 });
        assert_eq!(beside_guest("", named("x")), Cost::default());
    }

    #[test]
    fn memory_without_a_name_is_the_guests_by_its_size() {
        let smaps = "\
7f0000000000-7f0010000000 rw-p 00000000 00:00 0
Pss:              262144 kB
7f0010000000-7f0010001000 rw-p 00000000 00:00 0
Pss:                   4 kB
7f0020000000-7f0030000000 r--p 00000000 00:00 7                          /usr/lib/large
Pss:                   9 kB
";
        let cost = |kib| beside_guest(smaps, GuestMemory::AtLeast { kib }).pss;
        assert_eq!((cost(256 << 10), cost((256 << 10) + 1)), (13, 262_157));
    }
}
