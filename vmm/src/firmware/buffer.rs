//! The firmware window while it is filled.

use egm_address::{Gpa, Guest, Span};

use super::{FirmwareError, Table};

/// Tables start on a cache line; ACPI and EFI ask for 16 bytes at most.
const ALIGN: usize = 64;

/// The window being filled. It may grow past the window: then [`WindowBuffer::finish`] returns by how much.
pub(super) struct WindowBuffer {
    window: Span<Guest>,
    bytes: Vec<u8>,
    tables: Vec<Placed>,
}

/// An ACPI table inside [`WindowBuffer::bytes`].
struct Placed {
    signature: [u8; 4],
    start: usize,
    size: usize,
}

/// A window that is filled.
pub(super) struct Contents {
    pub(super) bytes: Vec<u8>,
    /// ACPI tables among the bytes.
    pub(super) tables: Vec<Table>,
}

impl WindowBuffer {
    pub(super) const fn new(window: Span<Guest>) -> Self {
        Self { window, bytes: Vec::new(), tables: Vec::new() }
    }

    /// Appends `bytes`, aligned; returns their guest address.
    pub(super) fn place(&mut self, bytes: &[u8]) -> Gpa {
        let start = self.bytes.len().next_multiple_of(ALIGN);
        self.bytes.resize(start, 0);
        self.bytes.extend(bytes);
        self.address(start)
    }

    /// Appends an ACPI table, aligned; returns its guest address.
    pub(super) fn table(&mut self, table: &[u8]) -> Gpa {
        let start = self.bytes.len().next_multiple_of(ALIGN);
        let signature = table.first_chunk().copied().unwrap_or_default();
        self.tables.push(Placed { signature, start, size: table.len() });
        self.place(table)
    }

    /// Writes over the first bytes of the window.
    pub(super) fn begin_with(&mut self, bytes: &[u8]) {
        for (to, from) in self.bytes.iter_mut().zip(bytes) {
            *to = *from;
        }
    }

    /// The guest address of a byte; beyond the window it means nothing, and [`WindowBuffer::finish`] fails.
    fn address(&self, offset: usize) -> Gpa {
        let start = self.window.start();
        u64::try_from(offset).ok().and_then(|offset| start.checked_add(offset)).unwrap_or(start)
    }

    /// The contents; the last `kept` bytes of the window stay free.
    pub(super) fn finish(self, kept: u64) -> Result<Contents, FirmwareError> {
        let need = u64::try_from(self.bytes.len()).unwrap_or(u64::MAX);
        let over = need.saturating_sub(self.window.size().saturating_sub(kept));
        if over > 0 {
            return Err(FirmwareError::TooLarge { need, over, window: self.window });
        }
        let placed = |t: &Placed| {
            let span = Span::between(self.address(t.start), self.address(t.start.saturating_add(t.size)))?;
            Some(Table { signature: t.signature, span })
        };
        let tables = self.tables.iter().filter_map(placed).collect();
        Ok(Contents { bytes: self.bytes, tables })
    }
}
