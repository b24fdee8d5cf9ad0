//! Who is behind which bridge, and the numbers of buses.
//!
//! ```text
//!  00:00.0 host bridge
//!  00:01.0 root port ── 01:00.0 first device that asks for a port
//!  00:02.0 root port ── 02:00.0 switch ─ 03:00.0 port ── 04:00.0 host functions that share a switch there
//!                                      └ 03:01.0 port ── 05:00.0
//!  00:03.0 first device that does not ask, …
//! ```

use egm_address::{PciAddress, Span};
use egm_vfio::topology::shared_switch;

use crate::config::{PciTopology, Spec};
use crate::plan::pci::Wanted;
use crate::plan::place::Places;
use crate::plan::{BridgePlan, FunctionPlan, FunctionRole, PassedPlan, PlanError};

/// Places on a bus.
const BUS_PLACES: usize = 32;

/// What one place of bus 0 has; devices are numbers into the list of wanted ones.
pub(super) enum Slot {
    /// A device.
    Direct([usize; 1]),
    /// A root port and a device.
    Port([usize; 1]),
    /// A root port, a switch and a device behind each of its ports.
    Switch(Vec<usize>),
}

impl Slot {
    pub(super) fn members(&self) -> &[usize] {
        match self {
            Self::Direct(one) | Self::Port(one) => one,
            Self::Switch(members) => members,
        }
    }

    pub(super) const fn is_behind_port(&self) -> bool {
        !matches!(self, Self::Direct(_))
    }

    /// Buses behind it.
    const fn buses(&self) -> usize {
        match self {
            Self::Direct(_) => 0,
            Self::Port(_) => 1,
            Self::Switch(members) => members.len().saturating_add(2),
        }
    }
}

/// Number of buses, bus 0 included.
pub(super) fn buses(slots: &[Slot]) -> usize {
    slots.iter().map(Slot::buses).fold(1, usize::saturating_add)
}

/// The slots of bus 0: those with root ports in the order of their first devices, then the others.
pub(super) fn slots(spec: &Spec, wanted: &[Wanted<'_>]) -> Result<Vec<Slot>, PlanError> {
    let mirror = spec.pcie.topology == PciTopology::Mirror;
    let mut slots = Vec::new();
    let mut done: Vec<usize> = Vec::new();
    for (index, one) in wanted.iter().enumerate().filter(|(_, one)| one.device.root_port) {
        if done.contains(&index) {
            continue;
        }
        let group = if mirror { on_its_switch(index, one, wanted) } else { Vec::new() };
        if group.len() < 2 {
            slots.push(Slot::Port([index]));
        } else {
            slots.extend(group.chunks(BUS_PLACES).map(|part| Slot::Switch(part.to_vec())));
            done.extend(group);
        }
    }
    let direct = wanted.iter().enumerate().filter(|(_, one)| !one.device.root_port);
    slots.extend(direct.map(|(index, _)| Slot::Direct([index])));
    if slots.len() >= BUS_PLACES {
        return Err(PlanError::Bus0 { devices: slots.len(), max: BUS_PLACES - 1 });
    }
    Ok(slots)
}

/// The devices that share the host's topmost switch above `one`, itself included.
fn on_its_switch(index: usize, one: &Wanted<'_>, wanted: &[Wanted<'_>]) -> Vec<usize> {
    let Some(host) = one.host else { return Vec::new() };
    let shares = |other: &Wanted<'_>| {
        other.device.root_port && other.host.is_some_and(|other| shared_switch(host, other).is_some())
    };
    wanted
        .iter()
        .enumerate()
        .filter(|(other, candidate)| *other == index || shares(candidate))
        .map(|(other, _)| other)
        .collect()
}

/// Numbers that the next bridge gets.
struct Numbers {
    bus: u8,
    slot: u16,
}

/// Every function, by address.
pub(super) fn functions(
    wanted: &[Wanted<'_>],
    slots: &[Slot],
    (low, high): (&Places, &Places),
    passed: &[Option<PassedPlan>],
) -> Result<Vec<FunctionPlan>, PlanError> {
    let endpoint = |index: usize, bus: u8, place: u8| {
        let (Some(wanted), Some(low), Some(high)) =
            (wanted.get(index), low.devices.get(index), high.devices.get(index))
        else {
            return Err(PlanError::Internal("a device has no placement"));
        };
        let passed = passed.get(index).cloned().flatten();
        let role = FunctionRole::Endpoint { device: wanted.device.clone(), passed };
        let mut endpoint = function(bus, place, role)?;
        endpoint.bars = low.bars.iter().chain(&high.bars).cloned().collect();
        endpoint.bars.sort_by_key(|bar| bar.index);
        endpoint.msix_vectors = wanted.msix_vectors;
        Ok(endpoint)
    };
    let above = |index: usize| {
        let window = |places: &Places| places.devices.get(index).and_then(|placed| placed.window);
        (window(low), window(high))
    };
    let ports = slots.iter().filter(|slot| slot.is_behind_port()).count();
    let mut next = Numbers { bus: 1, slot: u16::try_from(ports).unwrap_or(u16::MAX).saturating_add(1) };
    let mut all = vec![function(0, 0, FunctionRole::HostBridge)?];
    for (place, (index, slot)) in (1u8..).zip(slots.iter().enumerate()) {
        let windows = (low.slots.get(index).copied().flatten(), high.slots.get(index).copied().flatten());
        match slot {
            Slot::Direct([device]) => all.push(endpoint(*device, 0, place)?),
            Slot::Port([device]) => {
                let bridge = bridge(next.bus, next.bus, windows);
                all.push(function(0, place, FunctionRole::RootPort { slot: place.into(), bridge })?);
                all.push(endpoint(*device, next.bus, 0)?);
                next.bus = next.bus.saturating_add(1);
            }
            Slot::Switch(members) => {
                let (top, inner) = (next.bus, next.bus.saturating_add(1));
                let count = u8::try_from(members.len()).unwrap_or(u8::MAX);
                let last = inner.saturating_add(count);
                let port = FunctionRole::RootPort { slot: place.into(), bridge: bridge(top, last, windows) };
                all.push(function(0, place, port)?);
                let upstream = FunctionRole::SwitchUpstream { bridge: bridge(inner, last, windows) };
                all.push(function(top, 0, upstream)?);
                for (device, (port, bus)) in members.iter().zip((0u8..).zip(inner.saturating_add(1)..)) {
                    let bridge = bridge(bus, bus, above(*device));
                    let downstream = FunctionRole::SwitchDownstream { slot: next.slot, bridge };
                    next.slot = next.slot.saturating_add(1);
                    all.push(function(inner, port, downstream)?);
                    all.push(endpoint(*device, bus, 0)?);
                }
                next.bus = last.saturating_add(1);
            }
        }
    }
    all.sort_by_key(|function| function.address);
    Ok(all)
}

type Window = Option<Span<egm_address::Guest>>;

const fn bridge(secondary: u8, subordinate: u8, (window32, window64): (Window, Window)) -> BridgePlan {
    BridgePlan { secondary, subordinate, window32, window64 }
}

fn function(bus: u8, device: u8, role: FunctionRole) -> Result<FunctionPlan, PlanError> {
    let address = PciAddress::new(0, bus, device, 0);
    let address = address.map_err(|_| PlanError::Internal("a bus has more than 32 places"))?;
    Ok(FunctionPlan { address, role, bars: Vec::new(), msix_vectors: 0 })
}
