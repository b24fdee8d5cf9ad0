//! The broker: one process that holds files which open once, and grants slices of them by a policy.
//!
//! ```text
//!  client.rs ──one packet──► serve.rs ──► session.rs ──► policy      permission and order: pure
//!      ▲                       │   ▲           │
//!      └── descriptors ────────┘   └─ thread ◄─┘ source.rs           the ledger places, locks, scrubs
//! ```
//! One connection is one request and at most one slice. A slice stays granted until its connection is closed *and* the
//! process that made it has ended, or until the client reports that it has unmapped the slice. A lost connection alone
//! never frees memory that a process may map. Nor does a client's report that the kernel contradicts: memory that other
//! processes have or map stays granted. Nor does a report free a pool's slice: a client may pass on its file.
//!
//! This module never waits for a client, keeps only a few packets for it, and trusts nothing that it claims of itself.
#![cfg_attr(not(test), warn(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod client;
mod idle;
mod judge;
mod link;
mod listen;
mod open_devices;
mod packet;
mod peer;
mod refusal;
mod serve;
mod session;
mod source;
mod supply_checks;
mod threads;
mod wire;

pub use client::{BrokerLease, Client, ClientError, ReleasedSlice};
pub use idle::IdleScrub;
pub use listen::ServerError;
pub(crate) use listen::no_place;
pub use peer::{refuse_descriptors, user_of};
pub use serve::Server;
pub use source::{GrantFailure, GrantedSlice, LedgerSource, Source, StillUsed};
pub use wire::{MAX_PACKET, SliceRequest};
