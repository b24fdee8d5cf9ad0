//! The unsafe module of pages that move while they are in use, and the promise that a mapping stays where it is.
//!
//! Callers rely on this: moving a page changes neither its address nor its bytes, so it may be asked for of any range.
#![expect(unsafe_code, reason = "mbind and madvise, and memory that an RDMA device writes")]

use std::io;
use std::ptr::{self, NonNull};

use super::Mapping;

/// `MADV_COLLAPSE`: the pages of a range become a large one, now.
const COLLAPSE: libc::c_int = 25;
/// `MPOL_MF_MOVE`: pages that are there already move.
const MOVE: libc::c_int = 2;
/// A large page, in bytes.
const LARGE: usize = 2 << 20;
/// Nodes that a mask has room for.
const MASK_BITS: usize = 1024;

// SAFETY: a mapping stays at its address until it is dropped, and only its owner has access to it.
unsafe impl egm_vendor::verbs::Memory for Mapping {
    fn start(&self) -> NonNull<u8> {
        self.start
    }

    fn size(&self) -> usize {
        self.size
    }
}

/// A mapping from its first address on that is a multiple of something: what is moved can then be just what is used.
#[derive(Debug)]
pub(crate) struct Aligned {
    mapping: Mapping,
    skipped: usize,
}

impl Aligned {
    /// The part of `mapping` from a multiple of `to` on, a power of two; nothing where no byte is.
    pub(crate) fn new(mapping: Mapping, to: usize) -> Option<Self> {
        let start = mapping.start.addr().get();
        let skipped = start.checked_next_multiple_of(to)? - start;
        (skipped < mapping.size).then_some(Self { mapping, skipped })
    }

    pub(crate) fn address(&self) -> u64 {
        egm_vendor::verbs::Memory::start(self).as_ptr().expose_provenance() as u64
    }
}

// SAFETY: a part of a mapping, which it owns, from an offset below its size to its end.
unsafe impl egm_vendor::verbs::Memory for Aligned {
    fn start(&self) -> NonNull<u8> {
        let start = self.mapping.start.as_ptr().wrapping_add(self.skipped);
        NonNull::new(start).unwrap_or(self.mapping.start)
    }

    fn size(&self) -> usize {
        self.mapping.size - self.skipped
    }
}

/// Bytes of a page.
pub(crate) fn size() -> usize {
    rustix::param::page_size()
}

/// Moves the pages of `size` bytes from address `start`, a multiple of the page size, to `node`, those that stay behind
/// for whatever reason excepted.
pub(crate) fn move_to(start: u64, size: usize, node: u32) -> io::Result<()> {
    let mut mask = [0u64; MASK_BITS / 64];
    let node = usize::try_from(node).unwrap_or(usize::MAX);
    *mask.get_mut(node / 64).ok_or(io::ErrorKind::InvalidInput)? |= 1 << (node % 64);
    // SAFETY: the mask has MASK_BITS bits (the kernel reads `maxnode` - 1); moving pages changes no byte.
    let done = unsafe {
        libc::syscall(libc::SYS_mbind, start, size, libc::MPOL_BIND, mask.as_ptr(), MASK_BITS + 1, MOVE)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Copies the pages of `size` bytes from address `start`, a multiple of a large page, into new large ones, in the middle of
/// whatever uses them. Whether that took place is the kernel's word in smaps: fewer large pages, then more.
pub(crate) fn renewed(start: u64, size: usize) -> bool {
    let done = split(start, size).is_ok();
    let before = large(start, size);
    let done = done && advise(start, size, COLLAPSE).is_ok();
    let after = large(start, size);
    done && matches!((before, after), (Some(before), Some(after)) if before < after)
}

/// Has large pages of that range mapped as small ones: a piece of one gets another flag than the rest, which no large
/// page can have, and then the same again. Neither changes the access of any process.
fn split(start: u64, size: usize) -> io::Result<()> {
    for from in (start..start.saturating_add(size as u64)).step_by(LARGE) {
        advise(from.saturating_add(self::size() as u64), self::size(), libc::MADV_DONTFORK)?;
    }
    advise(start, size, libc::MADV_DOFORK)
}

/// Bytes of large pages in the mappings that that range is in.
fn large(start: u64, size: usize) -> Option<u64> {
    large_in(&std::fs::read_to_string("/proc/self/smaps").ok()?, start, start.checked_add(size as u64)?)
}

/// The same of a text: `7f00-7f20 rw-p …`, then lines of what there is of it, `AnonHugePages:  2048 kB` among them.
fn large_in(smaps: &str, start: u64, end: u64) -> Option<u64> {
    let (mut inside, mut bytes) = (false, 0u64);
    for line in smaps.lines() {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let range = range.and_then(|(from, to)| {
            Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?))
        });
        if let Some((from, to)) = range {
            inside = from < end && start < to;
        } else if let Some(value) = line.strip_prefix("AnonHugePages:").filter(|_| inside) {
            let kilobytes: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
            bytes = bytes.checked_add(kilobytes.checked_mul(1024)?)?;
        }
    }
    Some(bytes)
}

fn advise(start: u64, size: usize, advice: libc::c_int) -> io::Result<()> {
    let start = usize::try_from(start).unwrap_or(0);
    // SAFETY: these pieces of advice change which pages back the range, and not its bytes.
    let done = unsafe { libc::madvise(ptr::without_provenance_mut(start), size, advice) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The NUMA node of the page at `address`, negative (an error number) where there is none.
pub(crate) fn node_of(address: u64) -> io::Result<i32> {
    let pages = [address];
    let mut node = [0i32];
    // SAFETY: both arrays have one entry; without target nodes the call only reports.
    let done = unsafe {
        libc::syscall(libc::SYS_move_pages, 0, 1, pages.as_ptr(), ptr::null::<i32>(), node.as_mut_ptr(), 0)
    };
    if done == 0 { Ok(node[0]) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use egm_vendor::verbs::Memory;

    use super::*;

    #[test]
    fn aligned_memory_begins_where_it_states_and_ends_with_its_mapping() {
        let mapping = Mapping::new(3 << 20).unwrap();
        let end = mapping.start.addr().get() + mapping.size;
        let aligned = Aligned::new(mapping, 2 << 20).unwrap();
        assert!(aligned.address().is_multiple_of(2 << 20));
        assert_eq!(usize::try_from(aligned.address()).unwrap() + aligned.size(), end);
        assert!(aligned.size() > 1 << 20);
        let small = Mapping::new(4096).unwrap();
        let next = small.start.addr().get().is_multiple_of(1 << 30);
        assert_eq!(Aligned::new(small, 1 << 30).is_some(), next);
    }

    #[test]
    fn pages_that_are_moved_keep_their_bytes_and_their_node_is_reported() {
        let mut memory = Mapping::new(1 << 16).unwrap();
        memory.bytes_mut().fill(7);
        let start = memory.start().as_ptr().expose_provenance() as u64;
        assert!(node_of(start).unwrap() >= 0);
        move_to(start, 1 << 16, 0).unwrap();
        assert!(memory.bytes().iter().all(|byte| *byte == 7));
        assert!(move_to(start, 1 << 16, 5000).is_err());
    }

    #[test]
    fn large_pages_are_renewed_where_the_kernel_states_so_and_keep_their_bytes() {
        let size = 2 * LARGE;
        let mut mapping = Mapping::new(size + LARGE).unwrap();
        mapping.bytes_mut().fill(7);
        let memory = Aligned::new(mapping, LARGE).unwrap();
        let before = large(memory.address(), size).unwrap();
        // Without large pages there is nothing to be renewed, and it must not say so.
        let renewed = renewed(memory.address(), size);
        let after = large(memory.address(), size).unwrap();
        assert!(!renewed || after >= LARGE as u64, "{before} {after}");
        assert!(memory.mapping.bytes().iter().all(|byte| *byte == 7));
        if renewed {
            split(memory.address(), size).unwrap();
            assert!(large(memory.address(), size).unwrap() < after, "nothing was split of {after}");
        }
    }

    #[test]
    fn large_pages_are_counted_in_the_mappings_of_a_range() {
        let smaps = "1000-3000 rw-p 0 00:00 0\nSize: 8 kB\nAnonHugePages:      2048 kB\n\
                     3000-5000 rw-p 0 00:00 0\nAnonHugePages:      4096 kB\n\
                     9000-a000 rw-p 0 00:00 0 [heap]\nAnonHugePages: 64 kB\n";
        let counted = |from, to| large_in(smaps, from, to).unwrap();
        assert_eq!((counted(0x1000, 0x2000), counted(0x2fff, 0x3001)), (2 << 20, 6 << 20));
        assert_eq!((counted(0x5000, 0x9000), counted(0, u64::MAX)), (0, (6 << 20) + (64 << 10)));
    }
}
