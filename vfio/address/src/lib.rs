//! Numbers that must not be mixed up, and arithmetic over them.
//!
//! A guest physical address, a host physical address and an I/O virtual address are all `u64` in the
//! kernel's interfaces, and handing one where another is meant is how a device writes over the host.
//! Here each has its own type ([`Gpa`], [`Hpa`], [`Iova`]), a [`Span`] of one of them is never empty
//! and never wraps, and everything that decides *where* something goes is pure arithmetic:
//! no file, no clock, no allocation order.
//!
//! What this crate refuses to do: read the host, open anything, or use `unsafe`.
#![forbid(unsafe_code)]

mod cpu_set;
#[doc(hidden)]
pub mod fault;
mod pci;
mod place;
mod quoted;
mod size;
mod span;
mod span_set;

pub use cpu_set::{CpuSet, CpuSetError};
pub use pci::{PciAddress, PciAddressError};
pub use place::{PlaceError, Placement, Placer, Request};
pub use quoted::{Printable, Quoted, Shown};
pub use size::{ByteSize, SizeError, align_down, align_up};
pub use span::{
    Address, BarOffset, Gpa, Guest, Host, Hpa, InBar, InRegion, Io, Iova, Offset, Span, SpanError,
};
pub use span_set::SpanSet;
