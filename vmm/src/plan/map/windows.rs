//! Windows of the guest's address space for PCI: BARs of 32 and of 64 bits, and configuration space.
//!
//! A device's BARs are one block in each window, and so are the devices of a switch (`place`): the block is
//! what the bridge above forwards. `tree` places devices behind bridges.

use egm_address::{ByteSize, Gpa, Guest, Placer, Span, SpanSet, align_down, align_up};

use crate::config::Spec;
use crate::plan::demand::devices::{DeviceDemand, PAGE};
use crate::plan::map::blocks::BRIDGE_UNIT;
use crate::plan::map::placement::{Blocks, TopBlock, fixed_bars, with_spare};
use crate::plan::map::space::{Space, Windows};
use crate::plan::{AssignedRule, PlacementRule, PlanError};

/// Configuration space of a bus (PCI Express Base 7.2.2).
const BUS_CONFIGURATION: u64 = 1 << 20;
/// A window around BARs at fixed addresses begins and ends at multiples of this.
const FIXED_UNIT: u64 = 1 << 30;

/// Chooses the windows; the 64-bit one has room for a quarter more than the BARs, and shrinks where that does not fit.
pub(super) fn choose(
    spec: &Spec,
    high: &Blocks<'_>,
    buses: usize,
    space: &mut Space,
) -> Result<Windows, PlanError> {
    let ecam = configuration_space(high.devices.len(), buses, space)?;
    let blocks = high.fixed()?;
    let memory64 = if blocks.is_empty() {
        free_window(spec, high, space)?
    } else {
        Some(around(spec, high, &blocks, space)?)
    };
    Ok(Windows { memory32: space.layout.pci32, memory64, ecam })
}

fn free_window(spec: &Spec, high: &Blocks<'_>, space: &mut Space) -> Result<Option<Span<Guest>>, PlanError> {
    let needed = high.needed()?;
    let least = needed.max(BRIDGE_UNIT).checked_next_power_of_two().unwrap_or(u64::MAX);
    let mut size = match spec.pcie.window64 {
        Some(size) => size.get(),
        None => with_spare(needed),
    };
    let from = space.top;
    let memory64 = loop {
        let align = size.checked_next_power_of_two();
        let span = align.and_then(|align| space.place_at_top(size, align));
        if span.is_some() || spec.pcie.window64.is_some() || size <= least {
            break span;
        }
        size /= 2;
    };
    let configured = spec.pcie.window64.is_some();
    if memory64.is_none() && (configured || needed > 0) {
        let (size, limit, bits) = (ByteSize::new(size), space.limit, space.bits);
        return Err(PlanError::Window64 { size, from, limit, bits, configured });
    }
    Ok(memory64)
}

/// A window around blocks that must be somewhere, with room for the others behind them, or else before.
fn around(
    spec: &Spec,
    high: &Blocks<'_>,
    blocks: &[TopBlock],
    space: &Space,
) -> Result<Span<Guest>, PlanError> {
    check_fixed(high.devices, space)?;
    let lowest = blocks.iter().map(|block| block.span.start().get()).min().unwrap_or(0);
    let highest = blocks.iter().map(|block| block.span.end().get()).max().unwrap_or(0);
    let needed = high.needed()?;
    let start = align_down(lowest, FIXED_UNIT).max(space.top.get());
    let spare = if needed > 0 { with_spare(needed) } else { 0 };
    let end = match spec.pcie.window64 {
        Some(size) => start.checked_add(size.get()),
        None => align_up(highest, FIXED_UNIT).map(|end| end.saturating_add(spare)),
    };
    let end = end.unwrap_or(u64::MAX).min(space.limit);
    let window = |start: u64| Span::between(Gpa::new(start), Gpa::new(end.max(start)));
    let holds = |window: &Span<Guest>| {
        let taken = blocks.iter().map(|block| block.span).chain(space.blocked().iter()).collect();
        Placer::new(&SpanSet::from_iter([*window]), &taken).place_all(high.requests()).is_ok()
    };
    if end < highest {
        let (from, limit, bits) = (Gpa::new(start), space.limit, space.bits);
        let (size, configured) = (ByteSize::new(highest.saturating_sub(start)), spec.pcie.window64.is_some());
        return Err(PlanError::Window64 { size, from, limit, bits, configured });
    }
    let near = window(start).filter(holds);
    let all = || align_up(space.top.get(), BRIDGE_UNIT).and_then(window);
    near.or_else(all).ok_or(PlanError::Internal("a window around BARs is empty"))
}

/// No larger than the buses need: Linux looks for a host bridge at every place of each bus that the window has, and each
/// look leaves the guest twice (`pcibios_fixup_peer_bridges`; 16,000 exits, a quarter of all until init).
fn configuration_space(devices: usize, buses: usize, space: &mut Space) -> Result<Span<Guest>, PlanError> {
    let buses = u64::try_from(buses).unwrap_or(u64::MAX);
    let size = buses.checked_next_power_of_two().and_then(|buses| buses.checked_mul(BUS_CONFIGURATION));
    let size = size.ok_or(PlanError::Internal("there are more buses than numbers"))?;
    match space.layout.ecam {
        Some(most) if size <= most.size() => {
            Span::new(most.start(), size).map_err(|_| PlanError::Internal("configuration space has no place"))
        }
        Some(most) => Err(PlanError::Buses { devices, buses, max: most.size() / BUS_CONFIGURATION }),
        None => space.place_at_top(size, size).ok_or_else(|| PlanError::AddressSpace {
            what: "PCI configuration space".to_owned(),
            limit: space.limit,
            bits: space.bits,
            short_by: size,
            key: "memory.size",
        }),
    }
}

/// Checks that fixed BARs lie where BARs may be.
fn check_fixed(devices: &[DeviceDemand<'_>], space: &Space) -> Result<(), PlanError> {
    for fixed in fixed_bars(devices) {
        let span = Span::<Guest>::new(fixed.at, fixed.bar.size.max(PAGE));
        let beyond = || PlacementRule::Beyond { limit: space.limit, bits: space.bits };
        let Ok(span) = span else {
            return Err(AssignedRule::FixedBar {
                device: fixed.device.id.clone(),
                index: fixed.bar.index,
                why: "it runs past the end of the 64-bit address space",
            }
            .into());
        };
        let rule = match space.blocked().iter().find(|blocked| blocked.overlaps(span)) {
            _ if fixed.at < space.top => PlacementRule::Memory(space.top),
            _ if span.end().get() > space.limit => beyond(),
            Some(blocked) => PlacementRule::Reserved(blocked),
            None => continue,
        };
        let (device, data_direct) = (fixed.device.id.clone(), fixed.bar.data_direct);
        return Err(AssignedRule::Place { device, what: fixed.name(), span, rule, data_direct }.into());
    }
    Ok(())
}
