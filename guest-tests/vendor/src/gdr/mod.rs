//! GPU memory as processors see it through the GPU's BAR.
//!
//! ```text
//!  a dma-buf of GPU memory ──mmap──► DmaBuf ┐
//!                                           ├─► Window: write and read any bytes of it
//!  libgdrapi.so.2 with gdrdrv ──────► Gdr ──┘
//! ```
//! The first way needs no further module, but a driver that can map a dma-buf (CUDA 13.3 or newer); the second one
//! needs GDRCopy. [`gdrcopy`] parses the output of GDRCopy's own test programs.

mod dma_buf;
mod error;
pub mod gdrcopy;
mod library;

pub use dma_buf::DmaBuf;
pub use error::{GdrError, LIBRARY};
pub use library::{Gdr, Mapped};

/// GPU memory that is mapped for processors.
pub trait Window {
    /// Its length in bytes.
    fn bytes(&self) -> usize;

    /// Writes `from` at `offset`, at any alignment. Work that the GPU receives afterwards sees it.
    ///
    /// # Errors
    /// [`GdrError::Outside`], or a library's error.
    fn write(&self, offset: usize, from: &[u8]) -> Result<(), GdrError>;

    /// Reads `to.len()` bytes at `offset`, at any alignment.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), GdrError>;
}

/// The end of a range inside `within` bytes.
fn inside(offset: usize, bytes: usize, within: usize) -> Result<(), GdrError> {
    match offset.checked_add(bytes) {
        Some(end) if end <= within => Ok(()),
        _ => Err(GdrError::Outside { offset, bytes, within }),
    }
}
