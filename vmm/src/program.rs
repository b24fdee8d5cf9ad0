//! The program's own pages. This is an unsafe module.
//!
//! Why it exists: starting a machine runs most of the program once (command line, configuration, plan, ledger, tables);
//! running it needs little of that. Pages that were used once stay in the page tables, and count for the process.
//! What callers may rely on: the program goes on as before; pages that it still needs are mapped again from the page
//! cache at their next use.
#![expect(unsafe_code, reason = "madvise on the program's own file")]

use std::fs;
use std::ops::Range;
use std::ptr::with_exposed_provenance_mut;

use rustix::mm::{Advice, madvise};

/// Mappings of this program's instructions and constants. Only an optimization: without `/proc` there are none.
pub(crate) struct StartPages(Vec<Range<usize>>);

impl StartPages {
    /// Finds them in `/proc/self/maps`, which a sandboxed process cannot open.
    pub(crate) fn find() -> Self {
        let here: fn() -> Self = Self::find;
        let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        Self(unwritten(&maps, here as usize))
    }

    /// Returns their pages to the kernel. Call it when the start is over.
    pub(crate) fn forget(self) {
        for range in self.0 {
            let start = with_exposed_provenance_mut(range.start);
            // SAFETY: the range is one mapping of the program file that never had write permission, so that no page of it
            // differs from the file: every later access finds the bytes that it would have found.
            let _ = unsafe { madvise(start, range.len(), Advice::LinuxDontNeed) };
        }
    }
}

/// A private file mapping without write permission, in the text of `/proc/PID/maps` (proc_pid_maps(5)).
struct Mapping<'a> {
    range: Range<usize>,
    is_executable: bool,
    offset: &'a str,
    /// Device as `major:minor`, and inode.
    file: [&'a str; 2],
}

impl<'a> Mapping<'a> {
    fn of(line: &'a str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        let is_executable = match words.next()? {
            "r-xp" => true,
            "r--p" => false,
            _ => return None,
        };
        Some(Self { range, is_executable, offset: words.next()?, file: [words.next()?, words.next()?] })
    }
}

/// Mappings that were never written: the instructions around `address`, and the start of the same file, with its headers,
/// relocations and constants. The loader wrote relocations to the file's other read-only mappings before it protected them.
fn unwritten(maps: &str, address: usize) -> Vec<Range<usize>> {
    let all = || maps.lines().filter_map(Mapping::of);
    let instructions = all().find(|mapping| mapping.is_executable && mapping.range.contains(&address));
    let Some(instructions) = instructions else { return Vec::new() };
    let is_start = |mapping: &Mapping<'_>| {
        mapping.file == instructions.file && mapping.offset.bytes().all(|digit| digit == b'0')
    };
    let constants =
        all().filter(|mapping| !mapping.is_executable).filter(is_start).map(|mapping| mapping.range);
    [instructions.range.clone()].into_iter().chain(constants).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// KiB of the mapping around `address` that are in the page tables.
    fn resident(address: usize) -> u64 {
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = smaps.lines();
        let holds = |line: &str| Mapping::of(line).is_some_and(|mapping| mapping.range.contains(&address));
        lines.find(|line| holds(line)).unwrap();
        let rss = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
        rss.trim().strip_suffix(" kB").unwrap().parse().unwrap()
    }

    #[test]
    fn only_mappings_of_the_program_that_were_never_writable_are_given_back() {
        let maps = "\
1000-2000 r--p 00000000 fe:00 12 /usr/bin/egm-vmm
2000-5000 r-xp 00001000 fe:00 12 /usr/bin/egm-vmm
5000-6000 r--p 00004000 fe:00 12 /usr/bin/egm-vmm
6000-7000 rwxp 00005000 fe:00 12 /usr/bin/egm-vmm
7000-8000 r-xs 00005000 fe:00 12 /usr/bin/egm-vmm
8000-9000 r--p 00000000 fe:00 13 /usr/share/other
9000-a000 rw-p 00000000 fe:00 12 /usr/bin/egm-vmm
";
        assert_eq!(unwritten(maps, 0x4fff), [0x2000..0x5000, 0x1000..0x2000]);
        for address in [0x1fff, 0x5000, 0x6000, 0x7000, 0x9000] {
            assert_eq!(unwritten(maps, address), [], "{address:#x}");
        }
        assert_eq!(unwritten("", 0), []);
    }

    #[test]
    fn instructions_and_constants_that_only_the_start_needed_are_in_memory_no_more() {
        static CONSTANT: [u8; 4] = *b"text";
        let here: fn() -> StartPages = StartPages::find;
        let both = [here as usize, (&raw const CONSTANT).addr()];
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        for range in unwritten(&maps, here as usize) {
            let start = with_exposed_provenance_mut(range.start);
            // SAFETY: the range is one mapping, of which nothing is changed.
            unsafe { madvise(start, range.len(), Advice::LinuxPopulateRead) }.unwrap();
        }
        let before = both.map(resident);
        StartPages::find().forget();
        let after = both.map(resident);
        assert!(after[0] < before[0] && after[1] < before[1], "{after:?} KiB of {before:?} KiB");
        assert_eq!(CONSTANT, *b"text");
    }
}
