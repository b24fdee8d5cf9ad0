//! Why GPU memory cannot be reached through the BAR.

use std::io;

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum GdrError {
    /// The driver exports a dma-buf and does not let it be mapped.
    #[error(
        "the driver's dma-buf cannot be mapped for processors ({0}): drivers of CUDA 13.3 or newer allow it, others need GDRCopy"
    )]
    NotMappable(io::Error),
    /// The library lacks a function.
    #[error("{LIB} has no {symbol}: GDRCopy 2.4 or newer is needed", LIB = crate::LIBRARY)]
    Symbol {
        /// Which one.
        symbol: &'static str,
        /// What the loader said.
        source: libloading::Error,
    },
    /// The library finds neither its kernel module nor a driver that does without.
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
    /// What the library mapped is not what it was asked for.
    #[error("{asked:#x} bytes at {address:#x} were asked for, {is:#x} at {at:#x} are pinned")]
    Pinned {
        /// Bytes that were asked for.
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
