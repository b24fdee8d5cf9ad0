//! Memory by its first address and its size.

use std::fmt;

/// Contiguous bytes, in the address space that the use states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Extent {
    pub(crate) start: u64,
    pub(crate) size: u64,
}

impl Extent {
    /// The span that `egm-device` prints as JSON: its start in hexadecimal digits, and its size.
    pub(crate) fn of_span(span: &serde_json::Value) -> Option<Self> {
        let start = u64::from_str_radix(span["start"].as_str()?.strip_prefix("0x")?, 16).ok()?;
        Some(Self { start, size: span["size"].as_u64()? })
    }

    /// The address behind the last byte.
    pub(crate) const fn end(self) -> u64 {
        self.start.saturating_add(self.size)
    }

    pub(crate) fn contains(self, address: u64) -> bool {
        (self.start..self.end()).contains(&address)
    }

    pub(crate) const fn overlaps(self, other: Self) -> bool {
        self.start < other.end() && other.start < self.end()
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x} bytes at {:#x}", self.size, self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_that_touch_do_not_overlap() {
        let first = Extent { start: 0x1000, size: 0x1000 };
        let next = Extent { start: 0x2000, size: 0x1000 };
        assert!(!first.overlaps(next) && !next.overlaps(first));
        assert!(first.overlaps(Extent { start: 0x1fff, size: 2 }));
        assert!(first.contains(0x1fff) && !first.contains(0x2000));
        assert_eq!(next.to_string(), "0x1000 bytes at 0x2000");
    }

    #[test]
    fn a_span_of_a_ledger_is_read() {
        let span = |start| Extent::of_span(&serde_json::json!({ "start": start, "size": 4096 }));
        assert_eq!(span("0x2000"), Some(Extent { start: 0x2000, size: 4096 }));
        assert_eq!((span("2000"), span("0x")), (None, None));
    }
}
