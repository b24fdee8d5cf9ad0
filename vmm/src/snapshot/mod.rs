//! Snapshots: the state of a paused machine in a folder, of which another process makes the machine again.
//!
//! What each part of a machine saves lies beside that part; `vmm/DESIGN.md` has the format.

mod error;
mod folder;
mod format;
pub(crate) mod hex;
mod misfit;
mod stored;

pub use error::{RestoreError, RestoreReason, SaveReason, SnapshotError};
pub(crate) use folder::{Contents, NewSnapshot};
pub(crate) use format::{MACHINE, MemoryPiece, PAGE, STATE};
pub use misfit::Misfit;
pub(crate) use misfit::ensure;
pub(crate) use stored::StoredSnapshot;
