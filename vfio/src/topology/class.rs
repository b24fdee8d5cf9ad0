//! Names of class codes and of vendors.

/// Name of a 24-bit class code's upper 16 bits (PCI Code and ID Assignment 1.15 §1), or of the upper 8 if a finer name
/// is not needed here.
pub const fn class_name(class: u32) -> &'static str {
    match class >> 8 {
        0x0106 => "SATA controller",
        0x0108 => "NVMe controller",
        0x0200 => "Ethernet controller",
        0x0207 => "InfiniBand controller",
        0x0300 => "VGA controller",
        0x0302 => "3D controller",
        0x0403 => "audio device",
        0x0500 => "RAM controller",
        0x0502 => "CXL memory",
        0x0600 => "host bridge",
        0x0601 => "ISA bridge",
        0x0604 => "PCI bridge",
        0x0680 => "bridge",
        0x0880 => "system peripheral",
        0x0c03 => "USB controller",
        0x0c05 => "SMBus",
        0x1200 => "processing accelerator",
        other => match other >> 8 {
            0x01 => "storage controller",
            0x02 => "network controller",
            0x03 => "display controller",
            0x04 => "multimedia device",
            0x05 => "memory controller",
            0x06 => "bridge",
            0x07 => "communication controller",
            0x08 => "system peripheral",
            0x0c => "serial bus controller",
            0x0d => "wireless controller",
            0x10 => "encryption controller",
            0x12 => "accelerator",
            _ => "device",
        },
    }
}

/// Vendors of functions that hosts assign, by id (the PCI ID Repository).
const VENDORS: &[(u16, &str)] = &[
    (0x1000, "Broadcom"),
    (0x1002, "AMD"),
    (0x1022, "AMD"),
    (0x1077, "QLogic"),
    (0x10b5, "PLX"),
    (0x10de, "NVIDIA"),
    (0x10ee, "Xilinx"),
    (0x1179, "Toshiba"),
    (0x11f8, "Microchip"),
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

/// Name of the vendor with `id`, if it is one of these.
pub fn vendor_name(id: u16) -> Option<&'static str> {
    VENDORS.iter().find(|(known, _)| *known == id).map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vendors_have_names_and_each_id_is_there_once() {
        assert!(VENDORS.is_sorted_by(|(first, _), (second, _)| first < second));
        assert_eq!([vendor_name(0x10de), vendor_name(0xffff)], [Some("NVIDIA"), None]);
    }
}
