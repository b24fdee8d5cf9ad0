//! Reasons why memory is unavailable.

use std::io;
use std::path::PathBuf;

use egm_address::PciAddress;

/// Reason why a function's memory cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum MemoryError {
    #[error("cannot {action} {}", path.display())]
    File {
        /// Verb of the message: `read`, `open`, `map` or `write to`.
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A file of sysfs does not have the expected form.
    #[error("{} is not what Linux writes there", path.display())]
    Form { path: PathBuf },
    /// The bytes do not fit into the BAR.
    #[error("BAR {bar} of {address} has {has:#x} bytes, and {wanted:#x} were expected")]
    Short {
        address: PciAddress,
        bar: u8,
        /// Size of the BAR in bytes.
        has: u64,
        /// Bytes that should be there.
        wanted: u64,
    },
    /// The registers do not answer as they should.
    #[error(
        "the registers of {address} begin with {found:#x}: it was reset, unplugged, or is another device"
    )]
    Silent {
        address: PciAddress,
        /// Bytes that were read in place of the magic.
        found: u32,
    },
}

impl MemoryError {
    /// For `map_err` on a file operation.
    pub(crate) fn file<E: Into<io::Error>>(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(E) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source: source.into() }
    }
}
