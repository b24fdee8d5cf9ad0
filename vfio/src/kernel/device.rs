//! One PCI function that the kernel assigns to this process through VFIO.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use egm_address::{InBar, PciAddress, Span};

use super::answer::Placed;
use super::cdev::Cdev;
use super::container::Group;
use super::error::{self, OpenError};
use super::interrupts::{self, Connected};
use super::query::{self, IDENTIFY};
use super::{KernelDomain, sys};
use crate::backend::{Backend, BackendError, InterruptKind, Interrupts, Region, RegionIndex};
use crate::mapping::{MadeOf, Mapping};
use crate::memory::HostMemory;

/// The function's open file, and what keeps the function assigned to this process.
pub(super) enum Hold {
    /// Its group, in a container.
    Group {
        /// Closed first: the kernel then stops its DMA and resets it, if no mapping of a BAR is left.
        file: File,
        group: Arc<Group>,
    },
    /// The address space that it is attached to.
    Attached(Cdev),
}

/// A function of the host.
pub struct KernelFunction {
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
        let hold = match domain {
            KernelDomain::Legacy(container) => {
                let group = container.group(group, address)?;
                let file = group.function(address).map_err(OpenError::refused(format!("open {address}")))?;
                Hold::Group { file: File::from(file), group }
            }
            KernelDomain::Iommufd(iommufd) => Hold::Attached(Cdev::open(address, iommufd)?),
        };
        Self::described(address, hold)
    }

    /// Completes a function that is open with what the kernel reports of it.
    pub(super) fn described(address: PciAddress, hold: Hold) -> Result<Self, OpenError> {
        let refused = |what: &str| OpenError::refused(format!("{what} {address}"));
        let file = hold.file().as_fd();
        let can_reset = query::can_reset(file).map_err(refused(IDENTIFY))?;
        let (regions, interrupts) = match &hold {
            Hold::Group { .. } => (query::regions(file), query::interrupts(file)),
            Hold::Attached(cdev) => (cdev.regions(), cdev.interrupts()),
        };
        let regions = regions.map_err(refused("read the regions of"))?;
        let interrupts = interrupts.map_err(refused("read the interrupts of"))?;
        let (name, connected) = (address.to_string(), Mutex::default());
        Ok(Self { hold, address, name, can_reset, regions, interrupts, connected })
    }

    /// Address on the host.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// The open file of the function.
    pub(super) fn file(&self) -> &File {
        self.hold.file()
    }

    pub(super) fn refused(&self, what: impl Into<String>) -> impl FnOnce(io::Error) -> BackendError {
        let (function, what) = (self.name.clone(), what.into());
        move |source| match source.raw_os_error() {
            Some(libc::ENODEV) => {
                BackendError::Gone { function, why: format!("the kernel returned ENODEV for: {what}") }
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
        match &self.hold {
            Hold::Group { .. } => None,
            Hold::Attached(cdev) => cdev.dma_buf(region, part),
        }
    }
}

impl Hold {
    fn file(&self) -> &File {
        match self {
            Self::Group { file, .. } => file,
            Self::Attached(cdev) => cdev.file(),
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
            let read = self.file().read_exact_at(data, place);
            read.map_err(self.refused(format!("read byte {offset:#x} of {region:?}")))
        });
        read.inspect_err(|_| data.fill(0xff))
    }

    fn write(&self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<(), BackendError> {
        let place = self.place(region, offset, data.len())?;
        let written = self.file().write_all_at(data, place);
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
        let mapping = Mapping::of(self.file().as_fd(), place, part.size(), congruent_to, made_of);
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
        let done = connected.connect(self.file().as_fd(), kind, interrupts, first, triggers);
        done.map_err(self.refused(format!("connect {kind:?} from vector {first}")))
    }

    fn connect_resample(&self, resample: BorrowedFd<'_>) -> Result<(), BackendError> {
        interrupts::connect_resample(self.file().as_fd(), resample)
            .map_err(self.refused("connect what unmasks INTx"))
    }

    fn mask_intx(&self, masked: bool) -> Result<(), BackendError> {
        interrupts::mask_intx(self.file().as_fd(), masked).map_err(self.refused("mask or unmask INTx"))
    }

    fn disable(&self, kind: InterruptKind) -> Result<(), BackendError> {
        self.connected().disable(self.file().as_fd(), kind).map_err(self.refused(format!("disable {kind:?}")))
    }

    fn can_reset(&self) -> bool {
        self.can_reset
    }

    fn reset(&self) -> Result<(), BackendError> {
        sys::reset(self.file().as_fd()).map_err(self.refused("reset"))
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
