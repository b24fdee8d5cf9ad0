//! A function's 4096 bytes of configuration space: values, which bits the guest may write, and the
//! base address registers (PCI Express Base 6.0 §7.5.1).

use egm_address::{Gpa, Guest, Span};

use super::DecodedBar;
use super::saved::ConfigState;
use crate::plan::{BarKind, BarPlan};
use crate::snapshot::{Mismatch, ensure};

/// Bytes of configuration space.
pub(crate) const CONFIG_SIZE: usize = 4096;

/// Offset of the command register.
pub const COMMAND: u16 = 0x04;
/// Offset of the status register.
pub const STATUS: u16 = 0x06;
/// Offset of the first base address register.
pub const BAR0: u16 = 0x10;
/// Command register: the function answers memory accesses.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command register: the function may write memory and send MSI-X.
pub const COMMAND_BUS_MASTER: u16 = 1 << 2;
/// Command register: no INTx.
pub const COMMAND_INTX_DISABLE: u16 = 1 << 10;

const STATUS_CAPABILITIES: u16 = 1 << 4;
const CAPABILITIES_POINTER: u16 = 0x34;
const FIRST_CAPABILITY: u16 = 0x40;

/// Identity of a function in its header.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    /// Vendor id, assigned by the PCI-SIG.
    pub vendor: u16,
    /// Device id, assigned by the vendor.
    pub device: u16,
    /// Revision id, chosen by the vendor.
    pub revision: u8,
    /// Class code: base class, subclass, programming interface.
    pub class: [u8; 3],
    /// Subsystem vendor id; not used by bridges.
    pub subsystem_vendor: u16,
    /// Subsystem id; not used by bridges.
    pub subsystem: u16,
    /// Header type: 0 for an endpoint, 1 for a bridge.
    pub header_type: u8,
}

/// Configuration space with write masks. Every access is bounded: reads past the end give all ones, writes nothing.
pub(crate) struct ConfigSpace {
    bytes: Box<[u8; CONFIG_SIZE]>,
    writable: Box<[u8; CONFIG_SIZE]>,
    bars: Vec<BarPlan>,
    next_capability: u16,
    last_link: u16,
}

impl ConfigSpace {
    /// The header of `identity` with memory decode off and `bars` already at their planned places.
    pub(crate) fn new(identity: Identity, bars: &[BarPlan]) -> Self {
        let mut config = Self {
            bytes: Box::new([0; CONFIG_SIZE]),
            writable: Box::new([0; CONFIG_SIZE]),
            bars: bars.to_vec(),
            next_capability: FIRST_CAPABILITY,
            last_link: CAPABILITIES_POINTER,
        };
        config.put(0x00, &identity.vendor.to_le_bytes());
        config.put(0x02, &identity.device.to_le_bytes());
        let [base, sub, interface] = identity.class;
        config.put(0x08, &[identity.revision, interface, sub, base]);
        config.put(0x0e, &[identity.header_type]);
        if identity.header_type == 0 {
            config.put(0x2c, &identity.subsystem_vendor.to_le_bytes());
            config.put(0x2e, &identity.subsystem.to_le_bytes());
        }
        config.allow(COMMAND, &(COMMAND_MEMORY | COMMAND_BUS_MASTER | COMMAND_INTX_DISABLE).to_le_bytes());
        config.allow(0x0c, &[0xff]); // cache line size: no effect, but software writes and reads it back
        config.allow(0x3c, &[0xff]); // interrupt line: scratch
        for bar in bars {
            config.set_bar(bar);
        }
        config
    }

    fn set_bar(&mut self, bar: &BarPlan) {
        let register = BAR0.saturating_add(u16::from(bar.index).saturating_mul(4));
        let mask = !bar.span.size().saturating_sub(1);
        let (flags, width) = match bar.kind {
            BarKind::Memory32 => (0b0000, 4),
            BarKind::Memory64 => (0b0100, 8),
            BarKind::Memory64Prefetchable => (0b1100, 8),
        };
        let value = (bar.span.start().get() & mask | flags).to_le_bytes();
        self.put(register, value.get(..width).unwrap_or_default());
        self.allow(register, (mask & !0xf).to_le_bytes().get(..width).unwrap_or_default());
    }

    /// Sets bytes, whatever the guest may write.
    pub(crate) fn put(&mut self, offset: u16, data: &[u8]) {
        for (to, from) in self.bytes.iter_mut().skip(usize::from(offset)).zip(data) {
            *to = *from;
        }
    }

    /// Lets the guest write the bits that are set in `mask`.
    pub(crate) fn allow(&mut self, offset: u16, mask: &[u8]) {
        for (to, from) in self.writable.iter_mut().skip(usize::from(offset)).zip(mask) {
            *to = *from;
        }
    }

    /// Appends a capability (§7.5.3): `body` follows the id and the link. Returns its offset, or `None` when the
    /// 192 bytes for capabilities are used up.
    pub(crate) fn add_capability(&mut self, id: u8, body: &[u8]) -> Option<u16> {
        let at = self.next_capability;
        let length = u16::try_from(body.len()).ok()?.checked_add(2)?;
        let end = at.checked_add(length)?.checked_next_multiple_of(4)?;
        if end > 0x100 {
            return None;
        }
        let status = self.u16(STATUS) | STATUS_CAPABILITIES;
        self.put(STATUS, &status.to_le_bytes());
        self.put(self.last_link, &[u8::try_from(at).ok()?]);
        self.put(at, &[id, 0]);
        self.put(at.checked_add(2)?, body);
        self.last_link = at.checked_add(1)?;
        self.next_capability = end;
        Some(at)
    }

    /// Reads `data.len()` bytes at `offset`.
    pub(crate) fn read(&self, offset: u16, data: &mut [u8]) {
        data.fill(0xff);
        for (to, from) in data.iter_mut().zip(self.bytes.iter().skip(usize::from(offset))) {
            *to = *from;
        }
    }

    /// Writes for the guest: bits outside the mask keep their value. Returns whether the write touched the command
    /// register or a base address register, so that address decoding may have changed.
    #[must_use]
    pub(crate) fn write(&mut self, offset: u16, data: &[u8]) -> bool {
        let from = usize::from(offset);
        for ((old, mask), new) in self.bytes.iter_mut().zip(self.writable.iter()).skip(from).zip(data) {
            *old = *old & !mask | new & mask;
        }
        let end = from.saturating_add(data.len());
        let touches = |first: usize, last: usize| from <= last && end > first;
        touches(usize::from(COMMAND), usize::from(COMMAND)) || touches(0x10, 0x27)
    }

    /// The bits that the guest may write.
    pub(crate) fn saved(&self) -> ConfigState {
        let last = self.writable.iter().rposition(|mask| *mask != 0).map_or(0, |at| at.saturating_add(1));
        let bytes = self.bytes.iter().zip(self.writable.iter()).map(|(byte, mask)| byte & mask);
        ConfigState(bytes.take(last).collect())
    }

    /// Sets them, and no others.
    ///
    /// # Errors
    /// [`Mismatch`]: a bit that the guest cannot write is set, or the length is another function's.
    pub(crate) fn restore(&mut self, saved: &ConfigState) -> Result<(), Mismatch> {
        let ConfigState(saved) = saved;
        let fits = saved.len() == self.saved().0.len()
            && saved.iter().zip(self.writable.iter()).all(|(byte, mask)| byte & !mask == 0);
        ensure(fits, || "its configuration space has other writable bits".to_owned())?;
        for ((byte, mask), new) in self.bytes.iter_mut().zip(self.writable.iter()).zip(saved) {
            *byte = *byte & !mask | new;
        }
        Ok(())
    }

    /// A 16-bit register; all ones past the end.
    pub(crate) fn u16(&self, offset: u16) -> u16 {
        let mut data = [0; 2];
        self.read(offset, &mut data);
        u16::from_le_bytes(data)
    }

    /// A 32-bit register; all ones past the end.
    pub(crate) fn u32(&self, offset: u16) -> u32 {
        let mut data = [0; 4];
        self.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// Where each base address register decodes now; empty while memory decode is off. A register that the guest
    /// has set so that it would wrap decodes nothing.
    pub(crate) fn decoded(&self) -> Vec<DecodedBar> {
        if self.u16(COMMAND) & COMMAND_MEMORY == 0 {
            return Vec::new();
        }
        self.bars.iter().filter_map(|bar| Some(DecodedBar::new(bar.index, self.bar_span(bar)?))).collect()
    }

    fn bar_span(&self, bar: &BarPlan) -> Option<Span<Guest>> {
        let register = BAR0.saturating_add(u16::from(bar.index).saturating_mul(4));
        let low = u64::from(self.u32(register) & !0xf);
        let start = match bar.kind {
            BarKind::Memory32 => low,
            BarKind::Memory64 | BarKind::Memory64Prefetchable => {
                low | u64::from(self.u32(register.saturating_add(4))) << 32
            }
        };
        Span::new(Gpa::new(start), bar.span.size()).ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const IDENTITY: Identity = Identity {
        vendor: 0x1af4,
        device: 0x1042,
        revision: 1,
        class: [1, 0x80, 0],
        subsystem_vendor: 0x1af4,
        subsystem: 0x1100,
        header_type: 0,
    };

    fn config() -> ConfigSpace {
        let span = Span::new(Gpa::new(0x80_0000_0000), 0x8000).unwrap();
        ConfigSpace::new(IDENTITY, &[BarPlan { index: 0, kind: BarKind::Memory64Prefetchable, span }])
    }

    #[test]
    fn a_bar_is_sized_by_writing_ones() {
        let mut config = config();
        assert_eq!((config.u32(0x10), config.u32(0x14)), (0xc, 0x80));
        assert!(config.write(0x10, &[0xff; 4]));
        assert!(config.write(0x14, &[0xff; 4]));
        assert_eq!((config.u32(0x10), config.u32(0x14)), (0xffff_800c, 0xffff_ffff));
        assert!(config.write(0x18, &[0xff; 4]));
        assert_eq!(config.u32(0x18), 0, "a register that is not there reads zero");
    }

    #[test]
    fn what_a_guest_wrote_is_restored_and_no_other_bit() {
        let mut first = config();
        assert!(first.write(COMMAND, &[0xff; 2]) && first.write(0x10, &[0xff; 8]));
        let saved = first.saved();
        let mut second = config();
        second.restore(&saved).unwrap();
        assert_eq!((second.saved(), second.decoded()), (first.saved(), first.decoded()));
        assert_eq!(second.bytes, first.bytes);
        let mut wrong = saved.clone();
        wrong.0[0] = 1;
        assert!(second.restore(&wrong).is_err(), "the vendor");
        assert!(second.restore(&ConfigState(saved.0[1..].to_vec())).is_err());
    }

    #[test]
    fn memory_is_decoded_only_when_enabled() {
        let mut config = config();
        assert!(config.decoded().is_empty());
        assert!(config.write(COMMAND, &COMMAND_MEMORY.to_le_bytes()));
        assert_eq!(
            config.decoded(),
            [DecodedBar::new(0, Span::new(Gpa::new(0x80_0000_0000), 0x8000).unwrap())]
        );
    }

    #[test]
    fn the_capability_list_is_linked_and_bounded() {
        let mut config = config();
        let first = config.add_capability(0x11, &[0; 10]).unwrap();
        let second = config.add_capability(0x09, &[16, 1]).unwrap();
        let mut link = [0; 1];
        config.read(0x34, &mut link);
        assert_eq!(u16::from(link[0]), first);
        config.read(first + 1, &mut link);
        assert_eq!(u16::from(link[0]), second);
        assert_eq!(config.u16(STATUS) & STATUS_CAPABILITIES, STATUS_CAPABILITIES);
        assert_eq!(config.add_capability(0x09, &[0; 200]), None);
    }

    proptest! {
        #[test]
        fn no_guest_write_changes_identity_or_panics(
            writes in prop::collection::vec((any::<u16>(), prop::collection::vec(any::<u8>(), 0..9)), 0..64)
        ) {
            let mut config = config();
            for (offset, data) in writes {
                let _ = config.write(offset, &data);
                for bar in config.decoded() {
                    prop_assert_eq!(bar.span.size(), 0x8000);
                }
            }
            prop_assert_eq!((config.u16(0), config.u16(2), config.u16(0x2c)), (0x1af4, 0x1042, 0x1af4));
        }
    }
}
