//! Steps of scenarios on a Grace host.

pub(crate) mod again;
pub(crate) mod egm;
pub(crate) mod gpu;
pub(crate) mod outside;
pub(crate) mod rdma;
pub(crate) mod trust;
