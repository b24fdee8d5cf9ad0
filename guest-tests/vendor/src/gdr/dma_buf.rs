//! A dma-buf, mapped.
//!
//! An unsafe module. It guarantees: there is no reference to the mapped bytes; each access is one volatile byte or
//! aligned word inside the mapping, because a GPU changes them and a BAR does not support unaligned access on every
//! processor.
#![expect(unsafe_code, reason = "a mapping that a GPU writes to is no memory of Rust's")]

use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{Ordering, fence};

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::gdr::{GdrError, Window, inside};

/// `ENOTSUPP` of `include/linux/errno.h`, the kernel's own: none of the C library's numbers.
const ENOTSUPP: i32 = 524;

/// GPU memory by a mapping of its dma-buf.
#[derive(Debug)]
pub struct DmaBuf {
    start: NonNull<u8>,
    bytes: usize,
}

impl DmaBuf {
    /// Maps the first `bytes` of a dma-buf.
    ///
    /// # Errors
    /// [`GdrError::NotMappable`] when the driver supports no mapping, as before CUDA 13.3;
    /// [`GdrError::Call`] for any other kernel error, and when the dma-buf is shorter.
    pub fn map(dma_buf: impl AsFd, bytes: usize) -> Result<Self, GdrError> {
        // The kernel refuses a mapping that is too long with the same error number as a driver without support for
        // mapping. If the dma-buf reports no length, this tries the mapping.
        if rustix::fs::seek(&dma_buf, SeekFrom::End(0)).is_ok_and(|has| has > 0 && has < bytes as u64) {
            let short =
                io::Error::other(format!("it is shorter than the {bytes:#x} bytes that were exported"));
            return Err(GdrError::Call { call: MMAP, source: short });
        }
        let (protection, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping where the kernel likes, over nothing of ours.
        let start = unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, protection, shared, dma_buf, 0) };
        let start = start.map_err(refused)?;
        let nowhere = || GdrError::Call { call: MMAP, source: io::Error::other("mapped at address 0") };
        let start = NonNull::new(start.cast()).ok_or_else(nowhere)?;
        Ok(Self { start, bytes })
    }

    /// Address of `offset`, and size of the next access: 8 if the address is aligned and `bytes` are enough, else 1.
    fn step(&self, offset: usize, bytes: usize) -> (*mut u8, usize) {
        let at = self.start.as_ptr().wrapping_add(offset);
        (at, if at.addr().is_multiple_of(8) && bytes >= 8 { 8 } else { 1 })
    }
}

/// Name of `mmap` in an error.
const MMAP: &str = "mmap of a dma-buf";

/// Drivers that map no dma-buf return one of a few numbers: NVIDIA's ENOTSUPP, those without the function ENODEV, the
/// kernel's own check EINVAL. Another number is an error of its own: permissions, limits, a lost GPU.
fn refused(errno: Errno) -> GdrError {
    let number = errno.raw_os_error();
    match errno {
        _ if number == ENOTSUPP => GdrError::NotMappable(io::Error::other("ENOTSUPP")),
        Errno::OPNOTSUPP | Errno::NODEV | Errno::INVAL => GdrError::NotMappable(errno.into()),
        _ => GdrError::Call { call: MMAP, source: errno.into() },
    }
}

impl Window for DmaBuf {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<(), GdrError> {
        inside(offset, from.len(), self.bytes)?;
        let (mut offset, mut from) = (offset, from);
        while let Some(byte) = from.first() {
            let (at, step) = self.step(offset, from.len());
            match from.first_chunk::<8>() {
                // SAFETY: an aligned word inside the mapping.
                Some(word) if step == 8 => unsafe {
                    at.cast::<u64>().write_volatile(u64::from_ne_bytes(*word))
                },
                // SAFETY: a byte inside the mapping.
                _ => unsafe { at.write_volatile(*byte) },
            }
            offset += step;
            from = from.get(step..).unwrap_or_default();
        }
        // Combined writes leave the processor before whatever starts the GPU does.
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), GdrError> {
        inside(offset, to.len(), self.bytes)?;
        let (mut offset, mut to) = (offset, to);
        while !to.is_empty() {
            let (at, step) = self.step(offset, to.len());
            let (now, rest) = to.split_at_mut(step);
            if step == 8 {
                // SAFETY: an aligned word inside the mapping.
                now.copy_from_slice(&unsafe { at.cast::<u64>().read_volatile() }.to_ne_bytes());
            } else {
                // SAFETY: a byte inside the mapping.
                now.fill(unsafe { at.read_volatile() });
            }
            offset += step;
            to = rest;
        }
        Ok(())
    }
}

impl Drop for DmaBuf {
    fn drop(&mut self) {
        // SAFETY: our mapping, to which nothing refers any more.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bytes_go_where_they_should_at_any_alignment(
            writes in prop::collection::vec((0usize..300, prop::collection::vec(any::<u8>(), 0..100)), 0..8),
            read in (0usize..300, 0usize..100),
        ) {
            let mut file = tempfile::tempfile().unwrap();
            file.set_len(256).unwrap();
            let window = DmaBuf::map(&file, 256).unwrap();
            let mut model = vec![0; 256];
            for (offset, bytes) in &writes {
                let end = offset + bytes.len();
                prop_assert_eq!(window.write(*offset, bytes).is_ok(), end <= 256);
                if end <= 256 {
                    model[*offset..end].copy_from_slice(bytes);
                }
            }
            let mut is = Vec::new();
            file.rewind().unwrap();
            file.read_to_end(&mut is).unwrap();
            prop_assert_eq!(&is, &model);
            let (offset, length) = read;
            let mut seen = vec![0xa5; length];
            let inside = offset + length <= 256;
            prop_assert_eq!(window.read(offset, &mut seen).is_ok(), inside);
            if inside {
                prop_assert_eq!(&seen[..], &model[offset..offset + length]);
            }
        }
    }

    #[test]
    fn a_driver_that_maps_none_is_distinguished_from_one_that_fails() {
        for errno in [Errno::OPNOTSUPP, Errno::NODEV, Errno::INVAL, Errno::from_raw_os_error(ENOTSUPP)] {
            assert!(matches!(refused(errno), GdrError::NotMappable(_)), "{errno}");
        }
        for errno in [Errno::ACCESS, Errno::PERM, Errno::NOMEM, Errno::IO, Errno::AGAIN] {
            assert!(matches!(refused(errno), GdrError::Call { .. }), "{errno}");
        }
        // The kernel's own number is none of the C library's: it has no words there.
        assert!(refused(Errno::from_raw_os_error(ENOTSUPP)).to_string().contains("(ENOTSUPP)"));
    }

    #[test]
    fn what_is_too_short_is_no_driver_that_maps_none() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        assert!(DmaBuf::map(&file, 4096).is_ok());
        let short = DmaBuf::map(&file, 8192).unwrap_err();
        assert!(matches!(short, GdrError::Call { .. }) && short.to_string().contains("0x2000"), "{short}");
    }

    #[test]
    fn what_cannot_be_mapped_states_so() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let refused = DmaBuf::map(&socket, 4096).unwrap_err();
        assert!(matches!(refused, GdrError::NotMappable(_)), "{refused}");
        let shut = std::fs::File::options().write(true).open("/dev/zero").unwrap();
        let failed = DmaBuf::map(&shut, 4096).unwrap_err();
        assert!(matches!(failed, GdrError::Call { .. }), "{failed}");
        assert!(failed.to_string().starts_with("mmap of a dma-buf: "), "{failed}");
    }
}
