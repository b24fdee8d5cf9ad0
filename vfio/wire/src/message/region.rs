//! A region of a device, and which parts of it can be mapped.
//!
//! A list of capabilities holds the parts, linked by offsets that a peer chose: it is only followed forwards, so that
//! it ends. Capabilities other than the sparse mmap areas are ignored. (0x8001, areas with a file each, is only sent to
//! peers that announce `sparse_mmap_fds` in the handshake, which we do not.)

use super::Wrong;
use crate::bytes::{Reader, put_u32, put_u64};

/// Most areas of a region that we take from a peer.
pub const MOST_AREAS: u32 = 4096;

const READ: u32 = 1 << 0;
const WRITE: u32 = 1 << 1;
const MMAP: u32 = 1 << 2;
const CAPS: u32 = 1 << 3;

const SPARSE_MMAP: u16 = 1;
/// Bytes of a capability's header and of the count of areas.
const SPARSE_HEAD: u32 = 16;
const AREA: u32 = 16;

/// Query of `DEVICE_GET_REGION_INFO`, `_REGION_IO_FDS` or `_IRQ_INFO`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Query {
    /// Most bytes of the reply's body.
    pub room: u32,
    /// Number of the region or kind of interrupt.
    pub index: u32,
}

impl Query {
    /// Decodes a query for a kind of interrupt.
    ///
    /// # Errors
    /// [`Wrong`] when it is too short.
    pub fn decode(body: &[u8]) -> Result<Self, Wrong> {
        let mut reader = Reader::new("query", body);
        let [room, _flags, index, _count] = [reader.u32()?, reader.u32()?, reader.u32()?, reader.u32()?];
        Ok(Self { room, index })
    }

    /// Decodes a query for a region.
    ///
    /// # Errors
    /// [`Wrong`] when it is too short.
    pub(crate) fn decode_region(body: &[u8]) -> Result<Self, Wrong> {
        Reader::new("query for a region", body).bytes(RegionInfo::SIZE.into())?;
        Self::decode(body)
    }

    /// Decodes a query for the eventfds of a region.
    ///
    /// # Errors
    /// [`Wrong`] when it is too short, has flags, or a count.
    pub(crate) fn decode_io_fds(body: &[u8]) -> Result<Self, Wrong> {
        let mut reader = Reader::new("query for eventfds", body);
        let [room, flags, index, count] = [reader.u32()?, reader.u32()?, reader.u32()?, reader.u32()?];
        let rule = "a query has neither flags nor a count";
        let wrong = Wrong::Value { what: "flags of a query for eventfds", value: flags.into(), rule };
        if flags | count == 0 { Ok(Self { room, index }) } else { Err(wrong) }
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        put_u32(out, [self.room, 0, self.index, 0]);
    }

    pub(super) fn encode_region(&self, out: &mut Vec<u8>) {
        self.encode(out);
        put_u64(out, [0, 0]);
    }
}

/// A part of a region that can be mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Area {
    /// First byte, in the region.
    pub offset: u64,
    /// Bytes, at least one.
    pub size: u64,
}

/// The reply to `DEVICE_GET_REGION_INFO`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RegionInfo {
    /// Number of the region: 0–5 BARs, 6 ROM, 7 config space, 8 VGA.
    pub index: u32,
    /// Bytes; 0 when there is no such region.
    pub size: u64,
    /// Offset of the region in the file that comes with the message.
    pub offset: u64,
    /// Whether it can be read (`VFIO_REGION_INFO_FLAG_READ`).
    pub read: bool,
    /// Whether it can be written (`VFIO_REGION_INFO_FLAG_WRITE`).
    pub write: bool,
    /// Can be mapped: all of it when there are no `areas`.
    pub mmap: bool,
    /// Parts that can be mapped, in order and apart from each other.
    pub areas: Vec<Area>,
}

/// Content of a reply to `DEVICE_GET_REGION_INFO`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RegionReply {
    /// The whole description, with all areas.
    Whole(RegionInfo),
    /// The query must be repeated with room for this many bytes.
    NeedsRoom(u32),
}

impl RegionInfo {
    /// Size without capabilities, in bytes.
    pub const SIZE: u32 = 32;

    /// Size of the encoding, in bytes.
    #[must_use]
    pub fn size(&self) -> u32 {
        let areas = u32::try_from(self.areas.len()).unwrap_or(u32::MAX);
        let sparse = if areas == 0 { 0 } else { areas.saturating_mul(AREA).saturating_add(SPARSE_HEAD) };
        sparse.saturating_add(Self::SIZE)
    }

    /// Encodes a reply to a peer with `room` bytes for it. If the areas do not fit, they and the file are left out, and
    /// this returns false.
    pub fn encode(&self, room: u32, out: &mut Vec<u8>) -> bool {
        let size = self.size();
        let whole = size <= room;
        let caps = whole && !self.areas.is_empty();
        let flags = [(self.read, READ), (self.write, WRITE), (self.mmap, MMAP), (caps, CAPS)];
        let flags = flags.into_iter().filter(|(is, _)| *is).fold(0, |all, (_, flag)| all | flag);
        put_u32(out, [size, flags, self.index, if caps { Self::SIZE } else { 0 }]);
        put_u64(out, [self.size, self.offset]);
        if caps {
            let version_and_id = 1 << 16 | u32::from(SPARSE_MMAP);
            let count = u32::try_from(self.areas.len()).unwrap_or(u32::MAX);
            put_u32(out, [version_and_id, 0, count, 0]);
            put_u64(out, self.areas.iter().flat_map(|area| [area.offset, area.size]));
        }
        whole
    }

    /// Decodes a reply to a query with `room` bytes.
    ///
    /// # Errors
    /// [`Wrong`] when it is too short, its list of capabilities leads out of it or backwards, or an area is empty, in
    /// another or outside the region.
    pub fn decode(body: &[u8], room: u32) -> Result<RegionReply, Wrong> {
        let mut reader = Reader::new("region info", body);
        let [need, flags, index, first] = [reader.u32()?, reader.u32()?, reader.u32()?, reader.u32()?];
        let [size, offset] = [reader.u64()?, reader.u64()?];
        let what = "offset of a region in its file";
        let rule = "offset and size have to stay below 2^64";
        offset.checked_add(size).ok_or(Wrong::Value { what, value: offset, rule })?;
        if need > room {
            return Ok(RegionReply::NeedsRoom(need));
        }
        let mut areas = if flags & CAPS == 0 { Vec::new() } else { capabilities(body, first)? };
        areas.sort_unstable();
        let mut end = 0;
        for area in &areas {
            let what = "offset of an area that can be mapped";
            let rule = "it has to hold a byte, lie in the region and in no other area";
            let wrong = Wrong::Value { what, value: area.offset, rule };
            let last = area.offset.checked_add(area.size).filter(|last| *last <= size).ok_or(wrong)?;
            if area.size == 0 || area.offset < end {
                return Err(wrong);
            }
            end = last;
        }
        let [read, write, mmap] = [READ, WRITE, MMAP].map(|flag| flags & flag != 0);
        Ok(RegionReply::Whole(Self { index, size, offset, read, write, mmap, areas }))
    }
}

/// The areas in the list that begins at `next`.
fn capabilities(body: &[u8], mut next: u32) -> Result<Vec<Area>, Wrong> {
    let mut areas = Vec::new();
    let mut before = RegionInfo::SIZE.saturating_sub(1);
    while next != 0 {
        if next <= before {
            let rule = "a list of capabilities leads forwards";
            return Err(Wrong::Value { what: "offset of a capability", value: next.into(), rule });
        }
        before = next;
        let mut reader = Reader::new("region info with capabilities", body);
        reader.bytes(next.into())?;
        let id = reader.u16()?;
        let _version = reader.u16()?;
        next = reader.u32()?;
        if id == SPARSE_MMAP {
            let count = reader.u32()?;
            let _reserved = reader.u32()?;
            if count > MOST_AREAS {
                let rule = "a region has 0x1000 areas at most";
                return Err(Wrong::Value { what: "number of areas", value: count.into(), rule });
            }
            for _ in 0..count {
                areas.push(Area { offset: reader.u64()?, size: reader.u64()? });
            }
        }
    }
    Ok(areas)
}
