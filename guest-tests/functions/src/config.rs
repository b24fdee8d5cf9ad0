//! Configuration space: a header, power management, PCI Express with function-level reset, MSI-X. Pure.

use crate::registers::{GRACE_SIZE, PENDING, SIZE, TABLE};

/// Bytes of it: that of a PCI Express function.
pub const LENGTH: usize = 4096;

const COMMAND: usize = 0x04;
const BAR0: usize = 0x10;
const BAR2: usize = 0x18;
const POWER: u8 = 0x40;
const EXPRESS: u8 = 0x50;
const MSIX: u8 = 0x90;
/// Capabilities of a Grace GPU: advanced error reporting, then the one that NVIDIA's driver looks for.
const ERRORS: usize = 0x100;
const DESIGNATED: usize = 0x148;
/// Device control (PCI Express base specification 7.5.3.4) in its capability; bit 15 resets the function.
const DEVICE_CONTROL: usize = 8;

/// PCI IDs that the function presents.
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
    /// Offset of device control.
    control: usize,
}

impl Config {
    /// With a BAR 2 of `bar` bytes (a power of two, 1 MiB at least) and `vectors` (1 to 256).
    #[must_use]
    pub fn new(identity: Identity, bar: u64, vectors: u32) -> Self {
        let mut config = Self::over(vec![0; LENGTH], usize::from(EXPRESS) + DEVICE_CONTROL);
        let Identity { vendor, device, class } = identity;
        config.put(0, u32::from(device) << 16 | u32::from(vendor), 0);
        // Memory decode, bus mastering, interrupt disable; a list of capabilities.
        config.put(COMMAND, 0x0010_0000, 0x0406);
        config.put(0x08, class << 8 | 1, 0);
        config.put_bars(SIZE, bar);
        config.put(0x2c, u32::from(device) << 16 | u32::from(vendor), 0);
        config.put(0x34, POWER.into(), 0);
        // Power management, version 3: D0 and D3hot, which keeps its state.
        config.put(usize::from(POWER), 0x0003_0001 | u32::from(EXPRESS) << 8, 0);
        config.put(usize::from(POWER) + 4, 0x8, 0x3);
        // An endpoint, version 2, with function-level reset, 16 lanes of 16 GT/s.
        config.put(usize::from(EXPRESS), 0x0002_0010 | u32::from(MSIX) << 8, 0);
        config.put(usize::from(EXPRESS) + 4, 0x1000_8000, 0);
        config.put(config.control, 0, 0x7fff);
        config.put(usize::from(EXPRESS) + 0xc, 0x104, 0);
        config.put(usize::from(EXPRESS) + 0x10, 0x0104_0000, 0x3);
        config.put(usize::from(EXPRESS) + 0x2c, 0x1e, 0);
        config.put_msix(MSIX.into(), 0, vectors);
        config.fresh = config.bytes.clone();
        config
    }

    /// The configuration space of a GPU that shares its memory with a Grace processor: BAR 0 has a real one's size, and
    /// the GPU reports errors. A capability of NVIDIA's states to Linux' nvgrace-gpu that all memory can be cached (as
    /// of Grace Blackwell). Without it the driver makes a BAR 2 from the memory's end, in place of the function's.
    #[must_use]
    pub fn grace(identity: Identity, bar: u64, vectors: u32) -> Self {
        let mut config = Self::new(identity, bar, vectors);
        config.put_bars(GRACE_SIZE, bar);
        // Advanced error reporting, version 2 (PCI Express base specification 7.8.4): masks, severities, enables.
        config.put(ERRORS, 0x0002_0001 | 0x148 << 20, 0);
        config.put(ERRORS + 8, 0, 0x07ff_f030);
        config.put(ERRORS + 0xc, 0x0046_2030, 0x07ff_f030);
        config.put(ERRORS + 0x14, 0x2000, 0xf1c1);
        config.put(ERRORS + 0x18, 0xa0, 0x140);
        // Designated vendor-specific (7.9.6): NVIDIA's third, 12 bytes, bit 0 of its word.
        config.put(DESIGNATED, 0x0001_0023, 0);
        config.put(DESIGNATED + 4, 12 << 20 | 0x10de, 0);
        config.put(DESIGNATED + 8, 1 << 16 | 3, 0);
        config.fresh = config.bytes.clone();
        config
    }

    /// A configuration space that was recorded from a real function (its first bytes; the rest is zero), except: BARs
    /// and MSI-X are as in [`Config::new`], and there is no MSI, interrupt line or expansion ROM. `None` when it lacks
    /// PCI Express with function-level reset, or MSI-X.
    #[must_use]
    pub fn recorded(mut bytes: Vec<u8>, bar: u64, vectors: u32) -> Option<Self> {
        bytes.resize(LENGTH, 0);
        let list = capabilities(&bytes);
        let at = |id| list.iter().find(|at| bytes[**at] == id).copied();
        let (power, express, msix, msi) = (at(0x01), at(0x10)?, at(0x11)?, at(0x05));
        let mut config = Self::over(bytes, express + DEVICE_CONTROL);
        (config.word(express + 4) & 1 << 28 != 0).then_some(())?;
        config.put(COMMAND, config.word(COMMAND) & 0xffff_0000, 0x0406);
        config.put_bars(SIZE, bar);
        [BAR2 + 8, BAR2 + 12, 0x30, 0x3c].into_iter().for_each(|unused| config.put(unused, 0, 0));
        if let Some(power) = power {
            config.put(power + 4, config.word(power + 4), 0x3);
        }
        config.put(config.control, config.word(config.control), 0x7fff);
        config.put_msix(msix, config.bytes[msix + 1], vectors);
        if let Some(msi) = msi {
            let links = std::iter::once(0x34).chain(list.iter().map(|at| at + 1));
            let link = links.into_iter().find(|link| usize::from(config.bytes[*link]) == msi)?;
            config.bytes[link] = config.bytes[msi + 1];
        }
        config.fresh = config.bytes.clone();
        Some(config)
    }

    /// Nothing of it can be written.
    fn over(bytes: Vec<u8>, control: usize) -> Self {
        Self { bytes, writable: vec![0; LENGTH], fresh: Vec::new(), control }
    }

    fn put_bars(&mut self, registers: u32, bar: u64) {
        let [low, high] = [0, 32].map(|shift| u32::try_from(!(bar - 1) >> shift & 0xffff_ffff).unwrap_or(0));
        self.put(BAR0, 0, !(registers - 1));
        self.put(BAR0 + 4, 0, 0);
        self.put(BAR2, 0xc, low);
        self.put(BAR2 + 4, 0, high);
    }

    fn put_msix(&mut self, at: usize, next: u8, vectors: u32) {
        self.put(at, (vectors.clamp(1, 256) - 1) << 16 | u32::from(next) << 8 | 0x11, 0xc000_0000);
        self.put(at + 4, TABLE, 0);
        self.put(at + 8, PENDING, 0);
    }

    fn word(&self, at: usize) -> u32 {
        (0..4).rev().fold(0, |word, byte| word << 8 | u32::from(self.bytes[at + byte]))
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

    /// Writes the writable bits of `data`; true when it requests a function-level reset.
    #[must_use]
    pub fn write(&mut self, offset: usize, data: &[u8]) -> bool {
        for (at, byte) in (offset..LENGTH).zip(data) {
            let mask = self.writable[at];
            self.bytes[at] = self.bytes[at] & !mask | byte & mask;
        }
        let control = (self.control + 1).checked_sub(offset).and_then(|index| data.get(index));
        control.is_some_and(|byte| byte & 0x80 != 0)
    }

    /// Returns to the state after a reset.
    pub fn reset(&mut self) {
        self.bytes.clone_from(&self.fresh);
    }

    /// Whether the function may do DMA.
    #[must_use]
    pub fn is_master(&self) -> bool {
        self.bytes[COMMAND] & 4 != 0
    }
}

/// Offsets of the standard capabilities, except those too close to the end for the fields written to them.
fn capabilities(bytes: &[u8]) -> Vec<usize> {
    let next = |at: usize| Some(usize::from(bytes[at] & !3)).filter(|at| (0x40..=0xf0).contains(at));
    std::iter::successors(next(0x34), |at| next(at + 1)).take(48).collect()
}

/// The bytes of a text of rows (`1b0: 80 80 …`, sixteen bytes each); rows of zeros are left out, and lines that begin with `#`.
#[must_use]
pub fn rows(text: &str) -> Option<Vec<u8>> {
    let mut bytes = vec![0; LENGTH];
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
        let (at, row) = line.split_once(':')?;
        let at = usize::from_str_radix(at, 16).ok()?;
        for (index, byte) in row.split_whitespace().enumerate() {
            *bytes.get_mut(at.checked_add(index)?)? = u8::from_str_radix(byte, 16).ok()?;
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: &str = include_str!("../../../vfio/tests/data/h200.txt");
    const CONNECTX: &str = include_str!("../../../vfio/tests/data/connectx5.txt");

    fn ids(config: &Config) -> Vec<u8> {
        capabilities(&config.bytes).into_iter().map(|at| config.bytes[at]).collect()
    }

    #[test]
    fn a_recorded_function_has_the_capabilities_of_the_real_one_but_msi() {
        let config = Config::recorded(rows(H200).unwrap(), 128 << 30, 8).unwrap();
        assert_eq!((word(&config, 0), word(&config, 8)), (0x2335_10de, 0x0302_00a1));
        assert_eq!(ids(&config), [0x01, 0x10, 0x11]);
        assert_eq!((config.word(0x60) & 0xff, config.word(0xb0) >> 16 & 0x7ff), (0x10, 7));
        assert_eq!(config.word(0x1b8) & 0xffff, 1, "errors are reported");
        let config = Config::recorded(rows(CONNECTX).unwrap(), 32 << 20, 8).unwrap();
        assert_eq!(word(&config, 0), 0x1019_15b3);
        assert_eq!(ids(&config), [0x10, 0x03, 0x11, 0x09, 0x01]);
    }

    #[test]
    fn a_recorded_function_has_bars_and_a_reset_of_its_own() {
        let mut config = Config::recorded(rows(H200).unwrap(), 128 << 30, 8).unwrap();
        for at in (BAR0..0x28).step_by(4).chain([0x30]) {
            assert!(!config.write(at, &[0xff; 4]));
        }
        let sizes = (BAR0..0x28).step_by(4).chain([0x30]).map(|at| word(&config, at));
        assert_eq!(sizes.collect::<Vec<_>>(), [0xffff_c000, 0, 0xc, 0xffff_ffe0, 0, 0, 0]);
        assert!(config.write(0x68, &[0, 0x80]) && !config.write(0x58, &[0, 0x80]));
    }

    #[test]
    fn any_bytes_at_all_are_a_function_or_none() {
        for byte in 0..=255 {
            let _ = Config::recorded(vec![byte; LENGTH], 1 << 20, 1);
        }
        assert!(Config::recorded(vec![0; 64], 1 << 20, 1).is_none());
        assert!(
            rows("ff8: 1 2 3 4 5 6 7 8 9").is_none() && rows("00: 1g").is_none() && rows("zeros").is_none()
        );
    }

    #[test]
    fn a_grace_gpu_is_what_its_driver_looks_for() {
        let mut config = Config::grace(GPU, 64 << 20, 8);
        assert_eq!(config.bytes, rows(include_str!("../tests/grace.txt")).unwrap());
        assert!(!config.write(BAR0, &[0xff; 4]));
        assert_eq!(config.word(BAR0), !(GRACE_SIZE - 1));
        // As nvgrace-gpu reads it: the list of extended capabilities, one of vendor 0x10de with number 3, its bit 0.
        let next = |at: usize| Some(config.word(at) as usize >> 20).filter(|next| *next != 0);
        let list: Vec<_> = std::iter::successors(Some(0x100), |at| next(*at)).collect();
        assert_eq!(list.iter().map(|at| config.word(*at) & 0xffff).collect::<Vec<_>>(), [0x01, 0x23]);
        assert_eq!((config.word(list[1] + 4), config.word(list[1] + 8)), (0x00c0_10de, 0x1_0003));
    }

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
        let control = config.control;
        assert!(config.write(control, &[0, 0x80]));
        assert!(config.write(control + 1, &[0x80]));
        assert!(config.write(control - 2, &[0, 0, 0, 0x80]));
        assert!(!config.write(control, &[0x80, 0]));
        assert!(!config.write(control + 2, &[0x80]));
        assert_eq!(word(&config, control) & 0x8000, 0, "it reads as 0");
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
