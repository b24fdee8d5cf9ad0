//! Reading the guest kernel's facts from `/proc` and `/sys`.

use std::fs;
use std::path::{Path, PathBuf};

use egm_address::{CpuSet, PciAddress};

use crate::error::Broken;

/// The whole text of a file.
pub(crate) fn text(path: impl AsRef<Path>) -> Result<String, Broken> {
    let path = path.as_ref();
    fs::read(path)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .map_err(Broken::file("read", path))
}

/// The bytes of a file.
pub(crate) fn bytes(path: impl AsRef<Path>) -> Result<Vec<u8>, Broken> {
    fs::read(path.as_ref()).map_err(Broken::file("read", path.as_ref()))
}

/// A number, decimal or hexadecimal after `0x`.
pub(crate) fn number(path: impl AsRef<Path>) -> Result<u64, Broken> {
    let text = text(path.as_ref())?;
    parse_number(&text)
        .ok_or_else(|| Broken::text(path.as_ref().display().to_string(), text.trim(), "a number"))
}

/// A number as sysfs writes it.
pub(crate) fn parse_number(text: &str) -> Option<u64> {
    let text = text.trim();
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// A list such as `0-3,8`.
pub(crate) fn list(path: impl AsRef<Path>) -> Result<CpuSet, Broken> {
    let text = text(path.as_ref())?;
    text.trim()
        .parse()
        .map_err(|_| Broken::text(path.as_ref().display().to_string(), text.trim(), "a list of numbers"))
}

/// Names in a folder, sorted; none when there is no such folder.
pub(crate) fn names(path: impl AsRef<Path>) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(path)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort_unstable();
    names
}

/// The sysfs folder of a PCI function.
pub(crate) fn pci(address: PciAddress) -> PathBuf {
    Path::new("/sys/bus/pci/devices").join(address.to_string())
}

/// The name of the virtio device of a PCI function, `virtio3`.
pub(crate) fn virtio(address: PciAddress) -> Option<String> {
    names(pci(address)).into_iter().find(|name| {
        name.strip_prefix("virtio").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    })
}

/// Name of the entry in `class` (such as `vda` in `block`) that the driver made for a PCI function's virtio device.
pub(crate) fn virtio_child(address: PciAddress, class: &str) -> Option<String> {
    names(pci(address).join(virtio(address)?).join(class)).into_iter().next()
}

/// Lines of `first: rest` as `/proc/cpuinfo` and node `meminfo` have them.
pub(crate) fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then_some(value.trim())
    })
}

/// Bytes that a node's `meminfo` gives for `key`: `Node 1 MemTotal:  256664 kB`.
pub(crate) fn node_meminfo(text: &str, node: u32, key: &str) -> Option<u64> {
    let value = field(text, &format!("Node {node} {key}"))?;
    value.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_decimal_or_hexadecimal() {
        assert_eq!(parse_number("0x1af4\n"), Some(0x1af4));
        assert_eq!(parse_number("17\n"), Some(17));
        assert_eq!(parse_number("0x"), None);
    }

    #[test]
    fn a_node_states_its_memory_in_kib() {
        let text = include_str!("../fixtures/q35/node1-meminfo");
        assert_eq!(node_meminfo(text, 1, "MemTotal"), Some(256_664 * 1024));
        assert_eq!(node_meminfo(text, 0, "MemTotal"), None);
    }
}
