//! Steps of scenarios about RDMA.

pub(crate) mod guests;
pub(crate) mod roce;
