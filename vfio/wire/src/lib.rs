//! The vfio-user protocol: bytes in, values out, a limit on every length.
//!
//! ```text
//!  bytes ──frame──► header, body ──message──► request or reply
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod bytes;
pub mod frame;
pub mod message;
