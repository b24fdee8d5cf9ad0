//! Memory of the client that a server may reach.

use std::ops::RangeInclusive;

use super::Wrong;
use crate::bytes::{Reader, put_u32, put_u64};

const READ: u32 = 1 << 0;
const WRITE: u32 = 1 << 1;
/// Access by mmap(2) or by pread(2) and pwrite(2), as libvfio-user's clients can demand. Both need a file.
const MMAP: u32 = 1 << 2;
const FILE_IO: u32 = 1 << 3;
const ALL: u32 = 1 << 1;
const MAP_SIZE: u32 = 32;
const UNMAP_SIZE: u32 = 24;
/// Largest `argsz` of an unmap: the largest transfer.
const MOST_UNMAP: u32 = 1 << 20;

/// A window of DMA addresses and the location of its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaMap {
    /// Whether the device may read it.
    pub read: bool,
    /// Whether the device may write it.
    pub write: bool,
    /// First byte, in the file that comes with the message.
    pub offset: u64,
    /// First DMA address of the window.
    pub address: u64,
    /// Bytes: at least one, and its end fits in 64 bits.
    pub size: u64,
    /// Whether the client requires access by the file, which must then come with the message.
    pub by_file: ByFile,
}

/// Kind of access to its memory that a client requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ByFile {
    /// By the file if one comes, by messages otherwise.
    #[default]
    Any,
    /// By a mapping of the file.
    Mmap,
    /// By pread(2) and pwrite(2).
    Io,
}

impl DmaMap {
    /// Decodes a request.
    ///
    /// # Errors
    /// [`Wrong`] when it or its `argsz` is too short, it has unknown flags, is empty, or ends beyond 2^64 as an address or
    /// in the file.
    pub fn decode(body: &[u8]) -> Result<Self, Wrong> {
        let mut reader = Reader::new("DMA map", body);
        let (argsz, flags) = (reader.u32()?, reader.u32()?);
        let [offset, address, size] = [reader.u64()?, reader.u64()?, reader.u64()?];
        bounded("address of a DMA map", address, size)?;
        bounded("file offset of a DMA map", offset, size)?;
        covers(argsz, MAP_SIZE..=u32::MAX)?;
        let by_file = match flags & !(READ | WRITE) {
            0 => ByFile::Any,
            MMAP => ByFile::Mmap,
            FILE_IO => ByFile::Io,
            _ => return Err(unknown("flags of a DMA map", flags)),
        };
        Ok(Self { read: flags & READ != 0, write: flags & WRITE != 0, offset, address, size, by_file })
    }

    /// Appends the encoding of a request to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let by_file = match self.by_file {
            ByFile::Any => 0,
            ByFile::Mmap => MMAP,
            ByFile::Io => FILE_IO,
        };
        let flags = if self.read { READ } else { 0 } | if self.write { WRITE } else { 0 } | by_file;
        put_u32(out, [MAP_SIZE, flags]);
        put_u64(out, [self.offset, self.address, self.size]);
    }
}

/// Windows that a server must release. The reply repeats them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmaUnmap {
    /// The windows of a range, which must contain each of them wholly.
    Window {
        /// First DMA address of the range.
        address: u64,
        /// Bytes of the range: at least one, and its end fits in 64 bits.
        size: u64,
    },
    /// Every window of the client.
    All,
}

impl DmaUnmap {
    /// Decodes a request or a reply.
    ///
    /// # Errors
    /// [`Wrong`] when it is too short, its `argsz` does not fit, it has flags other than the one for all windows, or a range
    /// that is empty, ends beyond 2^64 or comes with that flag.
    pub fn decode(body: &[u8]) -> Result<Self, Wrong> {
        let mut reader = Reader::new("DMA unmap", body);
        let (argsz, flags) = (reader.u32()?, reader.u32()?);
        let [address, size] = [reader.u64()?, reader.u64()?];
        covers(argsz, UNMAP_SIZE..=MOST_UNMAP)?;
        match (flags, address | size) {
            (ALL, 0) => Ok(Self::All),
            (0, _) => {
                bounded("address of a DMA unmap", address, size)?;
                Ok(Self::Window { address, size })
            }
            _ => Err(unknown("flags of a DMA unmap", flags)),
        }
    }

    /// Appends the encoding of a request or a reply to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let (flags, address, size) = match *self {
            Self::Window { address, size } => (0, address, size),
            Self::All => (ALL, 0, 0),
        };
        put_u32(out, [UNMAP_SIZE, flags]);
        put_u64(out, [address, size]);
    }
}

fn covers(argsz: u32, lengths: RangeInclusive<u32>) -> Result<(), Wrong> {
    let rule = "it has to cover the structure and stay within a transfer";
    let wrong = Wrong::Value { what: "argsz", value: argsz.into(), rule };
    if lengths.contains(&argsz) { Ok(()) } else { Err(wrong) }
}

fn unknown(what: &'static str, flags: u32) -> Wrong {
    Wrong::Value {
        what,
        value: flags.into(),
        rule: "an unknown flag, or flags and fields that exclude each other",
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
