//! Where the BARs of a function go that is plugged into a spare port while the guest runs: the bus and the windows are the
//! plan's, and the guest may move the BARs inside.

use egm_address::{Guest, PlaceError, Span};
use egm_vfio::host::HostFunction;

use crate::config::Device;
use crate::plan::demand::devices::bars;
use crate::plan::demand::wanted::WantedBar;
use crate::plan::map::blocks::{Item, pack};
use crate::plan::map::place::bar_item;
use crate::plan::units::BRIDGE_UNIT;
use crate::plan::{BarPlan, BridgePlan, PlanError};

/// The BARs of `host`, which becomes `device`, behind `bridge`.
///
/// # Errors
/// [`PlanError::SpareWindow`] when the port's windows are too small, [`PlanError::Bar`] for BARs that no function has.
pub fn plug(device: &Device, host: &HostFunction, bridge: &BridgePlan) -> Result<Vec<BarPlan>, PlanError> {
    let wanted = bars(device, &host.shown_bars())?;
    let mut placed = inside(device, &wanted, false, bridge.window32)?;
    placed.extend(inside(device, &wanted, true, bridge.window64)?);
    placed.sort_by_key(|bar| bar.index);
    Ok(placed)
}

fn inside(
    device: &Device,
    wanted: &[WantedBar],
    high: bool,
    window: Option<Span<Guest>>,
) -> Result<Vec<BarPlan>, PlanError> {
    let items: Vec<Item> = wanted.iter().filter(|bar| bar.kind.is_high() == high).map(bar_item).collect();
    let fault = |_| PlanError::Internal("a function's BARs exceed 64 bits");
    let Some(block) = pack(&items, BRIDGE_UNIT).map_err(fault)? else { return Ok(Vec::new()) };
    let (size, largest) = (block.size, window.map_or(0, |window| window.size()));
    let Some(window) = window.filter(|_| size <= largest) else {
        let source =
            PlaceError { tag: (), size, align: block.align, largest, short_by: size.saturating_sub(largest) };
        let (device, bits) = (device.id.clone(), if high { 64 } else { 32 });
        return Err(PlanError::SpareWindow { device, window: bits, source });
    };
    let place = |(index, offset): (usize, u64)| {
        let bar = wanted.iter().find(|bar| usize::from(bar.index) == index)?;
        let span = Span::new(window.start().checked_add(offset)?, bar.size).ok()?;
        Some(BarPlan { index: bar.index, kind: bar.kind, span })
    };
    Ok(block.parts.into_iter().filter_map(place).collect())
}
