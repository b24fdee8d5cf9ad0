//! Number of a device's regions and kinds of interrupt.

use super::Wrong;
use crate::bytes::{Reader, put_u32};

const RESET: u32 = 1 << 0;
const PCI: u32 = 1 << 1;

/// The reply to `DEVICE_GET_INFO`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Whether the device can be reset.
    pub resettable: bool,
    /// Regions: for a PCI function 9 or more.
    pub regions: u32,
    /// Kinds of interrupts: for a PCI function 5 or more.
    pub irqs: u32,
}

impl DeviceInfo {
    /// Size of the encoding, in bytes.
    pub const SIZE: u32 = 16;

    /// Decodes a reply.
    ///
    /// # Errors
    /// [`Wrong`] when it is too short or no PCI function.
    pub fn decode(body: &[u8]) -> Result<Self, Wrong> {
        let mut reader = Reader::new("device info", body);
        let [_argsz, flags, regions, irqs] = [reader.u32()?, reader.u32()?, reader.u32()?, reader.u32()?];
        if flags & PCI == 0 {
            return Err(Wrong::Value {
                what: "device flags",
                value: flags.into(),
                rule: "only PCI functions (0x2)",
            });
        }
        Ok(Self { resettable: flags & RESET != 0, regions, irqs })
    }

    /// Appends the encoding of a reply to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let flags = PCI | if self.resettable { RESET } else { 0 };
        put_u32(out, [Self::SIZE, flags, self.regions, self.irqs]);
    }

    /// Decodes a request: room for the reply, in bytes.
    pub(super) fn decode_request(body: &[u8]) -> Result<u32, Wrong> {
        let mut reader = Reader::new("device info request", body);
        let [room, ..] = [reader.u32()?, reader.u32()?, reader.u32()?, reader.u32()?];
        Ok(room)
    }

    pub(super) fn encode_request(room: u32, out: &mut Vec<u8>) {
        put_u32(out, [room, 0, 0, 0]);
    }
}
