//! Hosts, emulated or real: their devices, memory and capabilities.

pub(crate) mod capability;
pub(crate) mod extent;
pub(crate) mod functions;
pub(crate) mod grace;
pub(crate) mod iommu;
pub(crate) mod kcore;
pub(crate) mod l1;
pub(crate) mod pagemap;
pub(crate) mod parts;
pub(crate) mod physical;
pub(crate) mod pool;
pub(crate) mod qemu;
mod schedule;
pub(crate) mod served;
