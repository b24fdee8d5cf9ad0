//! Memory of this process that the guest and devices reach. This is an unsafe module: it holds an unsafe trait, and the
//! two functions that rely on the trait's promise.
#![expect(unsafe_code, reason = "an unsafe trait: its implementers promise that memory stays")]

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

/// Backing of a range of memory; it determines how an IOMMU can map the range.
#[derive(Debug, Clone, Copy)]
pub enum HostBacking<'a> {
    /// A memory file (memfd, hugetlb) from `offset`: by file where the kernel can (IOMMU_IOAS_MAP_FILE, Linux 6.13).
    File {
        /// Descriptor of the memory file.
        file: BorrowedFd<'a>,
        /// Offset of the memory's first byte in it.
        offset: u64,
    },
    /// Memory of one VM (guest_memfd) from `offset`: its pages can be pinned, so by address. `IOMMU_IOAS_MAP_FILE` takes
    /// memfd and hugetlb only; another process maps it as any file.
    GuestMemfd {
        /// Descriptor of the guest_memfd.
        file: BorrowedFd<'a>,
        /// Offset of the memory's first byte in it.
        offset: u64,
    },
    /// Memory without struct pages (`VM_PFNMAP`: EGM character device, `/dev/mem`): legacy type1 by address only.
    Invisible,
    /// A BAR of a function: legacy type1 by address, iommufd by dma-buf (Linux 6.19).
    Bar {
        /// The dma-buf and the offset of the memory's first byte in it; `None` where the kernel gave none.
        dma_buf: Option<(BorrowedFd<'a>, u64)>,
    },
    /// Ordinary pages with struct pages and without a file of use: by address.
    Pages,
}

/// Shared memory at a fixed place in this process's address space.
///
/// # Safety
/// From `address()` on, `size()` bytes are mapped readable and shared, at the same address as long as the value lives.
/// They are writable too, unless the implementer documents otherwise to those it hands the value to. No code creates a
/// Rust reference to them: guests, devices and peers change them at any time.
pub unsafe trait HostMemory: Send + Sync {
    /// Address of the first byte in this process.
    fn address(&self) -> NonNull<u8>;
    /// Number of mapped bytes from [`HostMemory::address`] on.
    fn size(&self) -> u64;
    /// Backing of the memory.
    fn backing(&self) -> HostBacking<'_>;
}

impl dyn HostMemory + '_ {
    /// Copies bytes out, one by one; `None` if they do not all lie inside. Concurrent writes may be torn.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Option<()> {
        let place = self.place(offset, data.len())?;
        for (index, byte) in data.iter_mut().enumerate() {
            // SAFETY: `place` checked that all the bytes lie inside, and the implementer promised that they are mapped.
            *byte = unsafe { place.wrapping_add(index).read_volatile() };
        }
        Some(())
    }

    /// Copies bytes in, one by one; `None` when they do not all lie inside. The memory must be writable.
    pub fn write(&self, offset: u64, data: &[u8]) -> Option<()> {
        let place = self.place(offset, data.len())?;
        for (index, byte) in data.iter().enumerate() {
            // SAFETY: as in `read`; a write to memory that is not writable ends the process and corrupts nothing.
            unsafe { place.wrapping_add(index).write_volatile(*byte) };
        }
        Some(())
    }

    fn place(&self, offset: u64, length: usize) -> Option<*mut u8> {
        let end = offset.checked_add(u64::try_from(length).ok()?)?;
        let offset = usize::try_from(offset).ok()?;
        (end <= self.size()).then(|| self.address().as_ptr().wrapping_add(offset))
    }
}
