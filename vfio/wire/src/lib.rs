//! The vfio-user protocol without sockets: bytes in, values out, a limit on every length.
//!
//! Today there is the envelope of every message, [`frame`]. What the messages mean comes with the peers that speak
//! them.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

pub mod frame;
