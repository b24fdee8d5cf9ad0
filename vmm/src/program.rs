//! The program's own pages. This is an unsafe module.
//!
//! Why it exists: starting a machine runs most of the program once (command line, configuration, plan, ledger, tables);
//! running it needs little of that. Pages that were used once stay in the page tables, and count for the process.
//! What callers may rely on: the program goes on as before; pages that it still needs are mapped again from the page
//! cache at their next use.
#![expect(unsafe_code, reason = "madvise on the program's own instructions")]

use std::fs;
use std::ops::Range;
use std::ptr::with_exposed_provenance_mut;

use rustix::mm::{Advice, madvise};

/// Gives back the mapped pages of this program's instructions; to be called when the start is over. It is a courtesy:
/// where `/proc` is missing they stay.
pub(crate) fn forget_start() {
    let here: fn() = forget_start;
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    if let Some(text) = mapping_of(&maps, here as usize) {
        let start = with_exposed_provenance_mut(text.start);
        // SAFETY: the range is one mapping of the program file, without write permission, so that no page of it differs from
        // the file: every later access finds the bytes that it would have found.
        let _ = unsafe { madvise(start, text.len(), Advice::LinuxDontNeed) };
    }
}

/// The private file mapping without write permission around `address`, in the text of `/proc/PID/maps` (proc_pid_maps(5)).
fn mapping_of(maps: &str, address: usize) -> Option<Range<usize>> {
    maps.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        (range.contains(&address) && words.next()? == "r-xp").then_some(range)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// KiB of the mapping around `address` that are in the page tables.
    fn resident(address: usize) -> u64 {
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let range = mapping_of(&smaps, address).unwrap();
        let from = smaps.find(&format!("{:x}-{:x} r-xp", range.start, range.end)).unwrap();
        let rss = smaps[from..].lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
        rss.trim().strip_suffix(" kB").unwrap().parse().unwrap()
    }

    #[test]
    fn only_an_executable_private_mapping_that_cannot_be_written_is_given_back() {
        let maps = "\
1000-2000 r--p 00000000 fe:00 12 /usr/bin/egm-vmm
2000-5000 r-xp 00001000 fe:00 12 /usr/bin/egm-vmm
5000-6000 rwxp 00004000 fe:00 12 /usr/bin/egm-vmm
6000-7000 r-xs 00004000 fe:00 12 /usr/bin/egm-vmm
";
        assert_eq!(mapping_of(maps, 0x4fff), Some(0x2000..0x5000));
        assert_eq!([0x1fff, 0x5000, 0x6000, 0x7000].map(|at| mapping_of(maps, at)), [const { None }; 4]);
        assert_eq!(mapping_of("", 0), None);
    }

    #[test]
    fn instructions_that_only_the_start_needed_are_in_memory_no_more() {
        let here: fn() = forget_start;
        let before = resident(here as usize);
        forget_start();
        let after = resident(here as usize);
        assert!(after < before, "{after} KiB of {before} KiB");
    }
}
