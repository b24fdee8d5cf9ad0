//! Names of class codes.

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
