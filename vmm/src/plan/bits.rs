//! Width of guest physical addresses.

use std::fmt;

/// How many bits addresses have, and why not more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressBits {
    /// The guest's processors have as many.
    Guest(u8),
    /// An IOMMU above the machine's host functions translates as many, and guest addresses are their devices' too.
    Translated(u8),
}

impl AddressBits {
    pub(super) const fn number(self) -> u8 {
        let (Self::Guest(bits) | Self::Translated(bits)) = self;
        bits
    }
}

impl fmt::Display for AddressBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Guest(bits) => write!(f, "{bits} guest physical address bits"),
            Self::Translated(bits) => write!(f, "the {bits} bits that the host's IOMMU translates"),
        }
    }
}
