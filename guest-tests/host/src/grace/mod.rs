//! Steps of scenarios on a Grace host.

pub(crate) mod again;
pub(crate) mod egm;
pub(crate) mod gpu;
pub(crate) mod rdma;
pub(crate) mod trust;
pub(crate) mod vfio_user_gpu;
