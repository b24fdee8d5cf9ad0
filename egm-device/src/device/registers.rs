//! BAR 0: offsets, widths and bits of its registers. Pure; `DESIGN.md` ("The device") is its table.

/// "EGMD" in memory order: the magic of BAR 0 and the signature of the capability.
pub const MAGIC: u32 = u32::from_le_bytes(*b"EGMD");
/// Version of the table of registers, and of the capability's layout.
pub const VERSION: u32 = 1;
/// Bytes of BAR 0.
pub const SIZE: u32 = 0x4000;
/// Offset of the window on the retired list.
pub const WINDOW: u32 = 0x1000;
/// Spans that the window shows.
pub const SPANS: u32 = 256;
/// Offset of the MSI-X table.
pub const TABLE: u32 = 0x2000;
/// Offset of the pending bits.
pub const PENDING: u32 = 0x3000;
/// MSI-X vectors: one for each [`Event`].
pub const VECTORS: u32 = 3;

/// An event for the guest: the number is the MSI-X vector, and its bit in [`Register::Pending`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Event {
    /// Pages were retired: [`Register::Generation`] and the retired list have changed.
    Retired = 0,
    /// The bytes that can be used are fewer than before: [`Register::Size`] less [`Register::RetiredBytes`].
    Resized = 1,
    /// The owner wants it back.
    Wanted = 2,
}

impl Event {
    /// Number of its MSI-X vector, below [`VECTORS`].
    #[must_use]
    pub const fn vector(self) -> u32 {
        self as u32
    }

    /// The bit in [`Register::Pending`].
    #[must_use]
    pub const fn bit(self) -> u32 {
        1 << self as u32
    }
}

/// A request of the guest by [`Register::Doorbell`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doorbell {
    /// All real bytes are to be zero.
    Scrub,
    /// The guest has stopped to use the memory.
    Quiesce,
    /// It uses it again.
    Resume,
}

impl Doorbell {
    /// Decodes `value`; `None` for an unknown one.
    #[must_use]
    pub const fn decode(value: u32) -> Option<Self> {
        match value {
            1 => Some(Self::Scrub),
            2 => Some(Self::Quiesce),
            3 => Some(Self::Resume),
            _ => None,
        }
    }
}

/// In [`Register::Status`]: a scrub runs.
pub const SCRUBS: u32 = 1 << 0;
/// In [`Register::Status`]: the guest has stopped to use the memory.
pub const QUIESCED: u32 = 1 << 1;
/// In [`Register::Status`]: the last scrub ended early.
pub const CUT_SHORT: u32 = 1 << 2;
/// In [`Register::Control`]: scrub at the next reset.
pub const SCRUB_AT_RESET: u32 = 1 << 0;

macro_rules! registers {
    ($($(#[$doc:meta])* $name:ident = $offset:literal, $bytes:literal;)*) => {
        /// A register of BAR 0.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Register { $($(#[$doc])* $name,)* }

        impl Register {
            /// All registers, by offset.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Offset in BAR 0.
            #[must_use]
            pub const fn offset(self) -> u64 {
                match self { $(Self::$name => $offset,)* }
            }

            /// Bytes of it: 4 or 8.
            #[must_use]
            pub const fn bytes(self) -> usize {
                match self { $(Self::$name => $bytes,)* }
            }
        }
    };
}

registers! {
    /// Always [`MAGIC`], "EGMD" in memory order.
    Magic = 0x00, 4;
    /// [`VERSION`] of this table of registers.
    Version = 0x04, 4;
    /// Bytes of the slice, retired ones included.
    Size = 0x08, 8;
    /// Offset of the slice in its region.
    Base = 0x10, 8;
    /// Bytes in a page.
    Page = 0x18, 8;
    /// Guest proximity domain; all ones where the operator named none.
    Pxm = 0x20, 4;
    /// Generation of size and retired list.
    Generation = 0x24, 4;
    /// Spans in the retired list.
    Spans = 0x28, 4;
    /// The first of them that the window shows.
    First = 0x2c, 4;
    /// Bytes of the slice that are retired.
    RetiredBytes = 0x30, 8;
    /// Events so far, of all kinds; a reset keeps the number, which wraps at 2^32.
    Events = 0x38, 4;
    /// Events that are not confirmed.
    Pending = 0x3c, 4;
    /// Write-only: the number of a [`Doorbell`] request.
    Doorbell = 0x40, 4;
    /// Read-only bits: [`SCRUBS`], [`QUIESCED`], [`CUT_SHORT`].
    Status = 0x44, 4;
    /// Bytes that a scrub has made zero.
    Scrubbed = 0x48, 8;
    /// Bit [`SCRUB_AT_RESET`]; other bits cannot be set.
    Control = 0x50, 4;
    /// Number of invalid accesses; a reset keeps it.
    Mistakes = 0x54, 4;
}

/// The target of an access to BAR 0, and the bit of it at which the access begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AccessTarget {
    /// A register, and the first bit of the access in it: 0 or 32.
    Register(Register, u32),
    /// In the window: which span, and whether its number of bytes rather than its offset.
    Window {
        /// Span, from the first that is shown.
        index: u32,
        /// Its size, not its start.
        size: bool,
        /// First bit of the access in that number: 0 or 32.
        bit: u32,
    },
    /// MSI-X table or pending bits: byte from [`TABLE`].
    Vectors(usize),
}

impl AccessTarget {
    /// The target of an access of `length` bytes at `offset`; `None` for an invalid one.
    #[must_use]
    pub(crate) fn decode(offset: u64, length: usize) -> Option<Self> {
        if let Some(at) = offset.checked_sub(TABLE.into()) {
            return usize::try_from(at).ok().map(Self::Vectors);
        }
        let whole = length == 8 && offset.is_multiple_of(8);
        if !whole && (length != 4 || !offset.is_multiple_of(4)) {
            return None;
        }
        let bit = if offset.is_multiple_of(8) { 0 } else { 32 };
        if let Some(at) = offset.checked_sub(WINDOW.into()) {
            let index = u32::try_from(at / 16).ok()?;
            return Some(Self::Window { index, size: at % 16 >= 8, bit });
        }
        let within = |register: &Register| {
            let into = offset.checked_sub(register.offset()).and_then(|into| usize::try_from(into).ok());
            into.is_some_and(|into| into < register.bytes())
        };
        let register = Register::ALL.iter().copied().find(within)?;
        match (register.bytes(), length) {
            (8, _) => Some(Self::Register(register, bit)),
            (_, 4) => Some(Self::Register(register, 0)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_do_not_overlap_and_lie_on_their_own_width() {
        let mut end = 0;
        for register in Register::ALL {
            assert!(register.offset() >= end, "{register:?}");
            assert!(register.offset().is_multiple_of(register.bytes() as u64), "{register:?}");
            end = register.offset() + register.bytes() as u64;
        }
        assert!(end <= WINDOW.into());
        assert_eq!(WINDOW + SPANS * 16, TABLE);
    }

    #[test]
    fn every_offset_and_length_is_a_register_a_half_a_span_a_vector_or_nothing() {
        for offset in 0..u64::from(SIZE) {
            for length in 0..=16 {
                let place = AccessTarget::decode(offset, length);
                let aligned = matches!(length, 4 | 8) && offset.is_multiple_of(length as u64);
                match place {
                    Some(AccessTarget::Register(register, bit)) => {
                        assert!(aligned);
                        assert_eq!(register.offset() + u64::from(bit / 8), offset);
                        assert!(bit as usize / 8 + length <= register.bytes());
                    }
                    Some(AccessTarget::Window { index, size, bit }) => {
                        let at = u64::from(index) * 16 + u64::from(size) * 8 + u64::from(bit / 8);
                        assert!(aligned && at + u64::from(WINDOW) == offset && index < SPANS);
                    }
                    Some(AccessTarget::Vectors(at)) => assert_eq!(at as u64 + u64::from(TABLE), offset),
                    None => assert!(!aligned || offset < WINDOW.into(), "{offset:#x} {length}"),
                }
            }
        }
        let places = (0..0x100).flat_map(|offset| [4, 8].map(|length| AccessTarget::decode(offset, length)));
        // A narrow one in one way, a wide one in three.
        let ways = Register::ALL.iter().map(|register| if register.bytes() == 4 { 1 } else { 3 });
        assert_eq!(places.flatten().count(), ways.sum::<usize>());
    }
}
