//! Where the broker's slices come from: the ledger, by way of files that are opened once.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use egm_address::{Offset, Span, SpanSet};

use crate::backing::{self, Backing, BackingError};
use crate::carve::plan::Request;
use crate::lease::Lease;
use crate::ledger::{HostMemory, Ledger, Memory, Watch};
use crate::policy::Supply;
use crate::region::{Region, RegionKind, Slice};
use crate::report::{Chain, Report};

/// What the broker needs of a ledger. All of it is called on threads of its own but [`Source::supplies`], which must not
/// take long.
pub trait Source: Send + Sync {
    /// What every region has, now. A region of which that cannot be said has nothing.
    fn supplies(&self) -> Vec<Supply>;

    /// A slice of `region`. `cancel` is set when nobody wants it any more.
    ///
    /// # Errors
    /// A text for operators.
    fn grant(&self, region: &str, request: &Request, cancel: &AtomicBool) -> Result<Box<dyn Held>, String>;
}

/// A slice that the broker holds for a client.
pub trait Held: Send {
    /// The region, with all that is retired.
    fn region(&self) -> &Region;

    /// Its place there.
    fn slice(&self) -> &Slice;

    /// Its bytes.
    fn backing(&self) -> &dyn Backing;

    /// Cleans it for the next owner, as far as that succeeds; nobody has it afterwards.
    ///
    /// # Errors
    /// A text for operators.
    fn give_back(self: Box<Self>) -> Result<(), String>;
}

impl Held for Lease {
    fn region(&self) -> &Region {
        Self::region(self)
    }
    fn slice(&self) -> &Slice {
        Self::slice(self)
    }
    fn backing(&self) -> &dyn Backing {
        self
    }
    fn give_back(self: Box<Self>) -> Result<(), String> {
        Self::give_back(*self, &Watch::nobody()).map_err(|error| Chain(&error).to_string())
    }
}

/// The host's regions and their ledger.
pub struct LedgerSource {
    ledger: Ledger,
    regions: Vec<Region>,
    memory: Arc<dyn Memory>,
}

impl LedgerSource {
    /// `regions` as `ledger` keeps them. guest_memfd is left out: its memory belongs to a VM of the process that makes it.
    #[must_use]
    pub fn new(ledger: Ledger, mut regions: Vec<Region>) -> Self {
        regions.retain(|region| region.kind != RegionKind::GuestMemfd);
        Self { ledger, regions, memory: Arc::new(KeptOpen::default()) }
    }

    fn supply(&self, region: &Region) -> Supply {
        // Retired pages are free as far as places go: a slice spans them as holes.
        let whole: SpanSet<_> = Span::new(Offset::new(0), region.size.get()).into_iter().collect();
        let free = self.ledger.states(region).map(|states| whole.minus(&states.busy())).unwrap_or_default();
        Supply {
            region: region.name.clone(),
            kind: region.kind.word().to_owned(),
            page_size: region.page_size.get().max(1),
            usable: region.size.get(),
            free: free.size(),
            largest: free.iter().map(|span| span.size()).max().unwrap_or(0),
        }
    }
}

impl Source for LedgerSource {
    fn supplies(&self) -> Vec<Supply> {
        self.regions.iter().map(|region| self.supply(region)).collect()
    }

    fn grant(&self, region: &str, request: &Request, cancel: &AtomicBool) -> Result<Box<dyn Held>, String> {
        let found = self.regions.iter().find(|r| r.name == region);
        let found = found.ok_or_else(|| format!("there is no region {region:?}"))?;
        let watch = Watch { progress: &|_| {}, cancel, near: None, pace: None };
        match self.ledger.grant_from(&self.memory, found, request, &watch) {
            Ok(lease) => Ok(Box::new(lease)),
            Err(error) => Err(Chain(&error as &dyn Report).to_string()),
        }
    }
}

/// The host's memory, where an EGM device is opened for its first slice and then kept: a second open would be refused,
/// and closing it would let anybody else have the whole device.
#[derive(Default)]
struct KeptOpen {
    devices: Mutex<BTreeMap<String, Arc<Mutex<Option<File>>>>>,
}

impl KeptOpen {
    /// A duplicate of the region's descriptor. Only those who wait for the same device wait for each other.
    fn duplicate(&self, region: &Region, slice: &Slice, watch: &Watch<'_>) -> Result<File, BackingError> {
        let device = {
            let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
            devices.entry(region.name.clone()).or_default().clone()
        };
        let mut device = device.lock().unwrap_or_else(PoisonError::into_inner);
        if device.is_none() {
            let first = HostMemory.open(region, slice, watch)?;
            *device = Some(clone(region, first.file())?);
        }
        match device.as_ref() {
            Some(file) => clone(region, file),
            None => Err(BackingError::NoBase { region: region.name.clone() }),
        }
    }
}

fn clone(region: &Region, file: &File) -> Result<File, BackingError> {
    let device = match &region.kind {
        RegionKind::Egm { device } => device.clone(),
        _ => "/proc/self/fd".into(),
    };
    file.try_clone().map_err(|source| BackingError::Open { region: region.name.clone(), device, source })
}

impl Memory for KeptOpen {
    fn open(
        &self,
        region: &Region,
        slice: &Slice,
        watch: &Watch<'_>,
    ) -> Result<Box<dyn Backing>, BackingError> {
        match region.kind {
            RegionKind::Egm { .. } => backing::adopt(region, slice, self.duplicate(region, slice, watch)?),
            _ => HostMemory.open(region, slice, watch),
        }
    }
}
