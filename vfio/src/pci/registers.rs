//! Offsets and bits that more than one file needs (PCI Express Base 6.0 §7.5.1).

/// Bytes of a conventional function's configuration space.
pub(super) const CONVENTIONAL: u16 = 0x100;
/// Bytes of a PCI Express function's configuration space.
pub(super) const EXPRESS: u16 = 0x1000;

pub(super) const COMMAND: u16 = 0x04;
pub(super) const COMMAND_MEMORY: u16 = 1 << 1;
pub(super) const COMMAND_BUS_MASTER: u16 = 1 << 2;
pub(super) const COMMAND_INTX_DISABLE: u16 = 1 << 10;
pub(super) const STATUS: u16 = 0x06;
pub(super) const STATUS_CAPABILITIES: u16 = 1 << 4;
pub(super) const HEADER_TYPE: u16 = 0x0e;
pub(super) const BAR0: u16 = 0x10;
pub(super) const ROM: u16 = 0x30;
pub(super) const CAPABILITIES: u16 = 0x34;
pub(super) const INTERRUPT_PIN: u16 = 0x3d;
pub(super) const FIRST_CAPABILITY: u16 = 0x40;

/// Standard capability ids (PCI Code and ID Assignment 1.15 §2).
pub(super) mod id {
    pub(in super::super) const POWER: u8 = 0x01;
    pub(in super::super) const VPD: u8 = 0x03;
    pub(in super::super) const MSI: u8 = 0x05;
    pub(in super::super) const VENDOR: u8 = 0x09;
    pub(in super::super) const EXPRESS: u8 = 0x10;
    pub(in super::super) const MSIX: u8 = 0x11;
    pub(in super::super) const ADVANCED: u8 = 0x13;
}

/// Extended capability ids (PCI Code and ID Assignment 1.15 §3).
pub(super) mod extended {
    pub(in super::super) const NULL: u16 = 0x00;
    pub(in super::super) const AER: u16 = 0x01;
    pub(in super::super) const VENDOR: u16 = 0x0b;
    pub(in super::super) const REBAR: u16 = 0x15;
    pub(in super::super) const DVSEC: u16 = 0x23;
}

fn bytes<const N: usize>(space: &[u8], at: u16) -> Option<[u8; N]> {
    let from = usize::from(at);
    space.get(from..from.checked_add(N)?)?.try_into().ok()
}

/// A byte of `space`; `None` past its end.
pub(super) fn byte(space: &[u8], at: u16) -> Option<u8> {
    space.get(usize::from(at)).copied()
}

/// A 16-bit register of `space`; `None` past its end.
pub(super) fn word(space: &[u8], at: u16) -> Option<u16> {
    bytes(space, at).map(u16::from_le_bytes)
}

/// A 32-bit register of `space`; `None` past its end.
pub(super) fn dword(space: &[u8], at: u16) -> Option<u32> {
    bytes(space, at).map(u32::from_le_bytes)
}
