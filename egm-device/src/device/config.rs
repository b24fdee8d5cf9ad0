//! Configuration space of the function: ids, two BARs, power management, PCI Express with function-level reset, MSI-X, and
//! the vendor capability that carries what ACPI would. Pure.

use super::core::Facts;
use super::registers::{MAGIC, PENDING, SIZE, TABLE, VECTORS, VERSION};

/// Bytes of it: that of a PCI Express function.
pub const LENGTH: usize = 4096;

const COMMAND: usize = 0x04;
const BAR0: usize = 0x10;
const BAR2: usize = 0x18;
const POWER: u8 = 0x40;
const EXPRESS: u8 = 0x50;
const MSIX: u8 = 0x90;
/// Offset of the vendor capability.
pub const VENDOR: u8 = 0xa0;
const VENDOR_LENGTH: u8 = 32;
/// Device control (PCI Express base specification 7.5.3.4); bit 15 resets the function.
const DEVICE_CONTROL: usize = EXPRESS as usize + 8;
/// Memory controller, RAM (PCI code and ID assignment specification 1.6).
const CLASS: u32 = 0x05_0000;

/// PCI vendor and device id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Id {
    /// Vendor id, as PCI-SIG assigns it.
    pub vendor: u16,
    /// Device id of that vendor.
    pub device: u16,
}

impl Default for Id {
    /// No vendor's id: see `DESIGN.md`, "The device".
    fn default() -> Self {
        Self { vendor: 0xe60d, device: 1 }
    }
}

impl std::str::FromStr for Id {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let number = |text: &str| {
            let digits = text.len() == 4 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            u16::from_str_radix(text, 16).ok().filter(|_| digits)
        };
        let halves =
            text.split_once(':').and_then(|(vendor, device)| Some((number(vendor)?, number(device)?)));
        match halves {
            // A bus answers all ones for no function and 0001 for one that is not ready (base specification 2.3.2).
            Some((vendor, device)) if !matches!(vendor, 0 | 1 | 0xffff) => Ok(Self { vendor, device }),
            _ => Err(IdError(text.to_owned())),
        }
    }
}

/// Text that is no PCI id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not vendor:device in four hex digits each, as e60d:0001, with a vendor other than 0000, 0001 and ffff"
)]
pub struct IdError(String);

/// Bytes, and which of their bits can be written.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    bytes: Vec<u8>,
    writable: Vec<u8>,
    initial: Vec<u8>,
}

impl Config {
    pub(crate) fn new(id: Id, facts: &Facts) -> Self {
        let nothing = vec![0; LENGTH];
        let mut config = Self { bytes: nothing.clone(), writable: nothing, initial: Vec::new() };
        let ids = u32::from(id.device) << 16 | u32::from(id.vendor);
        config.put(0, ids, 0);
        // Memory decode, bus mastering (without which no MSI-X), interrupt disable; a list of capabilities.
        config.put(COMMAND, 0x0010_0000, 0x0406);
        config.put(0x08, CLASS << 8 | VERSION, 0);
        config.put(BAR0, 0, !SIZE.wrapping_sub(1));
        let [low, high] = halves(!facts.bar().wrapping_sub(1));
        config.put(BAR2, 0xc, low & !0xf);
        config.put(BAR2.saturating_add(4), 0, high);
        config.put(0x2c, ids, 0);
        config.put(0x34, POWER.into(), 0);
        config.standard(facts.msix);
        config.vendor(facts);
        config.initial = config.bytes.clone();
        config
    }

    fn standard(&mut self, msix: bool) {
        // Power management, version 3: D0 and D3hot, which keeps its state.
        self.put_at(POWER, 0, 0x0003_0001 | u32::from(EXPRESS) << 8, 0);
        self.put_at(POWER, 4, 0x8, 0x3);
        // An endpoint, version 2, with function-level reset; its link is nominal: one lane of 2.5 GT/s.
        let next = if msix { MSIX } else { VENDOR };
        self.put_at(EXPRESS, 0, 0x0002_0010 | u32::from(next) << 8, 0);
        self.put_at(EXPRESS, 4, 0x1000_8000, 0);
        self.put_at(EXPRESS, 8, 0, 0x7fff);
        self.put_at(EXPRESS, 0xc, 0x11, 0);
        self.put_at(EXPRESS, 0x10, 0x0011_0000, 0x3);
        self.put_at(EXPRESS, 0x2c, 0x2, 0);
        if msix {
            self.vectors();
        }
    }

    fn vectors(&mut self) {
        let vectors = VECTORS.saturating_sub(1) << 16;
        self.put_at(MSIX, 0, vectors | u32::from(VENDOR) << 8 | 0x11, 0xc000_0000);
        self.put_at(MSIX, 4, TABLE, 0);
        self.put_at(MSIX, 8, PENDING, 0);
    }

    fn vendor(&mut self, facts: &Facts) {
        let head = VERSION << 24 | u32::from(VENDOR_LENGTH) << 16 | 0x09;
        let bars_and_page = facts.page.trailing_zeros() << 16 | 2;
        let ([size_low, size_high], [base_low, base_high]) = (halves(facts.size), halves(facts.base));
        let words = [head, MAGIC, bars_and_page, facts.pxm(), size_low, size_high, base_low, base_high];
        for (at, word) in (0..).step_by(4).zip(words) {
            self.put_at(VENDOR, at, word, 0);
        }
    }

    fn put_at(&mut self, capability: u8, at: usize, value: u32, writable: u32) {
        self.put(usize::from(capability).saturating_add(at), value, writable);
    }

    fn put(&mut self, at: usize, value: u32, writable: u32) {
        for (bytes, word) in [(&mut self.bytes, value), (&mut self.writable, writable)] {
            let room = bytes.get_mut(at..).into_iter().flatten();
            room.zip(word.to_le_bytes()).for_each(|(to, from)| *to = from);
        }
    }

    /// Fills `data`; beyond the end with ones.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let from = usize::try_from(offset).ok().and_then(|offset| self.bytes.get(offset..));
        data.iter_mut().zip(from.unwrap_or_default()).for_each(|(to, from)| *to = *from);
    }

    /// Writes the writable bits of `data`; true when it asks for a function-level reset.
    #[must_use]
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        let Ok(offset) = usize::try_from(offset) else { return false };
        let bytes = self.bytes.iter_mut().zip(&self.writable).skip(offset);
        for ((byte, mask), new) in bytes.zip(data) {
            *byte = *byte & !mask | new & mask;
        }
        let control = DEVICE_CONTROL.saturating_add(1).checked_sub(offset);
        control.and_then(|index| data.get(index)).is_some_and(|byte| byte & 0x80 != 0)
    }

    /// As after a reset.
    pub(crate) fn reset(&mut self) {
        self.bytes.clone_from(&self.initial);
    }
}

/// A number of 64 bits as two of 32, the lower first.
fn halves(number: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = number.to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts {
            size: 0x1_8000_0000,
            base: 0x40_0000,
            page: 0x1_0000,
            pxm: Some(4),
            scrub_at_reset: false,
            msix: true,
        }
    }

    fn word(config: &Config, at: u64) -> u32 {
        let mut bytes = [0; 4];
        config.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn capabilities(config: &Config) -> Vec<u32> {
        let list = std::iter::successors(Some(u64::from(word(config, 0x34)) & 0xff), |at| {
            Some(u64::from(word(config, *at)) >> 8 & 0xff).filter(|next| *next != 0)
        });
        list.map(|at| word(config, at) & 0xff).collect()
    }

    #[test]
    fn the_function_is_memory_with_an_unassigned_id_and_four_capabilities() {
        let config = Config::new(Id::default(), &facts());
        assert_eq!((word(&config, 0), word(&config, 8)), (0x0001_e60d, 0x0500_0001));
        assert_eq!(capabilities(&config), [0x01, 0x10, 0x11, 0x09]);
    }

    #[test]
    fn without_msi_x_there_is_neither_its_capability_nor_a_bit_of_it_to_write() {
        let mut config = Config::new(Id::default(), &Facts { msix: false, ..facts() });
        assert_eq!(capabilities(&config), [0x01, 0x10, 0x09]);
        assert!(!config.write(MSIX.into(), &[0xff; 12]));
        assert_eq!([0, 4, 8].map(|at| word(&config, u64::from(MSIX) + at)), [0; 3]);
    }

    #[test]
    fn the_vendor_capability_is_what_the_design_states_byte_by_byte() {
        let mut bytes = [0; 32];
        Config::new(Id::default(), &facts()).read(VENDOR.into(), &mut bytes);
        let expected = [
            &[0x09, 0, 32, 1][..],
            b"EGMD",
            &[2, 0, 16, 0],
            &[4, 0, 0, 0],
            &[0, 0, 0, 0x80, 1, 0, 0, 0],
            &[0, 0, 0x40, 0, 0, 0, 0, 0],
        ];
        assert_eq!(bytes[..], expected.concat());
    }

    #[test]
    fn bars_are_sized_by_writing_ones_and_bar_2_is_the_next_power_of_two() {
        let mut config = Config::new(Id::default(), &facts());
        for at in (0x10..0x28).step_by(4) {
            assert!(!config.write(at, &[0xff; 4]));
        }
        let sizes = (0x10..0x28).step_by(4).map(|at| word(&config, at));
        assert_eq!(sizes.collect::<Vec<_>>(), [0xffff_c000, 0, 0xc, 0xffff_fffe, 0, 0]);
        let one_page = Facts { size: 0x1000, page: 0x1000, ..facts() };
        let mut config = Config::new(Id::default(), &one_page);
        assert!(!config.write(0x18, &[0xff; 8]));
        assert_eq!((word(&config, 0x18), word(&config, 0x1c)), (0xffff_f00c, 0xffff_ffff));
    }

    #[test]
    fn a_function_level_reset_is_seen_in_a_write_of_any_length() {
        let mut config = Config::new(Id::default(), &facts());
        let control = DEVICE_CONTROL as u64;
        assert!(config.write(control, &[0, 0x80]));
        assert!(config.write(control + 1, &[0x80]));
        assert!(config.write(control - 2, &[0, 0, 0, 0x80]));
        assert!(!config.write(control, &[0x80, 0]));
        assert!(!config.write(control + 2, &[0x80]));
        assert!(!config.write(u64::MAX, &[0xff; 8]));
        assert_eq!(word(&config, control) & 0x8000, 0, "it reads as 0");
    }

    #[test]
    fn what_a_reset_leaves_is_what_there_was() {
        let mut config = Config::new(Id::default(), &facts());
        let all =
            |config: &Config| (0..LENGTH as u64).step_by(4).map(|at| word(config, at)).collect::<Vec<_>>();
        let initial = all(&config);
        for at in 0..LENGTH as u64 {
            let _ = config.write(at, &[0xff]);
        }
        assert_ne!(all(&config), initial);
        config.reset();
        assert_eq!(all(&config), initial);
    }

    #[test]
    fn an_id_is_two_numbers_of_four_digits_that_a_bus_can_answer() {
        assert_eq!("1234:00Ab".parse(), Ok(Id { vendor: 0x1234, device: 0xab }));
        for wrong in
            ["", "1234", "12345:0", "+123:0001", "ffff:0001", "0000:0001", "0001:0001", "1234:1", "é234:0001"]
        {
            assert!(wrong.parse::<Id>().is_err(), "{wrong}");
        }
    }
}
