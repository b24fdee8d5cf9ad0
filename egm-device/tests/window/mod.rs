//! A window of a plain file as memory that keeps its bytes.

use std::fs::File;

use egm_device::Backing;

const PAGE: u64 = 4096;

/// File, offset and size.
pub(crate) struct Window(pub(crate) File, pub(crate) u64, pub(crate) u64);

impl Backing for Window {
    fn file(&self) -> &File {
        &self.0
    }
    fn offset(&self) -> u64 {
        self.1
    }
    fn size(&self) -> u64 {
        self.2
    }
    fn page_size(&self) -> u64 {
        PAGE
    }
    fn is_invisible(&self) -> bool {
        true
    }
    fn outlives_power(&self) -> bool {
        false
    }
}
