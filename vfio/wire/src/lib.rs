//! The vfio-user protocol: bytes in, values out, a limit on every length.
//!
//! ```text
//!  bytes ──frame──► header, body ──message──► request ──session──► requests allowed now
//!    ▲                                                                  │
//!    └─ socket: the only input and output ◄── client, serve: blocking ◄─┘
//! ```
//! [`frame`], [`message`] and [`session`] use no descriptors and no clock.
//!
//! ```
//! use egm_vfio_wire::frame::{Header, Kind, Malformed};
//!
//! let header = Header { id: 7, command: 13, kind: Kind::Command { no_reply: false } };
//! let bytes = header.encode(0, 4096)?;
//! assert_eq!(Header::decode(&bytes, 4096)?, (header, 0));
//! # Ok::<(), Malformed>(())
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod bytes;
pub mod client;
pub mod frame;
pub mod message;
pub mod receiver;
pub mod serve;
pub mod session;
pub mod socket;
