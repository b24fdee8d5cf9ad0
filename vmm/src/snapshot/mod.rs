//! Snapshots: the state of a paused machine in a folder, of which another process makes the machine again.
//!
//! What each part of a machine saves lies beside that part; `vmm/DESIGN.md` has the format.

pub(crate) mod hex;
mod misfit;

pub use misfit::Misfit;
pub(crate) use misfit::ensure;
