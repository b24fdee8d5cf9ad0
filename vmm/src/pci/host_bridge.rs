//! The host bridge at 00:00.0: it is there to be found, and does nothing.

use std::sync::Mutex;

use super::saved::BridgeState;
use super::{ConfigSpace, Identity, PciFunction};
use crate::lock::lock;
use crate::snapshot::Mismatch;

/// Vendor and device of QEMU's generic PCI Express host bridge.
const VENDOR: u16 = 0x1b36;
const DEVICE: u16 = 0x0008;
const CLASS_HOST_BRIDGE: [u8; 3] = [0x06, 0x00, 0x00];

/// A host bridge with the ids of QEMU's, and without BARs.
pub struct HostBridge {
    config: Mutex<ConfigSpace>,
}

/// Its configuration space after a reset.
fn config_space() -> ConfigSpace {
    let identity = Identity {
        vendor: VENDOR,
        device: DEVICE,
        revision: 0,
        class: CLASS_HOST_BRIDGE,
        subsystem_vendor: 0x1af4,
        subsystem: 0x1100,
        header_type: 0,
    };
    ConfigSpace::new(identity, &[])
}

impl Default for HostBridge {
    fn default() -> Self {
        Self { config: Mutex::new(config_space()) }
    }
}

impl PciFunction for HostBridge {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        lock(&self.config).read(offset, data);
    }

    fn config_write(&self, offset: u16, data: &[u8]) -> bool {
        lock(&self.config).write(offset, data)
    }

    fn warm_reset(&self) {
        *lock(&self.config) = config_space();
    }

    fn saved(&self) -> Option<BridgeState> {
        Some(BridgeState { config: lock(&self.config).saved(), slot: None })
    }

    fn restore(&self, saved: &BridgeState) -> Result<(), Mismatch> {
        lock(&self.config).restore(&saved.config)
    }
}
