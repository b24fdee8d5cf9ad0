//! Mappings that are private to this process. This is an unsafe module.
//!
//! Why it exists: mapping at a chosen address has no safe interface. Callers may rely on what [`Mapping`] promises.
#![expect(unsafe_code, reason = "mmap has no safe interface")]

use std::io;
use std::os::fd::AsFd;

use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use super::{Mapping, MappingError, MappingLayout, base_page};

impl Mapping {
    /// `size` bytes of private memory without a file, at an address as [`Mapping::new`] chooses it. A child of this process
    /// does not have it.
    ///
    /// # Errors
    /// [`MappingError`] when the kernel refuses.
    pub fn private(size: u64, congruent_to: u64) -> Result<Self, MappingError> {
        let mapping = Self::for_private(size, congruent_to)?;
        let (access, (whole, length)) = (ProtFlags::READ | ProtFlags::WRITE, mapping.pages);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the whole pages lie inside the range that `mapping` reserved, so MAP_FIXED replaces only our own reservation.
        let mapped = unsafe { mm::mmap_anonymous(whole.as_ptr().cast(), length, access, flags) };
        mapping.finish_private(mapped)
    }

    /// As [`Mapping::private`], with the bytes of `file` from `offset` on, a multiple of the page: each page is read when it is
    /// first touched, and writes never reach the file. A page that the file has lost by then is a SIGBUS.
    ///
    /// # Errors
    /// [`MappingError`] when the kernel refuses.
    pub fn private_of(
        file: impl AsFd,
        offset: u64,
        size: u64,
        congruent_to: u64,
    ) -> Result<Self, MappingError> {
        let mapping = Self::for_private(size, congruent_to)?;
        let (access, (whole, length)) = (ProtFlags::READ | ProtFlags::WRITE, mapping.pages);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the whole pages lie inside the range that `mapping` reserved, so MAP_FIXED replaces only our own reservation.
        let mapped = unsafe { mm::mmap(whole.as_ptr().cast(), length, access, flags, file, offset) };
        mapping.finish_private(mapped)
    }

    /// Addresses for private memory.
    fn for_private(size: u64, congruent_to: u64) -> Result<Self, MappingError> {
        let place = MappingLayout::new(base_page(), 0, size, congruent_to).filter(|_| size > 0);
        let invalid = || MappingError { step: "map", size, source: io::ErrorKind::InvalidInput.into() };
        Self::reserve(&place.ok_or_else(invalid)?, base_page(), size)
    }

    /// The mapping once it is `mapped` there.
    fn finish_private(self, mapped: rustix::io::Result<*mut std::ffi::c_void>) -> Result<Self, MappingError> {
        let size = u64::try_from(self.size).unwrap_or(u64::MAX);
        mapped.map_err(|error| MappingError { step: "map", size, source: error.into() })?;
        let mapping = self;
        mapping.advise_always("keep from core files", Advice::LinuxDontDump)?;
        mapping.advise_always("keep from children", Advice::LinuxDontFork)?;
        Ok(mapping)
    }
}
