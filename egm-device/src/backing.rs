//! Where bytes come from.

use std::fs::File;

/// Memory that can be mapped by this process, by KVM and by devices: `size` bytes of `file` from `offset`.
///
/// Kept out: mapping (see [`crate::Mapping`]), ownership, and how the file was found.
pub trait Backing: Send + Sync {
    /// The file; mapping it shared gives the memory.
    fn file(&self) -> &File;

    /// Offset of the first byte in the file, a multiple of [`Backing::page_size`].
    fn offset(&self) -> u64;

    /// Bytes, a multiple of [`Backing::page_size`].
    fn size(&self) -> u64;

    /// Bytes in a page that the backing guarantees.
    fn page_size(&self) -> u64;

    /// Whether the host kernel has no struct pages for it (hypervisor-invisible).
    fn is_invisible(&self) -> bool;
}
