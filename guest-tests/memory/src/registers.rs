//! A function's registers, BAR 0: what changes while a guest has the memory.

use std::ops::Range;

use egm_address::PciAddress;

use crate::MemoryError;
use crate::capability::{Facts, MAGIC, VERSION};
use crate::mapping::Mapping;

/// Bytes of BAR 0.
pub(crate) const REGISTERS: usize = 0x4000;
const SIZE: u64 = 0x08;
const BASE: u64 = 0x10;
const PAGE: u64 = 0x18;
const PXM: u64 = 0x20;
const GENERATION: u64 = 0x24;
const SPANS: u64 = 0x28;
const FIRST: u64 = 0x2c;
const EVENTS: u64 = 0x38;
const WINDOW: u64 = 0x1000;
/// Spans that the window shows.
const SHOWN: u32 = 256;
/// The list changes when memory goes bad: more often than this it does not, or the device lies.
const TRIES: u32 = 16;
/// More spans than any list has: a device that claims more lies.
const MOST_SPANS: u32 = 1 << 20;

/// A function's registers, mapped until this is dropped.
#[derive(Debug)]
pub struct Registers {
    address: PciAddress,
    mapping: Mapping,
}

/// Bytes that must not be used: offsets in the memory, ascending.
pub type Retired = Vec<Range<u64>>;

impl Registers {
    pub(crate) fn new(address: PciAddress, mapping: Mapping) -> Result<Self, MemoryError> {
        let registers = Self { address, mapping };
        registers.check()?;
        Ok(registers)
    }

    /// The device is still there, and it is the one.
    fn check(&self) -> Result<(), MemoryError> {
        match (self.word(0), self.word(4)) {
            (MAGIC, VERSION) => Ok(()),
            (found, _) => Err(MemoryError::Silent { address: self.address, found }),
        }
    }

    /// Facts about its memory, as in its capability; `None` if they make no sense.
    #[must_use]
    pub fn facts(&self) -> Option<Facts> {
        Facts::new(self.long(SIZE), self.long(BASE), self.long(PAGE), self.word(PXM))
    }

    /// Events so far: pages retired, sizes changed, requests of the owner.
    #[must_use]
    pub fn events(&self) -> u32 {
        self.word(EVENTS)
    }

    /// The retired bytes.
    ///
    /// # Errors
    /// [`MemoryError::Silent`] when the device is gone, or changes its list all the time.
    pub fn retired(&self) -> Result<Retired, MemoryError> {
        let silent = || MemoryError::Silent { address: self.address, found: self.word(0) };
        for _ in 0..TRIES {
            let (generation, count) = (self.word(GENERATION), self.word(SPANS));
            if count > MOST_SPANS {
                break;
            }
            let list: Retired = (0..count).filter_map(|index| self.span(index)).collect();
            if (self.word(GENERATION), self.word(SPANS)) == (generation, count) {
                self.check()?;
                return Ok(list);
            }
        }
        Err(silent())
    }

    /// Span `index` of the list, by the window.
    fn span(&self, index: u32) -> Option<Range<u64>> {
        let inside = index % SHOWN;
        if inside == 0 {
            self.mapping.write(FIRST, index)?;
        }
        let at = WINDOW + u64::from(inside) * 16;
        let (start, size) = (self.long(at), self.long(at + 8));
        Some(start..start.checked_add(size)?)
    }

    fn word(&self, offset: u64) -> u32 {
        self.mapping.read(offset).unwrap_or(u32::MAX)
    }

    fn long(&self, offset: u64) -> u64 {
        self.mapping.read(offset).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;
    use crate::testing;

    const FACTS: Facts = Facts { size: 0x60_0000, base: 0x20_0000, page: 0x1000, pxm: Some(4) };

    fn registers(bytes: &[u8]) -> Result<Registers, MemoryError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), bytes).unwrap();
        let file = File::options().read(true).write(true).open(file.path()).unwrap();
        let mapping = Mapping::new(&file, REGISTERS as u64, 0).unwrap();
        Registers::new("0000:01:00.0".parse().unwrap(), mapping)
    }

    #[test]
    fn registers_show_the_capabilitys_values_and_the_retired_pages() {
        let retired = [(0x1000, 0x2000), (0x5000, 0x1000)];
        let registers = registers(&testing::registers(&FACTS, &retired)).unwrap();
        assert_eq!(registers.facts(), Some(FACTS));
        assert_eq!(registers.retired().unwrap(), [0x1000..0x3000, 0x5000..0x6000]);
    }

    #[test]
    fn a_device_that_answers_ones_or_claims_any_number_of_spans_ends_in_an_error() {
        let gone = registers(&[0xff; REGISTERS]).unwrap_err();
        assert!(matches!(gone, MemoryError::Silent { found: u32::MAX, .. }), "{gone}");
        let mut liar = testing::registers(&FACTS, &[]);
        liar[0x28..0x2c].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(registers(&liar).unwrap().retired().is_err());
    }
}
