//! A state that a machine begins with: of a snapshot, or of the execution before this one.

use crate::config::{DeviceKind, NewDevice};
use crate::error::Report;
use crate::kept::KeptFiles;
use crate::machine::{MachineState, UpgradeError};
use crate::memory::{Beginning, MemoryImage};
use crate::plan::Plan;
use crate::snapshot::{RestoreError, RestoreReason, StoredSnapshot};

/// A state, which is parsed before anything is reserved.
pub(crate) struct Restored {
    memory: SavedMemory,
    state: MachineState,
    /// Whether the guest runs at once; otherwise the machine is paused.
    pub(crate) resume: bool,
}

/// Where the guest's memory is.
enum SavedMemory {
    Snapshot {
        snapshot: StoredSnapshot,
        /// Whether it is copied in before the guest runs.
        copy: bool,
    },
    /// In files that are open.
    Kept(KeptFiles),
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
        Ok(Self { memory: SavedMemory::Snapshot { snapshot, copy }, state, resume })
    }

    /// The machine of the execution before this one, with its open `files`.
    pub(crate) const fn taken_over(state: MachineState, files: KeptFiles, resume: bool) -> Self {
        Self { memory: SavedMemory::Kept(files), state, resume }
    }

    /// Whether its memory is that of the execution before this one.
    pub(crate) const fn has_memory(&self) -> bool {
        matches!(self.memory, SavedMemory::Kept(_))
    }

    pub(super) const fn state(&self) -> &MachineState {
        &self.state
    }

    /// The error of a state that is not restored for `reason`.
    pub(super) fn failed(&self, reason: RestoreReason) -> Box<dyn Report> {
        match &self.memory {
            SavedMemory::Snapshot { snapshot, .. } => Box::new(reason.of(snapshot.path())),
            SavedMemory::Kept(_) => Box::new(UpgradeError::State(reason)),
        }
    }

    /// Its memory, for the machine of `plan`. A file that another user can change is copied in. So is all memory where it is made
    /// present before the guest runs: read in whole anyway, it has huge pages then.
    pub(crate) fn beginning(&self, plan: &Plan) -> Beginning<'_> {
        match &self.memory {
            SavedMemory::Snapshot { snapshot, copy } => {
                let (file, pieces) = snapshot.memory();
                let is_present =
                    plan.passthrough.is_some() || plan.backings.iter().any(|backing| backing.prefault);
                Beginning::Snapshot(MemoryImage {
                    file,
                    pieces,
                    copy: *copy || is_present || !snapshot.is_ours(),
                })
            }
            SavedMemory::Kept(files) => Beginning::Kept(files),
        }
    }
}
