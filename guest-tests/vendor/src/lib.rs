//! Safe bindings of the vendors' libraries that the guest checks use: CUDA's driver, libibverbs, NVSHMEM and GDRCopy.
//!
//! Each library is loaded at run time, so a program that is linked with this package starts where none is installed.

pub mod cuda;
pub mod gdr;
pub mod nvshmem;
pub mod verbs;
