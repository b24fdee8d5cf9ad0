//! The memory of the host's own slices: devices, files of slices and pools.

use std::path::Path;

use super::memory::{Memory, Progress, Watch};
use super::{slice_device, slice_file};
use crate::backing::{self, BackingError, OpenResult, OpenWait};
use crate::region::{Region, Slice};
use crate::trusted;

/// The memory of a ledger, opened by this process. [`Ledger::memory`](super::Ledger::memory) is the only source of one,
/// so that a device is opened only under the ledger of the host that has it.
#[derive(Debug, Clone, Copy)]
pub struct HostMemory {
    /// Whether the ledger is this host's. A copy of another host names devices that are other memory here.
    pub(super) opens_devices: bool,
}

impl HostMemory {
    /// The memory of the host with its `/etc`, `/proc` and `/sys` below `root`: with devices where that is `/`.
    pub(super) fn below(root: &Path) -> Self {
        Self { opens_devices: trusted::is_this_host(root) || egm_address::fault!("devices-of-a-copy-opened") }
    }

    /// Memory that opens pools only.
    pub(crate) const fn without_devices() -> Self {
        Self { opens_devices: false }
    }
}

impl HostMemory {
    fn check(self, region: &Region) -> Result<(), BackingError> {
        if region.kind.keeps_bytes() && !self.opens_devices {
            return Err(BackingError::OtherHost { region: region.name.clone() });
        }
        Ok(())
    }
}

impl Memory for HostMemory {
    fn open(&self, region: &Region, slice: &Slice, watch: &Watch<'_>) -> OpenResult {
        self.check(region)?;
        if region.kind.has_slice_devices() {
            slice_device::revoke(region, slice)?;
        }
        if region.kind.has_slice_files() {
            slice_file::clear(self, region, slice, watch)?;
        }
        let progress = |waited| (watch.progress)(Progress::Opening(waited));
        backing::open(region, slice, &OpenWait { progress: &progress, cancel: watch.cancel })
    }

    fn reopen(&self, region: &Region, slice: &Slice, watch: &Watch<'_>) -> OpenResult {
        self.check(region)?;
        if region.kind.has_slice_files() {
            return slice_file::name(region, slice, watch);
        }
        let device =
            region.kind.has_slice_devices().then(|| slice_device::reopen(region, slice)).transpose()?;
        device.flatten().map_or_else(|| self.open(region, slice, watch), Ok)
    }

    fn renew(&self, region: &Region, slice: &Slice, watch: &Watch<'_>) -> OpenResult {
        self.check(region)?;
        if region.kind.has_slice_files() {
            return slice_file::reclaim(region, slice, watch);
        }
        self.open(region, slice, watch)
    }

    fn release(&self, region: &Region, slice: &Slice) {
        match &region.kind {
            _ if !self.opens_devices => {}
            kind if kind.has_slice_files() => slice_file::release(region, slice),
            kind if kind.has_slice_devices() && !egm_address::fault!("slice-device-not-removed") => {
                slice_device::release(region, slice);
            }
            _ => {}
        }
    }

    fn set_aside(&self, region: &Region, slice: &Slice) -> Result<(), BackingError> {
        self.check(region)?;
        slice_file::set_aside(region, slice)
    }

    fn is_device_used(&self, region: &Region, slice: &Slice, watch: &Watch<'_>) -> bool {
        match &region.kind {
            kind if !kind.has_slice_devices() && !kind.has_slice_files() => false,
            _ if !self.opens_devices => true,
            kind if kind.has_slice_files() => slice_file::is_in_use(region, slice, watch),
            _ => slice_device::is_in_use(region, slice),
        }
    }
}
