//! Host addresses of a machine's memory, from `/proc/PID/pagemap`, as root (Documentation/admin-guide/mm/pagemap.rst).

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::engine::step::Fault;
use crate::hosts::extent::Extent;

/// Bytes for each entry.
pub(crate) const PAGE: u64 = 4096;
/// Suffix of the name of each mapping of guest memory.
pub(crate) const GUEST_MEMORY: &str = "egm-vmm (deleted)";
/// The folder of slices that are files, as `l1-init.sh` makes it.
pub(crate) const SLICE_FILES: &str = " /mnt/pmem/egm/";

/// The host physical address of the page that `process` has mapped at `at`, a page's start, if there is one.
pub(crate) fn address(process: &Path, at: u64) -> Result<Option<u64>, Fault> {
    Ok(addresses(process, Extent { start: at, size: PAGE })?.into_iter().next())
}

/// The host physical addresses of the pages that `process` has in `memory`.
fn addresses(process: &Path, memory: Extent) -> Result<HashSet<u64>, Fault> {
    let mut entries = vec![0; usize::try_from(memory.size / PAGE * 8)?];
    File::open(process.join("pagemap"))?.read_exact_at(&mut entries, memory.start / PAGE * 8)?;
    Ok(entries.as_chunks().0.iter().filter_map(|entry| page(u64::from_le_bytes(*entry))).collect())
}

/// Bit 63 of an entry is set for a present page; bits 0 to 54 are the page's number.
fn page(entry: u64) -> Option<u64> {
    (entry >> 63 == 1).then_some((entry & ((1 << 55) - 1)) * PAGE)
}

/// The memory of a process at which a machine has its slice.
pub(crate) struct Mapping {
    /// The process, below `/proc`.
    process: PathBuf,
    /// In the process's addresses.
    memory: Extent,
}

impl Mapping {
    /// The host physical addresses of its pages.
    pub(crate) fn pages(&self) -> Result<HashSet<u64>, Fault> {
        addresses(&self.process, self.memory)
    }
}

/// The mappings of the slices of running machines, of memfd or huge pages, found by size.
pub(crate) fn slices(size: u64) -> Result<Vec<Mapping>, Fault> {
    let mut found = Vec::new();
    for process in machines()? {
        let maps = fs::read_to_string(process.join("maps"))?;
        let start = maps.lines().find_map(|line| slice(line, size));
        found.extend(start.map(|start| Mapping { process, memory: Extent { start, size } }));
    }
    Ok(found)
}

/// The processes of running machines, below `/proc`.
pub(crate) fn machines() -> Result<Vec<PathBuf>, Fault> {
    let is_machine = |process: &PathBuf| {
        fs::read_to_string(process.join("comm")).is_ok_and(|name| name.trim() == "egm-vmm")
    };
    Ok(fs::read_dir("/proc")?.flatten().map(|entry| entry.path()).filter(is_machine).collect())
}

/// The host physical address of the byte `inside` the slice of `size` bytes of the one machine that runs.
pub(crate) fn of_slice(size: u64, inside: u64) -> Result<u64, Fault> {
    let mapping = slices(size)?.pop().ok_or("no machine has mapped a slice")?;
    let at = mapping.memory.start + inside;
    let page = address(&mapping.process, at - at % PAGE)?;
    Ok(page.ok_or_else(|| format!("the machine has no page {inside:#x} bytes behind its slice's start"))?
        + at % PAGE)
}

/// The first address of a line of `/proc/PID/maps`, if it is of a slice of `size` bytes.
fn slice(line: &str, size: u64) -> Option<u64> {
    let (from, to) = line.split_whitespace().next()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let (from, to) = (number(from)?, number(to)?);
    let is_memory = line.ends_with(GUEST_MEMORY) || line.contains(SLICE_FILES);
    (line.contains(" rw-s ") && is_memory && to - from == size).then_some(from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_is_found_among_other_memory_of_the_machine() {
        let size = 528 << 20;
        let line = |size: u64| {
            format!("7f0000000000-{:x} rw-s 0 00:0f 9 /memfd:egm-vmm (deleted)", 0x7f00_0000_0000 + size)
        };
        assert_eq!(slice(&line(size), size), Some(0x7f00_0000_0000));
        assert_eq!(slice(&line(size).replace("memfd:", ""), size), Some(0x7f00_0000_0000));
        assert_eq!(slice(&line(256 << 20), size), None);
        assert_eq!(slice("7f0000000000-7f0021000000 rw-p 0 00:00 0", size), None);
    }

    #[test]
    fn an_entry_has_an_address_only_where_a_page_is_present() {
        assert_eq!(page(0x8180_0000_0012_3456), Some(0x1_2345_6000));
        assert_eq!(page(0x0180_0000_0012_3456), None);
    }
}
