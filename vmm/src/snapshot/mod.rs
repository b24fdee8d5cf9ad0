//! Snapshots: the state of a paused machine in a folder, of which another process makes the machine again.
//!
//! What each part of a machine saves lies beside that part; `vmm/DESIGN.md` has the format.

mod error;
mod folder;
mod format;
pub(crate) mod hex;
mod mismatch;
mod stored;

pub use error::{RestoreError, RestoreReason, SaveReason, SnapshotError};
pub(crate) use folder::{Contents, NewSnapshot};
pub(crate) use format::{FORMAT, MACHINE, MemoryPiece, PAGE, STATE};
pub use mismatch::Mismatch;
pub(crate) use mismatch::ensure;
pub(crate) use stored::StoredSnapshot;
