//! Features of a device and its state for migration: read and written as bytes, for devices that have any.

use super::Wrong;
use crate::bytes::{Reader, put_u32};

const INDEX: u32 = 0xffff;
const GET: u32 = 1 << 16;
const SET: u32 = 1 << 17;
const PROBE: u32 = 1 << 18;

/// `DEVICE_FEATURE`, request or reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Feature<'a> {
    /// Most bytes of the reply's body; in a reply how many it needs.
    pub room: u32,
    /// Number of the feature.
    pub index: u16,
    /// Whether the feature is read; excludes `set` unless `probe` is set.
    pub get: bool,
    /// Whether the feature is set to `data`.
    pub set: bool,
    /// Only checks whether it could be read or set.
    pub probe: bool,
    /// Data of the feature.
    pub data: &'a [u8],
}

impl<'a> Feature<'a> {
    /// Decodes a request or a reply.
    ///
    /// # Errors
    /// [`Wrong`] when it is too short, or both gets and sets.
    pub fn decode(body: &'a [u8]) -> Result<Self, Wrong> {
        let mut reader = Reader::new("device feature", body);
        let (room, flags) = (reader.u32()?, reader.u32()?);
        let [get, set, probe] = [GET, SET, PROBE].map(|flag| flags & flag != 0);
        if get && set && !probe {
            let rule = "to get and to set exclude each other";
            return Err(Wrong::Value { what: "flags of a device feature", value: flags.into(), rule });
        }
        let index = u16::try_from(flags & INDEX).unwrap_or_default();
        Ok(Self { room, index, get, set, probe, data: reader.rest() })
    }

    /// Appends the encoding to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let flags = [(self.get, GET), (self.set, SET), (self.probe, PROBE)];
        let flags =
            flags.into_iter().filter(|(is, _)| *is).fold(u32::from(self.index), |all, (_, flag)| all | flag);
        put_u32(out, [self.room, flags]);
        out.extend_from_slice(self.data);
    }
}

/// A part of the device's state: `MIG_DATA_READ`, its reply, or `MIG_DATA_WRITE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Migration<'a> {
    /// Most bytes of the reply's body.
    pub room: u32,
    /// Bytes of state wanted, or in `data`.
    pub size: u32,
    /// The state; none in a request to read.
    pub data: &'a [u8],
}

impl<'a> Migration<'a> {
    pub(super) fn decode_read(body: &'a [u8]) -> Result<Self, Wrong> {
        let mut reader = Reader::new("request for migration data", body);
        Ok(Self { room: reader.u32()?, size: reader.u32()?, data: &[] })
    }

    /// Decodes a request to write, or the reply to one to read.
    ///
    /// # Errors
    /// [`Wrong`] if there is less data than its size.
    pub(crate) fn decode_write(body: &'a [u8]) -> Result<Self, Wrong> {
        let mut reader = Reader::new("migration data", body);
        let (room, size) = (reader.u32()?, reader.u32()?);
        Ok(Self { room, size, data: reader.bytes(size.into())? })
    }

    /// Appends the body to `out`, without the data that follows.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_u32(out, [self.room, self.size]);
    }
}
