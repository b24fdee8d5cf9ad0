//! Host memory, through a file with its addresses as offsets. This is an unsafe module.
//!
//! Reason: `read` of `/dev/mem` stops at the end of the kernel's own memory; only a mapping shows the memory above.
//! It guarantees: every request for a word reads it from the memory itself, once.
#![expect(unsafe_code, reason = "mmap, vmsplice, and memory that others write to")]

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::pipe::{IoSliceRaw, SpliceFlags, vmsplice};

/// Bytes in a word.
const WORD: usize = size_of::<u64>();

/// A part of a file, mapped shared.
#[derive(Debug)]
pub(crate) struct Physical {
    start: NonNull<c_void>,
    /// Bytes of the mapping, which begins with a page.
    mapped: usize,
    /// Bytes of the mapping before the requested range.
    skip: usize,
    writable: bool,
}

impl Physical {
    /// `size` bytes of `file` from `offset`, a multiple of a word, on a host with pages of any size.
    pub(crate) fn map(file: &File, offset: u64, size: u64) -> io::Result<Self> {
        Self::with(file, offset, size, ProtFlags::READ)
    }

    /// As [`Self::map`], also for writing.
    pub(crate) fn map_writable(file: &File, offset: u64, size: u64) -> io::Result<Self> {
        Self::with(file, offset, size, ProtFlags::READ | ProtFlags::WRITE)
    }

    fn with(file: &File, offset: u64, size: u64, allowed: ProtFlags) -> io::Result<Self> {
        if !offset.is_multiple_of(WORD as u64) {
            return Err(io::Error::other("not at a word's beginning"));
        }
        let skip = offset % rustix::param::page_size() as u64;
        let (from, skip) = (offset.saturating_sub(skip), usize::try_from(skip).map_err(io::Error::other)?);
        let mapped = usize::try_from(size).map_err(io::Error::other)?.saturating_add(skip);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { mmap(ptr::null_mut(), mapped, allowed, MapFlags::SHARED, file, from) }?;
        let start = NonNull::new(start).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Self { start, mapped, skip, writable: allowed.contains(ProtFlags::WRITE) })
    }

    /// Writes a word at `offset`, rounded down to a word's; `None` outside, and where only reading is allowed.
    pub(crate) fn set_word(&self, offset: u64, value: u64) -> Option<()> {
        let word = self.place(offset).filter(|_| self.writable)?;
        // SAFETY: inside the mapping, which may be written, and aligned; others read it, hence volatile.
        unsafe { ptr::write_volatile(word, value) };
        Some(())
    }

    /// Puts the first page into `pipe`, which then refers to the memory itself, and not to a copy.
    pub(crate) fn share_page(&self, pipe: impl AsFd) -> io::Result<usize> {
        let page = rustix::param::page_size().min(self.mapped);
        // SAFETY: the bytes lie in the mapping, which outlives the slice; only their address is used.
        let bytes = unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast::<u8>(), page) };
        // SAFETY: the page is a shared file's, so readers of the pipe expect that others write to it.
        Ok(unsafe { vmsplice(pipe, &[IoSliceRaw::from_slice(bytes)], SpliceFlags::empty()) }?)
    }

    /// Address of the range in this process.
    pub(crate) fn address(&self) -> u64 {
        u64::try_from(self.start.as_ptr().addr().wrapping_add(self.skip)).unwrap_or(u64::MAX)
    }

    /// The word at `offset`, rounded down to a word's.
    pub(crate) fn word(&self, offset: u64) -> Option<u64> {
        let word = self.place(offset)?;
        // SAFETY: inside the mapping, aligned, and any bits are a word; others write to it, hence volatile.
        Some(unsafe { ptr::read_volatile(word) })
    }

    fn place(&self, offset: u64) -> Option<*mut u64> {
        let index = usize::try_from(offset).ok()? / WORD;
        let first = self.start.as_ptr().wrapping_byte_add(self.skip).cast::<u64>();
        (index < self.size() / WORD).then(|| first.wrapping_add(index))
    }

    /// Size of the requested range in bytes.
    const fn size(&self) -> usize {
        self.mapped.saturating_sub(self.skip)
    }

    /// Number of words equal to `word`.
    pub(crate) fn count(&self, word: u64) -> usize {
        (0..self.size() as u64).step_by(WORD).filter(|offset| self.word(*offset) == Some(word)).count()
    }

    /// Offset of the first word that is not zero.
    pub(crate) fn first_not_zero(&self) -> Option<u64> {
        (0..self.size() as u64).step_by(WORD).find(|offset| self.word(*offset) != Some(0))
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping, with this value as its only owner.
        let _ = unsafe { munmap(self.start.as_ptr(), self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_mapping_begins_at_any_word_whatever_the_hosts_pages_are() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(3 * 4096).unwrap();
        file.write_all_at(&7u64.to_le_bytes(), 4096 + 24).unwrap();
        let memory = Physical::map(&file, 4096 + 16, 24).unwrap();
        assert_eq!((memory.word(8), memory.word(16), memory.word(24)), (Some(7), Some(0), None));
        assert_eq!((memory.first_not_zero(), memory.address() % 4096), (Some(8), 16));
        assert!(Physical::map(&file, 4, 8).is_err());
    }

    #[test]
    fn a_word_that_is_written_is_seen_where_it_is_and_nowhere_else() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(3 * 4096).unwrap();
        let memory = Physical::map(&file, 4096, 8192).unwrap();
        assert_eq!(memory.first_not_zero(), None);
        file.write_all_at(&7u64.to_le_bytes(), 4096 + 24).unwrap();
        assert_eq!((memory.word(24), memory.word(16), memory.word(8192)), (Some(7), Some(0), None));
        assert_eq!((memory.first_not_zero(), memory.count(7)), (Some(24), 1));
        let writable = Physical::map_writable(&file, 4096, 8192).unwrap();
        assert_eq!((writable.set_word(32, 9), writable.set_word(8192, 9)), (Some(()), None));
        assert_eq!((memory.word(32), memory.set_word(32, 1)), (Some(9), None));
    }
}
