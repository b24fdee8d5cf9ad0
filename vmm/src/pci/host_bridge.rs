//! The host bridge at 00:00.0: it is there to be found, and does nothing.

use std::sync::{Mutex, MutexGuard, PoisonError};

use egm_address::{Guest, Span};

use super::{ConfigSpace, Identity, PciFunction};

/// Vendor and device of QEMU's generic PCI Express host bridge.
const VENDOR: u16 = 0x1b36;
const DEVICE: u16 = 0x0008;
const CLASS_HOST_BRIDGE: [u8; 3] = [0x06, 0x00, 0x00];

/// A host bridge.
pub struct HostBridge {
    config: Mutex<ConfigSpace>,
}

impl Default for HostBridge {
    fn default() -> Self {
        let identity = Identity {
            vendor: VENDOR,
            device: DEVICE,
            revision: 0,
            class: CLASS_HOST_BRIDGE,
            subsystem_vendor: 0x1af4,
            subsystem: 0x1100,
            header_type: 0,
        };
        Self { config: Mutex::new(ConfigSpace::new(identity, &[])) }
    }
}

impl HostBridge {
    fn lock(&self) -> MutexGuard<'_, ConfigSpace> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PciFunction for HostBridge {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        self.lock().read(offset, data);
    }

    fn config_write(&self, offset: u16, data: &[u8]) -> bool {
        self.lock().write(offset, data)
    }

    fn decoded(&self) -> Vec<(u8, Span<Guest>)> {
        Vec::new()
    }

    fn place(&self, _bars: &[(u8, Span<Guest>)]) {}

    fn bar_read(&self, _bar: u8, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn bar_write(&self, _bar: u8, _offset: u64, _data: &[u8]) {}
}
