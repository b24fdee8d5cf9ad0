//! A backing in this process's address space. This is an unsafe module.
//!
//! Why it exists: mapping at a chosen address, page policy and population have no safe interface.
//! Callers may rely on this: a [`Mapping`] owns its address range until it is dropped, nothing else overlaps it, and it is
//! shared memory that the guest, devices and peers change at any time: no code may make a Rust reference to its bytes.
#![expect(unsafe_code, reason = "mmap, mbind and madvise have no safe interface")]

mod private;

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use egm_address::CpuSet;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use crate::backing::Backing;
use crate::stream;

/// A failure to map a backing.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step} {size:#x} bytes of host memory")]
pub struct MappingError {
    /// The step that failed.
    pub step: &'static str,
    /// Size of the mapping, in bytes.
    pub size: u64,
    /// The kernel's error at that step.
    #[source]
    pub source: io::Error,
}

/// Mapped memory; unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    size: usize,
    /// The whole pages around them that are mapped: start and bytes.
    pages: (NonNull<u8>, usize),
    /// The range reserved to find an aligned place: start and bytes.
    reserved: (NonNull<u8>, usize),
    /// The kernel mapped every page at once and knows no pages to bind or to populate (`VM_PFNMAP`).
    complete: bool,
    /// Bytes in a page that the backing guarantees.
    page: usize,
    /// Bytes that the kernel makes present in one piece where it can.
    fault: usize,
}

// SAFETY: a mapping is an address range, valid in every thread; the type gives no access to the bytes.
unsafe impl Send for Mapping {}
// SAFETY: as above; the methods that take `&self` are system calls that the kernel serialises.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `size` bytes of `backing` from `offset`, congruent to `congruent_to` (the guest physical address) modulo the
    /// largest page that fits: only so does the kernel use 2 MiB and 1 GiB pages in the page tables of host and guest.
    ///
    /// The bytes may start and end inside pages of the backing: the kernel maps whole pages, so the neighbours in the first and
    /// the last page are mapped too, outside of what the mapping gives access to. A core file leaves all of them out.
    ///
    /// # Errors
    /// [`MappingError`] when the range does not lie in the backing or the kernel refuses.
    pub fn new(
        backing: &dyn Backing,
        offset: u64,
        size: u64,
        congruent_to: u64,
    ) -> Result<Self, MappingError> {
        let error = |step| move |source: io::Error| MappingError { step, size, source };
        let invalid = || error("map")(io::ErrorKind::InvalidInput.into());
        if offset.checked_add(size).is_none_or(|end| end > backing.size()) || size == 0 {
            return Err(invalid());
        }
        let page = backing.page_size();
        let place = MappingLayout::new(page, offset, size, congruent_to).ok_or_else(invalid)?;
        let mut mapping = Self::reserve(&place, page, size)?;
        mapping.complete = backing.is_invisible();
        let at = backing.offset().saturating_add(offset.saturating_sub(offset % page));
        // Without NORESERVE: of a hugetlb pool the kernel reserves the pages now, for as long as the file lives, or refuses.
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let (access, (whole, length)) = (ProtFlags::READ | ProtFlags::WRITE, mapping.pages);
        // SAFETY: the whole pages lie inside the range that `mapping` reserved, so MAP_FIXED replaces only our own reservation.
        unsafe { mm::mmap(whole.as_ptr().cast(), length, access, flags, backing.file().as_fd(), at) }
            .map_err(|e| error("map")(e.into()))?;
        let kept = if egm_address::fault!("slice-dumped") { Advice::Normal } else { Advice::LinuxDontDump };
        mapping.advise_always("keep from core files", kept)?;
        Ok(mapping)
    }

    /// Advice on all pages that is a promise of this type.
    fn advise_always(&self, step: &'static str, advice: Advice) -> Result<(), MappingError> {
        let (start, length) = self.pages;
        // SAFETY: the range is ours, and the advice given here never changes contents.
        unsafe { mm::madvise(start.as_ptr().cast(), length, advice) }.map_err(|error| MappingError {
            step,
            size: u64::try_from(length).unwrap_or(u64::MAX),
            source: error.into(),
        })
    }

    /// Addresses for `size` bytes at `place`, without access.
    fn reserve(place: &MappingLayout, page: u64, size: u64) -> Result<Self, MappingError> {
        let error = |step| move |source: io::Error| MappingError { step, size, source };
        let invalid = || error("map")(io::ErrorKind::InvalidInput.into());
        let reserved_size = place.whole.checked_add(place.align).ok_or_else(invalid)?;
        // SAFETY: a fresh private mapping at an address that the kernel chooses touches nothing that exists.
        let reserved = unsafe {
            mm::mmap_anonymous(
                std::ptr::null_mut(),
                reserved_size,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let reserved = reserved.map_err(|e| error("reserve addresses for")(e.into()))?.cast::<u8>();
        let whole =
            reserved.wrapping_add(place.phase.wrapping_sub(reserved.addr()) & place.align.wrapping_sub(1));
        let reserved = (NonNull::new(reserved).ok_or_else(invalid)?, reserved_size);
        Ok(Self {
            start: NonNull::new(whole.wrapping_add(place.front)).ok_or_else(invalid)?,
            size: usize::try_from(size).map_err(|_| invalid())?,
            pages: (NonNull::new(whole).ok_or_else(invalid)?, place.whole),
            reserved,
            complete: false,
            page: usize::try_from(page).map_err(|_| invalid())?,
            fault: usize::try_from(page).map_err(|_| invalid())?,
        })
    }

    /// Address of the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// First address, which is never null.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Number of mapped bytes, page fragments excluded.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Addresses of the whole pages that are mapped, which nothing else uses.
    pub(crate) fn pages(&self) -> Range<usize> {
        let (start, size) = (self.pages.0.addr().get(), self.pages.1);
        start..start.saturating_add(size)
    }

    /// Bytes of the reservation below the first page, which nothing uses.
    #[cfg(test)]
    pub(crate) fn reserved_below(&self) -> usize {
        self.pages.0.addr().get().saturating_sub(self.reserved.0.addr().get())
    }

    /// Bytes in a page, as the backing guarantees; pages may turn out larger.
    pub fn page_size(&self) -> usize {
        self.page
    }

    /// Pages that are not there yet come from `nodes` of the host only. Invisible memory has its place already.
    ///
    /// # Errors
    /// The kernel's, for instance for a node that does not exist.
    pub fn bind(&self, nodes: &CpuSet) -> Result<(), MappingError> {
        if self.complete {
            return Ok(());
        }
        let mut mask = [0u64; 16];
        for node in nodes.iter() {
            if let Some(word) = usize::try_from(node / 64).ok().and_then(|word| mask.get_mut(word)) {
                *word |= 1 << (node % 64);
            }
        }
        let bits = mask.len().saturating_mul(64).saturating_add(1); // the kernel reads one bit less than its argument
        let (start, size) = (self.pages.0.as_ptr(), self.pages.1);
        // SAFETY: the range is ours and `mask` has `bits - 1` bits; policy does not touch contents.
        let result =
            unsafe { libc::syscall(libc::SYS_mbind, start, size, libc::MPOL_BIND, mask.as_ptr(), bits, 0) };
        self.check("bind to host nodes", result)
    }

    /// Bytes that the kernel makes present in one piece where it can: a page of [`Mapping::page_size`], or a transparent huge one.
    pub(crate) fn fault_size(&self) -> usize {
        self.fault
    }

    /// Asks for transparent huge pages, of `page` bytes each, or for none. A kernel may ignore it.
    pub fn advise_huge(&mut self, page: Option<usize>) {
        let advice = if page.is_some() { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        self.fault = self.page.max(page.unwrap_or(0));
        // SAFETY: the range is ours; this advice never changes contents.
        let _ = unsafe { mm::madvise(self.as_ptr().cast(), self.size, advice) };
    }

    /// Makes every page of `offset .. offset + size` present and writable without changing it. Invisible memory is: its
    /// mappings are complete from the start, and the kernel refuses to populate them.
    ///
    /// # Errors
    /// Out of memory, a hardware error in the pages, or a range outside the mapping.
    pub fn populate(&self, offset: usize, size: usize) -> Result<(), MappingError> {
        self.fault_in("populate", offset, size, Advice::LinuxPopulateWrite)
    }

    /// As [`Mapping::populate`], of pages that the file has already. The kernel maps the neighbours of a page that is read
    /// (16 at a time where pages are of 4 KiB) and each page that is written alone; of shared memory both may then be written.
    pub fn reach(&self, offset: usize, size: usize) -> Result<(), MappingError> {
        self.fault_in("reach", offset, size, Advice::LinuxPopulateRead)
    }

    fn fault_in(
        &self,
        step: &'static str,
        offset: usize,
        size: usize,
        advice: Advice,
    ) -> Result<(), MappingError> {
        let from = self.within(step, offset, size)?.cast();
        if self.complete {
            return Ok(());
        }
        loop {
            // SAFETY: checked above to lie inside our range; population preserves contents.
            match unsafe { mm::madvise(from, size, advice) } {
                Ok(()) => return Ok(()),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                Err(error) => {
                    let size = u64::try_from(size).unwrap_or(u64::MAX);
                    return Err(MappingError { step, size, source: error.into() });
                }
            }
        }
    }

    /// Makes every byte of `offset .. offset + size` zero. A bad page is a SIGBUS: see [`crate::poison`].
    ///
    /// # Errors
    /// A range outside the mapping.
    pub fn zero(&self, offset: usize, size: usize) -> Result<(), MappingError> {
        let from = self.within("zero", offset, size)?;
        // SAFETY: checked to lie inside our range, which is writable; no reference to its bytes exists.
        unsafe { stream::zero(from, size) };
        Ok(())
    }

    /// Copies bytes from `offset` on to `data`, words of 8 bytes at once where both are aligned. A bad page is a SIGBUS.
    ///
    /// # Errors
    /// A range outside the mapping.
    pub fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), MappingError> {
        let from = self.within("read", offset, data.len())?;
        let mut at = 0;
        while let Some(rest) = data.get_mut(at..).filter(|rest| !rest.is_empty()) {
            let from = from.wrapping_add(at);
            if let (true, Some(word)) = (is_aligned(from), rest.first_chunk_mut::<8>()) {
                // SAFETY: eight bytes from here on lie inside (`within`), and the address is a multiple of 8.
                *word = unsafe { from.cast::<u64>().read_volatile() }.to_ne_bytes();
                at = at.saturating_add(8);
            } else if let Some(byte) = rest.first_mut() {
                // SAFETY: the byte lies inside (`within`).
                *byte = unsafe { from.read_volatile() };
                at = at.saturating_add(1);
            }
        }
        Ok(())
    }

    /// Offset of the first byte of `offset .. offset + size` that is not zero. A bad page is a SIGBUS.
    ///
    /// # Errors
    /// A range outside the mapping.
    pub(crate) fn first_nonzero(&self, offset: usize, size: usize) -> Result<Option<usize>, MappingError> {
        const PART: usize = 4096;
        let mut buffer = [0; PART];
        let end = offset.saturating_add(size);
        for at in (offset..end).step_by(PART) {
            let part = buffer.get_mut(..PART.min(end.saturating_sub(at))).unwrap_or_default();
            self.read(at, part)?;
            if let Some(found) = first_nonzero(part) {
                return Ok(Some(at.saturating_add(found)));
            }
        }
        Ok(None)
    }

    /// Copies `data` to `offset` and what follows, as [`Mapping::read`] does.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<(), MappingError> {
        let to = self.within("write", offset, data.len())?;
        let mut at = 0;
        while let Some(rest) = data.get(at..).filter(|rest| !rest.is_empty()) {
            let to = to.wrapping_add(at);
            if let (true, Some(word)) = (is_aligned(to), rest.first_chunk::<8>()) {
                // SAFETY: eight writable bytes from here on lie inside (`within`), and the address is a multiple of 8.
                unsafe { to.cast::<u64>().write_volatile(u64::from_ne_bytes(*word)) };
                at = at.saturating_add(8);
            } else if let Some(byte) = rest.first() {
                // SAFETY: the byte lies inside (`within`) and is writable.
                unsafe { to.write_volatile(*byte) };
                at = at.saturating_add(1);
            }
        }
        Ok(())
    }

    /// The address of `offset`, from which `size` bytes lie inside.
    fn within(&self, step: &'static str, offset: usize, size: usize) -> Result<*mut u8, MappingError> {
        if offset.checked_add(size).is_some_and(|end| end <= self.size) {
            return Ok(self.as_ptr().wrapping_add(offset));
        }
        let size = u64::try_from(size).unwrap_or(u64::MAX);
        Err(MappingError { step, size, source: io::ErrorKind::InvalidInput.into() })
    }

    fn check(&self, step: &'static str, result: i64) -> Result<(), MappingError> {
        if result >= 0 {
            return Ok(());
        }
        let size = u64::try_from(self.size).unwrap_or(u64::MAX);
        Err(MappingError { step, size, source: io::Error::last_os_error() })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let (start, size) = self.reserved;
        // SAFETY: the whole reservation is ours, the mapping lies inside it, and no reference to its bytes exists.
        let _ = unsafe { mm::munmap(start.as_ptr().cast(), size) };
    }
}

/// Place of the first byte that is not zero. Most often there is none, which is found many bytes at a time.
pub(crate) fn first_nonzero(bytes: &[u8]) -> Option<usize> {
    let any = bytes.iter().fold(0, |any, byte| any | byte);
    if any == 0 { None } else { bytes.iter().position(|byte| *byte != 0) }
}

/// Whether a word of 8 bytes may be read at `address`.
fn is_aligned(address: *mut u8) -> bool {
    address.addr().is_multiple_of(8)
}

/// Address of a mapping modulo its alignment, and the whole pages around it.
#[derive(Debug, PartialEq, Eq)]
struct MappingLayout {
    /// Modulus of the address, a power of two.
    align: usize,
    /// Remainder of the first whole page's address.
    phase: usize,
    /// Bytes of the first page before the first byte.
    front: usize,
    /// Bytes in whole pages.
    whole: usize,
}

impl MappingLayout {
    /// That of `size` bytes from `offset` of a backing with pages of `page` bytes. `None` where they exceed the address space.
    fn new(page: u64, offset: u64, size: u64, congruent_to: u64) -> Option<Self> {
        let page = if page.is_power_of_two() { page } else { return None };
        let front = offset % page;
        let whole = front.checked_add(size)?.checked_next_multiple_of(page)?;
        let align = congruence(size).max(page);
        // Inside a page the file decides, since the kernel maps whole pages; above, the guest address.
        let first_page = congruent_to.wrapping_sub(front);
        let phase = first_page.wrapping_sub(first_page % page) % align;
        let word = |number: u64| usize::try_from(number).ok();
        Some(Self { align: word(align)?, phase: word(phase)?, front: word(front)?, whole: word(whole)? })
    }
}

/// The modulus for an address of `size` bytes of memory: the largest of 1 GiB, 2 MiB and 4 KiB that fits.
fn congruence(size: u64) -> u64 {
    [1 << 30, 2 << 20].into_iter().find(|page| *page <= size).unwrap_or(4 << 10)
}

/// Bytes in a page of the host's processors.
pub(crate) fn base_page() -> u64 {
    u64::try_from(rustix::param::page_size()).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::tests::{region, slice};
    use crate::backing::{self, Anonymous};
    use crate::region::RegionKind;

    #[test]
    fn the_address_is_congruent_to_the_guest_address() {
        let memory = Anonymous::new("test", 8 << 20, None).unwrap();
        for gpa in [0u64, 0x10_0000, 0x1_0000_0000, 0x1234_5000] {
            let mapping = Mapping::new(&memory, 0, 4 << 20, gpa).unwrap();
            let address = u64::try_from(mapping.as_ptr().addr()).unwrap();
            assert_eq!(address % (2 << 20), gpa % (2 << 20));
        }
    }

    #[test]
    fn bytes_inside_a_large_page_are_mapped_with_all_of_the_page() {
        const HUGE: u64 = 2 << 20;
        // RAM of a PC around the hole below 1 MiB, and behind a hole of 64 KiB.
        for (offset, size, gpa, phase, front, whole) in [
            (0, 0xa_0000, 0, 0, 0, HUGE),
            (0xc_0000, 15 * HUGE - 0xc_0000, 0xc_0000, 0, 0xc_0000, 15 * HUGE),
            (0x81_0000, HUGE, 0x4081_0000, 0, 0x1_0000, 2 * HUGE),
        ] {
            let place = MappingLayout::new(HUGE, offset, size, gpa).unwrap();
            let [front, whole, phase] = [front, whole, phase].map(|n: u64| usize::try_from(n).unwrap());
            assert_eq!(
                (place.phase % (2 << 20), place.front, place.whole),
                (phase, front, whole),
                "{offset:#x}"
            );
        }
        let gib = MappingLayout::new(1 << 30, 0xc_0000, (2 << 30) - 0xc_0000, 0xc_0000).unwrap();
        assert_eq!(gib, MappingLayout { align: 1 << 30, phase: 0, front: 0xc_0000, whole: 2 << 30 });
        assert_eq!(MappingLayout::new(0, 0, 1, 0), None);
        assert_eq!(MappingLayout::new(HUGE, 0x1000, u64::MAX - 1, 0), None);
    }

    #[test]
    fn the_address_is_congruent_modulo_the_page_of_the_backing() {
        let (file, size) = (tempfile::tempfile().unwrap(), 64 << 20);
        file.set_len(size).unwrap();
        for page in [0x1_0000u64, 4 << 20, 32 << 20] {
            let region = region(RegionKind::Memfd, size, page);
            let memory = backing::adopt(&region, &slice(0, size), file.try_clone().unwrap()).unwrap();
            // Kept, so that the kernel chooses another address each time.
            let mappings: Vec<_> =
                (0..8).map(|_| Mapping::new(memory.as_ref(), 0, page, 3 * page).unwrap()).collect();
            for mapping in &mappings {
                let address = u64::try_from(mapping.as_ptr().addr()).unwrap();
                assert_eq!(address % page, 0, "{page:#x}");
            }
        }
    }

    #[test]
    fn a_range_outside_the_backing_is_refused() {
        let memory = Anonymous::new("test", 1 << 20, None).unwrap();
        assert!(Mapping::new(&memory, 0, 0, 0).is_err());
        assert!(Mapping::new(&memory, 4096, 1 << 20, 0).is_err());
        assert!(Mapping::new(&memory, u64::MAX, 4096, 0).is_err());
        let mapping = Mapping::new(&memory, 0, 1 << 20, 0).unwrap();
        assert!(mapping.populate(4096, 1 << 20).is_err());
    }

    #[test]
    fn what_is_written_is_read_at_any_alignment_and_beside_it_nothing_changes() {
        let memory = Anonymous::new("test", 1 << 20, None).unwrap();
        let mapping = Mapping::new(&memory, 0, 1 << 20, 0).unwrap();
        for (offset, length) in [(0, 8), (1, 30), (7, 1), (13, 100), (4090, 12), ((1 << 20) - 5, 5)] {
            let data: Vec<_> = (1..=u8::try_from(length).unwrap()).collect();
            mapping.write(offset, &data).unwrap();
            let end = (offset + length + 3).min(1 << 20);
            let start = offset.saturating_sub(3);
            let mut around = vec![0; end - start];
            mapping.read(start, &mut around).unwrap();
            let mut expected = vec![0; around.len()];
            expected[offset - start..][..length].copy_from_slice(&data);
            assert_eq!(around, expected, "{offset}");
            mapping.write(offset, &vec![0; length]).unwrap();
        }
        assert!(mapping.read((1 << 20) - 3, &mut [0; 4]).is_err());
        assert!(mapping.write(usize::MAX, &[0]).is_err());
    }

    #[test]
    fn a_host_node_that_does_not_exist_is_refused() {
        let memory = Anonymous::new("test", 1 << 20, None).unwrap();
        let mapping = Mapping::new(&memory, 0, 1 << 20, 0).unwrap();
        assert!(mapping.bind(&"1000".parse().unwrap()).is_err());
    }
}
