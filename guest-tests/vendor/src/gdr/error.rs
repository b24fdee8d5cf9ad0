//! Errors of access to GPU memory through the BAR.

use std::io;

/// File name of GDRCopy's library, for the loader.
pub const LIBRARY: &str = "libgdrapi.so.2";

/// Error of a mapping or an access.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum GdrError {
    /// The driver exports a dma-buf but cannot map it.
    #[error(
        "the driver's dma-buf cannot be mapped for processors ({0}): drivers of CUDA 13.3 or newer allow it, others need GDRCopy"
    )]
    NotMappable(io::Error),
    /// The library lacks a function.
    #[error("{LIB} has no {symbol}: GDRCopy 2.4 or newer is needed", LIB = LIBRARY)]
    Symbol { symbol: &'static str, source: libloading::Error },
    /// The library finds neither its kernel module nor a driver that needs none.
    #[error("gdr_open found no way to the GPU ({0}): load the module gdrdrv")]
    NoDriver(io::Error),
    /// A call of the library or the kernel failed.
    #[error("{call}: {source}")]
    Call { call: &'static str, source: io::Error },
    /// The library pinned another range than the requested one.
    #[error("{asked:#x} bytes at {address:#x} were asked for, {is:#x} at {at:#x} are pinned")]
    Pinned {
        /// Length of the requested range in bytes.
        asked: usize,
        /// Start address of these bytes.
        address: u64,
        /// Bytes that are pinned.
        is: u64,
        /// Start address of these bytes.
        at: u64,
    },
    /// A range outside of the window.
    #[error("{bytes:#x} bytes at {offset:#x} lie outside a window of {within:#x}")]
    Outside {
        offset: usize,
        /// Length of the range in bytes.
        bytes: usize,
        /// Length of the window in bytes.
        within: usize,
    },
}
