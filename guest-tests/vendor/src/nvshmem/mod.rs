//! NVSHMEM's host library (`libnvshmem_host.so.3`), loaded at run time.
//!
//! One processing element (PE) is one process with one GPU. All PEs of a job share the id that PE 0 requested, and
//! start and end together. Memory of the symmetric heap lies at the same offset in every PE; [`Pe`] names it by
//! [`Memory`] and a range in it, so that no call reaches beyond an allocation or a PE that does not exist.
//!
//! The binding is written from the headers of NVSHMEM 3.4.5 ([`abi`]) and needs functions that exist since
//! 3.3. The library prints its own messages on standard output and error, and **ends the process** when a transfer
//! fails: run a PE as a process of its own.
//!
//! A call is collective only where its documentation states it; all PEs must make a collective call.

pub mod abi;
mod error;
mod find;
mod library;
mod memory;

pub use abi::{Compare, SignalOp, UniqueId};
pub use error::ShmemError;
pub use find::{NAME, candidates};
pub use library::{Library, Pe, Signal};
pub use memory::{Memory, Peer, Range};
