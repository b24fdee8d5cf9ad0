//! CUDA's driver interface for the checks of `egm-guest`, safe and typed. It needs only the driver's `libcuda.so.1`, at
//! run time.
//!
//! ```text
//!  Driver::open() ─► Device ─► Context ─┬► Memory    of every Kind: for the GPU at an address, for the CPU as Words
//!   symbols by name   attributes        ├► Stream    copies, kernels, in order; Event: times
//!                                       └► Kernels   ours, kernels/egm.cu, each with its arguments checked
//! ```
//! [`FUNCTIONS`] names every function of the driver that is called. A driver that lacks one is refused with its name;
//! no code here panics. Results are numbers, so a code of a newer driver is only unknown.

mod attributes;
mod context;
mod device;
mod error;
mod functions;
mod kernels;
mod kind;
mod memory;
mod pattern;
mod words;

pub use attributes::{Attribute, Attributes, NUMBERS};
pub use context::{Context, Event, Stream};
pub use device::{Device, Driver, P2p};
pub use error::{CudaError, code_name};
pub use functions::FUNCTIONS;
pub use kernels::{ENTRIES, Kernels, MESSAGE_WORDS, Messages, PTX, Reports, Shape};
pub use kind::Kind;
pub use memory::{FABRIC_HANDLE, Memory, Part};
pub use pattern::{pattern, sum};
pub use words::{Words, Wrong};
