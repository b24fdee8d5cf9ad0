//! Reasons why a function cannot be presented to a guest.

use egm_address::{Guest, InBar, Span};

/// Why a function's configuration space, with the requested options, gives no valid guest function.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum ConfigError {
    /// Neither of the two sizes.
    #[error(
        "its configuration space has {length:#x} bytes, not 0x100 or 0x1000: only root may read all of it, and a \
         driver such as vfio-pci gives all of it"
    )]
    Length {
        /// Size of the space that was read, in bytes.
        length: usize,
    },
    #[error(
        "its configuration space reads as all ones: it is powered off, gone, or in a reset that failed; reset it or its bus"
    )]
    Dead,
    #[error(
        "its header type is {header_type:#x}, a bridge: give the guest the functions behind it, not the bridge"
    )]
    Bridge {
        /// The header type register without its multi-function bit.
        header_type: u8,
    },
    /// An invalid base address register.
    #[error("BAR {index} at {span}: {rule}")]
    Bar {
        /// Register number; 6 is the expansion ROM.
        index: u8,
        span: Span<Guest>,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// A pin that does not exist.
    #[error("interrupt pin {pin}: pins are 1 (INTA) to 4 (INTD)")]
    Pin { pin: u8 },
    /// MSI-X in a BAR that the guest does not have, or beyond its end.
    #[error(
        "its MSI-X {structure} is {size:#x} bytes at {offset:#x} of BAR {bar}, which the guest has not or not so long: \
         give it that BAR, or no MSI-X"
    )]
    Msix {
        /// `table` or `pending bit array`.
        structure: &'static str,
        /// Register number, 0 to 7.
        bar: u8,
        /// Offset in the BAR.
        offset: u32,
        size: u32,
    },
    #[error(
        "its MSI-X table at {table} and pending bit array at {pending} of the same BAR overlap: give it no MSI-X"
    )]
    MsixOverlap {
        table: Span<InBar>,
        /// The pending bit array.
        pending: Span<InBar>,
    },
    /// No free space for a capability.
    #[error(
        "{size:#x} bytes for the {name} capability fit nowhere in its configuration space: {taken}; leave it away"
    )]
    NoRoom {
        name: &'static str,
        /// Size of the capability, in bytes.
        size: usize,
        /// Capabilities at the offsets that were tried.
        taken: String,
    },
}
