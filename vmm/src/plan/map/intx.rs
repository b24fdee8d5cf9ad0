//! Interrupt lines of PCI pins.
//!
//! A function has one pin here, INTA. A bridge turns the pins of what is behind it by their device numbers, so that they end
//! at the four pins of each place of a host bridge's bus (PCI Express Base 6.0 §2.2.8.1); the `_PRT` of the firmware gives these a line.

use egm_address::PciAddress;

use crate::config::{Device, DeviceKind};
use crate::plan::types::{intx_owner, spare_intx_owner};
use crate::plan::{FunctionPlan, FunctionRole, LinePlan, Plan};

/// Interrupt lines that belong to PCI; on x86 those of an I/O APIC above the sixteen of ISA.
#[derive(Debug, Clone, Copy)]
pub struct IntxLines {
    /// First global system interrupt.
    pub first: u32,
    /// Number of lines from `first` on.
    pub count: u32,
}

/// A pin of a place on the bus of a host bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RootPin {
    /// Bus of the host bridge: 0, or an expander's.
    pub bus: u8,
    /// Device number on it.
    pub device: u8,
    /// 0 for INTA to 3 for INTD.
    pub pin: u8,
}

impl RootPin {
    /// Where INTA of `function` ends: below bus 0, or that of an expander, to which no bridge leads.
    pub(crate) fn of(all: &[FunctionPlan], function: PciAddress) -> Self {
        let (mut at, mut pin) = (function, 0u8);
        let above = |bus: u8| {
            let leads = |bridge: &&FunctionPlan| {
                bridge.address.bus() < bus && bridge.role.bridge().is_some_and(|plan| plan.secondary == bus)
            };
            all.iter().find(leads)
        };
        // Each step goes to a lower bus, or ends.
        while let Some(bridge) = above(at.bus()) {
            pin = pin.wrapping_add(at.device()) % 4;
            at = bridge.address;
        }
        Self { bus: at.bus(), device: at.device(), pin }
    }
}

/// INTA of a function, and the owner of its interrupt line.
struct Pin {
    function: PciAddress,
    owner: String,
}

/// Pins of host functions and vfio-user devices, and of the function that may come to each spare port. Slices have none.
fn pins(all: &[FunctionPlan]) -> impl Iterator<Item = Pin> {
    all.iter().filter_map(|function| match &function.role {
        FunctionRole::Endpoint { device: Device { kind: DeviceKind::Egm { .. }, .. }, .. } => None,
        FunctionRole::Endpoint { device, .. } if device.kind.is_assigned() => {
            Some(Pin { function: function.address, owner: intx_owner(&device.id) })
        }
        FunctionRole::RootPort { slot, bridge } | FunctionRole::SwitchDownstream { slot, bridge }
            if function.is_spare_port(all) =>
        {
            Some(Pin { function: bridge.only_device()?, owner: spare_intx_owner(*slot) })
        }
        _ => None,
    })
}

impl Plan {
    /// Address of each function with a pin, present or possible in a spare port, and its interrupt line.
    pub(crate) fn intx_lines(&self) -> impl Iterator<Item = (PciAddress, u32)> {
        pins(&self.pci).filter_map(|Pin { function, owner }| Some((function, self.line(&owner)?)))
    }
}

/// Interrupt lines of all pins. Functions that end at one root pin share a line; others may, too.
pub(super) fn lines(all: &[FunctionPlan], intx: Option<IntxLines>) -> impl Iterator<Item = LinePlan> {
    pins(all).filter_map(move |Pin { function, owner }| {
        let (intx, root) = (intx?, RootPin::of(all, function));
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
        BridgePlan { secondary, subordinate, window32: None, window64: None, acs: None }
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
        assert_eq!(of("0000:03:00.0"), RootPin { bus: 0, device: 2, pin: 0 });
        assert_eq!(of("0000:04:00.0"), RootPin { bus: 0, device: 2, pin: 1 });
        assert_eq!(of("0000:00:07.0"), RootPin { bus: 0, device: 7, pin: 0 });
        assert_eq!(of("0000:09:03.0"), RootPin { bus: 9, device: 3, pin: 0 }, "on the bus of an expander");
        // The downstream ports are spare: each has the line of a function that may come there.
        let lines: Vec<_> = lines(&all, Some(IntxLines { first: 16, count: 8 })).collect();
        let line = |gsi, owner: &str| LinePlan { gsi, owner: owner.to_owned() };
        assert_eq!(lines, [line(18, "slot 1 INTA"), line(19, "slot 2 INTA")]);
    }
}
