//! The three ways to the root complex: ECAM, the ports 0xcf8 and 0xcfc, and PCI memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use egm_address::{Guest, Span};

use super::RootComplex;
use crate::machine::{BoardState, BusDevice};
use crate::snapshot::Mismatch;

/// Enhanced configuration access (PCI Express Base 6.0 §7.2.2): bus in bits 27..20, device and function in 19..12.
pub struct Ecam(pub Arc<RootComplex>);

/// A register of configuration space, and its function.
#[derive(Debug, PartialEq, Eq)]
struct Target {
    bus: u8,
    devfn: u8,
    register: u16,
}

impl Target {
    /// By the offset of an access to ECAM.
    fn of_ecam(offset: u64) -> Self {
        let [low, second, third, fourth, ..] = offset.to_le_bytes();
        Self {
            bus: third >> 4 | fourth << 4,
            devfn: second >> 4 | third << 4,
            register: u16::from_le_bytes([low, second & 0x0f]),
        }
    }
}

impl BusDevice for Ecam {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let Target { bus, devfn, register } = Target::of_ecam(offset);
        self.0.config_read(bus, devfn, register, data);
    }
    fn write(&self, offset: u64, data: &[u8]) {
        let Target { bus, devfn, register } = Target::of_ecam(offset);
        self.0.config_write(bus, devfn, register, data);
    }
}

/// Configuration mechanism #1 (PCI Local Bus 3.0 §3.2.2.3.2): an address port and a data port, 256 bytes a function.
pub(crate) struct ConfigPorts {
    root: Arc<RootComplex>,
    address: AtomicU32,
}

pub(crate) const CONFIG_PORT: u16 = 0xcf8;
pub(crate) const CONFIG_PORTS: u16 = 8;
const ENABLE: u32 = 1 << 31;

impl ConfigPorts {
    /// Both ports, address register clear.
    pub(crate) fn new(root: Arc<RootComplex>) -> Self {
        Self { root, address: AtomicU32::new(0) }
    }

    /// Target of an access to the data port; `None` unless the address is enabled.
    fn target(&self, offset: u64) -> Option<Target> {
        let address = self.address.load(Ordering::Relaxed);
        let byte = u8::try_from(offset.checked_sub(4)?).ok().filter(|byte| *byte < 4)?;
        let [register, devfn, bus, _] = address.to_le_bytes();
        let register = u16::from(register & 0xfc | byte);
        (address & ENABLE != 0).then_some(Target { bus, devfn, register })
    }
}

impl BusDevice for ConfigPorts {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if offset == 0 && data.len() == 4 {
            data.copy_from_slice(&self.address.load(Ordering::Relaxed).to_le_bytes());
        } else if let Some(Target { bus, devfn, register }) = self.target(offset) {
            self.root.config_read(bus, devfn, register, data);
        }
    }
    fn write(&self, offset: u64, data: &[u8]) {
        if let (0, Ok(address)) = (offset, data.try_into()) {
            self.address.store(u32::from_le_bytes(address), Ordering::Relaxed);
        } else if let Some(Target { bus, devfn, register }) = self.target(offset) {
            self.root.config_write(bus, devfn, register, data);
        }
    }
    fn warm_reset(&self) {
        self.address.store(0, Ordering::Relaxed);
    }
    fn saved(&self) -> Option<BoardState> {
        Some(BoardState::ConfigAddress(self.address.load(Ordering::Relaxed)))
    }
    fn restore(&self, saved: &BoardState) -> Result<(), Mismatch> {
        let BoardState::ConfigAddress(address) = saved else {
            return Err(Mismatch::new("it is another device"));
        };
        self.address.store(*address, Ordering::Relaxed);
        Ok(())
    }
}

/// A window of PCI memory.
pub(crate) struct PciMemory {
    root: Arc<RootComplex>,
    window: Span<Guest>,
}

impl PciMemory {
    /// The part of PCI memory at `window`.
    pub(crate) fn new(root: Arc<RootComplex>, window: Span<Guest>) -> Self {
        Self { root, window }
    }
}

impl BusDevice for PciMemory {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let Some(address) = self.window.start().checked_add(offset) {
            self.root.memory_read(address, data);
        }
    }
    fn write(&self, offset: u64, data: &[u8]) {
        if let Some(address) = self.window.start().checked_add(offset) {
            self.root.memory_write(address, data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::{Bus, HostBridge, Port, PortConfig, PortKind};

    fn root() -> Arc<RootComplex> {
        let (mut root, mut behind) = (Bus::default(), Bus::default());
        root.add(0, Arc::new(HostBridge::default()));
        behind.add(0, Arc::new(HostBridge::default()));
        let port = PortConfig {
            kind: PortKind::Root,
            slot: 1,
            primary: 0,
            secondary: 1,
            subordinate: 1,
            window32: None,
            window64: None,
            acs: None,
            occupied: true,
        };
        root.add_port(8, Arc::new(Port::new(&port)), behind);
        Arc::new(RootComplex::new(root))
    }

    #[test]
    fn both_doors_find_the_same_functions() {
        let root = root();
        let (ecam, ports) = (Ecam(Arc::clone(&root)), ConfigPorts::new(Arc::clone(&root)));
        for (bus, devfn, expected) in [
            (0u8, 0u8, 0x0008_1b36u32),
            (0, 8, 0x000c_1b36),
            (1, 0, 0x0008_1b36),
            (0, 16, u32::MAX),
            (2, 0, u32::MAX),
        ] {
            let mut data = [0; 4];
            ecam.read(u64::from(bus) << 20 | u64::from(devfn) << 12, &mut data);
            assert_eq!(u32::from_le_bytes(data), expected, "{bus}:{devfn}");
            ports.write(0, &(ENABLE | u32::from(bus) << 16 | u32::from(devfn) << 8).to_le_bytes());
            ports.read(4, &mut data);
            assert_eq!(u32::from_le_bytes(data), expected, "{bus}:{devfn}");
        }
    }

    #[test]
    fn renumbering_a_port_moves_what_is_behind_it() {
        let root = root();
        let mut data = [0; 2];
        root.config_write(0, 8, 0x18, &[0, 5, 5, 0]);
        root.config_read(1, 0, 0, &mut data);
        assert_eq!(data, [0xff; 2]);
        root.config_read(5, 0, 0, &mut data);
        assert_eq!(u16::from_le_bytes(data), 0x1b36);
    }

    #[test]
    fn every_access_at_every_offset_is_harmless() {
        let root = root();
        let (ecam, ports) = (Ecam(Arc::clone(&root)), ConfigPorts::new(Arc::clone(&root)));
        ports.write(0, &ENABLE.to_le_bytes());
        for offset in (0..0x3000u64).chain((1 << 28) - 8..1 << 28) {
            for length in 0..=8usize {
                let mut data = vec![0xa5; length];
                ecam.write(offset, &data);
                ecam.read(offset, &mut data);
                ports.read(offset, &mut data);
                ports.write(offset.max(1), &data);
            }
        }
    }
}
