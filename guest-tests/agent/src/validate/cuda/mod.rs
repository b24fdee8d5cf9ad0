//! CUDA on every kind of memory that this machine shares with its GPUs.
//!
//! One claim a kind and a property, in one table: a report shows at once what pinned memory does and HOST_NUMA memory
//! does not. Kinds that the GPU denies are skipped, by the name of the attribute.

mod atomics;
mod attributes;
mod bandwidth;
mod bytes;
mod capacity;
pub(super) mod compare;
pub(super) mod each;
mod egm;
pub(super) mod gpu;
pub(super) mod latency;
mod managed;
pub(super) mod measure;
mod ordering;
mod ratio;
mod share;
mod together;
mod transfer;
pub(super) mod turns;

use gpu::Family;

use super::{Part, Validation};

const BYTES: &str = "every byte that GPU or processor writes is what the other one reads";
const ATOMICS: &str = "what GPU and processors add to one word is not lost: at once where HOST_NATIVE_ATOMIC_SUPPORTED, else in turns";
const ORDERING: &str = "a reader that sees a flag also sees what was written before it, both ways";
const BANDWIDTH: &str = "copy engines and SMs move right bytes at every size, at these rates";
const MANAGED: &str =
    "SMs read and write right bytes of pages that come to them and that are there, at these rates";
const LATENCY: &str = "the GPU follows a chain of words to its end at every size, at this time a word";

/// Rows of the table: a property of a family.
macro_rules! rows {
    ($($name:literal $claim:ident $check:path, $family:ident;)*) => {
        &[
            Validation {
                name: "cuda.attributes",
                claim: "what the GPU's attributes promise can be done, and what they deny cannot",
                run: attributes::check,
            },
            $(Validation { name: $name, claim: $claim, run: |setting| $check(setting, Family::$family) },)*
            Validation {
                name: "cuda.host_numa.of_pinned",
                claim: "copy engines and SMs reach 0.99 of pinned memory's rate with HOST_NUMA memory of the near node, in turns",
                run: ratio::check,
            },
            Validation {
                name: "cuda.host_numa.together",
                claim: "all GPUs at once move right bytes of HOST_NUMA memory, at this part of the sum of each alone",
                run: together::check,
            },
            Validation {
                name: "cuda.host_numa.capacity",
                claim: "one kernel streams through more HOST_NUMA memory than the GPU has of its own",
                run: capacity::check,
            },
            Validation {
                name: "cuda.host_numa.export",
                claim: "another process gets HOST_NUMA memory by a descriptor, finds its bytes and changes them",
                run: |setting| share::by_descriptor(setting, Family::HostNuma),
            },
            Validation {
                name: "cuda.device.export",
                claim: "another process gets the GPU's memory by a descriptor, finds its bytes and changes them",
                run: |setting| share::by_descriptor(setting, Family::Device),
            },
            Validation {
                name: "cuda.fabric",
                claim: "memory has a handle for other machines of the NVLink fabric",
                run: share::by_fabric,
            },
        ]
    };
}

pub(super) static ALL: &[Validation] = rows! {
    "cuda.device.bytes" BYTES bytes::check, Device;
    "cuda.host_numa.bytes" BYTES bytes::check, HostNuma;
    "cuda.pool.bytes" BYTES bytes::check, Pool;
    "cuda.pinned.bytes" BYTES bytes::check, Pinned;
    "cuda.registered.bytes" BYTES bytes::check, Registered;
    "cuda.egm_device.bytes" BYTES bytes::check, EgmDevice;
    "cuda.managed.bytes" BYTES bytes::check, Managed;
    "cuda.system.bytes" BYTES bytes::check, System;
    "cuda.host_numa.atomics" ATOMICS atomics::check, HostNuma;
    "cuda.pool.atomics" ATOMICS atomics::check, Pool;
    "cuda.pinned.atomics" ATOMICS atomics::check, Pinned;
    "cuda.registered.atomics" ATOMICS atomics::check, Registered;
    "cuda.egm_device.atomics" ATOMICS atomics::check, EgmDevice;
    "cuda.managed.atomics" ATOMICS atomics::check, Managed;
    "cuda.system.atomics" ATOMICS atomics::check, System;
    "cuda.host_numa.ordering" ORDERING ordering::check, HostNuma;
    "cuda.pool.ordering" ORDERING ordering::check, Pool;
    "cuda.pinned.ordering" ORDERING ordering::check, Pinned;
    "cuda.registered.ordering" ORDERING ordering::check, Registered;
    "cuda.egm_device.ordering" ORDERING ordering::check, EgmDevice;
    "cuda.managed.ordering" ORDERING ordering::check, Managed;
    "cuda.system.ordering" ORDERING ordering::check, System;
    "cuda.device.bandwidth" BANDWIDTH bandwidth::check, Device;
    "cuda.host_numa.bandwidth" BANDWIDTH bandwidth::check, HostNuma;
    "cuda.pool.bandwidth" BANDWIDTH bandwidth::check, Pool;
    "cuda.pinned.bandwidth" BANDWIDTH bandwidth::check, Pinned;
    "cuda.registered.bandwidth" BANDWIDTH bandwidth::check, Registered;
    "cuda.egm_device.bandwidth" BANDWIDTH bandwidth::check, EgmDevice;
    "cuda.managed.bandwidth" MANAGED managed::check, Managed;
    "cuda.system.bandwidth" BANDWIDTH bandwidth::check, System;
    "cuda.device.latency" LATENCY latency::check, Device;
    "cuda.host_numa.latency" LATENCY latency::check, HostNuma;
    "cuda.pool.latency" LATENCY latency::check, Pool;
    "cuda.pinned.latency" LATENCY latency::check, Pinned;
    "cuda.registered.latency" LATENCY latency::check, Registered;
    "cuda.egm_device.latency" LATENCY latency::check, EgmDevice;
    "cuda.managed.latency" LATENCY latency::check, Managed;
    "cuda.system.latency" LATENCY latency::check, System;
};

/// Parts that its validations start as processes of their own.
pub(super) static PARTS: &[Part] = &[share::IMPORT];
