//! A PCI function for tests, with configurable IDs: memory in a large BAR, a copy engine that reaches all memory that
//! the IOMMU permits, and MSI-X.
//!
//! ```text
//!  BAR 0   16 KiB, 32-bit: registers ([`registers`]), MSI-X table at 0x2000, pending bits at 0x3000; trapped
//!  BAR 2   64-bit prefetchable, as large as wanted: memory in a file from its beginning, the rest reads ones
//! ```
//! A Grace GPU ([`config::Config::grace`]) has 16 MiB of BAR 0 with two words that report when its memory is usable.
//! That memory itself is the host's; its driver shows it in place of BAR 4. The GPU may have an aperture on its
//! socket's EGM ([`device::Function::with_egm`]).
//!
//! QEMU's `vfio-user-pci` plugs it into a machine, so that a host under test can assign a GPU or a NIC that does DMA;
//! our own VMM uses it by its vfio-user client.

pub mod config;
pub mod device;
pub mod engine;
mod reach;
pub mod readiness;
pub mod registers;
