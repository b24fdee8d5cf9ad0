//! An event as a line: JSON in printable ASCII, with a limit on every text.
#![forbid(unsafe_code)]

use std::io;
use std::time::SystemTime;

use serde::Serialize;
use serde_json::ser::{CharEscape, Formatter, Serializer};

use super::event::Event;
use super::time;

/// Bytes in a line at most, its end included: six texts and the rest fit.
pub const MAX_LINE: usize = 8192;

/// Bytes of a text at most, as they stand in the line.
const MAX_TEXT: usize = 1024;

#[derive(Serialize)]
struct LogLine<'a> {
    time: String,
    #[serde(flatten)]
    event: &'a Event,
    #[serde(skip_serializing_if = "is_zero")]
    lost: u64,
    #[serde(skip_serializing_if = "is_zero")]
    suppressed: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
const fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// `event` at `now` as a line, with the lines that were lost or suppressed before it.
pub(super) fn encode(now: SystemTime, event: &Event, lost: u64, suppressed: u64) -> Vec<u8> {
    let line = LogLine { time: time::format(now), event, lost, suppressed };
    let mut bytes = Vec::new();
    // Structs of numbers and texts, written to memory: the serialization cannot fail.
    let _ =
        line.serialize(&mut Serializer::with_formatter(&mut bytes, BoundedJson { left: 0, is_cut: false }));
    bytes.push(b'\n');
    bytes
}

/// JSON without bytes that a terminal interprets; texts that are too long end with `...`.
struct BoundedJson {
    /// Bytes that the current text may still have.
    left: usize,
    is_cut: bool,
}

impl BoundedJson {
    fn put<W: ?Sized + io::Write>(&mut self, writer: &mut W, text: &str) -> io::Result<()> {
        match self.left.checked_sub(text.len()) {
            Some(left) if !self.is_cut => {
                self.left = left;
                writer.write_all(text.as_bytes())
            }
            _ => {
                self.is_cut = true;
                Ok(())
            }
        }
    }
}

impl Formatter for BoundedJson {
    fn begin_string<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        (self.left, self.is_cut) = (MAX_TEXT, false);
        writer.write_all(b"\"")
    }

    fn end_string<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(if self.is_cut { b"...\"" } else { b"\"" })
    }

    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        for c in fragment.chars() {
            let escaped: String = match c {
                ' '..='~' => c.into(),
                _ => c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect(),
            };
            self.put(writer, &escaped)?;
        }
        Ok(())
    }

    fn write_char_escape<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        escape: CharEscape,
    ) -> io::Result<()> {
        let escaped = match escape {
            CharEscape::Quote => "\\\"".to_owned(),
            CharEscape::ReverseSolidus => "\\\\".to_owned(),
            CharEscape::Solidus => "/".to_owned(),
            CharEscape::Backspace => "\\b".to_owned(),
            CharEscape::FormFeed => "\\f".to_owned(),
            CharEscape::LineFeed => "\\n".to_owned(),
            CharEscape::CarriageReturn => "\\r".to_owned(),
            CharEscape::Tab => "\\t".to_owned(),
            CharEscape::AsciiControl(byte) => format!("\\u{byte:04x}"),
        };
        self.put(writer, &escaped)
    }
}
