//! Features of a device and its state for migration: read and written as bytes, for whoever has any.

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
    /// Which feature.
    pub index: u16,
    /// Asks for it.
    pub get: bool,
    /// Sets it.
    pub set: bool,
    /// Asks whether it could be got or set.
    pub probe: bool,
    /// The feature's own.
    pub data: &'a [u8],
}

impl<'a> Feature<'a> {
    /// Out of a request or a reply.
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

    /// As a body.
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

    /// Out of a request to write, or the reply to one to read.
    ///
    /// # Errors
    /// [`Wrong`] when there is less data than it says.
    pub fn decode_write(body: &'a [u8]) -> Result<Self, Wrong> {
        let mut reader = Reader::new("migration data", body);
        let (room, size) = (reader.u32()?, reader.u32()?);
        Ok(Self { room, size, data: reader.bytes(size.into())? })
    }

    /// The body, but for the data that follows.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_u32(out, [self.room, self.size]);
    }
}
