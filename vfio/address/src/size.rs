//! Sizes in bytes as people write them: `64GiB`, `512 MiB`, `4096`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::Quoted;

/// `value` rounded up to a multiple of `align`, or `None` on overflow; an `align` of 0 changes nothing.
pub const fn align_up(value: u64, align: u64) -> Option<u64> {
    if align == 0 { Some(value) } else { value.checked_next_multiple_of(align) }
}

/// `value` rounded down to a multiple of `align`; an `align` of 0 changes nothing.
pub const fn align_down(value: u64, align: u64) -> u64 {
    match value.checked_rem(align) {
        Some(rest) => value.saturating_sub(rest),
        None => value,
    }
}

/// A number of bytes. Read from text with an IEC unit (`KiB`, `MiB`, `GiB`, `TiB`, or their first letter, or none);
/// printed with the largest unit that divides it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ByteSize(u64);

/// Why a text is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum SizeError {
    /// No digits at the start.
    #[error("size {} does not start with a number: write for instance \"64GiB\"", Quoted(.0))]
    NoNumber(String),
    /// A unit that is not one of ours; SI units are refused because no user means 10^9 bytes of RAM.
    #[error(
        "size {} has unknown unit {}: use KiB, MiB, GiB or TiB (powers of 1024), or no unit for bytes",
        Quoted(text),
        Quoted(unit)
    )]
    UnknownUnit {
        text: String,
        /// The part after the digits.
        unit: String,
    },
    /// Does not fit in 64 bits.
    #[error("size {} does not fit in 64 bits", Quoted(.0))]
    TooLarge(String),
}

const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

impl ByteSize {
    /// A size of `bytes` bytes; every `u64` is one.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// The number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl FromStr for ByteSize {
    type Err = SizeError;
    fn from_str(text: &str) -> Result<Self, SizeError> {
        let trimmed = text.trim();
        let digits =
            trimmed.len().saturating_sub(trimmed.trim_start_matches(|c: char| c.is_ascii_digit()).len());
        let (number, unit) = trimmed.split_at(digits);
        if number.is_empty() {
            return Err(SizeError::NoNumber(text.to_owned()));
        }
        let unit = unit.trim();
        let shift = match unit {
            "" | "B" => 0,
            _ => UNITS
                .iter()
                .find(|(name, _)| *name == unit || name.get(..1) == Some(unit))
                .map(|&(_, shift)| shift)
                .ok_or_else(|| SizeError::UnknownUnit { text: text.to_owned(), unit: unit.to_owned() })?,
        };
        let number: u64 = number.parse().map_err(|_| SizeError::TooLarge(text.to_owned()))?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(|| SizeError::TooLarge(text.to_owned()))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS.iter().find(|(_, shift)| self.0 != 0 && self.0.trailing_zeros() >= *shift);
        let text = match unit {
            Some((name, shift)) => format!("{}{name}", self.0 >> shift),
            None => format!("{}", self.0),
        };
        f.pad(&text)
    }
}

/// Written as a plain number of bytes; read from text or from a number.
impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}
impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = ByteSize;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"64GiB\", or a number of bytes")
            }
            fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(value))
            }
            fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<ByteSize, E> {
                value.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("4096", 4096),
            ("64GiB", 64 << 30),
            ("512 MiB", 512 << 20),
            ("2M", 2 << 20),
            (" 1TiB ", 1 << 40),
        ] {
            assert_eq!(text.parse::<ByteSize>().unwrap().get(), bytes, "{text}");
        }
    }

    #[test]
    fn a_wrong_size_states_what_is_wrong() {
        assert!(matches!("GiB".parse::<ByteSize>(), Err(SizeError::NoNumber(_))));
        assert!(matches!("5GB".parse::<ByteSize>(), Err(SizeError::UnknownUnit { .. })));
        assert!(matches!("99999999TiB".parse::<ByteSize>(), Err(SizeError::TooLarge(_))));
        assert!(matches!("-1".parse::<ByteSize>(), Err(SizeError::NoNumber(_))));
        assert!(matches!("1.5GiB".parse::<ByteSize>(), Err(SizeError::UnknownUnit { .. })));
    }

    #[test]
    fn sizes_print_with_the_largest_unit_that_divides_them() {
        for (bytes, text) in
            [(0, "0"), (1023, "1023"), (1 << 10, "1KiB"), (3 << 20, "3MiB"), (1 << 40, "1TiB")]
        {
            assert_eq!(ByteSize::new(bytes).to_string(), text);
        }
    }

    #[test]
    fn json_carries_a_number_and_reads_numbers_and_texts() {
        let size = ByteSize::new(2 << 20);
        assert_eq!(serde_json::to_string(&size).unwrap(), "2097152");
        for text in ["2097152", "\"2MiB\""] {
            assert_eq!(serde_json::from_str::<ByteSize>(text).unwrap(), size, "{text}");
        }
        let refused = serde_json::from_str::<ByteSize>("true").unwrap_err().to_string();
        assert!(refused.contains("expected a size such as \"64GiB\""), "{refused}");
    }

    #[test]
    fn aligning_never_wraps() {
        assert_eq!(align_up(u64::MAX, 4096), None);
        assert_eq!(align_up(4097, 4096), Some(8192));
        assert_eq!((align_down(4097, 4096), align_down(5, 0), align_up(5, 0)), (4096, 5, Some(5)));
    }

    proptest! {
        #[test]
        fn printing_and_reading_is_the_identity(bytes: u64) {
            prop_assert_eq!(ByteSize::new(bytes).to_string().parse::<ByteSize>().unwrap().get(), bytes);
        }
        #[test]
        fn any_text_is_a_size_or_an_error(text in "\\PC{0,12}") {
            let _ = text.parse::<ByteSize>();
        }
    }
}
