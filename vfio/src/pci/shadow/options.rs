//! Decisions of the machine about a function that a guest gets.

use egm_address::{Guest, Span};

/// Properties of a function in addition to its own bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Options {
    /// Its base address registers; those that are not here read as zero, I/O ports among them.
    pub bars: Vec<Bar>,
    /// Its expansion ROM: a power of two of bytes, at least 2 KiB, below 4 GiB. `None` hides it.
    pub rom: Option<Span<Guest>>,
    /// INTx pin, 1 to 4, or `None` if the machine does not deliver it.
    pub pin: Option<u8>,
    /// Whether its MSI capability may be used: the machine has to deliver the messages.
    pub msi: bool,
    /// Whether its MSI-X capability may be used.
    pub msix: bool,
    /// Treatment of its resizable BAR capability.
    pub resizable: Resizable,
    /// Capabilities that the hardware lacks and the guest finds in the standard list.
    pub added: Vec<AddedCapability>,
}

/// A base address register and its initial address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bar {
    /// Register number, 0 to 5; a 64-bit one takes the next as well.
    pub index: u8,
    /// Width and prefetchability of the register.
    pub kind: BarKind,
    /// Initial range: a power of two of bytes, 16 at least, at a multiple of it.
    pub span: Span<Guest>,
}

/// Type and width of a base address register (PCI Express Base 6.0 §7.5.1.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BarKind {
    /// Memory with a 32-bit address.
    Memory32,
    /// Prefetchable memory with a 32-bit address.
    Memory32Prefetchable,
    /// Memory with a 64-bit address, in two registers.
    Memory64,
    /// Prefetchable memory with a 64-bit address, in two registers.
    Memory64Prefetchable,
}

impl BarKind {
    /// Whether the address takes two registers.
    pub fn is_64(self) -> bool {
        matches!(self, Self::Memory64 | Self::Memory64Prefetchable)
    }

    /// The register's low four bits.
    pub(super) fn flags(self) -> u8 {
        match self {
            Self::Memory32 => 0b0000,
            Self::Memory32Prefetchable => 0b1000,
            Self::Memory64 => 0b0100,
            Self::Memory64Prefetchable => 0b1100,
        }
    }
}

/// Guest view of resizable BARs. Only the plan changes a size, because addresses follow from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Resizable {
    /// The capability, with the present size as the only one.
    #[default]
    Fixed,
    /// Hides the capability from the guest.
    Hidden,
}

/// A capability that is put into the standard list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddedCapability {
    /// Name for the table: `P2P approval`.
    pub name: &'static str,
    /// Offsets to try first, in this order; then any free space after the last capability.
    pub preferred: &'static [u16],
    /// Capability id, its first byte.
    pub id: u8,
    /// Bytes after the id and the link.
    pub body: Vec<u8>,
    /// Reason for adding it.
    pub reason: &'static str,
}
