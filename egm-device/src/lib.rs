//! Regions, slices and backings of Extended GPU Memory.
//!
//! A *backing* is where bytes come from; outwards it is a file, an offset and a length, because that is what KVM,
//! VFIO and vfio-user peers take. The VMM asks for backings here and never makes memory itself, so that carving,
//! ownership and scrubbing have one place to live.
//!
//! Today there is one backing, [`Anonymous`] memory of this process (memfd, hugetlb memfd), which every host has.

mod anonymous;
mod backing;
mod mapping;
mod prefault;
pub mod region;
pub mod retired;

pub use anonymous::{Anonymous, AnonymousError, HugePage};
pub use backing::Backing;
pub use mapping::{Mapping, MappingError};
pub use prefault::{PrefaultError, prefault, workers_for};
