//! The PCI Express capability of a port (PCI Express Base 6.0 §7.5.3).

use super::PortConfig;
use super::slot::{CAPABILITIES, Slot};
use crate::pci::ConfigSpace;

const CAPABILITY_EXPRESS: u8 = 0x10;
/// Capability Version (§7.5.3.2): 2 for every function of this specification.
const VERSION: u16 = 2;
const SLOT_IMPLEMENTED: u16 = 1 << 8;
const DEVICE_ROLE_BASED_ERRORS: u32 = 1 << 15;
/// 2.5 GT/s, one lane.
const LINK: u16 = 1 | 1 << 4;
/// Link Capabilities: the port reports whether its link is active.
const LINK_ACTIVE_REPORTING: u32 = 1 << 20;
/// Link Status: data link layer active.
const LINK_ACTIVE: u16 = 1 << 13;
/// Slot Status: presence detect state.
const PRESENT: u16 = 1 << 6;

const LINK_STATUS: u16 = 0x12;
/// Slot Control; Slot Status follows.
pub(super) const SLOT_CONTROL: u16 = 0x18;

/// Adds it to `config`; `slot` is a hot-plug port's. Returns where it is.
pub(super) fn add(config: &mut ConfigSpace, port: &PortConfig, slot: Option<&Slot>) -> u16 {
    let mut body = [0; 58];
    // Offsets of the specification, which count from the two bytes before the body.
    let mut put = |at: usize, data: &[u8]| {
        for (to, from) in body.iter_mut().skip(at.saturating_sub(2)).zip(data) {
            *to = *from;
        }
    };
    let has_slot = port.kind.has_slot();
    let implemented = if has_slot { SLOT_IMPLEMENTED } else { 0 };
    put(0x02, &(VERSION | port.kind.express() << 4 | implemented).to_le_bytes());
    put(0x04, &DEVICE_ROLE_BASED_ERRORS.to_le_bytes());
    let reporting = if slot.is_some() { LINK_ACTIVE_REPORTING } else { 0 };
    put(0x0c, &(u32::from(LINK) | reporting | u32::from(port.slot & 0xff) << 24).to_le_bytes());
    put(LINK_STATUS.into(), &link_status(port.occupied).to_le_bytes());
    if has_slot {
        let capabilities = slot.map_or(0, |_| CAPABILITIES);
        put(0x14, &(capabilities | u32::from(port.slot) << 19).to_le_bytes());
        put(0x1a, &(if port.occupied { PRESENT } else { 0 }).to_le_bytes());
    }
    put(0x2c, &(1u32 << 1).to_le_bytes()); // supported link speeds: 2.5 GT/s
    put(0x30, &1u16.to_le_bytes()); // target link speed
    let at = config.add_capability(CAPABILITY_EXPRESS, &body).unwrap_or_default(); // the first capability: it fits
    slot.iter().for_each(|slot| show(config, at, slot));
    at
}

/// Shows the guest what `slot` is like, in the capability at `at`.
pub(super) fn show(config: &mut ConfigSpace, at: u16, slot: &Slot) {
    let mut put = |offset: u16, value: u16| config.put(at.saturating_add(offset), &value.to_le_bytes());
    put(LINK_STATUS, link_status(slot.is_up()));
    put(SLOT_CONTROL, slot.control());
    put(SLOT_CONTROL + 2, slot.status());
}

const fn link_status(active: bool) -> u16 {
    if active { LINK | LINK_ACTIVE } else { LINK }
}
