//! iommufd: an I/O address space without groups. It pins pages, so memory without struct pages is out of its reach. Memory
//! files are mapped as files and BARs as dma-bufs, where the kernel can.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use egm_address::{Io, Iova, Span};
use iommufd_bindings::iommufd as bindings;
use iommufd_ioctls::{IommuFd, IommufdError, IommufdIoas};
use vfio_ioctls::{VfioError, VfioIommufd};

use super::error::OpenError;
use super::{Track, answer, sys};
use crate::dma::{Access, DmaError, Domain, Limits};
use crate::memory::{HostBacking, HostMemory};

const IOMMU: &str = "/dev/iommu";

/// Mapped spans, each with the memory that must outlive its map.
type Maps = BTreeMap<Iova, (Span<Io>, Arc<dyn HostMemory>)>;

/// An I/O address space of iommufd. Functions attach to it and keep it; it outlives them.
pub struct Iommufd {
    /// Declared before `maps`: it is destroyed, with every map, before that memory is released. Each function that has a
    /// share of it also keeps this `Iommufd`.
    space: Arc<VfioIommufd>,
    /// The same file, for ioctls that the crates lack.
    file: File,
    track: Option<Track>,
    /// The kernel is older than 6.13: files are mapped by address.
    without_files: AtomicBool,
    maps: Mutex<Maps>,
}

/// Extracts the kernel's error from the crate's.
fn reason(error: IommufdError) -> io::Error {
    match error {
        IommufdError::IommuIoasAlloc(number)
        | IommufdError::IommuIoasMap(number)
        | IommufdError::IommuIoasMapFile(number)
        | IommufdError::IommuIoasUnmap(number) => number.into(),
        other => io::Error::other(other),
    }
}

impl Iommufd {
    /// Creates an empty I/O address space. `track` reports every function to KVM.
    ///
    /// # Errors
    /// [`OpenError`] if the host has no iommufd, or we may not use it.
    pub fn new(track: Option<Track>) -> Result<Arc<Self>, OpenError> {
        let path = Path::new(IOMMU);
        let rule = "the kernel has no iommufd; set \"backend\": \"legacy\" on the function";
        let file = File::options().read(true).write(true).open(path);
        Self::of(file.map_err(OpenError::file(path, IOMMU, rule))?, track)
    }

    /// Creates an empty I/O address space in an open `/dev/iommu`.
    pub(super) fn of(file: File, track: Option<Track>) -> Result<Arc<Self>, OpenError> {
        let copy = file.try_clone().map_err(OpenError::refused("copy a descriptor"))?;
        // Without KVM: the crate does not withdraw a function that it could not bind, and unwraps in its `Drop`.
        let space = VfioIommufd::new(Arc::new(IommuFd::new_from_fd(copy)), None, None);
        let space = space.map_err(|error| match error {
            VfioError::NewVfioIommufd(error) => reason(error),
            other => io::Error::other(other),
        });
        Ok(Arc::new(Self {
            space: Arc::new(space.map_err(OpenError::refused("make an I/O address space"))?),
            file,
            track,
            without_files: AtomicBool::new(false),
            maps: Mutex::default(),
        }))
    }

    /// The address space, in the form that vfio-ioctls takes.
    pub(super) fn space(&self) -> &Arc<VfioIommufd> {
        &self.space
    }

    fn ioas(&self) -> &IommufdIoas {
        self.space.ioas()
    }

    /// Reports to KVM that a function was added, or is about to be removed.
    pub(super) fn notify_kvm(&self, function: BorrowedFd<'_>, added: bool) -> io::Result<()> {
        self.track.as_ref().map_or(Ok(()), |track| track(function, added))
    }

    fn maps(&self) -> MutexGuard<'_, Maps> {
        self.maps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps part of a file. Returns `None` if the kernel cannot map files.
    fn by_file(
        &self,
        iova: Span<Io>,
        file: BorrowedFd<'_>,
        start: u64,
        access: Access,
    ) -> Option<io::Result<()>> {
        if self.without_files.load(Ordering::Relaxed) {
            return None;
        }
        let writable = access == Access::ReadWrite;
        let mapped = self.ioas().map_file(file.as_raw_fd(), start, iova.size(), iova.start().get(), writable);
        match mapped.map_err(reason) {
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                self.without_files.store(true, Ordering::Relaxed);
                None
            }
            result => Some(result),
        }
    }

    fn by_address(
        &self,
        iova: Span<Io>,
        memory: &dyn HostMemory,
        offset: u64,
        access: Access,
    ) -> io::Result<()> {
        let write = match access {
            Access::ReadWrite => bindings::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE,
            Access::Read => 0,
        };
        let map = bindings::iommu_ioas_map {
            size: u32::try_from(size_of::<bindings::iommu_ioas_map>()).unwrap_or(0),
            flags: write
                | bindings::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE
                | bindings::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA,
            ioas_id: self.ioas().id(),
            user_va: sys::address(memory, offset, iova.size())?,
            length: iova.size(),
            iova: iova.start().get(),
            ..Default::default()
        };
        self.space.iommufd().map_iommu_ioas(&map).map_err(reason)
    }
}

impl Domain for Iommufd {
    fn limits(&self) -> Limits {
        let asked = sys::iova_ranges(self.file.as_fd(), self.ioas().id());
        asked.map_or_else(
            |_| Limits::default(),
            |(ranges, page_size)| Limits {
                ranges: answer::ranges(ranges.into_iter()),
                page_size,
                mappings: None,
            },
        )
    }

    fn takes_unfilled(&self, memory: &dyn HostMemory) -> bool {
        !matches!(way(memory.backing()), Ok(MapMethod::File(file, _)) if is_pooled(file))
    }

    fn map(
        &self,
        iova: Span<Io>,
        memory: &Arc<dyn HostMemory>,
        offset: u64,
        access: Access,
    ) -> Result<(), DmaError> {
        let no_way = |rule| DmaError::NoWay { iova: iova.start(), size: iova.size(), rule };
        sys::address(memory.as_ref(), offset, iova.size()).map_err(|e| DmaError::refused_map(iova, e))?;
        let by_address = || self.by_address(iova, memory.as_ref(), offset, access);
        let mapped = match way(memory.backing()).map_err(no_way)? {
            MapMethod::DmaBuf(file, start) => {
                let mapped = self.by_file(iova, file, start.saturating_add(offset), access);
                mapped.ok_or_else(|| no_way(NO_DMA_BUF))?
            }
            MapMethod::File(file, start) => {
                self.by_file(iova, file, start.saturating_add(offset), access).unwrap_or_else(by_address)
            }
            MapMethod::Address => by_address(),
        };
        mapped.map_err(|source| DmaError::refused_map(iova, source))?;
        self.maps().insert(iova.start(), (iova, Arc::clone(memory)));
        Ok(())
    }

    fn unmap(&self, iova: Span<Io>) -> Result<(), DmaError> {
        let refused =
            |source| DmaError::Refused { iova: iova.start(), size: iova.size(), what: "unmap", source };
        if self.maps().get(&iova.start()).is_none_or(|(mapped, _)| *mapped != iova) {
            return Err(refused(io::ErrorKind::NotFound.into()));
        }
        self.ioas().unmap(iova.start().get(), iova.size()).map_err(|e| refused(reason(e)))?;
        self.maps().remove(&iova.start());
        Ok(())
    }
}

/// How memory is passed to iommufd.
enum MapMethod<'a> {
    /// As part of a dma-buf, from this offset on.
    DmaBuf(BorrowedFd<'a>, u64),
    /// As part of a file, from this offset on; by address if the kernel cannot map files.
    File(BorrowedFd<'a>, u64),
    /// By this process's address: the kernel pins what is mapped there.
    Address,
}

/// Whether the file's pages come from a hugetlb pool. If `IOMMU_IOAS_MAP_FILE` does not find such a page, it allocates
/// one on the thread's node and ignores the file's policy. If another thread's fault is faster, it fails with ENOMEM,
/// because it expects a reservation that the fault has used (`memfd_alloc_folio`, seen with Linux 7.3).
fn is_pooled(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|system| system.f_type == libc::HUGETLBFS_MAGIC)
}

/// Selects how to map a kind of memory, or explains why iommufd cannot map it.
const fn way(backing: HostBacking<'_>) -> Result<MapMethod<'_>, &'static str> {
    match backing {
        HostBacking::File { file, offset } => Ok(MapMethod::File(file, offset)),
        HostBacking::Bar { dma_buf: Some((file, offset)) } => Ok(MapMethod::DmaBuf(file, offset)),
        // IOMMU_IOAS_MAP_FILE accepts memfd and hugetlb (memfd_pin_folios) and returns EINVAL for any other file.
        HostBacking::GuestMemfd { .. } | HostBacking::Pages => Ok(MapMethod::Address),
        HostBacking::Invisible => Err(NO_PAGES),
        HostBacking::Bar { dma_buf: None } => Err(NO_DMA_BUF),
    }
}

const NO_PAGES: &str = "iommufd pins pages, and this memory has none (an EGM device, /dev/mem): set \"backend\": \"legacy\" \
    on the functions that shall reach it";
const NO_DMA_BUF: &str = "iommufd maps a BAR as a dma-buf, which takes Linux 6.19 and a driver that exports it: without, \
    functions cannot reach each other (peer-to-peer); \"backend\": \"legacy\" can";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_memfd_is_a_file_that_only_its_pages_addresses_lead_to() {
        let null = File::open("/dev/null").unwrap();
        let (file, offset) = (null.as_fd(), 0x1000);
        assert!(matches!(way(HostBacking::GuestMemfd { file, offset }), Ok(MapMethod::Address)));
        assert!(matches!(way(HostBacking::File { file, offset }), Ok(MapMethod::File(_, 0x1000))));
        assert!(matches!(
            way(HostBacking::Bar { dma_buf: Some((file, offset)) }),
            Ok(MapMethod::DmaBuf(_, 0x1000))
        ));
        assert!(matches!(way(HostBacking::Pages), Ok(MapMethod::Address)));
    }

    #[test]
    fn only_a_pools_file_is_distinguished_from_others() {
        use rustix::fs::{MemfdFlags, memfd_create};
        let pooled = |flags| is_pooled(memfd_create(c"test", flags).unwrap().as_fd());
        assert!(pooled(MemfdFlags::HUGETLB));
        assert!(!pooled(MemfdFlags::empty()));
        assert!(!is_pooled(File::open("/dev/null").unwrap().as_fd()));
    }

    #[test]
    fn memory_that_cannot_be_pinned_is_refused_with_what_would_help() {
        for backing in [HostBacking::Invisible, HostBacking::Bar { dma_buf: None }] {
            assert!(way(backing).is_err_and(|rule| rule.contains("\"legacy\"")), "{backing:?}");
        }
    }
}
