//! PCI functions for a driver in user space: those of the host's kernel, and those of vfio-user servers.
//!
//! [`backend::Backend`] is a function's registers, memory and interrupts, [`dma::Domain`] the memory that it reaches.
//! DESIGN.md explains how they become a guest's device.
//!
//! ```text
//!  host ──► topology      functions of sysfs; groups, switches and peer-to-peer routes as values
//!    └────► kernel, client ──► backend ──► variant, pci     open functions ──► what a guest sees of them
//!                         └──► dma                          memory mapped for them
//! ```
//! The functions of this host that a guest could get, and why the others are refused:
//!
//! ```
//! use std::path::Path;
//!
//! use egm_vfio::{host, topology};
//!
//! let functions = host::functions(Path::new("/"))?;
//! for function in functions.iter().filter(|function| !topology::is_bridge(function)) {
//!     match topology::usable(&functions, function.address) {
//!         Ok(()) => println!("{}: ready", function.address),
//!         Err(error) => println!("{}: {error}; {}", function.address, error.help()),
//!     }
//! }
//! # Ok::<(), host::HostError>(())
//! ```

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
