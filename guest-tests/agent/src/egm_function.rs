//! A slice as a PCI function, as `egm-device/DESIGN.md` ("The device") lays it out. `egm-memory` finds it; here are all of its
//! two BARs, also what no program should touch.

use std::fs::File;
use std::os::unix::fs::FileExt;

use egm_address::{BarOffset, InBar, PciAddress, Span, SpanSet};
use egm_memory::MemoryError;

use crate::config_space::{self, MsixTable};
use crate::error::Broken;
use crate::sys::Registers;
use crate::sysfs;

/// "EGMD", the first register.
pub(crate) const MAGIC: u32 = u32::from_le_bytes(*b"EGMD");
pub(crate) const VERSION: u32 = 1;
const REGISTER_BAR: u8 = 0;
const MEMORY_BAR: u8 = 2;

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
    pub(crate) const EVENTS: usize = 0x38;
    pub(crate) const PENDING: usize = 0x3c;
    pub(crate) const DOORBELL: usize = 0x40;
    pub(crate) const STATUS: usize = 0x44;
    pub(crate) const CONTROL: usize = 0x50;
    pub(crate) const MISTAKES: usize = 0x54;
}

/// All functions of this machine that have EGM memory, by address; an error where any of them is broken.
pub(crate) fn all() -> Result<Vec<egm_memory::Function>, Broken> {
    let found = egm_memory::find()?;
    found.broken.into_iter().next().map_or(Ok(found.functions), |(_, error)| Err(error.into()))
}

/// The function with EGM memory at `address`, if there is one.
pub(crate) fn at(address: PciAddress) -> Result<Option<egm_memory::Function>, Broken> {
    Ok(all()?.into_iter().find(|function| function.address == address))
}

/// A function and its mapped BARs.
#[derive(Debug)]
pub(crate) struct Function {
    /// As it was found.
    pub(crate) found: egm_memory::Function,
    pub(crate) registers: Registers,
    /// Its memory BAR, all of it.
    pub(crate) memory: Registers,
}

impl Function {
    /// Maps the BARs of `found`, which decodes them from now on.
    pub(crate) fn open(found: &egm_memory::Function) -> Result<Self, Broken> {
        // Enables it, and refuses one with other registers.
        found.registers()?;
        let map = |bar: u8| {
            let path = sysfs::pci(found.address).join(format!("resource{bar}"));
            let map = |file: File| {
                let size = usize::try_from(file.metadata()?.len()).map_err(std::io::Error::other)?;
                Registers::map(&file, size)
            };
            let file = File::options().read(true).write(true).open(&path);
            file.and_then(map).map_err(Broken::file("map", path))
        };
        Ok(Self { found: found.clone(), registers: map(REGISTER_BAR)?, memory: map(MEMORY_BAR)? })
    }

    /// The bytes that must not be used. Only one reader at a time: the window on the list is the function's.
    pub(crate) fn retired(&self) -> Result<SpanSet<InBar>, Broken> {
        let list = self.found.registers()?.retired()?;
        let span = |range: std::ops::Range<u64>| {
            Span::between(BarOffset::new(range.start), BarOffset::new(range.end))
        };
        Ok(list.into_iter().filter_map(span).collect())
    }

    /// The slice without them.
    pub(crate) fn usable(&self) -> Result<SpanSet<InBar>, Broken> {
        let slice = Span::between(BarOffset::new(0), BarOffset::new(self.found.facts.size));
        Ok(slice.into_iter().collect::<SpanSet<_>>().minus(&self.retired()?))
    }

    /// Its MSI-X table, if it has one and that lies with the registers.
    pub(crate) fn vectors(&self) -> Result<Option<MsixTable>, Broken> {
        let config = sysfs::bytes(sysfs::pci(self.found.address).join("config"))?;
        Ok(config_space::msix_table(&config).filter(|table| table.bar == REGISTER_BAR))
    }

    /// Changes 16 bits of its configuration space: `set` on, `clear` off.
    pub(crate) fn change(&self, at: usize, set: u16, clear: u16) -> Result<(), Broken> {
        let path = sysfs::pci(self.found.address).join("config");
        let change = |file: File| {
            let (at, mut word) = (at as u64, [0; 2]);
            file.read_exact_at(&mut word, at)?;
            file.write_all_at(&(u16::from_le_bytes(word) & !clear | set).to_le_bytes(), at)
        };
        let file = File::options().read(true).write(true).open(&path);
        file.and_then(change).map_err(Broken::file("change", path))
    }
}

impl From<MemoryError> for Broken {
    fn from(error: MemoryError) -> Self {
        Self::System { what: "EGM memory".to_owned(), source: std::io::Error::other(chain(&error)) }
    }
}

/// An error and its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
