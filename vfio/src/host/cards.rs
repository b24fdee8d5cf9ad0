//! Functions of one card: their vital product data, and the partners of requested functions.

use std::fs;
use std::path::Path;

use egm_address::PciAddress;

use super::{HostError, HostFunction, addresses, function};
use crate::variant::Variant;
use crate::variant::data_direct::Card;

/// Reads the cards of `all`, if the host has pairs: each read takes tens of milliseconds.
pub(super) fn read(root: &Path, all: &mut [HostFunction]) {
    if all.iter().any(|function| Variant::of(function) == Variant::DataDirect) {
        all.iter_mut().for_each(|function| read_card(root, function));
    }
}

fn may_have_partner(function: &HostFunction) -> bool {
    matches!(Variant::of(function), Variant::DataDirect | Variant::ConnectX)
}

fn read_card(root: &Path, function: &mut HostFunction) {
    if may_have_partner(function) {
        let folder = root.join("sys/bus/pci/devices").join(function.address.to_string());
        function.card = fs::read(folder.join("vpd")).ok().map(|vpd| Card::of(&vpd));
    }
}

/// Adds the functions that may pair with one of `found`, if the host has such pairs.
pub(super) fn add_partners(root: &Path, found: &mut Vec<HostFunction>) -> Result<(), HostError> {
    if !found.iter().any(may_have_partner) {
        return Ok(());
    }
    let folder = root.join("sys/bus/pci/devices");
    let says = |at: &PciAddress, file, value| {
        let text = fs::read_to_string(folder.join(at.to_string()).join(file)).unwrap_or_default();
        text.trim() == value
    };
    let mut cards = addresses(&folder);
    cards.retain(|at| says(at, "vendor", "0x15b3"));
    if !cards.iter().any(|at| says(at, "device", "0x2100")) {
        return Ok(());
    }
    for address in cards {
        if !found.iter().any(|function| function.address == address) {
            found.push(function(root, address)?);
        }
    }
    found.sort_by_key(|function| function.address);
    read(root, found);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{around, functions};

    /// A network function, and another of its card: the one that reaches GPUs if `device` is that id.
    fn host(device: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (address, device, number) in [("0000:03:00.0", "0x1023", "a"), ("0009:03:00.0", device, "a")] {
            let folder = root.path().join("sys/bus/pci/devices").join(address);
            fs::create_dir_all(&folder).unwrap();
            let write = |file: &str, text: &str| fs::write(folder.join(file), text).unwrap();
            write("vendor", "0x15b3\n");
            write("device", &format!("{device}\n"));
            write("class", "0x020700\n");
            write("resource", &"0x0 0x0 0x0\n".repeat(6));
            // Read-only data of four bytes: keyword, size, value.
            let vpd = [&[0x90, 4, 0, b'V', b'3', 1], number.as_bytes()].concat();
            fs::write(folder.join("vpd"), vpd).unwrap();
        }
        root
    }

    #[test]
    fn the_partner_of_a_requested_function_is_read_with_its_card_and_only_where_there_is_one() {
        let wanted = "0000:03:00.0".parse().unwrap();
        let pairs = host("0x2100");
        let number = |function: &HostFunction| function.card.clone().and_then(|card| card.number);
        for found in [around(pairs.path(), &[wanted]).unwrap(), functions(pairs.path()).unwrap()] {
            let cards: Vec<_> = found.iter().map(number).collect();
            assert_eq!(cards, [Some("a".to_owned()), Some("a".to_owned())]);
        }
        let plain = host("0x1023");
        let found = around(plain.path(), &[wanted]).unwrap();
        assert_eq!((found.len(), number(&found[0])), (1, None));
    }
}
