//! Kinds of memory that GPUs use.

use std::fmt;

use egm_address::PciAddress;

/// Location of memory and method of its allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The GPU's own, by `cuMemCreate`.
    Device,
    /// Of a NUMA node of processors, by its Linux number, by `cuMemCreate`: extended GPU memory, where the platform has it.
    HostNuma(i32),
    /// Of a NUMA node, from a pool.
    Pool(i32),
    /// By `cuMemHostAlloc`, like `cudaMallocHost`.
    Pinned,
    /// Ordinary memory that was registered.
    Registered,
    /// The BAR of the EGM device with this address, registered.
    EgmDevice(PciAddress),
    /// By `cuMemAllocManaged`: the driver migrates it.
    Managed,
    /// Ordinary memory, as it is.
    System,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device => f.write_str("the GPU's memory"),
            Self::HostNuma(node) => write!(f, "HOST_NUMA memory of node {node}"),
            Self::Pool(node) => write!(f, "a pool on node {node}"),
            Self::Pinned => f.write_str("pinned memory"),
            Self::Registered => f.write_str("registered memory"),
            Self::EgmDevice(address) => write!(f, "memory of the EGM device {address}"),
            Self::Managed => f.write_str("managed memory"),
            Self::System => f.write_str("system memory"),
        }
    }
}
