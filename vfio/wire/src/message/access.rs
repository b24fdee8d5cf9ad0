//! Reads and writes: of a region by the client, of the client's memory by the server.

use super::{Command, Wrong};
use crate::bytes::{Reader, put_u32, put_u64};

/// Bytes of a region: the request to read them, and the head of every message that carries or acknowledges them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// First byte, in the region.
    pub offset: u64,
    /// Region index, as in [`RegionInfo::index`](super::RegionInfo::index).
    pub region: u32,
    /// Length in bytes; a session refuses more than the agreed `max_data_xfer_size`.
    pub count: u32,
}

impl Access {
    /// Size of the encoding, in bytes.
    pub const SIZE: u32 = 16;

    /// Decodes the access at the head of a body; ignores the data that follows.
    ///
    /// # Errors
    /// [`Wrong`] when it is too short, or the access ends beyond 2^64.
    pub fn decode(body: &[u8]) -> Result<Self, Wrong> {
        Self::split(body).map(|(access, _)| access)
    }

    /// Splits a body into the access and its data. (In a reply to a read, the count may differ from the requested one.)
    ///
    /// # Errors
    /// As [`Access::decode`].
    pub fn split(body: &[u8]) -> Result<(Self, &[u8]), Wrong> {
        let mut reader = Reader::new("region access", body);
        let access = Self { offset: reader.u64()?, region: reader.u32()?, count: reader.u32()? };
        if access.offset.checked_add(u64::from(access.count)).is_none() {
            let rule = "an access has to end below 2^64";
            return Err(Wrong::Value { what: "offset of a region access", value: access.offset, rule });
        }
        Ok((access, reader.rest()))
    }

    /// Appends the encoding to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_u64(out, [self.offset]);
        put_u32(out, [self.region, self.count]);
    }
}

/// A write to a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write<'a> {
    /// Region, offset and length.
    pub access: Access,
    /// Bytes to write, as many as `access` counts.
    pub data: &'a [u8],
}

impl<'a> Write<'a> {
    /// Decodes a body.
    ///
    /// # Errors
    /// [`Wrong`] if there is less or more data than the count.
    pub fn decode(body: &'a [u8]) -> Result<Self, Wrong> {
        let (write, rest) = Self::split(body)?;
        rest.end("a write has as many bytes as it counts")?;
        Ok(write)
    }

    fn split(body: &'a [u8]) -> Result<(Self, Reader<'a>), Wrong> {
        let (access, rest) = Access::split(body)?;
        let mut rest = Reader::new("data of a region write", rest);
        let data = rest.bytes(access.count.into())?;
        Ok((Self { access, data }, rest))
    }
}

/// Several writes of 8 bytes at most, checked when decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Writes<'a>(&'a [u8]);

impl<'a> Writes<'a> {
    /// Size of one entry, in bytes.
    const SIZE: usize = 24;

    /// Decodes a body.
    ///
    /// # Errors
    /// [`Wrong`] if there are fewer entries than the count, or one has more than 8 bytes.
    pub fn decode(body: &'a [u8]) -> Result<Self, Wrong> {
        let mut reader = Reader::new("multiple region writes", body);
        let count = reader.u64()?;
        let all = reader.bytes(count.saturating_mul(Self::SIZE as u64))?;
        for one in all.chunks(Self::SIZE) {
            let access = Access::decode(one)?;
            if access.count > 8 {
                let rule = "one of several writes has 8 bytes at most";
                let value = access.count.into();
                return Err(Wrong::Value { what: "count of a region write", value, rule });
            }
        }
        Ok(Self(all))
    }

    /// Iterates over the writes, in order.
    pub fn iter(&self) -> impl Iterator<Item = Write<'a>> {
        self.0.chunks(Self::SIZE).filter_map(|one| Write::split(one).ok().map(|(write, _)| write))
    }

    /// Number of writes, 24 bytes of the body each.
    #[must_use]
    pub fn count(&self) -> u64 {
        (self.0.len() / Self::SIZE) as u64
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        put_u64(out, [self.count()]);
        out.extend_from_slice(self.0);
    }

    /// Encodes writes of at most 8 bytes as entries of such a message; keeps the first 8 bytes of a longer one.
    #[must_use]
    pub fn entries(writes: &[Write<'_>]) -> Vec<u8> {
        let mut out = Vec::with_capacity(writes.len().saturating_mul(Self::SIZE));
        for write in writes {
            let (kept, length) = write.data.get(..8).map_or((write.data, write.data.len()), |kept| (kept, 8));
            let count = u32::try_from(length).unwrap_or(8);
            Access { count, ..write.access }.encode(&mut out);
            out.extend_from_slice(kept);
            out.extend(std::iter::repeat_n(0, 8_usize.saturating_sub(length)));
        }
        out
    }

    /// Wraps entries that [`Writes::entries`] made.
    ///
    /// # Errors
    /// As [`Writes::decode`].
    pub fn of(entries: &'a [u8]) -> Result<Self, Wrong> {
        let whole = entries.len().checked_rem(Self::SIZE) == Some(0);
        let what = "multiple region writes";
        whole.then_some(Self(entries)).ok_or(Wrong::Short { what, have: entries.len(), need: Self::SIZE })
    }
}

/// Bytes of the client's memory, by their DMA address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaAccess {
    /// DMA address of the first byte.
    pub address: u64,
    /// Length in bytes; the end stays below 2^64.
    pub count: u64,
}

impl DmaAccess {
    /// Splits a body into the access and its data.
    ///
    /// # Errors
    /// [`Wrong`] when it is too short, or the access ends beyond 2^64.
    pub fn split(body: &[u8]) -> Result<(Self, &[u8]), Wrong> {
        let mut reader = Reader::new("access to memory", body);
        let access = Self { address: reader.u64()?, count: reader.u64()? };
        if access.address.checked_add(access.count).is_none() {
            let rule = "an access has to end below 2^64";
            return Err(Wrong::Value { what: "address of a memory access", value: access.address, rule });
        }
        Ok((access, reader.rest()))
    }

    /// Appends the encoding to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_u64(out, [self.address, self.count]);
    }
}

/// Request of a server to its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call<'a> {
    /// Read of the client's memory.
    Read(DmaAccess),
    /// Write to the client's memory, with as many bytes as the access counts.
    Write(DmaAccess, &'a [u8]),
}

impl<'a> Call<'a> {
    /// Decodes the request of `command` with `body`.
    ///
    /// # Errors
    /// [`Wrong`] if the bytes do not fit the command.
    pub fn decode(command: u16, body: &'a [u8]) -> Result<Self, Wrong> {
        let (access, rest) = DmaAccess::split(body)?;
        match Command::try_from(command)? {
            Command::DmaRead => Ok(Self::Read(access)),
            Command::DmaWrite => {
                let data = Reader::new("data of a write to memory", rest).bytes(access.count)?;
                Ok(Self::Write(access, data))
            }
            _ => Err(Wrong::Command { command }),
        }
    }

    /// Command that carries the request.
    #[must_use]
    pub fn command(&self) -> Command {
        if let Self::Read(_) = self { Command::DmaRead } else { Command::DmaWrite }
    }

    /// Range of client memory.
    #[must_use]
    pub fn access(&self) -> DmaAccess {
        let (Self::Read(access) | Self::Write(access, _)) = self;
        *access
    }

    /// Data that follows the access in the message.
    #[must_use]
    pub fn data(&self) -> &'a [u8] {
        if let Self::Write(_, data) = self { data } else { &[] }
    }
}
