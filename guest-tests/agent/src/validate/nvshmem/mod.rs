//! NVSHMEM between the GPUs of this machine: one process a GPU, each a PE, no network between them.
//!
//! [`job`] starts the PEs and collects what they found; [`element`] is such a process. The rest is what it does: each
//! file a few claims. Everything is poisoned first, and compared byte by byte with the seeds' patterns at the end.

mod atomics;
mod buffer;
mod collectives;
mod element;
mod job;
mod speed;
mod transfer;

use super::{Part, Setting, Validation};
use crate::error::Broken;
use crate::finding::Finding;
use element::Element;

/// Work of a PE for a claim.
struct Work {
    /// `group.what` of the validation.
    name: &'static str,
    /// The fewest PEs that can decide it.
    least: i32,
    /// Whether PEs may share a GPU: without MPS, NVSHMEM then has neither waits on streams nor collectives.
    shared: bool,
    run: fn(&mut Element<'_>) -> Result<(), Broken>,
}

static WORKS: &[Work] = &[
    Work { name: "nvshmem.start", least: 1, shared: true, run: transfer::start },
    Work { name: "nvshmem.put", least: 1, shared: true, run: transfer::put },
    Work { name: "nvshmem.get", least: 1, shared: true, run: transfer::get },
    Work { name: "nvshmem.signal", least: 1, shared: false, run: transfer::signal },
    Work { name: "nvshmem.atomics", least: 1, shared: true, run: atomics::atomics },
    Work { name: "nvshmem.barrier", least: 2, shared: false, run: atomics::barrier },
    Work { name: "nvshmem.collectives", least: 1, shared: false, run: collectives::collectives },
    Work { name: "nvshmem.bandwidth", least: 1, shared: true, run: speed::bandwidth },
    Work { name: job::BUFFER, least: 1, shared: true, run: buffer::buffer },
];

/// Declares a validation that is a job of the same name.
macro_rules! job {
    ($name:expr, $claim:literal) => {
        Validation {
            name: $name,
            claim: $claim,
            run: |setting: &Setting| -> Result<Finding, Broken> { job::run($name, setting) },
        }
    };
}

pub(super) static ALL: &[Validation] = &[
    job!("nvshmem.start", "a PE on each GPU starts, and each reaches every other's memory"),
    job!("nvshmem.put", "a put of any length at any alignment arrives whole and touches nothing beside"),
    job!(
        "nvshmem.get",
        "a get of any length at any alignment brings what is there and touches nothing beside"
    ),
    job!("nvshmem.signal", "a PE that sees a put's signal also sees its data"),
    job!("nvshmem.atomics", "no addition of any PE to one word is lost, by signals or by kernels"),
    job!("nvshmem.barrier", "behind a barrier, everything that was put before it is there"),
    job!("nvshmem.collectives", "broadcast, fcollect, alltoall, sum and max reductions are right"),
    job!("nvshmem.bandwidth", "how fast puts and gets are"),
    job!(job::BUFFER, "a buffer in HOST_NUMA memory is registered and reached as symmetric memory"),
];

/// Parts that its validations start as processes of their own.
pub(super) static PARTS: &[Part] = &[Part { name: job::PE, run: element::run }];
