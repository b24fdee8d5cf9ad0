//! `/proc/PID/smaps`: what a process costs beside the memory of its guest. Pure.

/// KiB of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    /// Proportional set size: pages shared with other processes count in part.
    pub(crate) pss: u64,
    /// The anonymous part, which no other process shares.
    pub(crate) anonymous: u64,
}

/// Adds up all mappings but those with `guest` in the name of their file.
pub(crate) fn beside_guest(smaps: &str, guest: &str) -> Cost {
    let (mut cost, mut counts) = (Cost::default(), true);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let Some(first) = words.next() else { continue };
        if !first.ends_with(':') {
            // A mapping: addresses, rights, offset, device, inode, and perhaps a name.
            counts = !line.contains(guest);
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
        assert_eq!(beside_guest(smaps, "egm-vmm (deleted)"), Cost { pss: 76, anonymous: 68 });
        assert_eq!(beside_guest("", "x"), Cost::default());
    }
}
