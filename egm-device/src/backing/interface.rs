//! The interface of all memory of slices.

use std::fs::File;
use std::io;

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

    /// Whether the host kernel has no struct pages for it (hypervisor-invisible): its mappings are complete from the
    /// start, and the kernel refuses what needs pages (`MADV_POPULATE_WRITE`, iommufd by address).
    fn is_invisible(&self) -> bool;

    /// Whether stored bytes outlive power: then a scrub ends when its zeros are on the medium.
    fn outlives_power(&self) -> bool;

    /// Writes stored bytes to the medium, where that outlives power.
    fn persist(&self) -> io::Result<()> {
        if self.outlives_power() && !egm_address::fault!("zeros-not-stored") {
            return self.file().sync_data();
        }
        Ok(())
    }
}
