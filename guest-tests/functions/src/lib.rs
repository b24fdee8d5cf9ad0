//! A PCI function for tests that is what its ids say it is: memory in a large BAR, a copy engine that reaches whatever the
//! IOMMU lets it, and MSI-X.
//!
//! ```text
//!  BAR 0   16 KiB, 32-bit: registers ([`registers`]), MSI-X table at 0x2000, pending bits at 0x3000; trapped
//!  BAR 2   64-bit prefetchable, as large as wanted: memory in a file from its beginning, the rest reads ones
//! ```
//! It is plugged into a machine by QEMU's `vfio-user-pci`, so that a host under test has a GPU or a NIC to pass on that
//! does DMA, and into our own VMM by its vfio-user client.

pub mod config;
pub mod device;
pub mod engine;
pub mod registers;
