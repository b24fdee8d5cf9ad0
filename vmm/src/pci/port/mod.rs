//! A PCI Express port: a bridge of the root complex or of a switch (PCI Express Base 6.0 §7.5.1.3, §7.5.3).
//!
//! A hot-plug port has a [`Slot`] and what is in it; others have what is behind them for good.

mod express;
mod hot;
mod slot;

use std::sync::{Arc, Mutex};

use egm_address::{Gpa, Guest, Span};
use egm_vfio::topology::Acs;
use hot::Hot;
pub use hot::Plugged;
pub(crate) use slot::Duty;
use slot::Slot;

use super::saved::BridgeState;
use super::{COMMAND, COMMAND_MEMORY, ConfigSpace, Identity, PciFunction};
use crate::lock::lock;
use crate::snapshot::Mismatch;

const CLASS_PCI_BRIDGE: [u8; 3] = [0x06, 0x04, 0x00];
const HEADER_BRIDGE: u8 = 1;

const PRIMARY_BUS: u16 = 0x18;
const SECONDARY_BUS: u16 = 0x19;
const SUBORDINATE_BUS: u16 = 0x1a;
const MEMORY_BASE: u16 = 0x20;
const PREFETCHABLE_BASE: u16 = 0x24;
const PREFETCHABLE_BASE_UPPER: u16 = 0x28;
const PREFETCHABLE_LIMIT_UPPER: u16 = 0x2c;
const BRIDGE_CONTROL: u16 = 0x3e;
const SECONDARY_BUS_RESET: u16 = 1 << 6;
const PREFETCHABLE_64_BIT: u16 = 1;
/// Bridge windows are in units of 1 MiB.
const GRANULE: u64 = 1 << 20;

/// Where extended capabilities begin.
const EXTENDED: u16 = 0x100;

/// Kind of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortKind {
    /// A port of the root complex.
    Root,
    /// A switch's, to the root complex. Behind it is the switch's own bus.
    Upstream,
    /// A switch's, to a slot.
    Downstream,
}

impl PortKind {
    /// Vendor and device: QEMU's generic root port and a Texas Instruments switch, which guests treat as plain ones.
    const fn ids(self) -> (u16, u16) {
        match self {
            Self::Root => (0x1b36, 0x000c),
            Self::Upstream => (0x104c, 0x8232),
            Self::Downstream => (0x104c, 0x8233),
        }
    }

    /// Value of the Device/Port Type field (§7.5.3.2).
    const fn express(self) -> u16 {
        match self {
            Self::Root => 4,
            Self::Upstream => 5,
            Self::Downstream => 6,
        }
    }

    const fn has_slot(self) -> bool {
        !matches!(self, Self::Upstream)
    }
}

/// Kind, bus numbers and windows of a port at the start.
#[derive(Debug, Clone, Copy)]
pub struct PortConfig {
    /// Whether it is a root port or a port of a switch.
    pub kind: PortKind,
    /// Physical slot number, 13 bits; an upstream port has none.
    pub slot: u16,
    /// Bus that it is on.
    pub primary: u8,
    /// Bus directly behind it.
    pub secondary: u8,
    /// Highest bus behind it.
    pub subordinate: u8,
    /// 32-bit memory window that it forwards, if any.
    pub window32: Option<Span<Guest>>,
    /// 64-bit prefetchable memory window.
    pub window64: Option<Span<Guest>>,
    /// Whether a device is in the slot.
    pub occupied: bool,
    /// Access Control Services of the host's port in its place.
    pub acs: Option<Acs>,
}

/// A PCI Express port.
pub struct Port {
    /// Its state at the start.
    start: PortConfig,
    registers: Mutex<Registers>,
    hot: Option<Hot>,
    /// Ports that a reset of the bus behind this one reaches.
    below: Vec<Arc<Self>>,
}

/// Registers that the guest reads and writes.
struct Registers {
    config: ConfigSpace,
    /// Slot of a hot-plug port.
    slot: Option<Slot>,
    /// Offset of the PCI Express capability.
    express: u16,
}

impl Port {
    /// A port with the plan's numbers and windows already programmed.
    pub fn new(port: &PortConfig) -> Self {
        Self::with(port, None)
    }

    /// The same with `below` behind it.
    #[must_use]
    pub fn above(self, below: Vec<Arc<Self>>) -> Self {
        Self { below, ..self }
    }

    fn with(port: &PortConfig, slot: Option<Slot>) -> Self {
        let registers = Mutex::new(Registers::new(port, slot));
        Self { start: *port, registers, hot: None, below: Vec::new() }
    }

    /// The bus behind it, as programmed.
    pub(crate) fn secondary_bus(&self) -> u8 {
        let [bus, _] = lock(&self.registers).config.u16(SECONDARY_BUS).to_le_bytes();
        bus
    }

    /// Whether configuration accesses to `bus` are passed on.
    pub(crate) fn forwards_bus(&self, bus: u8) -> bool {
        let config = &lock(&self.registers).config;
        let [secondary, _] = config.u16(SECONDARY_BUS).to_le_bytes();
        let [subordinate, _] = config.u16(SUBORDINATE_BUS).to_le_bytes();
        (secondary..=subordinate).contains(&bus)
    }

    /// Whether an access to all of `span` is passed on.
    pub fn forwards(&self, span: Span<Guest>) -> bool {
        let config = &lock(&self.registers).config;
        let open = config.u16(COMMAND) & COMMAND_MEMORY != 0;
        let window32 =
            window(u64::from(config.u16(MEMORY_BASE)) << 16, u64::from(config.u16(MEMORY_BASE + 2)) << 16);
        let half = |low: u16, high: u16| u64::from(config.u16(low)) << 16 | u64::from(config.u32(high)) << 32;
        let window64 = window(
            half(PREFETCHABLE_BASE, PREFETCHABLE_BASE_UPPER),
            half(PREFETCHABLE_BASE + 2, PREFETCHABLE_LIMIT_UPPER),
        );
        let window64 = window64.filter(|_| config.u16(PREFETCHABLE_BASE) & PREFETCHABLE_64_BIT != 0);
        open && [window32, window64].into_iter().flatten().any(|window| window.covers(span))
    }
}

impl Registers {
    /// Registers after a reset, with the plan's numbers and windows already programmed.
    fn new(port: &PortConfig, slot: Option<Slot>) -> Self {
        let (vendor, device) = port.kind.ids();
        let identity = Identity {
            vendor,
            device,
            revision: 0,
            class: CLASS_PCI_BRIDGE,
            subsystem_vendor: 0,
            subsystem: 0,
            header_type: HEADER_BRIDGE,
        };
        let mut config = ConfigSpace::new(identity, &[]);
        config.put(PRIMARY_BUS, &[port.primary, port.secondary, port.subordinate]);
        config.allow(PRIMARY_BUS, &[0xff, 0xff, 0xff]);
        // I/O base and limit are read-only zeros: no I/O window (PCI-to-PCI Bridge 1.2 §3.2.5.6).
        let (base, limit) = window_registers(port.window32);
        config.put(MEMORY_BASE, &register_pair(base, limit, 0));
        config.allow(MEMORY_BASE, &[0xf0, 0xff, 0xf0, 0xff]);
        if let Some(window) = port.window64 {
            add_prefetchable(&mut config, window);
        }
        // Parity response and SERR are kept, without effect.
        config.allow(BRIDGE_CONTROL, &(0x03 | SECONDARY_BUS_RESET).to_le_bytes());
        config.allow(COMMAND, &[0x46, 0x05]);
        let express = express::add(&mut config, port, slot.as_ref());
        if let Some(acs) = port.acs {
            config.put(EXTENDED, &access_control(acs));
        }
        Self { config, slot, express }
    }

    /// Whether the bus behind is held in reset.
    fn resets(&self) -> bool {
        self.config.u16(BRIDGE_CONTROL) & SECONDARY_BUS_RESET != 0
    }
}

impl PciFunction for Port {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        lock(&self.registers).config.read(offset, data);
    }

    fn config_write(&self, offset: u16, data: &[u8]) -> bool {
        let mut registers = lock(&self.registers);
        let resetting = registers.resets();
        let touched = registers.config.write(offset, data);
        let link = self.hot_write(&mut registers, offset, data);
        let resets = registers.resets();
        drop(registers);
        if resets != resetting {
            self.hold(resets);
        }
        // A bridge has its windows where an endpoint has base address registers, and more of them.
        touched || link || (0x18..0x30).contains(&offset) || (0x3c..0x40).contains(&offset)
    }

    fn warm_reset(&self) {
        let registers = self.initial_hot_registers().unwrap_or_else(|| Registers::new(&self.start, None));
        *lock(&self.registers) = registers;
    }

    fn saved(&self) -> Option<BridgeState> {
        let registers = lock(&self.registers);
        Some(BridgeState { config: registers.config.saved(), slot: self.saved_slot(&registers) })
    }

    fn restore(&self, saved: &BridgeState) -> Result<(), Mismatch> {
        let mut registers = lock(&self.registers);
        registers.config.restore(&saved.config)?;
        self.restore_slot(&mut registers, saved.slot.as_ref())
    }
}

/// The prefetchable window. Without one its registers are read-only zeros (PCI-to-PCI Bridge 1.2 §3.2.5.9): Linux gives every
/// hot-plug port one that can have it.
fn add_prefetchable(config: &mut ConfigSpace, window: Span<Guest>) {
    let (base, limit) = window_registers(Some(window));
    config.put(PREFETCHABLE_BASE, &register_pair(base, limit, PREFETCHABLE_64_BIT));
    config.allow(PREFETCHABLE_BASE, &[0xf0, 0xff, 0xf0, 0xff]);
    for (register, value) in [(PREFETCHABLE_BASE_UPPER, base), (PREFETCHABLE_LIMIT_UPPER, limit)] {
        config.put(register, value.to_le_bytes().get(4..).unwrap_or_default());
        config.allow(register, &[0xff; 4]);
    }
}

/// Base and limit for a window; an absent one has its base above its limit.
fn window_registers(window: Option<Span<Guest>>) -> (u64, u64) {
    window.map_or((GRANULE, 0), |w| (w.start().get(), w.last().get()))
}

fn register_pair(base: u64, limit: u64, flags: u16) -> [u8; 4] {
    let half = |value: u64| {
        let [_, _, low, high, ..] = value.to_le_bytes();
        (u16::from_le_bytes([low, high]) & 0xfff0 | flags).to_le_bytes()
    };
    let ([b0, b1], [l0, l1]) = (half(base), half(limit));
    [b0, b1, l0, l1]
}

fn window(base: u64, limit: u64) -> Option<Span<Guest>> {
    let aligned = |value: u64| value & !(GRANULE - 1);
    Span::between(Gpa::new(aligned(base)), Gpa::new(aligned(limit).checked_add(GRANULE)?))
}

/// Access control services (§7.7.11) as the host has them, the only extended capability. The guest cannot change what the
/// host's ports do, so it cannot write the bits; egress control needs a vector that is not there.
fn access_control(acs: Acs) -> [u8; 8] {
    const EGRESS_CONTROL: u8 = 1 << 5;
    let [capability, control] = [acs.capability, acs.control].map(|bits| bits & !EGRESS_CONTROL);
    [0x0d, 0, 1, 0, capability, 0, control & capability, 0]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: u64, size: u64) -> Span<Guest> {
        Span::new(Gpa::new(start), size).unwrap()
    }

    fn config() -> PortConfig {
        PortConfig {
            kind: PortKind::Root,
            slot: 1,
            primary: 0,
            secondary: 3,
            subordinate: 3,
            window32: None,
            window64: Some(span(0x80_0000_0000, 2 << 20)),
            occupied: true,
            acs: Some(Acs { capability: 0x7f, control: 0x3d }),
        }
    }

    fn port() -> Port {
        Port::new(&config())
    }

    #[test]
    fn the_planned_window_is_forwarded_once_memory_is_enabled() {
        let port = port();
        assert!(!port.forwards(span(0x80_0000_0000, 0x8000)), "memory space is off at the start");
        assert!(port.config_write(COMMAND, &2u16.to_le_bytes()));
        assert!(port.forwards(span(0x80_0000_0000, 2 << 20)));
        assert!(!port.forwards(span(0x80_001f_ffff, 2)));
        assert!(!port.forwards(span(0, 0x1000)), "an absent window forwards nothing");
        assert_eq!(port.secondary_bus(), 3);
    }

    #[test]
    fn a_window_that_was_not_planned_cannot_be_made() {
        let port = Port::new(&PortConfig { window64: None, ..config() });
        let _ = port.config_write(COMMAND, &2u16.to_le_bytes());
        let _ = port.config_write(PREFETCHABLE_BASE, &0xfff0_fff0u32.to_le_bytes());
        let mut data = [0xff; 12];
        port.config_read(PREFETCHABLE_BASE, &mut data);
        assert_eq!(data, [0; 12]);
        assert!(!port.forwards(span(0, 0x1000)));
    }

    #[test]
    fn a_guest_can_close_and_move_the_window() {
        let port = port();
        let _ = port.config_write(COMMAND, &2u16.to_le_bytes());
        assert!(port.config_write(PREFETCHABLE_BASE, &0xfff0u16.to_le_bytes()));
        assert!(!port.forwards(span(0x80_0000_0000, 0x1000)));
        assert!(port.config_write(SECONDARY_BUS, &[9]));
        assert_eq!(port.secondary_bus(), 9);
    }

    #[test]
    fn the_guest_sees_what_the_host_keeps_apart_and_cannot_change_it() {
        let port = port();
        let _ = port.config_write(EXTENDED + 4, &[0xff; 4]);
        let mut data = [0; 8];
        port.config_read(EXTENDED, &mut data);
        assert_eq!(data, [0x0d, 0, 1, 0, 0x5f, 0, 0x1d, 0], "all but egress control");
    }
}
