//! The patch table: for each bit of a configuration space, which side answers a read, and which keeps or gets a write.

use crate::pci::registers::EXPRESS;

/// Eight bits of a configuration space.
#[derive(Debug, Clone, Copy, Default)]
struct Byte {
    /// Value that the guest reads in bits with `live` 0.
    value: u8,
    /// `value` after a reset.
    initial: u8,
    /// Bits that are read from the device.
    live: u8,
    /// Bits of `value` that the guest changes.
    store: u8,
    /// Bits that a write forwards to the device.
    forward: u8,
    /// Value that the device gets in the other bits of such a byte.
    fill: u8,
}

/// A write for the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forward {
    /// Offset in the configuration space.
    pub offset: u16,
    /// Bytes, 1 at least and as many as the guest wrote at most.
    pub data: Vec<u8>,
}

/// Treatment of a register's bits; a bit in none of the masks is a constant of ours.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Masks {
    /// Read from the device.
    pub(super) live: u32,
    /// Kept here as the guest writes it.
    pub(super) store: u32,
    /// Written to the device.
    pub(super) forward: u32,
}

/// A configuration space with a rule for every bit.
#[derive(Debug, Clone)]
pub(super) struct Image(Box<[Byte]>);

impl Image {
    /// 4096 bytes that read as zero and cannot be written.
    pub(super) fn new() -> Self {
        Self(vec![Byte::default(); usize::from(EXPRESS)].into_boxed_slice())
    }

    fn bytes(&mut self, offset: u16, count: usize) -> impl Iterator<Item = &mut Byte> {
        self.0.iter_mut().skip(usize::from(offset)).take(count)
    }

    /// Sets the rule of a register of `width` bytes, 4 at most: `value` is the initial value of its own bits, `fill`
    /// what the device gets in the bits that are not forwarded.
    pub(super) fn register(&mut self, offset: u16, width: u8, masks: Masks, value: u32, fill: u32) {
        let Masks { live, store, forward } = masks;
        let columns = [value, live, store, forward, fill].map(u32::to_le_bytes);
        for (index, byte) in self.bytes(offset, usize::from(width.min(4))).enumerate() {
            let [value, live, store, forward, fill] =
                columns.map(|column| column.get(index).copied().unwrap_or_default());
            *byte = Byte { value, initial: value, live, store, forward, fill };
        }
    }

    /// Passes `count` bytes through: reads go to the device, and writes too if `write` is set.
    pub(super) fn expose(&mut self, offset: u16, count: u16, write: bool) {
        let forward = if write { 0xff } else { 0 };
        for byte in self.bytes(offset, usize::from(count)) {
            *byte = Byte { live: 0xff, forward, ..Byte::default() };
        }
    }

    /// Makes the bytes from `offset` on constants of these values: no write changes them.
    pub(super) fn fix(&mut self, offset: u16, values: &[u8]) {
        for (byte, value) in self.bytes(offset, values.len()).zip(values) {
            *byte = Byte { value: *value, initial: *value, ..Byte::default() };
        }
    }

    /// Sets the values that the guest reads in bits of ours, whatever it may write; a reset undoes it.
    pub(super) fn set(&mut self, offset: u16, values: &[u8]) {
        for (byte, value) in self.bytes(offset, values.len()).zip(values) {
            byte.value = *value;
        }
    }

    /// A little-endian register of ours, `width` bytes, 8 at most; zero past the end.
    pub(super) fn get(&self, offset: u16, width: usize) -> u64 {
        let bytes = self.0.iter().skip(usize::from(offset)).take(width.min(8));
        bytes.rev().fold(0, |value, byte| value << 8 | u64::from(byte.value))
    }

    /// Whether any bit of these bytes is the device's.
    pub(super) fn is_live(&self, offset: u16, count: usize) -> bool {
        self.0.iter().skip(usize::from(offset)).take(count).any(|byte| byte.live != 0)
    }

    /// Puts our bits over the device's; past the end all ones.
    pub(super) fn read(&self, offset: u16, data: &mut [u8]) {
        let mut bytes = self.0.iter().skip(usize::from(offset));
        for out in data {
            *out = bytes.next().map_or(0xff, |byte| byte.value & !byte.live | *out & byte.live);
        }
    }

    /// Stores the bits that we keep and returns the writes that the device must get, in ascending runs.
    pub(super) fn write(&mut self, offset: u16, data: &[u8]) -> Vec<Forward> {
        let mut runs = Runs::default();
        let offsets = offset..=u16::MAX;
        for ((byte, new), at) in self.bytes(offset, data.len()).zip(data).zip(offsets) {
            byte.value = byte.value & !byte.store | new & byte.store;
            let forward = if egm_address::fault!("hidden-capability-written") { 0xff } else { byte.forward };
            runs.push(at, (forward != 0).then_some(new & forward | byte.fill & !forward));
        }
        runs.done
    }

    /// Value that the device must have in a register for it to agree with ours.
    pub(super) fn hardware(&self, offset: u16, width: usize) -> Forward {
        let bytes = self.0.iter().skip(usize::from(offset)).take(width);
        let data = bytes.map(|byte| byte.value & byte.forward | byte.fill & !byte.forward).collect();
        Forward { offset, data }
    }

    /// Restores every initial value.
    pub(super) fn reset(&mut self) {
        for byte in &mut self.0 {
            byte.value = byte.initial;
        }
    }
}

/// Bytes collected into runs without gaps.
#[derive(Default)]
struct Runs {
    done: Vec<Forward>,
    open: bool,
}

impl Runs {
    fn push(&mut self, offset: u16, byte: Option<u8>) {
        match (byte, self.done.last_mut().filter(|_| self.open)) {
            (Some(byte), Some(run)) => run.data.push(byte),
            (Some(byte), None) => self.done.push(Forward { offset, data: vec![byte] }),
            (None, _) => {}
        }
        self.open = byte.is_some();
    }
}
