//! The part of libibverbs that the guest checks need, loaded at run time.
//!
//! A guest without RDMA has no such library, and a program that were linked with it would not start there. Half of the
//! interface is not in the library at all but inline in its header, through tables in the context, so the structures are
//! here by hand ([`abi`]).
//!
//! ```text
//! Verbs ─► Devices ─► Device ─► Context ─┬─► Domain ─┬─► Registered<M> ─► Sge (ours), Remote (theirs)
//!                                        │           └─► QueuePair ─connect─► Connected ─► post(Work)
//!                                        └─► CompletionQueue ─► Completion
//! ```
//! Memory of CUDA is registered by its address or as a dma-buf, past the processor by [`Mlx5`].
//! A value borrows the value that it was made from, so it never outlives it; memory is owned by its registration.

pub mod abi;
mod attributes;
mod device;
mod error;
mod gpu;
mod library;
mod memory;
mod queue;
mod steps;

pub use attributes::{Abilities, Atomics, Gid, GidKind, Mtu, Odp, Port, best_gid};
pub use device::{Context, Device, Devices};
pub use error::VerbsError;
pub use gpu::Mlx5;
pub use library::Verbs;
pub use memory::{Access, DmaBuf, Domain, Memory, Registered, Remote, Sge};
pub use queue::{Completion, CompletionQueue, Connected, QueuePair, Work};
pub use steps::{Endpoint, LocalPort};
