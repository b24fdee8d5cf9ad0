//! Bytes as hexadecimal digits, two for each byte.

use std::fmt::Write;

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::Serializer;

pub(crate) fn text(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().saturating_mul(2));
    for byte in bytes {
        let _ = write!(text, "{byte:02x}"); // a String takes all text
    }
    text
}

/// The bytes of `text`; `None` for anything but pairs of lower-case digits.
pub(crate) fn bytes(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte & 0xf),
        b'a'..=b'f' => Some((byte & 0xf) + 9),
        _ => None,
    };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let bytes = pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?));
    bytes.collect::<Option<Vec<u8>>>().filter(|_| rest.is_empty())
}

/// For `#[serde(with = …)]`.
///
/// # Errors
/// Those of `serializer`.
pub(crate) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&text(bytes))
}

/// For `#[serde(with = …)]`.
///
/// # Errors
/// Those of `deserializer`, and text that is no digits.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    bytes(&text).ok_or_else(|| Error::custom("expected pairs of hexadecimal digits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_and_other_text_is_refused() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(bytes(&text(&all)), Some(all));
        assert_eq!(bytes(""), Some(Vec::new()));
        for wrong in ["0", "0g", "AB", "é0"] {
            assert_eq!(bytes(wrong), None, "{wrong}");
        }
    }
}
