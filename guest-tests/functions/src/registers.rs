//! Registers of BAR 0: 32 or 64 bits, those of 64 also in halves; anything else reads ones and writes nothing.
//!
//! | offset | bits | | |
//! |---|---|---|---|
//! | 0x00 | 32 | ro | magic, "EGMF" in memory order |
//! | 0x04 | 32 | ro | version, 1 |
//! | 0x08 | 64 | ro | bytes of memory behind BAR 2 |
//! | 0x10 | 64 | rw | where to copy from: a DMA address, with bit 63 an offset in the function's own memory, with bit 62 one in EGM |
//! | 0x18 | 64 | rw | where to copy to, likewise |
//! | 0x20 | 64 | rw | bytes to copy |
//! | 0x28 | 32 | rw | vector to fire when it has ended; 0xffff_ffff for none |
//! | 0x2c | 32 | wo | 1 begins a copy, unless one runs |
//! | 0x30 | 32 | ro | 0 no copy yet, 1 running, 2 done, 3 fault |
//! | 0x34 | 32 | ro | copies that ended, with or without a fault |
//! | 0x38 | 64 | ro | first address that could not be reached, in the last copy that ended by a fault |
//! | 0x40 | 32 | ro | windows of DMA addresses that the function knows |
//! | 0x48 | 64 | rw | a Grace GPU: reads that each word below answers "not yet" after the next reset, 0xffff_ffff for all; kept by resets |
//! | 0x50 | 64 | ro | a Grace GPU: reads that were answered so since it was switched on |
//! | 0x1498 | 32 | ro | a Grace GPU: 0xff when its link to the processors is trained |
//! | 0x200bc | 32 | ro | a Grace GPU: 0xff when its memory is |
//!
//! Functions that are none read 0 at 0x48 and 0x50, and have no such words.

/// Set in an address: it is an offset in the function's own memory.
pub const OWN: u64 = 1 << 63;
/// Set in an address: it is an offset in the memory of the function's socket (`crate::reach`).
pub const EGM: u64 = 1 << 62;
/// No vector.
pub const NO_VECTOR: u32 = u32::MAX;
/// "EGMF".
pub const MAGIC: u32 = u32::from_le_bytes(*b"EGMF");
/// Offset of the MSI-X table.
pub const TABLE: u32 = 0x2000;
/// Offset of the pending bits.
pub const PENDING: u32 = 0x3000;
/// Bytes of BAR 0.
pub const SIZE: u32 = 0x4000;
/// Bytes of a Grace GPU's, as real ones have.
pub const GRACE_SIZE: u32 = 16 << 20;
/// Offset of a Grace GPU's word for its trained link.
pub const LINK: u64 = 0x1498;
/// Offset of a Grace GPU's word for its trained memory.
pub const TRAINING: u64 = 0x200bc;

/// A register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Register {
    /// `MAGIC`.
    Magic,
    /// Version of this table.
    Version,
    /// Bytes of memory.
    Memory,
    /// Source.
    From,
    /// Destination.
    To,
    /// Bytes.
    Count,
    /// Vector.
    Vector,
    /// Command.
    Command,
    /// Status.
    Status,
    /// Copies that ended.
    Ended,
    /// First address that could not be reached.
    Fault,
    /// Windows.
    Windows,
    /// Reads until it is ready.
    Reads,
    /// Reads before it was.
    Refused,
}

impl Register {
    /// The register that an access of `length` bytes at `offset` is for, and at which of its bits it begins.
    #[must_use]
    pub fn decode(offset: u64, length: usize) -> Option<(Self, u32)> {
        let half = u32::try_from(offset & 4).ok()? * 8;
        let wide = |register| (register, 8);
        let (register, bytes) = match offset {
            0x00 => (Self::Magic, 4),
            0x04 => (Self::Version, 4),
            0x08 | 0x0c => wide(Self::Memory),
            0x10 | 0x14 => wide(Self::From),
            0x18 | 0x1c => wide(Self::To),
            0x20 | 0x24 => wide(Self::Count),
            0x28 => (Self::Vector, 4),
            0x2c => (Self::Command, 4),
            0x30 => (Self::Status, 4),
            0x34 => (Self::Ended, 4),
            0x38 | 0x3c => wide(Self::Fault),
            0x40 => (Self::Windows, 4),
            0x48 | 0x4c => wide(Self::Reads),
            0x50 | 0x54 => wide(Self::Refused),
            _ => return None,
        };
        match (bytes, length) {
            (4, 4) => Some((register, 0)),
            (8, 4) => Some((register, half)),
            (8, 8) if half == 0 => Some((register, 0)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_offset_and_length_is_a_register_a_half_or_nothing() {
        let all = (0..0x2000).flat_map(|offset| [1, 2, 4, 8].map(|length| Register::decode(offset, length)));
        // Seven narrow ones, and seven wide ones in two halves and as a whole.
        assert_eq!(all.flatten().count(), 7 + 7 * 3);
        assert_eq!(Register::decode(0x10, 8), Some((Register::From, 0)));
        assert_eq!(Register::decode(0x14, 4), Some((Register::From, 32)));
        assert_eq!(Register::decode(0x14, 8), None);
    }
}
