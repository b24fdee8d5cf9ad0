//! The memory of a slice that its owner returns: reached anew, where nothing else has it.
#![forbid(unsafe_code)]

use egm_address::SpanSet;

use crate::backing::{Backing, BackingError};
use crate::free::{Evidence, Hold};
use crate::ledger::{GrantError, LedgerError, LockedSlice, Memory, Watch, slice_device};
use crate::scrub::Scrubbed;

impl LockedSlice {
    /// Opens memory that all slices share again: a machine that mapped it has closed every descriptor (`close.rs`).
    pub(super) fn open_again(
        &self,
        memory: &dyn Memory,
        backing: &mut Box<dyn Backing>,
        watch: &Watch<'_>,
    ) -> Result<(), GrantError> {
        if !self.region.kind.keeps_bytes() {
            return Ok(());
        }
        match memory.reopen(&self.region, &self.slice, watch) {
            Ok(again) => *backing = again,
            // A device that opens once is open here, and a machine keeps its descriptor.
            Err(BackingError::Busy { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// The slice by a new device, into `backing`: the old one is revoked. A client without its lock may map it still.
    pub(super) fn renew(
        &self,
        memory: &dyn Memory,
        backing: &mut Box<dyn Backing>,
        watch: &Watch<'_>,
    ) -> Result<(), GrantError> {
        // Another description can be locked only where no process has this one, with its lock.
        *backing = memory.reopen(&self.region, &self.slice, watch)?;
        let used = |locked: &Self| locked.quarantined(&Evidence::of(Hold::Description));
        if !slice_device::lock(backing.as_ref())? {
            return Err(used(self));
        }
        slice_device::unlock(backing.as_ref())?;
        *backing = memory.open(&self.region, &self.slice, watch).map_err(|error| match error {
            BackingError::InUse { .. } => used(self),
            error => error.into(),
        })?;
        if slice_device::lock(backing.as_ref())? { Ok(()) } else { Err(used(self)) }
    }

    /// The file of the slice into `backing`, for its scrub, once no process has a description of it and nothing refers to a page.
    pub(super) fn reclaim(
        &self,
        memory: &dyn Memory,
        backing: &mut Box<dyn Backing>,
        watch: &Watch<'_>,
    ) -> Result<(), GrantError> {
        // The kernel counts this process's descriptions, too.
        let used = |error| match error {
            BackingError::InUse { evidence, .. } => self.quarantined(&evidence),
            error => error.into(),
        };
        *backing = memory.reopen(&self.region, &self.slice, watch).map_err(used)?;
        self.expect_free(memory, backing.as_ref())?;
        *backing = memory.renew(&self.region, &self.slice, watch).map_err(used)?;
        Ok(())
    }

    /// Whether nothing else has the slice: its file is new, or it is by a device of its own, which is locked here.
    pub(crate) fn is_alone(&self, backing: &dyn Backing) -> Result<bool, LedgerError> {
        if self.region.kind.has_slice_files() {
            return Ok(true);
        }
        Ok(self.region.kind.has_slice_devices() && slice_device::lock(backing)?)
    }

    /// Ends the grant of a slice with a bad page in its file: the file is set aside, and the next grant of these bytes makes
    /// another. No offset of the region is retired, because the bad page has none any more.
    pub(super) fn settle_bad_file(&self, memory: &dyn Memory, scrubbed: &Scrubbed) -> Result<(), GrantError> {
        let aside = memory.set_aside(&self.region, &self.slice);
        self.settle(&scrubbed.done, &SpanSet::default())?;
        aside?;
        self.log_retired(&scrubbed.bad, "a scrub got a memory error there: the slice's file is set aside");
        Ok(())
    }
}
