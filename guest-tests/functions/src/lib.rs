//! A PCI function for tests that is what its ids say it is: memory in a large BAR, a copy engine that reaches whatever the
//! IOMMU lets it, and MSI-X.
//!
//! ```text
//!  BAR 0   16 KiB, 32-bit: registers ([`registers`]), MSI-X table at 0x2000, pending bits at 0x3000; trapped
//!  BAR 2   64-bit prefetchable, as large as wanted: memory in a file from its beginning, the rest reads ones
//! ```
//! A Grace GPU ([`config::Config::grace`]) has 16 MiB of BAR 0 and two words in it that say when its memory can be used; that
//! memory itself is the host's, which its driver shows in place of BAR 4. It may have an aperture on its socket's EGM
//! ([`device::Function::with_egm`]).
//!
//! It is plugged into a machine by QEMU's `vfio-user-pci`, so that a host under test has a GPU or a NIC to pass on that
//! does DMA, and into our own VMM by its vfio-user client.

pub mod config;
pub mod device;
pub mod engine;
mod reach;
pub mod readiness;
pub mod registers;
