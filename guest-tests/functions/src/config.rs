//! Configuration space: a header, power management, PCI Express with function-level reset, MSI-X. Pure.

use crate::registers::{PENDING, SIZE, TABLE};

/// Bytes of it: that of a PCI Express function.
pub const LENGTH: usize = 4096;

const COMMAND: usize = 0x04;
const BAR0: usize = 0x10;
const BAR2: usize = 0x18;
const POWER: u8 = 0x40;
const EXPRESS: u8 = 0x50;
const MSIX: u8 = 0x90;
/// Device control (PCI Express base specification 7.5.3.4); bit 15 resets the function.
const DEVICE_CONTROL: usize = EXPRESS as usize + 8;

/// What the function passes for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Vendor.
    pub vendor: u16,
    /// Device.
    pub device: u16,
    /// Class, subclass and programming interface, 24 bits.
    pub class: u32,
}

/// Bytes, and which of their bits can be written.
#[derive(Debug, Clone)]
pub struct Config {
    bytes: Vec<u8>,
    writable: Vec<u8>,
    fresh: Vec<u8>,
}

impl Config {
    /// With a BAR 2 of `bar` bytes (a power of two, 1 MiB at least) and `vectors` (1 to 256).
    #[must_use]
    pub fn new(identity: Identity, bar: u64, vectors: u32) -> Self {
        let nothing = vec![0; LENGTH];
        let mut config = Self { bytes: nothing.clone(), writable: nothing, fresh: Vec::new() };
        let Identity { vendor, device, class } = identity;
        config.put(0, u32::from(device) << 16 | u32::from(vendor), 0);
        // Memory decode, bus mastering, interrupt disable; a list of capabilities.
        config.put(COMMAND, 0x0010_0000, 0x0406);
        config.put(0x08, class << 8 | 1, 0);
        config.put(BAR0, 0, !(SIZE - 1));
        let [low, high] = [0, 32].map(|shift| u32::try_from(!(bar - 1) >> shift & 0xffff_ffff).unwrap_or(0));
        config.put(BAR2, 0xc, low);
        config.put(BAR2 + 4, 0, high);
        config.put(0x2c, u32::from(device) << 16 | u32::from(vendor), 0);
        config.put(0x34, POWER.into(), 0);
        // Power management, version 3: D0 and D3hot, which keeps its state.
        config.put(usize::from(POWER), 0x0003_0001 | u32::from(EXPRESS) << 8, 0);
        config.put(usize::from(POWER) + 4, 0x8, 0x3);
        // An endpoint, version 2, with function-level reset, 16 lanes of 16 GT/s.
        config.put(usize::from(EXPRESS), 0x0002_0010 | u32::from(MSIX) << 8, 0);
        config.put(usize::from(EXPRESS) + 4, 0x1000_8000, 0);
        config.put(DEVICE_CONTROL, 0, 0x7fff);
        config.put(usize::from(EXPRESS) + 0xc, 0x104, 0);
        config.put(usize::from(EXPRESS) + 0x10, 0x0104_0000, 0x3);
        config.put(usize::from(EXPRESS) + 0x2c, 0x1e, 0);
        config.put(usize::from(MSIX), (vectors.clamp(1, 256) - 1) << 16 | 0x11, 0xc000_0000);
        config.put(usize::from(MSIX) + 4, TABLE, 0);
        config.put(usize::from(MSIX) + 8, PENDING, 0);
        config.fresh = config.bytes.clone();
        config
    }

    fn put(&mut self, at: usize, value: u32, writable: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        self.writable[at..at + 4].copy_from_slice(&writable.to_le_bytes());
    }

    /// Fills `data`; beyond the end with ones.
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        data.fill(0xff);
        let known = self.bytes.get(offset..).unwrap_or_default();
        data.iter_mut().zip(known).for_each(|(to, from)| *to = *from);
    }

    /// Takes what of `data` can be written; true when it asks for a function-level reset.
    #[must_use]
    pub fn write(&mut self, offset: usize, data: &[u8]) -> bool {
        for (at, byte) in (offset..LENGTH).zip(data) {
            let mask = self.writable[at];
            self.bytes[at] = self.bytes[at] & !mask | byte & mask;
        }
        let control = (DEVICE_CONTROL + 1).checked_sub(offset).and_then(|index| data.get(index));
        control.is_some_and(|byte| byte & 0x80 != 0)
    }

    /// As after a reset.
    pub fn reset(&mut self) {
        self.bytes.clone_from(&self.fresh);
    }

    /// Whether the function may do DMA.
    #[must_use]
    pub fn is_master(&self) -> bool {
        self.bytes[COMMAND] & 4 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: Identity = Identity { vendor: 0x10de, device: 0x2342, class: 0x03_0200 };

    fn word(config: &Config, at: usize) -> u32 {
        let mut bytes = [0; 4];
        config.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn the_function_is_what_its_ids_say() {
        let config = Config::new(GPU, 64 << 30, 8);
        assert_eq!((word(&config, 0), word(&config, 8)), (0x2342_10de, 0x0302_0001));
        let list = std::iter::successors(Some(word(&config, 0x34) as usize & 0xff), |at| {
            Some(word(&config, *at) as usize >> 8 & 0xff).filter(|next| *next != 0)
        });
        let ids = list.map(|at| word(&config, at) & 0xff);
        assert_eq!(ids.collect::<Vec<_>>(), [0x01, 0x10, 0x11]);
        assert_eq!(word(&config, MSIX.into()) >> 16, 7);
    }

    #[test]
    fn bars_are_sized_by_writing_ones() {
        let mut config = Config::new(GPU, 64 << 30, 8);
        for at in (BAR0..0x28).step_by(4) {
            assert!(!config.write(at, &[0xff; 4]));
        }
        let sizes = (BAR0..0x28).step_by(4).map(|at| word(&config, at));
        assert_eq!(sizes.collect::<Vec<_>>(), [0xffff_c000, 0, 0xc, 0xffff_fff0, 0, 0]);
    }

    #[test]
    fn a_function_level_reset_is_seen_in_a_write_of_any_length() {
        let mut config = Config::new(GPU, 1 << 20, 1);
        assert!(config.write(DEVICE_CONTROL, &[0, 0x80]));
        assert!(config.write(DEVICE_CONTROL + 1, &[0x80]));
        assert!(config.write(DEVICE_CONTROL - 2, &[0, 0, 0, 0x80]));
        assert!(!config.write(DEVICE_CONTROL, &[0x80, 0]));
        assert!(!config.write(DEVICE_CONTROL + 2, &[0x80]));
        assert_eq!(word(&config, DEVICE_CONTROL) & 0x8000, 0, "it reads as 0");
    }

    #[test]
    fn what_a_reset_leaves_is_what_there_was() {
        let mut config = Config::new(GPU, 1 << 20, 1);
        let fresh: Vec<_> = (0..LENGTH).step_by(4).map(|at| word(&config, at)).collect();
        for at in 0..LENGTH {
            let _ = config.write(at, &[0xff]);
        }
        assert!(config.is_master());
        config.reset();
        assert!(!config.is_master());
        assert_eq!((0..LENGTH).step_by(4).map(|at| word(&config, at)).collect::<Vec<_>>(), fresh);
    }
}
