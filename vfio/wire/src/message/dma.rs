//! Which memory of the client a server may reach.

use super::Wrong;
use crate::bytes::{Reader, put_u32, put_u64};

const READ: u32 = 1 << 0;
const WRITE: u32 = 1 << 1;
const DIRTY_BITMAP: u32 = 1 << 0;
const ALL: u32 = 1 << 1;
const MAP_SIZE: u32 = 32;
const UNMAP_SIZE: u32 = 24;

/// A window of DMA addresses and where its memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaMap {
    /// Whether the device may read it.
    pub read: bool,
    /// Whether the device may write it.
    pub write: bool,
    /// First byte, in the file that comes with the message.
    pub offset: u64,
    /// First DMA address.
    pub address: u64,
    /// Bytes: at least one, and its end fits in 64 bits.
    pub size: u64,
}

impl DmaMap {
    /// Out of a request.
    ///
    /// # Errors
    /// [`Wrong`] when it is too short, empty, or ends beyond 2^64 as an address or in the file.
    pub fn decode(body: &[u8]) -> Result<Self, Wrong> {
        let mut reader = Reader::new("DMA map", body);
        let [_argsz, flags] = [reader.u32()?, reader.u32()?];
        let [offset, address, size] = [reader.u64()?, reader.u64()?, reader.u64()?];
        bounded("address of a DMA map", address, size)?;
        bounded("file offset of a DMA map", offset, size)?;
        Ok(Self { read: flags & READ != 0, write: flags & WRITE != 0, offset, address, size })
    }

    /// As a request.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let flags = if self.read { READ } else { 0 } | if self.write { WRITE } else { 0 };
        put_u32(out, [MAP_SIZE, flags]);
        put_u64(out, [self.offset, self.address, self.size]);
    }
}

/// What a server has to let go. The reply repeats it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmaUnmap {
    /// The windows of a range, of which none lies there in part.
    Window {
        /// First DMA address.
        address: u64,
        /// Bytes.
        size: u64,
    },
    /// Every window.
    All,
}

impl DmaUnmap {
    /// Out of a request or a reply.
    ///
    /// # Errors
    /// [`Wrong`] when it is too short, empty, ends beyond 2^64 or asks for a bitmap of dirty pages.
    pub fn decode(body: &[u8]) -> Result<Self, Wrong> {
        let mut reader = Reader::new("DMA unmap", body);
        let [_argsz, flags] = [reader.u32()?, reader.u32()?];
        let [address, size] = [reader.u64()?, reader.u64()?];
        if flags & DIRTY_BITMAP != 0 {
            let rule = "dirty pages are not kept here";
            return Err(Wrong::Value { what: "flags of a DMA unmap", value: flags.into(), rule });
        }
        if flags & ALL != 0 {
            return Ok(Self::All);
        }
        bounded("address of a DMA unmap", address, size)?;
        Ok(Self::Window { address, size })
    }

    /// As a request or a reply.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let (flags, address, size) = match *self {
            Self::Window { address, size } => (0, address, size),
            Self::All => (ALL, 0, 0),
        };
        put_u32(out, [UNMAP_SIZE, flags]);
        put_u64(out, [address, size]);
    }
}

fn bounded(what: &'static str, first: u64, size: u64) -> Result<(), Wrong> {
    let last = size.checked_sub(1).and_then(|more| first.checked_add(more));
    last.map(|_| ()).ok_or(Wrong::Value {
        what,
        value: first,
        rule: "it has to hold a byte and end below 2^64",
    })
}
