//! Steps of scenarios about assigned functions, and about devices that come and go.

pub(crate) mod aer;
pub(crate) mod confined;
pub(crate) mod dma;
pub(crate) mod dma_pin;
pub(crate) mod function;
pub(crate) mod held;
pub(crate) mod iommu_fault;
pub(crate) mod misuse;
pub(crate) mod network;
pub(crate) mod pair;
pub(crate) mod payload;
pub(crate) mod plugged;
pub(crate) mod plugged_virtio;
pub(crate) mod refused;
pub(crate) mod reset;
pub(crate) mod rounds;
pub(crate) mod vfio_user;
