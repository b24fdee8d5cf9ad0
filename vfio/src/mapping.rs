//! Shared memory that we mapped ourselves: BARs, a server's memory files, a test's pages. This is an unsafe module.
//!
//! Guarantee to callers: a [`Mapping`] owns its addresses until it is dropped and gives no reference to their bytes.
#![expect(unsafe_code, reason = "mmap has no safe interface")]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use crate::memory::{HostBacking, HostMemory};

/// Largest page size that a mapping is congruent for, in bytes.
const LARGEST_PAGE: u64 = 1 << 30;

/// Object that a mapping is made of, and keeps open: see [`HostBacking`].
#[derive(Debug)]
pub enum MadeOf {
    /// Pages of our own.
    Pages,
    /// A memory file, from the offset on.
    File(OwnedFd, u64),
    /// Memory of one VM, from the offset on.
    GuestMemfd(OwnedFd, u64),
    /// A BAR, and its dma-buf if the kernel exported one; the dma-buf begins at the mapping's first byte.
    Bar(Option<OwnedFd>),
    /// Device memory without struct pages.
    Invisible,
}

/// Mapped shared memory; unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    size: u64,
    /// Range reserved to find a congruent address: start and bytes. All of it is ours, and drop unmaps it.
    reserved: (NonNull<u8>, usize),
    made_of: MadeOf,
}

// SAFETY: a mapping is an address range, valid in every thread; the type gives no access to the bytes.
unsafe impl Send for Mapping {}
// SAFETY: as above; nothing changes after it is made.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `size` bytes of `file` from `offset`, at an address congruent to `congruent_to` (the guest physical
    /// address) modulo the largest page that fits: the kernel can use huge pages for the guest and the IOMMU only then.
    /// A core file omits the bytes.
    ///
    /// # Errors
    /// The kernel's; `InvalidInput` for sizes that no address space has.
    pub fn of(
        file: BorrowedFd<'_>,
        offset: u64,
        size: u64,
        congruent_to: u64,
        made_of: MadeOf,
    ) -> io::Result<Self> {
        Self::new(Some((file, offset)), size, congruent_to, made_of)
    }

    /// Zeroed pages.
    ///
    /// # Errors
    /// As [`Mapping::of`].
    pub fn pages(size: u64, congruent_to: u64) -> io::Result<Self> {
        Self::new(None, size, congruent_to, MadeOf::Pages)
    }

    fn new(
        file: Option<(BorrowedFd<'_>, u64)>,
        size: u64,
        congruent_to: u64,
        made_of: MadeOf,
    ) -> io::Result<Self> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let (length, skip, reserve) = layout(size, congruent_to).ok_or_else(invalid)?;
        let nothing = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new private mapping at an address that the kernel chooses touches no existing mapping.
        let reserved =
            unsafe { mm::mmap_anonymous(std::ptr::null_mut(), reserve, ProtFlags::empty(), nothing) }?
                .cast::<u8>();
        let start = reserved.wrapping_add(skip(reserved.addr()));
        let mapping = Self {
            start: NonNull::new(start).ok_or_else(invalid)?,
            size,
            reserved: (NonNull::new(reserved).ok_or_else(invalid)?, reserve),
            made_of,
        };
        let (both, fixed) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        match file {
            // SAFETY: `start .. start + length` lies inside what was reserved above, so MAP_FIXED replaces only that.
            Some((file, offset)) => unsafe { mm::mmap(start.cast(), length, both, fixed, file, offset) },
            // SAFETY: as above.
            None => unsafe { mm::mmap_anonymous(start.cast(), length, both, fixed) },
        }?;
        // SAFETY: the range is ours; this advice never changes contents.
        unsafe {
            mm::madvise(
                start.cast(),
                length,
                if egm_address::fault!("bar-in-core-file") { Advice::Normal } else { Advice::LinuxDontDump },
            )
        }?;
        Ok(mapping)
    }
}

/// Bytes to map, the distance from an address to the next congruent one, and bytes to reserve for it.
fn layout(size: u64, congruent_to: u64) -> Option<(usize, impl Fn(usize) -> usize, usize)> {
    let align = (1 << size.checked_ilog2()?).min(LARGEST_PAGE);
    let place = usize::try_from(congruent_to % align).ok()?;
    let (length, align) = (usize::try_from(size).ok()?, usize::try_from(align).ok()?);
    let skip = move |address: usize| place.wrapping_sub(address) & align.wrapping_sub(1);
    Some((length, skip, length.checked_add(align)?))
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let (start, size) = self.reserved;
        // SAFETY: this value alone owns the range, and every user of the address holds an `Arc` of this value.
        let _ = unsafe { mm::munmap(start.as_ptr().cast(), size) };
    }
}

// SAFETY: the range is mapped shared, readable and writable, from `new` to `drop`, and nothing here refers to its bytes.
unsafe impl HostMemory for Mapping {
    fn address(&self) -> NonNull<u8> {
        self.start
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn backing(&self) -> HostBacking<'_> {
        match &self.made_of {
            MadeOf::Pages => HostBacking::Pages,
            MadeOf::Invisible => HostBacking::Invisible,
            MadeOf::File(file, offset) => HostBacking::File { file: file.as_fd(), offset: *offset },
            MadeOf::GuestMemfd(file, offset) => {
                HostBacking::GuestMemfd { file: file.as_fd(), offset: *offset }
            }
            MadeOf::Bar(dma_buf) => {
                HostBacking::Bar { dma_buf: dma_buf.as_ref().map(|file| (file.as_fd(), 0)) }
            }
        }
    }
}

/// A part of other memory, which it keeps mapped.
pub struct MemoryPart {
    whole: Arc<dyn HostMemory>,
    offset: u64,
    size: u64,
}

impl MemoryPart {
    /// `size` bytes of `whole` from `offset`; `None` when they do not lie in it.
    pub fn new(whole: Arc<dyn HostMemory>, offset: u64, size: u64) -> Option<Self> {
        let end = offset.checked_add(size)?;
        (end <= whole.size() && usize::try_from(end).is_ok()).then_some(Self { whole, offset, size })
    }
}

// SAFETY: the part lies in `whole`, which it keeps; the implementer of `whole` made the same promise.
unsafe impl HostMemory for MemoryPart {
    fn address(&self) -> NonNull<u8> {
        let offset = usize::try_from(self.offset).unwrap_or_default(); // `new` checked this
        self.whole.address().map_addr(|address| address.saturating_add(offset))
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn backing(&self) -> HostBacking<'_> {
        let further = |offset: u64| offset.saturating_add(self.offset);
        match self.whole.backing() {
            HostBacking::File { file, offset } => HostBacking::File { file, offset: further(offset) },
            HostBacking::GuestMemfd { file, offset } => {
                HostBacking::GuestMemfd { file, offset: further(offset) }
            }
            HostBacking::Bar { dma_buf } => {
                HostBacking::Bar { dma_buf: dma_buf.map(|(file, offset)| (file, further(offset))) }
            }
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_mapping_is_congruent_to_the_guest_address_modulo_the_largest_page_that_fits() {
        for (size, guest, modulo) in [
            (0x1000, 0xfeb0_1000, 0x1000),
            (0x40_0000, 0x8020_3000, 0x40_0000),
            (0x1800, 0x1000, 0x1000),
            (3 << 30, 0x1_7000_0000, 1 << 30),
        ] {
            let mapping = Mapping::pages(size, guest).unwrap();
            let address = u64::try_from(mapping.address().addr().get()).unwrap();
            assert_eq!(address % modulo, guest % modulo, "{size:#x} {guest:#x}");
            assert_eq!(mapping.size(), size);
        }
    }

    #[test]
    fn a_core_file_leaves_every_mapping_out() {
        let file: File = tempfile::tempfile().unwrap();
        file.set_len(0x4000).unwrap();
        let of_file = Mapping::of(file.as_fd(), 0, 0x4000, 0, MadeOf::Invisible).unwrap();
        for mapping in [of_file, Mapping::pages(0x4000, 0).unwrap()] {
            let head = format!("{:x}-", mapping.address().addr());
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&head));
            let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
            assert!(flags.split_ascii_whitespace().any(|flag| flag == "dd"), "{flags}");
        }
    }

    #[test]
    fn a_mapping_of_a_file_is_the_file() {
        let file: File = tempfile::tempfile().unwrap();
        file.write_all_at(b"bar", 0x2000).unwrap();
        file.set_len(0x3000).unwrap();
        let kept = OwnedFd::from(file.try_clone().unwrap());
        let mapping = Mapping::of(file.as_fd(), 0x1000, 0x2000, 0, MadeOf::File(kept, 0x1000)).unwrap();
        let memory: &dyn HostMemory = &mapping;
        let mut data = [0; 3];
        memory.read(0x1000, &mut data).unwrap();
        assert_eq!(&data, b"bar");
        memory.write(0x1ffd, b"end").unwrap();
        file.read_exact_at(&mut data, 0x2ffd).unwrap();
        assert_eq!(&data, b"end");
        assert!(matches!(memory.backing(), HostBacking::File { offset: 0x1000, .. }));
    }

    #[test]
    fn a_part_is_within_the_whole_and_has_its_offset_in_the_file() {
        let file: File = tempfile::tempfile().unwrap();
        file.set_len(0x4000).unwrap();
        let kept = OwnedFd::from(file.try_clone().unwrap());
        let whole = Mapping::of(file.as_fd(), 0x1000, 0x3000, 0, MadeOf::File(kept, 0x1000)).unwrap();
        let whole: Arc<dyn HostMemory> = Arc::new(whole);
        let part = MemoryPart::new(Arc::clone(&whole), 0x1000, 0x2000).unwrap();
        assert!(matches!(part.backing(), HostBacking::File { offset: 0x2000, .. }));
        assert_eq!(part.address().addr().get() - whole.address().addr().get(), 0x1000);
        assert!(MemoryPart::new(Arc::clone(&whole), 0x1000, 0x2001).is_none());
        assert!(MemoryPart::new(whole, u64::MAX, 2).is_none());
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        assert_eq!(Mapping::pages(0, 0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert!(Mapping::pages(u64::MAX, 0).is_err());
        assert!(Mapping::pages(1 << 62, 0).is_err());
    }
}
