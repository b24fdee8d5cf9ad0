//! Guest view of a PCI function: pure, over untrusted bytes.
//!
//! A function's configuration space may be a guest's view of another VMM, a vfio-user peer's invention, or the all-ones
//! of a device that fell off its bus. Nothing here indexes, opens or waits.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

pub mod bars;
pub mod capability;
mod registers;
pub mod shadow;
