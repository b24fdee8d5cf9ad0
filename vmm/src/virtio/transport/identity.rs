//! Configuration space of a virtio function: identity, capabilities, and the window through which firmware without
//! memory decode reaches BAR 0 (virtio 1.3 §4.1.2, §4.1.4).

use super::registers::{
    COMMON, COMMON_SIZE, DEVICE, DEVICE_SIZE, ISR, ISR_SIZE, NOTIFY, NOTIFY_SIZE, NOTIFY_STRIDE, PENDING,
    TABLE,
};
use crate::pci::{COMMAND, COMMAND_BUS_MASTER, ConfigSpace, Identity};
use crate::plan::BarPlan;

const VENDOR: u16 = 0x1af4;
/// Device id of type 0 of the devices that are not transitional (§4.1.2.1).
const MODERN: u16 = 0x1040;
/// Subsystem id: 0x40 or more for a device that is not transitional (§4.1.2.1); QEMU's.
const SUBSYSTEM: u16 = 0x1100;

const CAPABILITY_VENDOR: u8 = 0x09;
const CAPABILITY_EXPRESS: u8 = 0x10;
const CAPABILITY_MSIX: u8 = 0x11;

const MSIX_ENABLE: u16 = 1 << 15;
const MSIX_FUNCTION_MASK: u16 = 1 << 14;

/// Where the capabilities landed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    msix: u16,
    window: u16,
}

/// An access to BAR 0 by way of configuration space (§4.1.4.9).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WindowAccess {
    /// Offset in BAR 0, a multiple of `length`.
    pub(super) offset: u32,
    /// 1, 2 or 4.
    pub(super) length: usize,
}

/// Identity of a function in its configuration space.
pub(super) struct Profile<'a> {
    pub(super) device_type: u16,
    /// The planned BAR 0.
    pub(super) bar: &'a BarPlan,
    pub(super) vectors: usize,
    /// An endpoint behind a root port, or one integrated into the root complex.
    pub(super) below_port: bool,
}

/// Builds the configuration space; `None` when its capabilities do not fit.
pub(super) fn config_space(profile: &Profile<'_>) -> Option<(ConfigSpace, Layout)> {
    let identity = Identity {
        vendor: VENDOR,
        device: MODERN.checked_add(profile.device_type)?,
        revision: 1,
        class: class(profile.device_type),
        subsystem_vendor: VENDOR,
        subsystem: SUBSYSTEM,
        header_type: 0,
    };
    let mut config = ConfigSpace::new(identity, std::slice::from_ref(profile.bar));
    add_express(&mut config, profile.below_port)?;
    let msix = add_msix(&mut config, profile.vectors)?;
    add_structure(&mut config, 1, COMMON, COMMON_SIZE, None)?;
    add_structure(&mut config, 2, NOTIFY, NOTIFY_SIZE, Some(NOTIFY_STRIDE))?;
    add_structure(&mut config, 3, ISR, ISR_SIZE, None)?;
    add_structure(&mut config, 4, DEVICE, DEVICE_SIZE, None)?;
    let window = add_structure(&mut config, 5, 0, 0, Some(0))?;
    config.allow(window.checked_add(4)?, &[0xff]);
    config.allow(window.checked_add(8)?, &[0xff; 12]);
    Some((config, Layout { msix, window }))
}

/// Base class, subclass, interface.
fn class(device_type: u16) -> [u8; 3] {
    match device_type {
        1 => [0x02, 0x00, 0],  // network controller, Ethernet
        2 => [0x01, 0x80, 0],  // mass storage, other
        19 => [0x07, 0x80, 0], // communication, other
        _ => [0xff, 0x00, 0],
    }
}

/// virtio_pci_cap (§4.1.4): length, type, BAR 0, id, padding, offset, length.
fn add_structure(
    config: &mut ConfigSpace,
    kind: u8,
    offset: u32,
    size: u32,
    extra: Option<u32>,
) -> Option<u16> {
    let length = if extra.is_some() { 20 } else { 16 };
    let mut body = vec![length, kind, 0, 0, 0, 0];
    body.extend(offset.to_le_bytes());
    body.extend(size.to_le_bytes());
    body.extend(extra.into_iter().flat_map(u32::to_le_bytes));
    config.add_capability(CAPABILITY_VENDOR, &body)
}

/// PCI Express Base 6.0 §7.5.3, version 2. It is what makes Linux look for the 4096-byte configuration space.
fn add_express(config: &mut ConfigSpace, below_port: bool) -> Option<u16> {
    const ENDPOINT: u16 = 0x0 << 4;
    const INTEGRATED_ENDPOINT: u16 = 0x9 << 4;
    const ROLE_BASED_ERRORS: u32 = 1 << 15;
    const LINK: u16 = 0x11; // 2.5 GT/s, one lane
    let kind = if below_port { ENDPOINT } else { INTEGRATED_ENDPOINT };
    let mut body = [0; 0x3a];
    let mut put = |at: usize, data: &[u8]| {
        for (to, from) in body.iter_mut().skip(at.saturating_sub(2)).zip(data) {
            *to = *from;
        }
    };
    put(0x02, &(kind | 2).to_le_bytes());
    put(0x04, &ROLE_BASED_ERRORS.to_le_bytes());
    if below_port {
        put(0x0c, &u32::from(LINK).to_le_bytes()); // link capabilities
        put(0x12, &LINK.to_le_bytes()); // link status
    }
    let at = config.add_capability(CAPABILITY_EXPRESS, &body)?;
    config.allow(at.checked_add(0x08)?, &0x7fff_u16.to_le_bytes()); // device control; no function-level reset
    if below_port {
        config.allow(at.checked_add(0x10)?, &0x0043_u16.to_le_bytes()); // link control: ASPM, common clock
    }
    Some(at)
}

/// PCI Express Base 6.0 §7.7.2.
fn add_msix(config: &mut ConfigSpace, vectors: usize) -> Option<u16> {
    let mut body = u16::try_from(vectors.checked_sub(1)?).ok()?.to_le_bytes().to_vec();
    body.extend(TABLE.to_le_bytes()); // the low three bits name BAR 0
    body.extend(PENDING.to_le_bytes());
    let at = config.add_capability(CAPABILITY_MSIX, &body)?;
    config.allow(at.checked_add(2)?, &(MSIX_ENABLE | MSIX_FUNCTION_MASK).to_le_bytes());
    Some(at)
}

impl Layout {
    /// MSI-X enable and function mask. A function that is not bus master sends no message: its vectors wait.
    pub(super) fn msix_control(self, config: &ConfigSpace) -> (bool, bool) {
        let control = config.u16(self.msix.saturating_add(2));
        let master = config.u16(COMMAND) & COMMAND_BUS_MASTER != 0;
        (master && control & MSIX_ENABLE != 0, control & MSIX_FUNCTION_MASK != 0)
    }

    /// Offset of the window's data register.
    pub(super) fn window_data(self) -> u16 {
        self.window.saturating_add(16)
    }

    /// Whether an access to configuration space touches the window's data register.
    pub(super) fn is_window(self, offset: u16, length: usize) -> bool {
        let (data, offset) = (usize::from(self.window_data()), usize::from(offset));
        offset < data.saturating_add(4) && offset.saturating_add(length) > data
    }

    /// Whether the window stands for no access, as after a reset: a length of 0 (§4.1.4.9).
    pub(super) fn is_idle(self, config: &ConfigSpace) -> bool {
        config.u32(self.window.saturating_add(12)) == 0
    }

    /// The access that the window stands for; `None` when the guest set it up wrongly.
    pub(super) fn window(self, config: &ConfigSpace) -> Option<WindowAccess> {
        let mut bar = [0];
        config.read(self.window.checked_add(4)?, &mut bar);
        let offset = config.u32(self.window.checked_add(8)?);
        let length = config.u32(self.window.checked_add(12)?);
        let valid = bar == [0] && matches!(length, 1 | 2 | 4) && offset.is_multiple_of(length);
        valid.then_some(WindowAccess { offset, length: usize::try_from(length).ok()? })
    }
}
