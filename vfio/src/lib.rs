//! PCI functions for a driver in user space: those of the host's kernel, and those of vfio-user servers.
//!
//! [`backend::Backend`] is a function's registers, memory and interrupts, [`dma::Domain`] the memory that it reaches.
//! DESIGN.md explains how they become a guest's device.

#![deny(clippy::print_stderr)]

pub mod backend;
pub mod bind;
pub mod client;
pub mod dma;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
pub mod host;
mod ids;
pub mod kernel;
pub mod local;
pub mod mapping;
pub mod memory;
mod parts;
pub mod pci;
pub mod topology;
pub mod variant;
