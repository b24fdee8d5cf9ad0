//! RDMA into every kind of memory: between two queue pairs of one device, and between two machines.
//!
//! Arguments: `rdma.device` (default the first with a port that is up), `rdma.gid` (index; default the one that reaches
//! farthest), `rdma.rxe=ADDRESS/PREFIX` (make a device of the first network card, by `rdma_rxe`), `rdma.rounds`,
//! `rdma.requests` (of `ib_write_bw`), `rdma.timeout` (seconds), `rdma.listen` and `rdma.peer` (`ADDRESS:PORT`, for
//! [`pair`]), `rdma.node` (of the pair's memory).

mod atomics;
pub(super) mod data;
pub(super) mod gpu;
pub(super) mod kinds;
pub(super) mod loopback;
mod pair;
mod perftest;
pub(super) mod site;
mod speed;
pub(super) mod trial;
mod words;

use super::{Part, Setting, Validation};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use egm_vendor::verbs::Access;
use site::Site;

pub(super) static ALL: &[Validation] = &[
    Validation {
        name: "rdma.device",
        claim: "an RDMA device has a port that is up and an address",
        run: |setting| site::with(setting, device),
    },
    Validation {
        name: "rdma.memory",
        claim: "writes, reads and sends between ordinary memory are right in every byte",
        run: |setting| {
            site::with(setting, |site| data::moves(site, setting, &kinds::ordinary(), Access::ALL))
        },
    },
    Validation {
        name: "rdma.nodes",
        claim: "the same with memory of each NUMA node, EGM among them",
        run: |setting| site::with(setting, |site| data::moves(site, setting, &kinds::nodes()?, Access::ALL)),
    },
    Validation {
        name: "rdma.hugepages",
        claim: "the same with huge pages of each pool that has free ones",
        run: |setting| site::with(setting, |site| data::moves(site, setting, &kinds::pools()?, Access::ALL)),
    },
    Validation {
        name: "rdma.relaxed",
        claim: "the same with relaxed ordering",
        run: |setting| site::with(setting, |site| relaxed(site, setting)),
    },
    Validation {
        name: "rdma.gpu_dmabuf",
        claim: "GPU memory can be registered as a dma-buf, and GPU and RDMA see the same bytes there",
        run: |setting| site::with(setting, |site| gpu::dmabuf(site, setting)),
    },
    Validation {
        name: "rdma.gpu_peermem",
        claim: "the same of GPU memory registered by its address (nvidia-peermem)",
        run: |setting| site::with(setting, |site| gpu::peermem(site, setting)),
    },
    Validation {
        name: "rdma.cuda_host_numa",
        claim: "HOST_NUMA memory of CUDA, extended GPU memory, can be registered by its address",
        run: |setting| site::with(setting, |site| gpu::host_numa(site, setting)),
    },
    Validation {
        name: "rdma.data_direct",
        claim: "the same of GPU memory that is reached past the processor (Data Direct)",
        run: |setting| site::with(setting, |site| gpu::data_direct(site, setting)),
    },
    Validation {
        name: "rdma.atomics",
        claim: "no fetch-and-add is lost and no compare-and-swap is wrong, from two queue pairs at once",
        run: |setting| site::with(setting, |site| atomics::run(site, setting)),
    },
    Validation {
        name: "rdma.bandwidth",
        claim: "writes and reads by size, in GB/s",
        run: |setting| site::with(setting, |site| speed::bandwidth(site, setting)),
    },
    Validation {
        name: "rdma.latency",
        claim: "small requests from their posting to their completion, in µs",
        run: |setting| site::with(setting, |site| speed::latency(site, setting)),
    },
    Validation {
        name: "rdma.perftest",
        claim: "ib_write_bw runs on this device; its figures stand beside ours",
        run: |setting| site::with(setting, |site| perftest::run(site, setting)),
    },
    Validation {
        name: "rdma.pair",
        claim: "writes, reads, sends and atomics between two machines are right in every byte",
        run: |setting| site::with(setting, |site| pair::run(site, setting)),
    },
];

/// Parts that its validations start as processes of their own.
pub(super) static PARTS: &[Part] = &[];

fn device(site: &Site<'_>) -> Result<Finding, Broken> {
    let (port, can) = (site.place.port, &site.abilities);
    let mut claim = Claim::default();
    claim.seen(format!(
        "{} port {} of {}, GID {} {} ({:?}), active MTU {}, firmware {:?}, {:?} atomics, dma-buf {}",
        site.name,
        port.number,
        can.ports,
        site.place.gid.index,
        site.place.gid.address(),
        site.place.gid.kind,
        port.mtu.bytes(),
        can.firmware,
        can.atomics,
        match site.context.domain()?.takes_dmabuf() {
            Ok(true) => "taken".to_owned(),
            Ok(false) => "not taken".to_owned(),
            Err(error) => format!("not known ({error})"),
        },
    ));
    if !site.others.is_empty() {
        claim.seen(format!("not used: {}", site.others.join(", ")));
    }
    Ok(claim.finish())
}

fn relaxed(site: &Site<'_>, setting: &Setting) -> Result<Finding, Broken> {
    data::moves(site, setting, &kinds::ordinary(), Access::ALL | Access::RELAXED_ORDERING)
}
