//! Base address registers of a host's PCI function.

use serde::{Deserialize, Serialize};

/// A base address register of a host function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostBar {
    /// Register number, 0 to 5.
    pub index: u8,
    /// Address space, width and prefetchability.
    pub kind: HostBarKind,
    /// Bytes, at least 1.
    pub size: u64,
    /// Start on the host: a physical address, or a port; 0 if the host assigned none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub start: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A BAR region that the driver backs with device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceMemory {
    /// Index of the BAR at which a guest finds it.
    pub bar: u8,
    /// Size of the region in bytes, of which fewer may be memory.
    pub size: u64,
}

/// Type and width of a host's base address register (PCI Express Base 7.5.1.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostBarKind {
    /// I/O ports: bit 0 of the register is 1.
    Ports,
    /// Memory with a 32-bit address.
    Memory32,
    /// Prefetchable memory with a 32-bit address.
    Memory32Prefetchable,
    /// Memory with a 64-bit address, in two registers.
    Memory64,
    /// Prefetchable memory with a 64-bit address, in two registers.
    Memory64Prefetchable,
}

impl HostBarKind {
    /// Decodes the low bits of a register (PCI Express Base 7.5.1.2.1).
    pub(crate) const fn of_register(register: u32) -> Self {
        match (register & 1, register & 6, register & 8) {
            (1, ..) => Self::Ports,
            (_, 4, 0) => Self::Memory64,
            (_, 4, _) => Self::Memory64Prefetchable,
            (_, _, 0) => Self::Memory32,
            _ => Self::Memory32Prefetchable,
        }
    }
}
