//! One process that holds files which open once, and lends slices of them to whom the policy lets.
//!
//! ```text
//!  client.rs ──one packet──► serve.rs ──► session.rs ──► policy      who may, who is next: pure
//!      ▲                       │   ▲           │
//!      └── descriptors ────────┘   └─ thread ◄─┘ source.rs           the ledger places, locks, scrubs
//! ```
//! One connection is one request and at most one slice. A slice is lent until its connection is closed *and* the process
//! that made the connection has ended, or until the client says that it has unmapped it: a connection that is merely lost
//! never frees memory that somebody maps. Nor does the client's word where the kernel contradicts it: memory that others
//! still have, or map, stays lent. A pool's slice, a file of its own that a client may pass on, is not freed by its word.
//!
//! What this module refuses to do: wait for a client, keep more than a few packets for it, believe what it says of itself.
#![cfg_attr(not(test), warn(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod client;
mod judge;
mod kept;
mod link;
mod listen;
mod looks;
mod packet;
mod peer;
mod refusal;
mod serve;
mod session;
mod source;
mod threads;
mod wire;

pub use client::{Client, ClientError, Loan};
pub use listen::ServerError;
pub(crate) use listen::no_place;
pub use peer::refuse_descriptors;
pub use serve::Server;
pub use source::{Held, LedgerSource, NotMade, Source, StillUsed};
pub use wire::{MAX_PACKET, Take};
