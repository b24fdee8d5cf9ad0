//! Names of host functions: vendor and ids, as far as the facts have them.

use egm_address::PciAddress;
use egm_vfio::topology;

use crate::facts::Facts;

/// Vendors of devices that hosts assign (the PCI ID Repository).
const VENDORS: &[(u16, &str)] = &[
    (0x1000, "Broadcom"),
    (0x1002, "AMD"),
    (0x1022, "AMD"),
    (0x1077, "QLogic"),
    (0x10b5, "PLX"),
    (0x10de, "NVIDIA"),
    (0x1179, "Toshiba"),
    (0x1344, "Micron"),
    (0x1425, "Chelsio"),
    (0x144d, "Samsung"),
    (0x14e4, "Broadcom"),
    (0x15b3, "Mellanox"),
    (0x15b7, "SanDisk"),
    (0x177d, "Cavium"),
    (0x1924, "Solarflare"),
    (0x1987, "Phison"),
    (0x19e5, "Huawei"),
    (0x1af4, "Red Hat"),
    (0x1b36, "Red Hat"),
    (0x1b96, "Western Digital"),
    (0x1bb1, "Seagate"),
    (0x1c5c, "SK hynix"),
    (0x1d0f, "Amazon"),
    (0x1dd8, "AMD Pensando"),
    (0x1e0f, "KIOXIA"),
    (0x8086, "Intel"),
];

/// `NVIDIA 10de:2335, host 0000:18:00.0`; without facts of the function `host function 0000:18:00.0`.
pub(super) fn host_function(facts: &Facts, address: PciAddress) -> String {
    let Some(function) = topology::find(&facts.functions, address) else {
        return format!("host function {address}");
    };
    let ids = format!("{:04x}:{:04x}", function.vendor, function.device);
    match VENDORS.iter().find(|(id, _)| *id == function.vendor) {
        Some((_, vendor)) => format!("{vendor} {ids}, host {address}"),
        None => format!("{ids}, host {address}"),
    }
}
