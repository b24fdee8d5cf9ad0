//! Description of a Linux host's PCI functions, read from sysfs without opening them.
//!
//! Every function takes the root of the file system, so that tests and recorded hosts read a copied tree.
//! Files: `Documentation/ABI/testing/sysfs-bus-pci` and `sysfs-kernel-iommu_groups`.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use egm_address::{Iova, PciAddress, Span};

use crate::pci::capability;
use crate::topology::FunctionPlacement;

mod bar;
mod cards;
mod function;

pub use bar::{DeviceMemory, HostBar, HostBarKind};
pub use function::{HostFunction, ReservedKind, ReservedRegion};

/// Help text for a function that does not exist.
pub const MISSING_REMEDY: &str =
    "\"egm-vmm check\" lists the functions of this host that a guest could have, \"lspci -D\" all of them";

/// Why a function could not be read.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum HostError {
    #[error("host function {address} does not exist")]
    Missing { address: PciAddress },
    /// A file that cannot be read.
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// A file with content other than the kernel documents.
    #[error("{} holds \"{text}\", which is not {expected}", path.display())]
    Content {
        path: PathBuf,
        /// Its text, or the wrong line of it.
        text: String,
        /// What the kernel documents.
        expected: &'static str,
    },
}

/// Reads every function of the host at `root`, in ascending order; none without PCI.
///
/// # Errors
/// As [`function()`].
pub fn functions(root: &Path) -> Result<Vec<HostFunction>, HostError> {
    let folder = root.join("sys/bus/pci/devices");
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(HostError::Read { path: folder, source }),
    };
    let mut addresses: Vec<PciAddress> =
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    addresses.sort_unstable();
    let mut all =
        addresses.into_iter().map(|address| function(root, address)).collect::<Result<Vec<_>, _>>()?;
    cards::read(root, &mut all);
    Ok(all)
}

/// Reads, in ascending order, those of `wanted` that exist, the bridges above them, the other members of their IOMMU
/// groups and possible Data Direct partners: everything that a verdict about them needs.
///
/// # Errors
/// As [`function()`].
pub fn around(root: &Path, wanted: &[PciAddress]) -> Result<Vec<HostFunction>, HostError> {
    let exists = |at: &PciAddress| root.join("sys/bus/pci/devices").join(at.to_string()).is_dir();
    let mut found = BTreeMap::new();
    for address in wanted.iter().copied().filter(exists) {
        found.insert(address, function(root, address)?);
    }
    let near = found.values().flat_map(|function| {
        let group = function.iommu_group.map(|group| format!("sys/kernel/iommu_groups/{group}/devices"));
        let members = group.map_or_else(Vec::new, |folder| addresses(&root.join(folder)));
        members.into_iter().chain(function.place.bridges.iter().copied())
    });
    for address in near.filter(exists).collect::<BTreeSet<_>>() {
        if let Entry::Vacant(entry) = found.entry(address) {
            entry.insert(function(root, address)?);
        }
    }
    let mut found: Vec<HostFunction> = found.into_values().collect();
    cards::add_partners(root, &mut found)?;
    Ok(found)
}

/// The function addresses among the names in a folder.
fn addresses(folder: &Path) -> Vec<PciAddress> {
    let names = fs::read_dir(folder).into_iter().flatten();
    names.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// Reads the function at `address` of the host at `root`.
///
/// # Errors
/// [`HostError`] when it does not exist, or sysfs does not look as documented.
pub fn function(root: &Path, address: PciAddress) -> Result<HostFunction, HostError> {
    let folder = root.join("sys/bus/pci/devices").join(address.to_string());
    if !folder.is_dir() {
        return Err(HostError::Missing { address });
    }
    let hex = |name: &str| -> Result<u32, HostError> {
        let path = folder.join(name);
        let text = read(&path)?;
        let digits = text.trim().trim_start_matches("0x");
        u32::from_str_radix(digits, 16).map_err(|_| content(&path, &text, "a hexadecimal number"))
    };
    let id = |name: &'static str| -> Result<u16, HostError> {
        let value = hex(name)?;
        u16::try_from(value).map_err(|_| content(&folder.join(name), &format!("{value:#x}"), "a 16-bit id"))
    };
    // An unprivileged user reads only the first 64 bytes.
    let config = fs::read(folder.join("config")).unwrap_or_default();
    let iommu_group = link_name(&folder.join("iommu_group")).and_then(|name| name.parse().ok());
    let (vendor, device) = (id("vendor")?, id("device")?);
    Ok(HostFunction {
        address,
        vendor,
        device,
        class: hex("class")?,
        driver: link_name(&folder.join("driver")),
        // -1 if the firmware does not report a node.
        numa_node: fs::read_to_string(folder.join("numa_node"))
            .ok()
            .and_then(|text| text.trim().parse().ok()),
        iommu_group,
        bars: bars(&folder.join("resource"))?,
        msix_vectors: msix_vectors(&config),
        place: FunctionPlacement::read(root, &folder, &config),
        iova_bits: iova_bits(root, &folder),
        memory: Vec::new(),
        card: None,
        reserved: match iommu_group {
            Some(group) => reserved(&root.join(format!("sys/kernel/iommu_groups/{group}/reserved_regions")))?,
            None => Vec::new(),
        },
    })
}

fn read(path: &Path) -> Result<String, HostError> {
    fs::read_to_string(path).map_err(|source| HostError::Read { path: path.to_owned(), source })
}

fn content(path: &Path, text: &str, expected: &'static str) -> HostError {
    HostError::Content { path: path.to_owned(), text: text.trim().to_owned(), expected }
}

/// Last part of a symbolic link's target, which is how sysfs names a function's driver and group.
fn link_name(path: &Path) -> Option<String> {
    Some(fs::read_link(path).ok()?.file_name()?.to_str()?.to_owned())
}

/// Hexadecimal numbers of one line, each after `0x`.
fn numbers<const N: usize>(line: &str) -> Option<[u64; N]> {
    let mut words = line.split_whitespace();
    let mut out = [0; N];
    for slot in &mut out {
        *slot = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    }
    Some(out)
}

/// Base address registers from `resource`: lines `start end flags`, of which the first six are the registers. The
/// upper half of a 64-bit register is a line of zeros, as is a register that the function does not have.
fn bars(path: &Path) -> Result<Vec<HostBar>, HostError> {
    // include/linux/ioport.h
    const IO: u64 = 0x100;
    const MEMORY: u64 = 0x200;
    const PREFETCH: u64 = 0x2000;
    const MEMORY_64: u64 = 0x10_0000;
    let mut bars = Vec::new();
    for (index, line) in (0..6).zip(read(path)?.lines()) {
        let Some([start, end, flags]) = numbers(line) else {
            return Err(content(path, line, "\"start end flags\" in hexadecimal"));
        };
        let kind = match (flags & IO != 0, flags & MEMORY_64 != 0, flags & PREFETCH != 0) {
            _ if flags & (IO | MEMORY) == 0 => continue,
            (true, _, _) => HostBarKind::Ports,
            (false, true, true) => HostBarKind::Memory64Prefetchable,
            (false, true, false) => HostBarKind::Memory64,
            (false, false, true) => HostBarKind::Memory32Prefetchable,
            (false, false, false) => HostBarKind::Memory32,
        };
        let size = end.checked_sub(start).and_then(|last| last.checked_add(1));
        let size =
            size.ok_or_else(|| content(path, line, "a range with an end that is not below its start"))?;
        bars.push(HostBar { index, kind, size, start });
    }
    Ok(bars)
}

/// Lines `start last kind` of `reserved_regions`; an unknown kind counts as reserved.
fn reserved(path: &Path) -> Result<Vec<ReservedRegion>, HostError> {
    let region = |line: &str| {
        let [start, last] = numbers(line)?;
        // A region up to the very last address loses its last byte: no span can end there.
        let size = last.checked_sub(start)?.saturating_add(1);
        let size = size.min(u64::MAX.checked_sub(start)?);
        let kind = match line.split_whitespace().nth(2)? {
            "direct" => ReservedKind::Direct,
            "direct-relaxable" => ReservedKind::DirectRelaxable,
            "msi" => ReservedKind::Msi,
            _ => ReservedKind::Reserved,
        };
        Some(ReservedRegion { span: Span::new(Iova::new(start), size).ok()?, kind })
    };
    read(path)?
        .lines()
        .map(|line| region(line).ok_or_else(|| content(path, line, "\"start last kind\" of a region")))
        .collect()
}

/// The width of an Intel IOMMU's page tables (VT-d 11.4.2, capability register: MGAW, SAGAW).
fn iova_bits(root: &Path, folder: &Path) -> Option<u8> {
    let iommu = root.join("sys/class/iommu").join(link_name(&folder.join("iommu"))?);
    let text = fs::read_to_string(iommu.join("intel-iommu/cap")).ok()?;
    let capability = u64::from_str_radix(text.trim(), 16).ok()?;
    let most = u8::try_from(capability >> 16 & 0x3f).ok()?.checked_add(1)?;
    let tables = [(3, 57), (2, 48), (1, 39)].into_iter().find(|(bit, _)| capability >> (8 + bit) & 1 != 0)?;
    Some(most.min(tables.1))
}

/// Vectors of the MSI-X capability (PCI Express Base 7.7.2), or 0 without one. `None` if `config` has less than 256
/// bytes: an unprivileged user reads 64.
fn msix_vectors(config: &[u8]) -> Option<u16> {
    const CONVENTIONAL_SIZE: usize = 256;
    (config.len() >= CONVENTIONAL_SIZE).then(|| capability::msix_vectors(config))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::topology::testing::Host;

    /// A tree with one function, as sysfs would have it.
    fn tree(resource: &str, config: &[u8]) -> (tempfile::TempDir, PciAddress) {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("sys/bus/pci/devices/0000:41:00.0");
        let group = root.path().join("sys/kernel/iommu_groups/7");
        fs::create_dir_all(&folder).unwrap();
        fs::create_dir_all(&group).unwrap();
        for (name, text) in
            [("vendor", "0x10de\n"), ("device", "0x2335\n"), ("class", "0x030200\n"), ("numa_node", "-1\n")]
        {
            fs::write(folder.join(name), text).unwrap();
        }
        fs::write(folder.join("resource"), resource).unwrap();
        fs::write(folder.join("config"), config).unwrap();
        symlink("../../../../kernel/iommu_groups/7", folder.join("iommu_group")).unwrap();
        symlink("../../../../bus/pci/drivers/vfio-pci", folder.join("driver")).unwrap();
        fs::write(
            group.join("reserved_regions"),
            "0x00000000fee00000 0x00000000feefffff msi\n0x000000fd00000000 0x000000ffffffffff reserved\n",
        )
        .unwrap();
        (root, "0000:41:00.0".parse().unwrap())
    }

    const H200: &str = "\
        0x0000202042000000 0x0000202042ffffff 0x000000000014220c\n\
        0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
        0x0000200000000000 0x0000203fffffffff 0x000000000014220c\n\
        0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
        0x0000202040000000 0x0000202041ffffff 0x000000000014220c\n\
        0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
        0x0000000000000000 0x0000000000000000 0x0000000000000000\n";

    fn config(capabilities: &[(usize, u8, u8)]) -> Vec<u8> {
        let mut config = vec![0; 256];
        config[6] = 0x10;
        config[0x34] = u8::try_from(capabilities[0].0).unwrap();
        for &(at, id, next) in capabilities {
            config[at] = id;
            config[at + 1] = next;
        }
        config
    }

    #[test]
    fn a_function_is_read_as_sysfs_documents_it() {
        let mut space = config(&[(0x40, 0x01, 0xc8), (0xc8, 0x11, 0)]);
        space[0xca] = 5;
        let (root, address) = tree(H200, &space);
        let read = function(root.path(), address).unwrap();
        assert_eq!((read.vendor, read.device, read.class), (0x10de, 0x2335, 0x03_0200));
        assert_eq!((read.driver.as_deref(), read.numa_node), (Some("vfio-pci"), None));
        assert_eq!((read.iommu_group, read.msix_vectors), (Some(7), Some(6)));
        let sizes: Vec<_> = read.bars.iter().map(|bar| (bar.index, bar.kind, bar.size)).collect();
        let kind = HostBarKind::Memory64Prefetchable;
        assert_eq!(sizes, [(0, kind, 16 << 20), (2, kind, 256 << 30), (4, kind, 32 << 20)]);
        assert_eq!(read.reserved[1].span.to_string(), "0xfd00000000..0x10000000000");
        assert_eq!(read.reserved[0].kind, ReservedKind::Msi);
        assert_eq!(functions(root.path()).unwrap(), [read]);
    }

    #[test]
    fn port_and_32_bit_registers_keep_their_kind() {
        let (root, address) = tree(
            "0x000000000000e000 0x000000000000e01f 0x0000000000040101\n\
             0x00000000fb000000 0x00000000fb00ffff 0x0000000000040200\n\
             0x00000000fa000000 0x00000000fa00ffff 0x0000000000042208\n\
             0x00000000f9000000 0x00000000f9003fff 0x0000000000140204\n",
            &[],
        );
        let read = function(root.path(), address).unwrap();
        let kinds: Vec<_> = read.bars.iter().map(|bar| bar.kind).collect();
        assert_eq!(
            kinds,
            [
                HostBarKind::Ports,
                HostBarKind::Memory32,
                HostBarKind::Memory32Prefetchable,
                HostBarKind::Memory64
            ]
        );
        assert_eq!(read.msix_vectors, None);
    }

    #[test]
    fn a_capability_chain_that_loops_ends() {
        assert_eq!(msix_vectors(&config(&[(0x40, 1, 0x50), (0x50, 2, 0x40)])), Some(0));
        assert_eq!(msix_vectors(&config(&[(0xfc, 0x05, 0x40)])[..0x80]), None);
    }

    #[test]
    fn a_function_is_read_with_the_bridges_above_it_and_its_group() {
        let host = Host::two_switches();
        fs::write(host.root().join("sys/kernel/iommu_groups/3/devices/0000:21:00.0"), "").unwrap();
        let nowhere = "0000:ff:00.0".parse().unwrap();
        let read = around(host.root(), &[host.gpu(0), nowhere]).unwrap();
        let names: Vec<String> = read.iter().map(|function| function.address.to_string()).collect();
        assert_eq!(names, ["0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:18:00.0", "0000:21:00.0"]);
    }

    #[test]
    fn a_missing_function_and_a_wrong_file_are_named() {
        let (root, address) = tree("garbage", &[]);
        let error = function(root.path(), address).unwrap_err().to_string();
        assert!(error.contains("resource holds \"garbage\""), "{error}");
        let error = function(root.path(), "0000:42:00.0".parse().unwrap()).unwrap_err().to_string();
        assert!(error.starts_with("host function 0000:42:00.0 does not exist"), "{error}");
        assert!(functions(Path::new("/nonexistent")).unwrap().is_empty());
    }

    #[test]
    fn an_intel_iommu_states_how_many_bits_it_translates() {
        let (root, address) =
            tree("0x0 0x0 0x0\n0x0 0x0 0x0\n0x0 0x0 0x0\n0x0 0x0 0x0\n0x0 0x0 0x0\n0x0 0x0 0x0\n", &[0; 256]);
        let bits = || function(root.path(), address).unwrap().iova_bits;
        assert_eq!(bits(), None);
        let iommu = root.path().join("sys/class/iommu/dmar0/intel-iommu");
        fs::create_dir_all(&iommu).unwrap();
        let device = root.path().join("sys/bus/pci/devices").join(address.to_string());
        symlink("../../../../class/iommu/dmar0", device.join("iommu")).unwrap();
        // QEMU's, with 39 and with 48 bits; a Xeon's; one with wider tables than addresses.
        for (text, expected) in
            [("d2008c22260206\n", 39), ("d2008c222f0606\n", 48), ("8d2078c106f0466\n", 48), ("260400\n", 39)]
        {
            fs::write(iommu.join("cap"), text).unwrap();
            assert_eq!(bits(), Some(expected), "{text}");
        }
        fs::write(iommu.join("cap"), "no number\n").unwrap();
        assert_eq!(bits(), None);
    }
}
