//! Slices behind sockets: each device has a thread that takes one client after the other.
//!
//! ```text
//!  file.rs     the configuration ─► offers
//!  slice.rs    an offer ─► its slice, by the ledger or a broker, and the way back
//!  socket.rs   an offer ─► its socket, made here or passed by systemd
//!  server.rs   a function, a socket: one client at a time
//! ```
//! `crate::cli`'s `serve` connects them, and handles bad pages and SIGTERM.
#![forbid(unsafe_code)]

mod file;
mod server;
mod slice;
mod socket;

pub(crate) use file::check;
pub use file::{DeviceConfig, FileError, load, schema};
pub use server::DeviceServer;
pub(crate) use slice::ServedSlice;
pub use slice::SliceError;
pub use socket::{Socket, SocketError, passed};
