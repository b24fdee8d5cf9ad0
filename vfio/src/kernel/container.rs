//! The legacy way: groups in a container with a type1v2 IOMMU. It maps by address, so it reaches every kind of memory.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};

use egm_address::{Io, Iova, PciAddress, Span};
use vfio_bindings::bindings::vfio;

use super::error::{CONTAINER, OpenError};
use super::message::Message;
use super::sys::{self, Request};
use super::{Track, answer};
use crate::dma::{Access, DmaError, Domain, Limits};
use crate::memory::HostMemory;

const TYPE1V2: u32 = vfio::VFIO_TYPE1v2_IOMMU;

type Unmap = vfio::vfio_iommu_type1_dma_unmap;

/// A container: one I/O address space for the groups in it.
///
/// The kernel drops all maps when the last group leaves. This type keeps them and makes them again when a group joins.
pub struct Container {
    /// Closed before the memory in `maps` is released.
    file: File,
    track: Option<Track>,
    /// Written while a group joins; read while memory is mapped, so that maps run in parallel.
    groups: RwLock<Groups>,
    maps: Mutex<BTreeMap<Iova, Mapped>>,
}

struct Mapped {
    iova: Span<Io>,
    memory: Arc<dyn HostMemory>,
    offset: u64,
    access: Access,
}

/// A group in a container. It leaves, and is free, when the last function of it is closed.
pub(super) struct Group {
    number: u32,
    file: File,
    container: Arc<Container>,
}

type Groups = BTreeMap<u32, Weak<Group>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

impl Container {
    /// Creates an empty container. `track` reports every group to KVM.
    ///
    /// # Errors
    /// [`OpenError`] if the host has no VFIO, or we may not use it.
    pub fn new(track: Option<Track>) -> Result<Arc<Self>, OpenError> {
        let path = Path::new(CONTAINER);
        let rule = "the kernel has no VFIO, or its module is not loaded";
        let file = open(path).map_err(OpenError::file(path, CONTAINER, rule))?;
        if !sys::has_iommu(file.as_fd(), TYPE1V2).map_err(OpenError::refused("ask VFIO for type1"))? {
            let why = io::Error::other("VFIO has none: modprobe vfio_iommu_type1");
            return Err(OpenError::refused("use a type 1 IOMMU of version 2")(why));
        }
        Ok(Arc::new(Self { file, track, groups: RwLock::default(), maps: Mutex::default() }))
    }

    /// Returns IOMMU group `number`, in this container; `function` is the requested member of it.
    pub(super) fn group(
        self: &Arc<Self>,
        number: u32,
        function: PciAddress,
    ) -> Result<Arc<Group>, OpenError> {
        let mut groups = self.groups.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(group) = groups.get(&number).and_then(Weak::upgrade) {
            return Ok(group);
        }
        groups.retain(|_, group| group.strong_count() > 0);
        let path = PathBuf::from(format!("/dev/vfio/{number}"));
        let rule = "no driver of VFIO has a function of this IOMMU group";
        let file = open(&path).map_err(OpenError::file(&path, &function.to_string(), rule))?;
        if !is_viable(&file).map_err(OpenError::refused(format!("ask {} for its status", path.display())))? {
            let why = io::Error::other("another driver or process uses a function of it");
            return Err(OpenError::refused(format!("take IOMMU group {number}"))(why));
        }
        sys::set_container(file.as_fd(), self.file.as_fd())
            .map_err(OpenError::refused(format!("put IOMMU group {number} into a container")))?;
        let group = Arc::new(Group { number, file, container: Arc::clone(self) });
        if groups.is_empty() {
            // EPERM here is a host without interrupt remapping: a device could send any interrupt.
            sys::set_iommu(self.file.as_fd(), TYPE1V2).map_err(OpenError::refused(
                "have the host's IOMMU translate DMA (EPERM: it does not remap interrupts)",
            ))?;
            lock(&self.maps).values().try_for_each(|mapped| self.map_now(mapped))?;
        }
        group.notify_kvm(true).map_err(OpenError::refused(format!("add IOMMU group {number} to KVM")))?;
        groups.insert(number, Arc::downgrade(&group));
        Ok(group)
    }

    /// The groups of these numbers that are in this container.
    fn groups(&self, numbers: &BTreeSet<u32>) -> Vec<Arc<Group>> {
        let groups = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        numbers.iter().filter_map(|number| groups.get(number)?.upgrade()).collect()
    }

    fn map_now(&self, mapped: &Mapped) -> Result<(), DmaError> {
        sys::map(self.file.as_fd(), mapped.iova, mapped.memory.as_ref(), mapped.offset, mapped.access)
            .map_err(|source| DmaError::refused_map(mapped.iova, source))
    }

    fn unmap_now(&self, iova: Span<Io>) -> io::Result<()> {
        let mut message = Message::of::<Unmap>(0)
            .with_long(offset_of!(Unmap, iova), iova.start().get())
            .with_long(offset_of!(Unmap, size), iova.size());
        sys::exchange(self.file.as_fd(), Request::IOMMU_UNMAP_DMA, &mut message)?;
        let unmapped = message.get_long(offset_of!(Unmap, size));
        if unmapped == Some(iova.size()) { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }
}

/// Whether the kernel can make maps: they need an IOMMU, and that comes with the first group.
fn is_live(groups: &Groups) -> bool {
    groups.values().any(|group| group.strong_count() > 0)
}

fn is_viable(group: &File) -> io::Result<bool> {
    let mut status = Message::of::<vfio::vfio_group_status>(0);
    sys::exchange(group.as_fd(), Request::GROUP_GET_STATUS, &mut status)?;
    let flags = status.get(offset_of!(vfio::vfio_group_status, flags)).unwrap_or(0);
    Ok(flags & vfio::VFIO_GROUP_FLAGS_VIABLE != 0)
}

impl Domain for Container {
    fn limits(&self) -> Limits {
        let question = Message::of::<vfio::vfio_iommu_type1_info>(0);
        let answer = sys::exchange_all(self.file.as_fd(), Request::IOMMU_GET_INFO, question);
        answer.ok().and_then(|answer| answer::limits(&answer)).unwrap_or_default()
    }

    fn map(
        &self,
        iova: Span<Io>,
        memory: &Arc<dyn HostMemory>,
        offset: u64,
        access: Access,
    ) -> Result<(), DmaError> {
        let mapped = Mapped { iova, memory: Arc::clone(memory), offset, access };
        let groups = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        if lock(&self.maps).values().any(|other| other.iova.overlaps(iova)) {
            return Err(DmaError::refused_map(iova, io::ErrorKind::AlreadyExists.into()));
        }
        if is_live(&groups) {
            self.map_now(&mapped)?;
        }
        lock(&self.maps).insert(iova.start(), mapped);
        Ok(())
    }

    fn unmap(&self, iova: Span<Io>) -> Result<(), DmaError> {
        let refused =
            |source| DmaError::Refused { iova: iova.start(), size: iova.size(), what: "unmap", source };
        let groups = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        if lock(&self.maps).get(&iova.start()).is_none_or(|mapped| mapped.iova != iova) {
            return Err(refused(io::ErrorKind::NotFound.into()));
        }
        if is_live(&groups) {
            self.unmap_now(iova).map_err(refused)?;
        }
        lock(&self.maps).remove(&iova.start());
        Ok(())
    }
}

impl Drop for Container {
    /// A mapped BAR in `maps` keeps its function, and so its group, open: devices must lose the rest before it is freed.
    fn drop(&mut self) {
        for mapped in lock(&self.maps).values() {
            let _ = self.unmap_now(mapped.iova);
        }
    }
}

impl Group {
    /// Opens a function of it.
    pub(super) fn function(&self, address: PciAddress) -> io::Result<OwnedFd> {
        sys::function(self.file.as_fd(), &CString::new(address.to_string())?)
    }

    /// Those of these groups that are in the same container.
    pub(super) fn held(&self, numbers: &BTreeSet<u32>) -> Vec<Arc<Self>> {
        self.container.groups(numbers)
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// Descriptor for a hot reset: it proves that its holder owns the group.
    pub(super) fn proof(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn notify_kvm(&self, added: bool) -> io::Result<()> {
        self.container.track.as_ref().map_or(Ok(()), |track| track(self.file.as_fd(), added))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = self.notify_kvm(false); // KVM holds the group's file too: without this the group would stay busy
    }
}
