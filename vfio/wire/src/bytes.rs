//! Reader of numbers from a peer's bytes, one after the other, without an index.

use crate::message::Wrong;

/// Unread part of a message body.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'a> {
    what: &'static str,
    all: usize,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads from `body`; `what` names it in errors.
    pub(crate) fn new(what: &'static str, body: &'a [u8]) -> Self {
        Self { what, all: body.len(), rest: body }
    }

    fn chunk<const N: usize>(&mut self) -> Result<[u8; N], Wrong> {
        let (chunk, rest) = self.rest.split_first_chunk().ok_or_else(|| self.short(N))?;
        self.rest = rest;
        Ok(*chunk)
    }

    fn short(&self, more: usize) -> Wrong {
        let need = self.all.saturating_sub(self.rest.len()).saturating_add(more);
        Wrong::Short { what: self.what, have: self.all, need }
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Wrong> {
        self.chunk().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Wrong> {
        self.chunk().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Wrong> {
        self.chunk().map(u64::from_le_bytes)
    }

    /// The next `count` bytes.
    pub(crate) fn bytes(&mut self, count: u64) -> Result<&'a [u8], Wrong> {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let (bytes, rest) = self.rest.split_at_checked(count).ok_or_else(|| self.short(count))?;
        self.rest = rest;
        Ok(bytes)
    }

    /// Fails if bytes are left: a length in the body does not match the body.
    pub(crate) fn end(&self, rule: &'static str) -> Result<(), Wrong> {
        let value = u64::try_from(self.rest.len()).unwrap_or(u64::MAX);
        if value == 0 { Ok(()) } else { Err(Wrong::Value { what: "number of surplus bytes", value, rule }) }
    }

    pub(crate) fn rest(self) -> &'a [u8] {
        self.rest
    }
}

/// Appends 32-bit numbers to `out`.
pub(crate) fn put_u32(out: &mut Vec<u8>, numbers: impl IntoIterator<Item = u32>) {
    out.extend(numbers.into_iter().flat_map(u32::to_le_bytes));
}

/// Appends 64-bit numbers to `out`.
pub(crate) fn put_u64(out: &mut Vec<u8>, numbers: impl IntoIterator<Item = u64>) {
    out.extend(numbers.into_iter().flat_map(u64::to_le_bytes));
}
