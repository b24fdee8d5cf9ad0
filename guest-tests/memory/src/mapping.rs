//! BARs in this process. This is an unsafe module.
//!
//! Callers rely on this: a [`Mapping`] owns its addresses until it is dropped, gives no reference to their bytes, and
//! accesses them in whole aligned words inside its bounds.
#![expect(unsafe_code, reason = "mmap has no safe interface, and BARs are not memory of this process")]

use std::fs::File;
use std::io;
use std::ptr::{self, NonNull};

use rustix::mm::{self, MapFlags, ProtFlags};

/// Largest page that a mapping is made congruent for.
const LARGEST_PAGE: u64 = 1 << 30;

#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    size: u64,
    /// Range reserved to find a congruent place: start and bytes. All of it is ours, and unmapped at the end.
    reserved: (NonNull<u8>, usize),
}

// SAFETY: a mapping is an address range, valid in every thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; words are read and written as a device's registers are, no matter what else accesses them.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `size` bytes of `file` at an address that equals `congruent_to` modulo the largest power of two up to
    /// `size` and 1 GiB.
    pub(crate) fn new(file: &File, size: u64, congruent_to: u64) -> io::Result<Self> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let align = (1 << size.checked_ilog2().ok_or_else(invalid)?).min(LARGEST_PAGE);
        let number = |value: u64| usize::try_from(value).map_err(|_| invalid());
        let (length, place, align) = (number(size)?, number(congruent_to % align)?, number(align)?);
        let reserve = length.checked_add(align).ok_or_else(invalid)?;
        let nothing = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh private mapping at an address that the kernel chooses touches nothing that exists.
        let reserved = unsafe { mm::mmap_anonymous(ptr::null_mut(), reserve, ProtFlags::empty(), nothing) }?;
        let reserved = reserved.cast::<u8>();
        let skip = place.wrapping_sub(reserved.addr()) & align.wrapping_sub(1);
        let start = reserved.wrapping_add(skip);
        let mapping = Self {
            start: NonNull::new(start).ok_or_else(invalid)?,
            size,
            reserved: (NonNull::new(reserved).ok_or_else(invalid)?, reserve),
        };
        let (both, fixed) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: `start .. start + length` lies inside what was reserved above, so MAP_FIXED replaces only that.
        unsafe { mm::mmap(start.cast(), length, both, fixed, file, 0) }?;
        Ok(mapping)
    }

    /// Reads the word at `offset`, a multiple of its size; `None` when it does not lie inside.
    pub(crate) fn read<T: Word>(&self, offset: u64) -> Option<T> {
        // SAFETY: `place` checked that the word lies inside and is aligned; every value of its bits is one.
        self.place::<T>(offset).map(|place| unsafe { place.read_volatile() })
    }

    pub(crate) fn write<T: Word>(&self, offset: u64, value: T) -> Option<()> {
        // SAFETY: as in `read`; what it does is the device's business.
        self.place::<T>(offset).map(|place| unsafe { place.write_volatile(value) })
    }

    fn place<T>(&self, offset: u64) -> Option<*mut T> {
        let size = u64::try_from(size_of::<T>()).ok()?;
        let inside = offset.checked_add(size)? <= self.size && offset.is_multiple_of(size);
        let offset = usize::try_from(offset).ok().filter(|_| inside)?;
        Some(self.start.as_ptr().wrapping_add(offset).cast())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let (start, size) = self.reserved;
        // SAFETY: the range is ours alone; by contract, every address that a caller got is valid only until here.
        let _ = unsafe { mm::munmap(start.as_ptr().cast(), size) };
    }
}

/// Unit of access to a device. All bit patterns are values of it.
pub(crate) trait Word: Copy {}
impl Word for u32 {}
impl Word for u64 {}

/// The memory of a function, mapped until this is dropped.
///
/// Devices, other programs and the host may map it too, so there is no slice of it: programs use the address, or words.
#[derive(Debug)]
pub struct Memory {
    mapping: Mapping,
    file: File,
}

impl Memory {
    pub(crate) fn new(file: File, size: u64, start: u64) -> io::Result<Self> {
        Ok(Self { mapping: Mapping::new(&file, size, start)?, file })
    }

    /// Address of the first byte, valid until this is dropped.
    #[must_use]
    pub fn address(&self) -> NonNull<u8> {
        self.mapping.start
    }

    /// Bytes, retired ones included.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.mapping.size
    }

    /// The file that it is mapped from, at offset 0: to be mapped once more, or passed to another process.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The 64 bits at `offset`, a multiple of 8; `None` past the end.
    #[must_use]
    pub fn read_word(&self, offset: u64) -> Option<u64> {
        self.mapping.read(offset)
    }

    /// Writes 64 bits at `offset`, a multiple of 8; `None` past the end.
    #[must_use]
    pub fn write_word(&self, offset: u64, value: u64) -> Option<()> {
        self.mapping.write(offset, value)
    }
}
