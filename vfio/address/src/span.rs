//! Addresses tagged with their space, and non-empty spans of them.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::marker::PhantomData;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Marker: guest physical address space.
#[derive(Debug)]
pub enum Guest {}
/// Marker: host physical address space.
#[derive(Debug)]
pub enum Host {}
/// Marker: the address space a device's DMA sees behind an IOMMU.
#[derive(Debug)]
pub enum Io {}
/// Marker: the bytes of one region of host memory, counted from its start.
#[derive(Debug)]
pub enum InRegion {}
/// Marker: the bytes of one region of a PCI function, counted from its start.
#[derive(Debug)]
pub enum InBar {}

/// A byte address in the address space `S`.
pub struct Address<S>(u64, PhantomData<fn() -> S>);

/// Address in a guest's physical address space.
pub type Gpa = Address<Guest>;
/// Address in the host's physical address space.
pub type Hpa = Address<Host>;
/// I/O virtual address: what a device's DMA uses and the IOMMU translates.
pub type Iova = Address<Io>;
/// Offset in a region of host memory.
pub type Offset = Address<InRegion>;
/// Offset in a region of a PCI function, a BAR mostly.
pub type BarOffset = Address<InBar>;

impl<S> Address<S> {
    /// The address with the numeric value `value`; every `u64` is one.
    pub const fn new(value: u64) -> Self {
        Self(value, PhantomData)
    }

    /// The numeric value, as the kernel's interfaces take it.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// `self + bytes`, or `None` past the end of a 64-bit space.
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(sum) => Some(Self::new(sum)),
            None => None,
        }
    }

    /// Distance in bytes from `base` up to `self`, or `None` when `self` lies below it.
    pub const fn offset_from(self, base: Self) -> Option<u64> {
        self.0.checked_sub(base.0)
    }

    /// Whether the address is a multiple of `align`; every address is a multiple of an `align` of 0.
    pub const fn is_aligned(self, align: u64) -> bool {
        align == 0 || self.0.is_multiple_of(align)
    }
}

// Derives would ask for `S: Clone` and so on; the marker is never a value.
impl<S> Clone for Address<S> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<S> Copy for Address<S> {}
impl<S> PartialEq for Address<S> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}
impl<S> Eq for Address<S> {}
impl<S> PartialOrd for Address<S> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<S> Ord for Address<S> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.cmp(&other.0)
    }
}
impl<S> Hash for Address<S> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}
impl<S> fmt::Debug for Address<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
impl<S> fmt::Display for Address<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
impl<S> fmt::LowerHex for Address<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::LowerHex::fmt(&self.0, f)
    }
}

/// Addresses are written as hexadecimal strings: JSON numbers lose bits above 2^53 in many readers.
impl<S> Serialize for Address<S> {
    fn serialize<T: Serializer>(&self, serializer: T) -> Result<T::Ok, T::Error> {
        serializer.collect_str(self)
    }
}
impl<'de, S> Deserialize<'de> for Address<S> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok()).map(Self::new).ok_or_else(
            || {
                serde::de::Error::custom(format_args!(
                    "\"{text}\" is not an address: write hexadecimal digits after 0x, for instance \"0x100000000\""
                ))
            },
        )
    }
}

/// Why two numbers are not a [`Span`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SpanError {
    /// The size is zero.
    #[error("a span at {start:#x} has size 0: a span holds at least one byte")]
    Empty {
        /// Where it would start.
        start: u64,
    },
    /// `start + size` does not fit in 64 bits.
    #[error("a span of {size:#x} bytes at {start:#x} runs past the end of the 64-bit address space")]
    Wraps {
        /// Where it would start.
        start: u64,
        /// Its size in bytes.
        size: u64,
    },
}

/// A non-empty range of addresses in the space `S`, with an end that does not wrap.
///
/// Holding one proves: `size >= 1`, and `start + size <= u64::MAX` (so [`Span::end`] is a number).
/// It does not prove that anything is mapped there.
#[derive(Serialize, Deserialize)]
#[serde(bound = "", try_from = "RawSpan<S>")]
pub struct Span<S> {
    start: Address<S>,
    size: u64,
}

#[derive(Deserialize)]
#[serde(bound = "")]
struct RawSpan<S> {
    start: Address<S>,
    size: u64,
}

impl<S> TryFrom<RawSpan<S>> for Span<S> {
    type Error = SpanError;
    fn try_from(raw: RawSpan<S>) -> Result<Self, SpanError> {
        Self::new(raw.start, raw.size)
    }
}

impl<S> Span<S> {
    /// The span of `size` bytes from `start`.
    ///
    /// # Errors
    /// [`SpanError::Empty`] for a size of 0, [`SpanError::Wraps`] when the end does not fit in 64 bits.
    pub const fn new(start: Address<S>, size: u64) -> Result<Self, SpanError> {
        if size == 0 {
            return Err(SpanError::Empty { start: start.get() });
        }
        if start.get().checked_add(size).is_none() {
            return Err(SpanError::Wraps { start: start.get(), size });
        }
        Ok(Self { start, size })
    }

    /// The span from `start` up to, not including, `end`; `None` when that is empty or inverted.
    pub fn between(start: Address<S>, end: Address<S>) -> Option<Self> {
        end.offset_from(start).and_then(|size| Self::new(start, size).ok())
    }

    /// Address of the first byte.
    pub const fn start(self) -> Address<S> {
        self.start
    }

    /// First address after the span.
    pub const fn end(self) -> Address<S> {
        Address::new(self.start.get().saturating_add(self.size)) // never saturates: the constructor checked
    }

    /// Last address inside the span.
    pub const fn last(self) -> Address<S> {
        Address::new(self.end().get().saturating_sub(1))
    }

    /// Bytes, at least 1.
    pub const fn size(self) -> u64 {
        self.size
    }

    /// Whether `address` lies inside.
    pub fn contains(self, address: Address<S>) -> bool {
        self.start <= address && address < self.end()
    }

    /// Whether all of `other` lies inside.
    pub fn covers(self, other: Self) -> bool {
        self.start <= other.start && other.end() <= self.end()
    }

    /// Whether the two share a byte.
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.end() && other.start < self.end()
    }

    /// The bytes that both have.
    pub fn intersection(self, other: Self) -> Option<Self> {
        Self::between(self.start.max(other.start), self.end().min(other.end()))
    }
}

impl<S> Clone for Span<S> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<S> Copy for Span<S> {}
impl<S> PartialEq for Span<S> {
    fn eq(&self, other: &Self) -> bool {
        self.start == other.start && self.size == other.size
    }
}
impl<S> Eq for Span<S> {}
impl<S> PartialOrd for Span<S> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<S> Ord for Span<S> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.start, self.size).cmp(&(other.start, other.size))
    }
}
impl<S> fmt::Debug for Span<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl<S> fmt::Display for Span<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start, self.end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: u64, size: u64) -> Span<Guest> {
        Span::new(Gpa::new(start), size).unwrap()
    }

    #[test]
    fn an_empty_span_and_a_wrapping_span_do_not_exist() {
        assert_eq!(Span::<Guest>::new(Gpa::new(7), 0), Err(SpanError::Empty { start: 7 }));
        assert_eq!(
            Span::<Guest>::new(Gpa::new(u64::MAX), 1),
            Err(SpanError::Wraps { start: u64::MAX, size: 1 })
        );
        assert_eq!(Span::between(Gpa::new(9), Gpa::new(9)), None);
        assert_eq!(Span::between(Gpa::new(9), Gpa::new(8)), None);
    }

    #[test]
    fn an_address_ends_with_its_space_and_is_aligned_to_its_divisors() {
        let address = Gpa::new(0x3000);
        assert_eq!(address.checked_add(0x10), Some(Gpa::new(0x3010)));
        assert_eq!(address.checked_add(u64::MAX), None);
        let aligned = [0, 1, 0x1000, 0x3000, 0x2000].map(|align| address.is_aligned(align));
        assert_eq!(aligned, [true, true, true, true, false]);
    }

    #[test]
    fn neighbours_do_not_overlap() {
        let (low, high) = (span(0x1000, 0x1000), span(0x2000, 0x1000));
        assert!(!low.overlaps(high) && !high.overlaps(low));
        assert!(low.overlaps(span(0x1fff, 1)));
        assert_eq!(low.intersection(span(0x1800, 0x1000)), Some(span(0x1800, 0x800)));
        assert_eq!(low.last(), Gpa::new(0x1fff));
    }

    #[test]
    fn a_span_contains_its_first_and_last_byte_and_covers_itself_and_its_parts() {
        let whole = span(0x1000, 0x1000);
        for (at, inside) in [(0xfff, false), (0x1000, true), (0x1fff, true), (0x2000, false), (0x3000, false)]
        {
            assert_eq!(whole.contains(Gpa::new(at)), inside, "{at:#x}");
        }
        for part in [whole, span(0x1000, 1), span(0x1fff, 1), span(0x1800, 0x10)] {
            assert!(whole.covers(part), "{part}");
        }
        for other in [span(0xfff, 0x10), span(0x1fff, 2), span(0xfff, 0x1002), span(0x2000, 1)] {
            assert!(!whole.covers(other), "{other}");
        }
    }

    #[test]
    fn equality_and_hash_see_address_and_size() {
        let hash = |address: Gpa| {
            let mut state = std::hash::DefaultHasher::new();
            address.hash(&mut state);
            state.finish()
        };
        assert_ne!(Gpa::new(1), Gpa::new(2));
        assert_ne!(hash(Gpa::new(1)), hash(Gpa::new(2)));
        assert_ne!(span(1, 1), span(1, 2));
        assert_ne!(span(1, 1), span(2, 1));
    }

    #[test]
    fn addresses_and_spans_print_in_hexadecimal() {
        let at = Gpa::new(0x9000);
        assert_eq!(format!("{at} {at:x} {at:#x} {at:?}"), "0x9000 9000 0x9000 0x9000");
        let span = span(0x9000, 0x1000);
        assert_eq!(format!("{span} {span:?}"), "0x9000..0xa000 0x9000..0xa000");
    }

    #[test]
    fn json_carries_all_64_bits_and_refuses_an_empty_span() {
        let text = serde_json::to_string(&span(0xffff_ffff_ffff_0000, 0x1000)).unwrap();
        assert_eq!(text, r#"{"start":"0xffffffffffff0000","size":4096}"#);
        assert_eq!(serde_json::from_str::<Span<Guest>>(&text).unwrap(), span(0xffff_ffff_ffff_0000, 0x1000));
        assert!(serde_json::from_str::<Span<Guest>>(r#"{"start":"0x0","size":0}"#).is_err());
        assert!(serde_json::from_str::<Gpa>("\"17\"").is_err());
    }
}
