//! Interrupts: their kinds, and requests to set them up, mask or trigger them.

use super::Wrong;
use crate::bytes::{Reader, put_u32};

/// Most vectors of one kind: MSI-X has 2048 (PCIe base specification 7.7.2.2, "Table Size").
pub(crate) const MOST_VECTORS: u32 = 2048;

const EVENTFD: u32 = 1 << 0;
const MASKABLE: u32 = 1 << 1;
const AUTOMASKED: u32 = 1 << 2;
const NORESIZE: u32 = 1 << 3;

/// The reply to `DEVICE_GET_IRQ_INFO`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IrqInfo {
    /// Kind: 0 INTx, 1 MSI, 2 MSI-X, 3 error, 4 request.
    pub index: u32,
    /// Number of vectors; 0 where the device has none of this kind.
    pub count: u32,
    /// Can signal an eventfd.
    pub eventfd: bool,
    /// Can be masked and unmasked.
    pub maskable: bool,
    /// Masks itself when it fires.
    pub automasked: bool,
    /// Vectors are set up all at once.
    pub noresize: bool,
}

impl IrqInfo {
    /// Size of the encoding, in bytes.
    pub const SIZE: u32 = 16;

    /// Decodes a reply.
    ///
    /// # Errors
    /// [`Wrong`] when it is too short or has more than `MOST_VECTORS`.
    pub fn decode(body: &[u8]) -> Result<Self, Wrong> {
        let mut reader = Reader::new("interrupt info", body);
        let [_argsz, flags, index, count] = [reader.u32()?, reader.u32()?, reader.u32()?, reader.u32()?];
        if count > MOST_VECTORS {
            let rule = "one kind of interrupt has 0x800 vectors at most";
            return Err(Wrong::Value { what: "count of interrupts", value: count.into(), rule });
        }
        let [eventfd, maskable, automasked, noresize] =
            [EVENTFD, MASKABLE, AUTOMASKED, NORESIZE].map(|flag| flags & flag != 0);
        Ok(Self { index, count, eventfd, maskable, automasked, noresize })
    }

    /// Appends the encoding to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let flags = [
            (self.eventfd, EVENTFD),
            (self.maskable, MASKABLE),
            (self.automasked, AUTOMASKED),
            (self.noresize, NORESIZE),
        ];
        let flags = flags.into_iter().filter(|(is, _)| *is).fold(0, |all, (_, flag)| all | flag);
        put_u32(out, [Self::SIZE, flags, self.index, self.count]);
    }
}

/// Action of `DEVICE_SET_IRQS` on vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IrqAction {
    /// Mask the vectors (`VFIO_IRQ_SET_ACTION_MASK`).
    Mask,
    /// Unmask the vectors (`VFIO_IRQ_SET_ACTION_UNMASK`).
    Unmask,
    /// Fire the vectors, or set their eventfds.
    Trigger,
}

/// Vectors that the action applies to, and their data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IrqData<'a> {
    /// All vectors of the range.
    None,
    /// Vectors with a byte other than 0.
    Bool(&'a [u8]),
    /// One eventfd per vector comes with the message; without any, connected vectors are disconnected.
    Eventfd,
}

/// Body of a `DEVICE_SET_IRQS` request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetIrqs<'a> {
    /// Kind, as in [`IrqInfo::index`].
    pub index: u32,
    /// First vector of the range.
    pub start: u32,
    /// Number of vectors; 0 with `Trigger` and `None` switches the whole kind off.
    pub count: u32,
    /// Action on the vectors.
    pub action: IrqAction,
    /// Selection among the vectors.
    pub data: IrqData<'a>,
}

impl<'a> SetIrqs<'a> {
    const SIZE: u32 = 20;

    /// Decodes a request.
    ///
    /// # Errors
    /// [`Wrong`] when it or its `argsz` is too short, it has a byte too many, has more than one kind of data or action
    /// or none, reaches beyond `MOST_VECTORS`, or is empty without switching a whole kind off.
    pub fn decode(body: &'a [u8]) -> Result<Self, Wrong> {
        let mut reader = Reader::new("set of interrupts", body);
        let (argsz, flags) = (reader.u32()?, reader.u32()?);
        let [index, start, count] = [reader.u32()?, reader.u32()?, reader.u32()?];
        if argsz < Self::SIZE && !egm_address::fault!("set-irqs-argsz-unchecked") {
            let rule = "it has to cover the structure (0x14)";
            return Err(Wrong::Value { what: "argsz", value: argsz.into(), rule });
        }
        let end = start.checked_add(count).filter(|end| *end <= MOST_VECTORS);
        if end.is_none() {
            let rule = "start and count have to stay within 0x800 vectors";
            return Err(Wrong::Value { what: "start of a set of interrupts", value: start.into(), rule });
        }
        let wrong = |rule| Wrong::Value { what: "flags of a set of interrupts", value: flags.into(), rule };
        let action = match flags >> 3 {
            1 => IrqAction::Mask,
            2 => IrqAction::Unmask,
            4 => IrqAction::Trigger,
            _ => return Err(wrong("exactly one action (0x8, 0x10, 0x20)")),
        };
        let data = match flags & 7 {
            1 => IrqData::None,
            2 => {
                let bytes = reader.bytes(count.into())?;
                reader.end("there is one byte for each interrupt")?;
                IrqData::Bool(bytes)
            }
            4 => IrqData::Eventfd,
            _ => return Err(wrong("exactly one kind of data (0x1, 0x2, 0x4)")),
        };
        if count == 0 && (start, action, data) != (0, IrqAction::Trigger, IrqData::None) {
            return Err(wrong("without a vector it can only switch all of a kind off (0x21, start 0)"));
        }
        Ok(Self { index, start, count, action, data })
    }

    /// Appends the encoding to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let action = match self.action {
            IrqAction::Mask => 1 << 3,
            IrqAction::Unmask => 1 << 4,
            IrqAction::Trigger => 1 << 5,
        };
        let (data, bytes): (u32, &[u8]) = match self.data {
            IrqData::None => (1, &[]),
            IrqData::Bool(bytes) => (2, bytes),
            IrqData::Eventfd => (4, &[]),
        };
        let size = u32::try_from(bytes.len()).unwrap_or(u32::MAX).saturating_add(Self::SIZE);
        put_u32(out, [size, action | data, self.index, self.start, self.count]);
        out.extend_from_slice(bytes);
    }
}
