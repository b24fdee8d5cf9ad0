//! A snapshot that a machine begins with.

use crate::config::{DeviceKind, NewDevice};
use crate::machine::MachineState;
use crate::memory::MemoryImage;
use crate::plan::Plan;
use crate::snapshot::{RestoreError, RestoreReason, StoredSnapshot};

/// A snapshot with its state, which is parsed before anything is reserved.
pub(crate) struct Restored {
    snapshot: StoredSnapshot,
    state: MachineState,
    /// Whether its memory is copied in before the guest runs.
    copy: bool,
    /// Whether the guest runs at once; otherwise the machine is paused.
    pub(crate) resume: bool,
}

impl Restored {
    /// The machine of `snapshot`.
    ///
    /// # Errors
    /// [`RestoreError`]: its state has another form, or a device that no machine has.
    pub(crate) fn new(snapshot: StoredSnapshot, copy: bool, resume: bool) -> Result<Self, RestoreError> {
        let state: MachineState = snapshot.state()?;
        let devices = state.unplugged();
        let devices = devices.map_err(|mismatch| RestoreReason::from(mismatch).of(snapshot.path()))?;
        let is_served = |device: &NewDevice| matches!(device.kind(), DeviceKind::VfioUser { .. });
        // A vfio-user server gets memory in files only.
        let copy = copy || devices.iter().any(is_served);
        Ok(Self { snapshot, state, copy, resume })
    }

    pub(crate) const fn snapshot(&self) -> &StoredSnapshot {
        &self.snapshot
    }

    pub(super) const fn state(&self) -> &MachineState {
        &self.state
    }

    /// Its memory, for the machine of `plan`. A file that another user can change is copied in. So is all memory where it is made
    /// present before the guest runs: read in whole anyway, it has huge pages then.
    pub(crate) fn image(&self, plan: &Plan) -> MemoryImage<'_> {
        let (file, pieces) = self.snapshot.memory();
        let is_present = plan.passthrough.is_some() || plan.backings.iter().any(|backing| backing.prefault);
        MemoryImage { file, pieces, copy: self.copy || is_present || !self.snapshot.is_ours() }
    }
}
