//! A slice as a PCI function, as `egm-device/DESIGN.md` ("The device") lays it out: found by its vendor capability, whatever its
//! id is, and reached through its BARs. No driver has it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use egm_address::{BarOffset, InBar, Span, SpanSet};

use crate::config_space::{self, VENDOR_SPECIFIC, capabilities};
use crate::error::Broken;
use crate::sys::Registers;
use crate::sysfs;

/// "EGMD": the signature of the capability and the magic of the registers.
pub(crate) const MAGIC: u32 = u32::from_le_bytes(*b"EGMD");
/// Of the capability's layout and of the table of registers.
pub(crate) const VERSION: u32 = 1;
/// Bytes of the capability.
const CAPABILITY: usize = 32;
/// Bytes of the BAR with the registers.
const REGISTERS: usize = 0x4000;
/// Where the window on the retired list begins, and how many spans it shows.
const WINDOW: usize = 0x1000;
const SHOWN: u32 = 256;
const FUNCTIONS: &str = "/sys/bus/pci/devices";

/// Offsets of registers of 64 bits.
pub(crate) mod wide {
    pub(crate) const SIZE: usize = 0x08;
    pub(crate) const BASE: usize = 0x10;
    pub(crate) const PAGE: usize = 0x18;
    pub(crate) const RETIRED: usize = 0x30;
    pub(crate) const SCRUBBED: usize = 0x48;
}

/// Offsets of registers of 32 bits.
pub(crate) mod narrow {
    pub(crate) const MAGIC: usize = 0x00;
    pub(crate) const VERSION: usize = 0x04;
    pub(crate) const PXM: usize = 0x20;
    pub(crate) const GENERATION: usize = 0x24;
    pub(crate) const SPANS: usize = 0x28;
    pub(crate) const FIRST: usize = 0x2c;
    pub(crate) const EVENTS: usize = 0x38;
    pub(crate) const PENDING: usize = 0x3c;
    pub(crate) const DOORBELL: usize = 0x40;
    pub(crate) const STATUS: usize = 0x44;
    pub(crate) const CONTROL: usize = 0x50;
    pub(crate) const MISTAKES: usize = 0x54;
}

/// What the capability says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Facts {
    /// The BAR that is the slice's memory.
    pub(crate) memory: u8,
    /// The BAR with the registers.
    pub(crate) registers: u8,
    /// Bytes in a page.
    pub(crate) page: u64,
    /// Guest proximity domain, all ones for none.
    pub(crate) pxm: u32,
    /// Bytes of the slice, retired ones included.
    pub(crate) size: u64,
    /// Offset of the slice in its region.
    pub(crate) base: u64,
}

impl Facts {
    /// Those of a configuration space; `None` where no capability has the signature and a layout that is known.
    pub(crate) fn read(config: &[u8]) -> Option<Self> {
        capabilities(config, VENDOR_SPECIFIC).find_map(|at| Self::of(config.get(at..at + CAPABILITY)?))
    }

    fn of(body: &[u8]) -> Option<Self> {
        let [_, _, length, layout, ..] = *body else { return None };
        let word = |at: usize| Some(u32::from_le_bytes(body.get(at..at + 4)?.try_into().ok()?));
        let double = |at: usize| Some(u64::from_le_bytes(body.get(at..at + 8)?.try_into().ok()?));
        let known = usize::from(length) >= CAPABILITY && u32::from(layout) == VERSION && word(4)? == MAGIC;
        Some(Self {
            memory: *body.get(8)?,
            registers: *body.get(9)?,
            page: 1_u64.checked_shl((*body.get(10)?).into())?,
            pxm: word(12)?,
            size: double(16)?,
            base: double(24)?,
        })
        .filter(|_| known)
    }
}

/// A function that has the capability.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    /// Segment, bus, device and function as the kernel writes them.
    pub(crate) address: String,
    /// What its capability says.
    pub(crate) facts: Facts,
}

/// Addresses of all functions of this machine, sorted.
pub(crate) fn addresses() -> Vec<String> {
    sysfs::names(FUNCTIONS)
}

/// All functions of this machine that have the capability, in the order of their addresses.
pub(crate) fn all() -> Vec<Found> {
    addresses().into_iter().filter_map(Found::at).collect()
}

impl Found {
    /// The function at `address`, if it is one.
    pub(crate) fn at(address: String) -> Option<Self> {
        let config = fs::read(Path::new(FUNCTIONS).join(&address).join("config")).ok()?;
        Facts::read(&config).map(|facts| Self { address, facts })
    }

    /// Whether its BARs can be mapped: the kernel shows a function that was plugged in before it has places for them.
    pub(crate) fn is_ready(&self) -> bool {
        let bars = [self.facts.registers, self.facts.memory];
        bars.iter().all(|bar| self.resource(*bar).exists())
    }

    fn resource(&self, bar: u8) -> PathBuf {
        self.folder().join(format!("resource{bar}"))
    }

    /// Its folder in sysfs.
    pub(crate) fn folder(&self) -> PathBuf {
        Path::new(FUNCTIONS).join(&self.address)
    }

    /// The function with its BARs mapped; it decodes them, and may send interrupts.
    pub(crate) fn open(&self) -> Result<Function, Broken> {
        // Fails for one that is enabled.
        let _ = fs::write(self.folder().join("enable"), "1");
        let registers = self.map(self.facts.registers)?;
        if registers.size() != REGISTERS {
            return Err(Broken::Argument(self.address.clone(), "has no 16 KiB of registers"));
        }
        let memory = self.map(self.facts.memory)?;
        Ok(Function { found: self.clone(), registers, memory })
    }

    fn map(&self, bar: u8) -> Result<Registers, Broken> {
        let path = self.resource(bar);
        let map = |file: File| {
            let size = usize::try_from(file.metadata()?.len()).map_err(std::io::Error::other)?;
            Registers::map(&file, size)
        };
        File::options().read(true).write(true).open(&path).and_then(map).map_err(Broken::file("map", path))
    }

    /// Its MSI-X table, when it has one and that lies with the registers.
    pub(crate) fn vectors(&self) -> Result<Option<config_space::MsixTable>, Broken> {
        let config = sysfs::bytes(self.folder().join("config"))?;
        Ok(config_space::msix_table(&config).filter(|table| table.bar == self.facts.registers))
    }

    /// Changes 16 bits of its configuration space: `set` on, `clear` off.
    pub(crate) fn change(&self, at: usize, set: u16, clear: u16) -> Result<(), Broken> {
        let path = self.folder().join("config");
        let change = |file: File| {
            let (at, mut word) = (at as u64, [0; 2]);
            file.read_exact_at(&mut word, at)?;
            file.write_all_at(&(u16::from_le_bytes(word) & !clear | set).to_le_bytes(), at)
        };
        File::options()
            .read(true)
            .write(true)
            .open(&path)
            .and_then(change)
            .map_err(Broken::file("change", path))
    }
}

/// A function whose BARs are mapped.
#[derive(Debug)]
pub(crate) struct Function {
    /// Which.
    pub(crate) found: Found,
    /// Its registers.
    pub(crate) registers: Registers,
    /// Its memory BAR, all of it.
    pub(crate) memory: Registers,
}

impl Function {
    /// The retired list, whose window is moved along it. Only one look at a time: the window is the function's.
    pub(crate) fn retired(&self) -> Option<SpanSet<InBar>> {
        let count = self.registers.read_word(narrow::SPANS);
        let mut spans = Vec::new();
        for index in 0..count {
            if index % SHOWN == 0 {
                self.registers.write_word(narrow::FIRST, index);
            }
            let at = WINDOW + 16 * usize::try_from(index % SHOWN).ok()?;
            let (start, size) = (self.registers.read(at), self.registers.read(at + 8));
            spans.push(Span::new(BarOffset::new(start), size).ok()?);
        }
        Some(spans.into_iter().collect())
    }

    /// The slice without its retired bytes; `None` where the list is none.
    pub(crate) fn usable(&self) -> Option<SpanSet<InBar>> {
        let slice: SpanSet<InBar> =
            [Span::new(BarOffset::new(0), self.found.facts.size).ok()?].into_iter().collect();
        Some(slice.minus(&self.retired()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of egm-device's own test of the same table.
    fn config() -> Vec<u8> {
        let mut config = vec![0; 256];
        config[0x34] = 0x40;
        config[0x40..0x50].copy_from_slice(&[0x09, 0x50, 16, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let body = [
            &[0x09, 0, 32, 1][..],
            b"EGMD",
            &[2, 0, 16, 0],
            &[4, 0, 0, 0],
            &[0, 0, 0, 0x80, 1, 0, 0, 0],
            &[0, 0, 0x40, 0, 0, 0, 0, 0],
        ];
        config[0x50..0x70].copy_from_slice(&body.concat());
        config
    }

    #[test]
    fn the_capability_is_found_behind_another_vendors_and_says_what_it_holds() {
        let facts =
            Facts { memory: 2, registers: 0, page: 0x1_0000, pxm: 4, size: 0x1_8000_0000, base: 0x40_0000 };
        assert_eq!(Facts::read(&config()), Some(facts));
    }

    #[test]
    fn another_signature_layout_or_length_is_another_function() {
        for (at, value) in [(0x50 + 2, 31), (0x50 + 3, 2), (0x50 + 4, 0), (0x50 + 10, 64)] {
            let mut config = config();
            config[at] = value;
            assert_eq!(Facts::read(&config), None, "{at:#x}");
        }
        assert_eq!(Facts::read(&config()[..0x6f]), None);
        assert_eq!(Facts::read(&[]), None);
    }

    proptest::proptest! {
        #[test]
        fn any_configuration_space_is_read(config: Vec<u8>) {
            let _ = Facts::read(&config);
        }
    }
}
