//! Typed addresses, spans of them, and deterministic placement.
//!
//! A guest physical address, a host physical address and an I/O virtual address are all `u64` in the kernel's interfaces.
//! Here each has a type of its own ([`Gpa`], [`Hpa`], [`Iova`]), and a [`Span`] is never empty and never wraps. Placement
//! is pure arithmetic: the same requests get the same addresses on every machine.
//!
//! ```text
//!  window, taken: SpanSet ────────┐
//!  Request { tag, size, align } ──┴─► Placer ──► Placement { tag, span }, or PlacerError with the tag
//! ```
//! ```
//! use egm_address::{Gpa, Placer, Request, Span, SpanSet};
//!
//! let window = SpanSet::from_iter([Span::new(Gpa::new(0x1_0000), 0x4_0000)?]);
//! let mut placer = Placer::new(&window, &SpanSet::EMPTY);
//! let bar = placer.place(Request { tag: "BAR 0", size: 0x1_0000, align: 0x2_0000 })?;
//! assert_eq!(bar.span.start(), Gpa::new(0x2_0000));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod cpu_set;
#[doc(hidden)]
pub mod fault;
mod pci;
mod placement;
mod quoted;
mod size;
mod span;
mod span_set;

pub use cpu_set::{CpuSet, CpuSetError};
pub use pci::{PciAddress, PciAddressError};
pub use placement::{Placement, Placer, PlacerError, Request};
pub use quoted::{Printable, Quoted, Shown};
pub use size::{ByteSize, SizeError, align_down, align_up};
pub use span::{
    Address, BarOffset, Gpa, Guest, Host, Hpa, InBar, InRegion, Io, Iova, Offset, Span, SpanError,
};
pub use span_set::SpanSet;
