//! Vectored reads and writes between a descriptor and guest memory, without a copy in between.
//!
//! This is an unsafe module: the kernel gets raw pointers into guest memory. Rules that callers rely on:
//! * every pointer comes from a `VolatileSlice`, which borrows its mapping for the whole call;
//! * no Rust reference into guest memory is made, so that the guest may write there at the same time.
#![expect(
    unsafe_code,
    reason = "readv and writev take pointers; safe wrappers want references, which guest memory cannot give"
)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use libc::iovec;
use vm_memory::VolatileSlice;

/// Most segments that one call passes to the kernel (`IOV_MAX`); the rest is left to the caller's next call.
pub(crate) const MAX_SEGMENTS: usize = 1024;

/// Reads into `segments` in order.
///
/// # Errors
/// The error of readv(2); an interrupted call is repeated.
pub fn readv(fd: BorrowedFd<'_>, segments: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let (iov, count) = vectors(segments);
    // SAFETY: `iov` holds `count` vectors, each within a slice that outlives the call and may be written at any time.
    retry(|| unsafe { libc::readv(fd.as_raw_fd(), iov.as_ptr(), count) })
}

/// Writes `segments` in order.
///
/// # Errors
/// The error of writev(2); an interrupted call is repeated.
pub fn writev(fd: BorrowedFd<'_>, segments: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let (iov, count) = vectors(segments);
    // SAFETY: `iov` holds `count` vectors, each within a slice that outlives the call and is only read.
    retry(|| unsafe { libc::writev(fd.as_raw_fd(), iov.as_ptr(), count) })
}

/// Reads into `segments` in order, from byte `offset` of a file.
///
/// # Errors
/// The error of preadv(2); an interrupted call is repeated.
pub(crate) fn preadv(fd: BorrowedFd<'_>, segments: &[VolatileSlice<'_>], offset: u64) -> io::Result<usize> {
    let (iov, count) = vectors(segments);
    let offset = file_offset(offset)?;
    // SAFETY: as in `readv`.
    retry(|| unsafe { libc::preadv(fd.as_raw_fd(), iov.as_ptr(), count, offset) })
}

/// Writes `segments` in order, to byte `offset` of a file.
///
/// # Errors
/// The error of pwritev(2); an interrupted call is repeated.
pub(crate) fn pwritev(fd: BorrowedFd<'_>, segments: &[VolatileSlice<'_>], offset: u64) -> io::Result<usize> {
    let (iov, count) = vectors(segments);
    let offset = file_offset(offset)?;
    // SAFETY: as in `writev`.
    retry(|| unsafe { libc::pwritev(fd.as_raw_fd(), iov.as_ptr(), count, offset) })
}

fn file_offset(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// The kernel's form of at most [`MAX_SEGMENTS`] segments, and their number. The pointers are good while the guest
/// memory is mapped.
pub(super) fn vectors(segments: &[VolatileSlice<'_>]) -> (Vec<iovec>, libc::c_int) {
    let iov: Vec<iovec> = segments
        .iter()
        .take(MAX_SEGMENTS)
        .map(|s| iovec { iov_base: s.ptr_guard_mut().as_ptr().cast(), iov_len: s.len() })
        .collect();
    let count = libc::c_int::try_from(iov.len()).unwrap_or(0); // at most MAX_SEGMENTS
    (iov, count)
}

fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(bytes) = usize::try_from(call()) {
            return Ok(bytes);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

    use super::*;

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000), (GuestAddress(0x1000), 0x1000)]).unwrap()
    }

    fn slices(memory: &GuestMemoryMmap, address: u64, length: usize) -> Vec<VolatileSlice<'_>> {
        memory
            .get_slices(GuestAddress(address), length, Permissions::ReadWrite)
            .unwrap()
            .map(Result::unwrap)
            .collect()
    }

    #[test]
    fn bytes_go_through_a_file_and_back_in_order_across_regions() {
        let memory = memory();
        let text: Vec<u8> = (0..200u8).collect();
        memory.write_slice(&text, GuestAddress(0xfa0)).unwrap();
        let file = tempfile::tempfile().unwrap();

        let out = slices(&memory, 0xfa0, 200);
        assert_eq!(out.len(), 2);
        assert_eq!(pwritev(file.as_fd(), &out, 512).unwrap(), 200);
        assert_eq!(preadv(file.as_fd(), &slices(&memory, 0x1800, 300), 512).unwrap(), 200);

        let mut back = vec![0; 200];
        memory.read_slice(&mut back, GuestAddress(0x1800)).unwrap();
        assert_eq!(back, text);
    }

    #[test]
    fn an_offset_beyond_what_files_have_is_refused() {
        let memory = memory();
        let file = tempfile::tempfile().unwrap();
        let error = preadv(file.as_fd(), &slices(&memory, 0, 8), u64::MAX).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_pipe_that_is_full_states_would_block() {
        let memory = memory();
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        let segments = slices(&memory, 0, 0x2000);
        let mut written = 0;
        let error = loop {
            match writev(writer.as_fd(), &segments) {
                Ok(bytes) => written += bytes,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        let mut read = 0;
        while let Ok(bytes) = readv(reader.as_fd(), &segments) {
            read += bytes;
        }
        assert_eq!(read, written);
    }
}
