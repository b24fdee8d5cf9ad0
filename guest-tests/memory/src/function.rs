//! Functions with EGM memory, as sysfs shows them.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use egm_address::PciAddress;

use crate::capability::Facts;
use crate::mapping::Memory;
use crate::registers::{REGISTERS, Registers};
use crate::{MemoryError, mapping};

const REGISTER_BAR: u8 = 0;
const MEMORY_BAR: u8 = 2;
/// Memory controller, RAM: class code of such a function (PCI code and ID assignment specification 1.6).
const CLASS: u64 = 0x05_0000;
/// Bytes of configuration space that Linux shows to a reader without `CAP_SYS_ADMIN`.
const SHORT_CONFIG: usize = 64;

/// A PCI function with EGM memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Segment, bus, device and function number.
    pub address: PciAddress,
    /// Facts about its memory, from its capability or its registers.
    pub facts: Facts,
    /// Physical address of the memory's first byte.
    pub start: u64,
    /// NUMA node that it is near to, by Linux's number.
    pub node: Option<u32>,
    folder: PathBuf,
}

/// Functions of a machine that have EGM memory, or should have.
#[derive(Debug, Default)]
pub struct Found {
    /// The functions with EGM memory, by address.
    pub functions: Vec<Function>,
    /// Functions that may have some and cannot be used, by address, and why. The others are none the worse.
    pub broken: Vec<(PciAddress, MemoryError)>,
}

/// The functions of this machine that have EGM memory.
///
/// # Errors
/// [`MemoryError`], where functions cannot be listed at all; a machine without PCI has none.
pub fn find() -> Result<Found, MemoryError> {
    find_in(Path::new("/sys/bus/pci/devices"))
}

/// Functions in a folder like `/sys/bus/pci/devices`.
///
/// # Errors
/// As [`find`].
pub fn find_in(root: &Path) -> Result<Found, MemoryError> {
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::default()),
        other => other.map_err(MemoryError::file("read", root))?,
    };
    let mut found = Found::default();
    for entry in entries {
        let folder = entry.map_err(MemoryError::file("read", root))?.path();
        let name = folder.file_name().and_then(|name| name.to_str());
        let Some(address) = name.and_then(|name| name.parse().ok()) else { continue };
        match one(address, &folder) {
            // It was unplugged while we looked.
            Err(MemoryError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(error) => found.broken.push((address, error)),
            Ok(function) => found.functions.extend(function),
        }
    }
    found.functions.sort_by_key(|function| function.address);
    found.broken.sort_by_key(|(address, _)| *address);
    Ok(found)
}

fn one(address: PciAddress, folder: &Path) -> Result<Option<Function>, MemoryError> {
    let read = |name: &str| fs::read(folder.join(name)).map_err(MemoryError::file("read", folder.join(name)));
    let config = read("config")?;
    let facts = match Facts::of_config(&config) {
        None if config.len() <= SHORT_CONFIG => by_magic(address, folder)?,
        facts => facts,
    };
    let Some(facts) = facts else { return Ok(None) };
    let (start, has) = bar(folder, MEMORY_BAR)?;
    if has < facts.size {
        return Err(MemoryError::Short { address, bar: MEMORY_BAR, has, wanted: facts.size });
    }
    let node = read("numa_node").ok();
    let node = node.and_then(|text| String::from_utf8(text).ok()?.trim().parse().ok());
    Ok(Some(Function { address, facts, start, node, folder: folder.to_owned() }))
}

/// By the registers, of a function of the right class, if this user may see them.
fn by_magic(address: PciAddress, folder: &Path) -> Result<Option<Facts>, MemoryError> {
    let class = fs::read_to_string(folder.join("class")).unwrap_or_default();
    let may_be = hex(&class) == Some(CLASS) && bar(folder, REGISTER_BAR)?.1 == REGISTERS as u64;
    let registers = may_be.then(|| registers(address, folder));
    Ok(registers.and_then(Result::ok).and_then(|registers| registers.facts()))
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
}

/// Start and bytes of BAR `index`; 0 bytes without one.
fn bar(folder: &Path, index: u8) -> Result<(u64, u64), MemoryError> {
    let path = folder.join("resource");
    let text = fs::read_to_string(&path).map_err(MemoryError::file("read", &path))?;
    let line = text.lines().nth(index.into()).and_then(|line| {
        let mut words = line.split_whitespace().map(hex);
        let (start, end) = (words.next()??, words.next()??);
        Some((start, end.checked_sub(start)?.checked_add(u64::from(end > 0))?))
    });
    line.ok_or(MemoryError::Form { path })
}

fn registers(address: PciAddress, folder: &Path) -> Result<Registers, MemoryError> {
    let (_, has) = bar(folder, REGISTER_BAR)?;
    if has != REGISTERS as u64 {
        return Err(MemoryError::Short { address, bar: REGISTER_BAR, has, wanted: REGISTERS as u64 });
    }
    enable(folder)?;
    let path = folder.join("resource0");
    let file = open(&path)?;
    let mapping =
        mapping::Mapping::new(&file, REGISTERS as u64, 0).map_err(MemoryError::file("map", &path))?;
    Registers::new(address, mapping)
}

fn open(path: &Path) -> Result<File, MemoryError> {
    OpenOptions::new().read(true).write(true).open(path).map_err(MemoryError::file("open", path))
}

/// Lets a function without a driver answer at its addresses; a disabled one reads ones.
fn enable(folder: &Path) -> Result<(), MemoryError> {
    let path = folder.join("enable");
    let is = fs::read_to_string(&path).map_err(MemoryError::file("read", &path))?;
    if is.trim() == "0" {
        fs::write(&path, "1").map_err(MemoryError::file("write to", &path))?;
    }
    Ok(())
}

impl Function {
    /// Its registers.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn registers(&self) -> Result<Registers, MemoryError> {
        registers(self.address, &self.folder)
    }

    /// Its memory: all bytes, at an address that equals [`Function::start`] modulo 1 GiB, 2 MiB or what fits, so that the
    /// kernel may use large pages. Write-combining where the kernel offers that, otherwise uncached.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn map(&self) -> Result<Memory, MemoryError> {
        enable(&self.folder)?;
        let combining = self.folder.join("resource2_wc");
        let path = if combining.exists() { combining } else { self.folder.join("resource2") };
        let file = open(&path)?;
        Memory::new(file, self.facts.size, self.start).map_err(MemoryError::file("map", path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    const FACTS: Facts = Facts { size: 0x60_0000, base: 0x20_0000, page: 0x1000, pxm: Some(4) };

    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        testing::function(root.path(), "0000:02:00.0", &FACTS, 0x80_0060_0000, 0x80_0000);
        let other = Facts { pxm: None, ..FACTS };
        testing::function(root.path(), "0000:01:00.0", &other, 0x81_0000_0000, 0x80_0000);
        root
    }

    /// All that are found, none of which is broken.
    fn functions(root: &tempfile::TempDir) -> Vec<Function> {
        let Found { functions, broken } = find_in(root.path()).unwrap();
        assert!(broken.is_empty(), "{broken:?}");
        functions
    }

    fn write(root: &tempfile::TempDir, name: &str, bytes: &[u8]) {
        fs::write(root.path().join("0000:02:00.0").join(name), bytes).unwrap();
    }

    #[test]
    fn functions_with_the_capability_are_found_with_their_facts_by_address() {
        let root = machine();
        let found = functions(&root);
        let addresses: Vec<String> = found.iter().map(|function| function.address.to_string()).collect();
        assert_eq!(addresses, ["0000:01:00.0", "0000:02:00.0"]);
        assert_eq!((found[1].facts, found[1].start, found[1].node), (FACTS, 0x80_0060_0000, Some(1)));
        write(&root, "config", &[0; 256]);
        assert_eq!(functions(&root).len(), 1);
        assert!(find_in(&root.path().join("no-pci")).unwrap().functions.is_empty());
    }

    #[test]
    fn with_half_of_configuration_space_functions_are_found_by_their_registers() {
        let root = machine();
        write(&root, "config", &[0; 64]);
        assert_eq!(functions(&root)[1].facts, FACTS);
        write(&root, "resource0", &[0xff; 0x4000]);
        assert_eq!(functions(&root).len(), 1);
        write(&root, "resource0", &testing::registers(&FACTS, &[]));
        write(&root, "class", b"0x030000\n");
        assert_eq!(functions(&root).len(), 1, "a display's first BAR is not touched");
    }

    #[test]
    fn memory_is_mapped_at_an_address_that_large_pages_fit() {
        let root = machine();
        let function = &functions(&root)[1];
        let memory = function.map().unwrap();
        assert_eq!(memory.size(), FACTS.size);
        assert_eq!(memory.address().addr().get() % (4 << 20), 0x20_0000, "0x80_0060_0000 modulo 4 MiB");
        assert_eq!(memory.write_word(FACTS.size - 8, 0x1122_3344_5566_7788), Some(()));
        assert_eq!(memory.read_word(FACTS.size - 8), Some(0x1122_3344_5566_7788));
        assert_eq!((memory.read_word(FACTS.size), memory.write_word(4, 1)), (None, None));
        let file = fs::read(root.path().join("0000:02:00.0/resource2_wc")).unwrap();
        assert_eq!(file[0x5f_fff8..0x60_0000], 0x1122_3344_5566_7788_u64.to_le_bytes());
    }

    #[test]
    fn a_function_that_was_not_enabled_is_enabled_first() {
        let root = machine();
        write(&root, "enable", b"0\n");
        functions(&root)[1].map().unwrap();
        assert_eq!(fs::read(root.path().join("0000:02:00.0/enable")).unwrap(), b"1");
    }

    #[test]
    fn a_broken_function_is_named_beside_the_good_ones() {
        let root = machine();
        testing::function(root.path(), "0000:02:00.0", &FACTS, 0x80_0000_0000, 0x40_0000);
        testing::function(root.path(), "0000:03:00.0", &FACTS, 0x82_0000_0000, 0x80_0000);
        testing::function(root.path(), "0000:04:00.0", &FACTS, 0x83_0000_0000, 0x80_0000);
        fs::write(root.path().join("0000:04:00.0/resource"), "nonsense").unwrap();
        let Found { functions, broken } = find_in(root.path()).unwrap();
        let addresses: Vec<String> = functions.iter().map(|function| function.address.to_string()).collect();
        assert_eq!(addresses, ["0000:01:00.0", "0000:03:00.0"]);
        let [
            (short, MemoryError::Short { bar: 2, has: 0x40_0000, wanted: 0x60_0000, .. }),
            (form, MemoryError::Form { .. }),
        ] = broken.as_slice()
        else {
            panic!("{broken:?}")
        };
        assert_eq!([short, form].map(ToString::to_string), ["0000:02:00.0", "0000:04:00.0"]);
    }
}
