//! Errors of access to GPU memory through the BAR.

use std::io;

/// Error of a mapping or an access.
#[derive(Debug, thiserror::Error)]
pub enum GdrError {
    /// The driver exports a dma-buf but cannot map it.
    #[error(
        "the driver's dma-buf cannot be mapped for processors ({0}): drivers of CUDA 13.3 or newer allow it, others need GDRCopy"
    )]
    NotMappable(io::Error),
    /// The library lacks a function.
    #[error("{LIB} has no {symbol}: GDRCopy 2.4 or newer is needed", LIB = crate::LIBRARY)]
    Symbol {
        /// Which one.
        symbol: &'static str,
        /// The loader's message.
        source: libloading::Error,
    },
    /// The library finds neither its kernel module nor a driver that needs none.
    #[error("gdr_open found no way to the GPU ({0}): load the module gdrdrv")]
    NoDriver(io::Error),
    /// A call of the library or the kernel failed.
    #[error("{call}: {source}")]
    Call {
        /// Which one.
        call: &'static str,
        /// As an error number.
        source: io::Error,
    },
    /// The library pinned another range than the requested one.
    #[error("{asked:#x} bytes at {address:#x} were asked for, {is:#x} at {at:#x} are pinned")]
    Pinned {
        /// Requested bytes.
        asked: usize,
        /// Where.
        address: u64,
        /// Bytes that are pinned.
        is: u64,
        /// Where.
        at: u64,
    },
    /// A range outside.
    #[error("{bytes:#x} bytes at {offset:#x} lie outside a window of {within:#x}")]
    Outside {
        /// First byte.
        offset: usize,
        /// How many.
        bytes: usize,
        /// Of how many.
        within: usize,
    },
}
