//! Interrupt lines of PCI pins.
//!
//! A function has one pin here, INTA. A bridge turns the pins of what is behind it by their device numbers, so that they end
//! at the four pins of each place of bus 0 (PCI Express Base 6.0 §2.2.8.1); the `_PRT` of the firmware gives these a line.

use egm_address::PciAddress;

use crate::plan::types::intx_owner;
use crate::plan::{FunctionPlan, FunctionRole, LinePlan};

/// Lines of an I/O APIC that belong to PCI: those above the sixteen of ISA.
#[derive(Debug, Clone, Copy)]
pub struct IntxLines {
    /// First global system interrupt.
    pub first: u32,
    /// How many.
    pub count: u32,
}

/// A pin of a place of bus 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RootPin {
    /// Device number on bus 0.
    pub device: u8,
    /// 0 for INTA to 3 for INTD.
    pub pin: u8,
}

impl RootPin {
    /// Where INTA of `function` ends; `None` when no bridge of `all` leads to it.
    pub fn of(all: &[FunctionPlan], function: PciAddress) -> Option<Self> {
        let (mut at, mut pin) = (function, 0u8);
        // Each step goes to a lower bus, or ends.
        while at.bus() != 0 {
            let bus = at.bus();
            pin = pin.wrapping_add(at.device()) % 4;
            let leads = |bridge: &&FunctionPlan| {
                bridge.address.bus() < bus && bridge.role.bridge().is_some_and(|plan| plan.secondary == bus)
            };
            at = all.iter().find(leads)?.address;
        }
        Some(Self { device: at.device(), pin })
    }
}

/// The lines of host functions. Functions that end at one pin share a line, as do some others.
pub(super) fn lines(all: &[FunctionPlan], intx: Option<IntxLines>) -> impl Iterator<Item = LinePlan> {
    let passed = all.iter().filter_map(|function| match &function.role {
        FunctionRole::Endpoint { device, passed: Some(_) } => {
            Some((function.address, intx_owner(&device.id)))
        }
        _ => None,
    });
    passed.filter_map(move |(address, owner)| {
        let (intx, root) = (intx?, RootPin::of(all, address)?);
        let number = u32::from(root.device).wrapping_add(root.pin.into()).checked_rem(intx.count)?;
        Some(LinePlan { gsi: intx.first.checked_add(number)?, owner })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::BridgePlan;

    fn function(address: &str, role: FunctionRole) -> FunctionPlan {
        FunctionPlan { address: address.parse().unwrap(), role, bars: Vec::new(), msix_vectors: 0 }
    }

    fn bridge(secondary: u8, subordinate: u8) -> BridgePlan {
        BridgePlan { secondary, subordinate, window32: None, window64: None }
    }

    #[test]
    fn pins_behind_a_switch_turn_by_device_numbers_on_the_way_up() {
        let all = [
            function("0000:00:02.0", FunctionRole::RootPort { slot: 1, bridge: bridge(1, 4) }),
            function("0000:01:00.0", FunctionRole::SwitchUpstream { bridge: bridge(2, 4) }),
            function("0000:02:00.0", FunctionRole::SwitchDownstream { slot: 1, bridge: bridge(3, 3) }),
            function("0000:02:01.0", FunctionRole::SwitchDownstream { slot: 2, bridge: bridge(4, 4) }),
        ];
        let of = |text: &str| RootPin::of(&all, text.parse().unwrap());
        assert_eq!(of("0000:03:00.0"), Some(RootPin { device: 2, pin: 0 }));
        assert_eq!(of("0000:04:00.0"), Some(RootPin { device: 2, pin: 1 }));
        assert_eq!(of("0000:00:07.0"), Some(RootPin { device: 7, pin: 0 }));
        assert_eq!(of("0000:09:00.0"), None);
    }
}
