//! What hosts and guests boot: kernels, emulators, initial roots, root file systems and programs.

pub(crate) mod cache;
pub(crate) mod cargo;
pub(crate) mod cpio;
pub(crate) mod debian;
pub(crate) mod emulator;
pub(crate) mod initramfs;
pub(crate) mod kernel;
pub(crate) mod modules;
pub(crate) mod pmem;
pub(crate) mod portable;
pub(crate) mod rdma_kit;
pub(crate) mod rootfs;
pub(crate) mod tools;
