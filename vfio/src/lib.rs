//! PCI functions that a driver in user space has: those of the host's kernel, and those of vfio-user servers.
//!
//! [`backend::Backend`] is a function's registers, memory and interrupts, [`dma::Domain`] what it reaches; DESIGN.md
//! says how they become a guest's device.

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
