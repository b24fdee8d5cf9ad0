//! Step 1: what the specification wants of this host.

pub(super) mod cpus;
pub(super) mod data_direct;
pub(super) mod devices;
pub(super) mod host;
pub(super) mod near;
pub(super) mod pages;
pub(super) mod regions;
pub(super) mod served;
pub(super) mod trust;
pub(super) mod wanted;
