//! One PCI function that the kernel assigns to this process through VFIO.

use std::fs::{self, File};
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use egm_address::{InBar, PciAddress, Span};
use vfio_bindings::bindings::vfio;

use super::answer::Placed;
use super::container::Group;
use super::error::{self, OpenError};
use super::interrupts::{self, Connected};
use super::message::Message;
use super::query;
use super::sys;
use super::{Iommufd, KernelDomain};
use crate::backend::{Backend, BackendError, InterruptKind, Interrupts, Region, RegionIndex};
use crate::mapping::{MadeOf, Mapping};
use crate::memory::HostMemory;

/// Object that keeps the function assigned to this process.
pub(super) enum Hold {
    /// Its group, in a container.
    Group(Arc<Group>),
    /// The address space that it is attached to.
    Attached(Arc<Iommufd>),
}

/// A function of the host.
pub struct KernelFunction {
    /// Closed first: the kernel then stops its DMA and resets it, if no mapping of a BAR is left.
    pub(super) file: File,
    pub(super) hold: Hold,
    pub(super) address: PciAddress,
    name: String,
    can_reset: bool,
    regions: Vec<Placed>,
    interrupts: Vec<Interrupts>,
    connected: Mutex<Connected>,
}

impl KernelFunction {
    /// Checks that the function at `address` of this host can be assigned, as far as sysfs shows.
    ///
    /// # Errors
    /// [`OpenError`] names the obstacle.
    pub fn check(address: PciAddress) -> Result<(), OpenError> {
        error::group(Path::new("/"), address).map(drop)
    }

    /// Opens the function at `address` of this host and attaches it to `domain`.
    ///
    /// # Errors
    /// [`OpenError`]; the function is not held in that case.
    pub fn open(address: PciAddress, domain: &KernelDomain) -> Result<Self, OpenError> {
        let root = Path::new("/");
        let group = error::group(root, address)?;
        let refused = |what: &str| OpenError::refused(format!("{what} {address}"));
        let (file, hold) = match domain {
            KernelDomain::Legacy(container) => {
                let group = container.group(group, address)?;
                let file = group.function(address).map_err(refused("open"))?;
                (File::from(file), Hold::Group(group))
            }
            KernelDomain::Iommufd(iommufd) => {
                let (path, file) = open_cdev(root, address)?;
                iommufd.attach(&file).map_err(|source| attach_error(&path, address, source))?;
                (file, Hold::Attached(Arc::clone(iommufd)))
            }
        };
        let can_reset = query::can_reset(file.as_fd()).map_err(refused("ask for what it is:"))?;
        let regions = query::regions(file.as_fd()).map_err(refused("read the regions of"))?;
        let interrupts = query::interrupts(file.as_fd()).map_err(refused("read the interrupts of"))?;
        let (name, connected) = (address.to_string(), Mutex::default());
        Ok(Self { file, hold, address, name, can_reset, regions, interrupts, connected })
    }

    /// Address on the host.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    pub(super) fn refused(&self, what: impl Into<String>) -> impl FnOnce(io::Error) -> BackendError {
        let (function, what) = (self.name.clone(), what.into());
        move |source| match source.raw_os_error() {
            Some(libc::ENODEV) => {
                BackendError::Gone { function, why: format!("the kernel says so to: {what}") }
            }
            _ => BackendError::Refused { function, what, source },
        }
    }

    fn placed(&self, region: RegionIndex) -> Option<&Placed> {
        self.regions.get(usize::try_from(region.number()).ok()?)
    }

    /// Position in the function's file of `length` bytes at `offset` of `region`.
    fn place(&self, region: RegionIndex, offset: u64, length: usize) -> Result<u64, BackendError> {
        let end = u64::try_from(length).ok().and_then(|length| offset.checked_add(length));
        let inside = self.placed(region).filter(|placed| end.is_some_and(|end| end <= placed.region.size));
        inside.and_then(|placed| placed.at.checked_add(offset)).ok_or_else(|| BackendError::Absent {
            function: self.name.clone(),
            what: format!("byte {offset:#x} of {region:?}"),
        })
    }

    fn connected(&self) -> std::sync::MutexGuard<'_, Connected> {
        self.connected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Exports part of a BAR as a dma-buf. `None` if the kernel cannot, or without iommufd, which alone uses it.
    fn dma_buf(&self, region: RegionIndex, part: Span<InBar>) -> Option<OwnedFd> {
        type Feature = vfio::vfio_device_feature;
        type Export = vfio::vfio_device_feature_dma_buf;
        let Hold::Attached(_) = &self.hold else { return None };
        let (export, range) = (size_of::<Feature>(), size_of::<Feature>().checked_add(size_of::<Export>())?);
        let flags = vfio::VFIO_DEVICE_FEATURE_GET | vfio::VFIO_DEVICE_FEATURE_DMA_BUF;
        let open = u32::try_from(libc::O_RDWR | libc::O_CLOEXEC).ok()?;
        let message = Message::of::<Feature>(size_of::<Export>().checked_add(16)?)
            .with(offset_of!(Feature, flags), flags)
            .with(export.checked_add(offset_of!(Export, region_index))?, region.number())
            .with(export.checked_add(offset_of!(Export, open_flags))?, open)
            .with(export.checked_add(offset_of!(Export, nr_ranges))?, 1)
            .with_long(range, part.start().get())
            .with_long(range.checked_add(8)?, part.size());
        sys::feature_file(self.file.as_fd(), message).ok()
    }
}

/// Opens the function's own character device, which `vfio-dev/vfioN` in its sysfs folder names.
fn open_cdev(root: &Path, address: PciAddress) -> Result<(PathBuf, File), OpenError> {
    let folder = root.join(format!("sys/bus/pci/devices/{address}/vfio-dev"));
    let rule =
        "the kernel has no character devices of VFIO (CONFIG_VFIO_DEVICE_CDEV); set \"backend\": \"legacy\"";
    let name = fs::read_dir(&folder).and_then(|mut entries| {
        entries.next().ok_or(io::ErrorKind::NotFound)?.map(|entry| entry.file_name())
    });
    let name = name.map_err(OpenError::file(&folder, &address.to_string(), rule))?;
    let path = root.join("dev/vfio/devices").join(name);
    let file = File::options().read(true).write(true).open(&path);
    let file = file.map_err(OpenError::file(&path, &address.to_string(), rule))?;
    Ok((path, file))
}

/// Error for a function, with its cdev at `path`, that iommufd did not accept.
fn attach_error(path: &Path, function: PciAddress, source: io::Error) -> OpenError {
    match source.raw_os_error() {
        // The kernel returns EINVAL to the second descriptor of an open function.
        Some(libc::EBUSY | libc::EPERM | libc::EINVAL) => OpenError::busy(path, &function.to_string()),
        _ => OpenError::refused(format!("give {function} to iommufd"))(source),
    }
}

impl Drop for KernelFunction {
    fn drop(&mut self) {
        if let Hold::Attached(iommufd) = &self.hold {
            let _ = iommufd.tell(self.file.as_fd(), false); // KVM holds the file too: it would stay open
        }
    }
}

impl Backend for KernelFunction {
    fn name(&self) -> &str {
        &self.name
    }

    fn region(&self, region: RegionIndex) -> &Region {
        self.placed(region).map_or(Region::NONE, |placed| &placed.region)
    }

    fn interrupts(&self, kind: InterruptKind) -> Interrupts {
        let index = usize::try_from(kind.number()).ok();
        index.and_then(|index| self.interrupts.get(index)).copied().unwrap_or_default()
    }

    fn read(&self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), BackendError> {
        let place = self.place(region, offset, data.len());
        let read = place.and_then(|place| {
            let read = self.file.read_exact_at(data, place);
            read.map_err(self.refused(format!("read byte {offset:#x} of {region:?}")))
        });
        read.inspect_err(|_| data.fill(0xff))
    }

    fn write(&self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<(), BackendError> {
        let place = self.place(region, offset, data.len())?;
        let written = self.file.write_all_at(data, place);
        written.map_err(self.refused(format!("write byte {offset:#x} of {region:?}")))
    }

    fn map(
        &self,
        region: RegionIndex,
        part: Span<InBar>,
        congruent_to: u64,
    ) -> Result<Arc<dyn HostMemory>, BackendError> {
        let mappable = &self.region(region).mappable;
        if !mappable.iter().any(|span| span.covers(part)) {
            let what = format!("mappable bytes {part} in {region:?}");
            return Err(BackendError::Absent { function: self.name.clone(), what });
        }
        let place = self.place(region, part.start().get(), 0)?;
        let made_of = MadeOf::Bar(self.dma_buf(region, part));
        let mapping = Mapping::of(self.file.as_fd(), place, part.size(), congruent_to, made_of);
        Ok(Arc::new(mapping.map_err(self.refused(format!("map {part} of {region:?}")))?))
    }

    fn connect(
        &self,
        kind: InterruptKind,
        first: u32,
        triggers: &[Option<BorrowedFd<'_>>],
    ) -> Result<(), BackendError> {
        let interrupts = self.interrupts(kind);
        let left = interrupts.count.checked_sub(first).and_then(|left| usize::try_from(left).ok());
        if left.is_none_or(|left| left < triggers.len()) {
            let what = format!("{} vectors of {kind:?} from {first} on", triggers.len());
            return Err(BackendError::Absent { function: self.name.clone(), what });
        }
        let mut connected = self.connected();
        let done = connected.connect(self.file.as_fd(), kind, interrupts, (first, triggers));
        done.map_err(self.refused(format!("connect {kind:?} from vector {first}")))
    }

    fn connect_resample(&self, resample: BorrowedFd<'_>) -> Result<(), BackendError> {
        interrupts::connect_resample(self.file.as_fd(), resample)
            .map_err(self.refused("connect what unmasks INTx"))
    }

    fn mask_intx(&self, masked: bool) -> Result<(), BackendError> {
        interrupts::mask_intx(self.file.as_fd(), masked).map_err(self.refused("mask or unmask INTx"))
    }

    fn disable(&self, kind: InterruptKind) -> Result<(), BackendError> {
        self.connected().disable(self.file.as_fd(), kind).map_err(self.refused(format!("disable {kind:?}")))
    }

    fn can_reset(&self) -> bool {
        self.can_reset
    }

    fn reset(&self) -> Result<(), BackendError> {
        sys::reset(self.file.as_fd()).map_err(self.refused("reset"))
    }

    fn reset_bus(&self) -> Result<Vec<PciAddress>, BackendError> {
        let all: Vec<_> = self.hot_reset_affects()?.iter().map(|affected| affected.function).collect();
        self.hot_reset(&all)?;
        Ok(all)
    }

    fn reset_with(&self, consent: &[PciAddress]) -> Result<(), BackendError> {
        self.hot_reset(consent)
    }
}
