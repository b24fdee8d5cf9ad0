//! A slice as a PCI function: memory in a BAR, registers that say what it is, interrupts for what happens to it.
//!
//! ```text
//!  access ─► registers: which ─► core, config: what ─► function: locks, descriptors, interrupts
//!                                                  └─► memory: the bytes behind BAR 2
//! ```
//! `DESIGN.md` ("The device") has the table of registers and the trust between the parties. The function is the same in
//! a VMM's own process and behind a socket (`crate::serve`).
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

pub mod config;
pub mod core;
mod function;
mod interrupts;
mod memory;
pub mod registers;
mod translate;

pub use function::{BadBytes, Connected, Function, ScrubEnd, Setup};
pub use translate::{in_region, in_slice};
