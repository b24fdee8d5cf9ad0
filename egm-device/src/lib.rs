//! Regions, slices and backings of Extended GPU Memory.
//!
//! A *backing* is where bytes come from; outwards it is a file, an offset and a length, because that is what KVM,
//! VFIO and vfio-user peers take. The VMM asks for backings here and never makes memory itself, so that carving,
//! ownership and scrubbing have one place to live.
//!
//! [`backing::open`] gives the bytes of a [`region::Slice`].
//!
//! ```text
//!  region ──► carve ──► ledger ──► lease ──► backing ──► Mapping
//!  survey     place     owners     scrub     a file      bytes
//! ```
//! Memory of this process as a backing, written and read through a mapping:
//!
//! ```
//! use egm_device::{Anonymous, Mapping};
//!
//! let memory = Anonymous::new("ram0", 2 << 20, None)?;
//! let mapping = Mapping::new(&memory, 0, 2 << 20, 0)?;
//! mapping.write(4096, b"egm")?;
//! let mut bytes = [0; 3];
//! mapping.read(4096, &mut bytes)?;
//! assert_eq!(&bytes, b"egm");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![deny(clippy::print_stderr)] // notes and warnings are events of `tracing`

mod access_list;
pub mod audit;
pub mod backing;
mod bounded;
pub mod broker;
pub mod carve;
mod claims;
#[expect(clippy::print_stderr, reason = "a program prints its result")]
mod cli;
pub mod close;
pub mod device;
mod evidence;
pub mod free;
pub mod host;
mod huge_page;
pub mod lease;
pub mod ledger;
mod mapping;
pub mod owner;
pub mod poison;
pub mod policy;
mod prefault;
pub mod progress;
pub mod record;
pub mod region;
pub mod retired;
mod schema;
pub mod scrub;
pub mod serve;
mod stream;
mod sys;
pub mod trust;
mod trusted;
pub mod unix_socket;
mod worker_pool;

pub use backing::{
    Anonymous, AnonymousError, Backing, BackingError, GuestMemfdError, HugeFiles, HugeFilesError,
};
pub use cli::main;
pub use huge_page::HugePage;
pub use lease::Lease;
pub use ledger::Ledger;
pub use mapping::{Mapping, MappingError};
pub use prefault::{PrefaultError, prefault, workers_for};
pub use worker_pool::pin;
