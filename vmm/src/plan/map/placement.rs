//! Blocks of BARs in the windows: what each node of the tree needs, and where it goes; later, in the window of a spare port.

use egm_address::{ByteSize, Gpa, Guest, Placer, PlacerError, Request, Span, SpanSet};

use crate::config::Device;
use crate::plan::demand::devices::{BarDemand, DeviceDemand, DeviceRegisters, PAGE};
use crate::plan::map::blocks::{BRIDGE_UNIT, Block, Item, PackError, pack};
use crate::plan::map::space::Space;
use crate::plan::map::tree::{ROOT, Tree, What};
use crate::plan::{AssignedRule, BarPlan, BridgePlan, FunctionPlan, FunctionRole, PlacementRule, PlanError};

/// Size of the 64-bit window when neither BARs nor the configuration require more: space for hot-plug.
const LEAST_WINDOW64: u64 = 64 << 30;

/// Size of a window for `needed` bytes of BARs, with room for a quarter more.
pub(super) fn with_spare(needed: u64) -> u64 {
    let roomy = needed.saturating_add(needed / 4).checked_next_power_of_two();
    roomy.unwrap_or(1 << 63).max(LEAST_WINDOW64)
}

/// The blocks of all nodes in one window, by node: a device's of its BARs, a bridge's of what is behind it. `None` for
/// a node without BARs there, and for bus 0, which has the whole window.
pub(super) struct Blocks<'a> {
    pub(super) devices: &'a [DeviceDemand<'a>],
    tree: &'a Tree,
    high: bool,
    blocks: Vec<Option<Block>>,
}

/// The span of a node that no other node's block encloses.
pub(super) struct TopBlock {
    node: usize,
    pub(super) span: Span<Guest>,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(
        devices: &'a [DeviceDemand<'a>],
        tree: &'a Tree,
        high: bool,
    ) -> Result<Self, PlanError> {
        let mut blocks: Vec<Option<Block>> = tree.nodes.iter().map(|_| None).collect();
        // What is behind a node follows it, so it is packed before.
        for number in (ROOT.saturating_add(1)..tree.nodes.len()).rev() {
            let block = match tree.nodes.get(number).map(|node| (node.what, node.above)) {
                Some((What::Device(device), above)) => {
                    device_block(devices.get(device), above == ROOT, high)?
                }
                Some((What::Spare(spare), _)) => {
                    let size = if high { spare.window64 } else { spare.window32 }.get();
                    Some(Block { parts: Vec::new(), size, align: size, at: None })
                }
                _ => {
                    let item = |below: usize| Some(blocks.get(below)?.as_ref()?.item(below));
                    let items: Vec<Item> = tree.on(number).filter_map(item).collect();
                    pack(&items, BRIDGE_UNIT).map_err(|error| bridge_error(devices, tree, &error))?
                }
            };
            if let Some(place) = blocks.get_mut(number) {
                *place = block;
            }
        }
        Ok(Self { devices, tree, high, blocks })
    }

    fn block(&self, node: usize) -> Option<&Block> {
        self.blocks.get(node)?.as_ref()
    }

    fn items(&self) -> impl Iterator<Item = Item> {
        self.tree.tops().filter_map(|node| self.block(node).map(|block| block.item(node)))
    }

    /// Blocks of tops that must be somewhere.
    pub(super) fn fixed(&self) -> Result<Vec<TopBlock>, PlanError> {
        let mut fixed = Vec::new();
        for item in self.items() {
            let Some(at) = item.at else { continue };
            let span = Span::new(Gpa::new(at), item.size);
            let span = span.map_err(|_| PlanError::Internal("a fixed block wraps"))?;
            fixed.push(TopBlock { node: item.tag, span });
        }
        Ok(fixed)
    }

    pub(super) fn requests(&self) -> Vec<Request<usize>> {
        let free = self.items().filter(|item| item.at.is_none());
        free.map(|item| Request { tag: item.tag, size: item.size, align: item.align }).collect()
    }

    /// Bytes from the start of a window to the end of its last block, were the window large enough and nothing fixed.
    pub(super) fn needed(&self) -> Result<u64, PlanError> {
        let whole = Span::new(Gpa::new(0), u64::MAX).into_iter().collect();
        let placed = Placer::new(&whole, &SpanSet::default()).place_all(self.requests());
        let placed = placed.map_err(|error| self.no_place(error, &whole, None))?;
        Ok(placed.iter().map(|placement| placement.span.end().get()).max().unwrap_or(0))
    }

    /// First device of a block, for messages.
    fn device(&self, node: usize) -> String {
        let first = self.tree.devices(node).find_map(|device| self.devices.get(device));
        first.map_or_else(|| "pcie.spare".to_owned(), |one| one.device.id.clone())
    }

    fn is_for_data_direct(&self, node: usize) -> bool {
        let mut devices = self.tree.devices(node).filter_map(|device| self.devices.get(device));
        devices.any(|one| one.bars.iter().any(|bar| bar.data_direct))
    }

    fn no_place(
        &self,
        error: PlacerError<usize>,
        spans: &SpanSet<Guest>,
        suggested: Option<ByteSize>,
    ) -> PlanError {
        let PlacerError { tag, size, align, largest, short_by } = error;
        match spans.iter().next() {
            Some(span) => PlanError::Window {
                device: self.device(tag),
                window: if self.high { "64-bit" } else { "32-bit" },
                span,
                source: PlacerError { tag: (), size, align, largest, short_by },
                suggested,
            },
            None => PlanError::Internal("a device needs a window that was not placed"),
        }
    }
}

fn device_block(
    one: Option<&DeviceDemand<'_>>,
    direct: bool,
    high: bool,
) -> Result<Option<Block>, PlanError> {
    let one = one.ok_or(PlanError::Internal("the tree has a device that the machine lacks"))?;
    let bars: Vec<Item> = one.bars.iter().filter(|bar| bar.kind.is_high() == high).map(bar_item).collect();
    pack(&bars, if direct { PAGE } else { BRIDGE_UNIT }).map_err(|error| bar_error(one, &error))
}

fn bar_item(bar: &BarDemand) -> Item {
    let size = bar.size.max(PAGE);
    Item { tag: bar.index.into(), size, align: size, at: bar.at.map(Gpa::get) }
}

fn bar_error(one: &DeviceDemand<'_>, error: &PackError) -> PlanError {
    let (PackError::TooLarge(tag) | PackError::Overlap(tag, _)) = *error;
    let Some(bar) = one.bars.iter().find(|bar| usize::from(bar.index) == tag) else {
        return PlanError::Internal("a block has a BAR that the device lacks");
    };
    let why = match error {
        PackError::TooLarge(_) => "the device's BARs together exceed 64 bits",
        PackError::Overlap(..) => "another BAR of the device is fixed at the same addresses",
    };
    PlanError::Bar { device: one.device.id.clone(), index: bar.index, size: bar.size, why }
}

/// Tags are nodes here; what collides, or is too large, is some device behind them.
fn bridge_error(devices: &[DeviceDemand<'_>], tree: &Tree, error: &PackError) -> PlanError {
    let (PackError::TooLarge(tag) | PackError::Overlap(tag, _)) = *error;
    let first = |node| tree.devices(node).find_map(|device| devices.get(device));
    let other = match error {
        PackError::TooLarge(_) => None,
        PackError::Overlap(_, other) => first(*other),
    };
    match (first(tag), other) {
        (Some(one), Some(other)) => shared(one, &other.device.id),
        (Some(one), None) => bar_error(one, &PackError::TooLarge(0)),
        _ => PlanError::Internal("a block has a device that the machine lacks"),
    }
}

/// Address ranges of nodes and devices in one window, by number.
pub(super) struct Placements {
    pub(super) spans: Vec<Option<Span<Guest>>>,
    pub(super) bars: Vec<Vec<BarPlan>>,
}

impl Placements {
    /// The span of node `number`, if it has one in this window.
    pub(super) fn span(&self, number: usize) -> Option<Span<Guest>> {
        self.spans.get(number).copied().flatten()
    }
}

/// Address ranges in both windows.
pub(super) struct Placed {
    pub(super) low: Placements,
    pub(super) high: Placements,
}

pub(super) fn place(
    blocks: &Blocks<'_>,
    window: Option<Span<Guest>>,
    space: &Space,
) -> Result<Placements, PlanError> {
    let window: SpanSet<Guest> = window.into_iter().collect();
    let suggested = if blocks.high { Some(ByteSize::new(with_spare(blocks.needed()?))) } else { None };
    let mut tops = blocks.fixed()?;
    tops.sort_by_key(|top| top.span);
    if let Some([a, b]) = tops.array_windows().find(|[a, b]| a.span.overlaps(b.span)) {
        return Err(AssignedRule::Place {
            device: blocks.device(a.node),
            what: "its block of BARs".to_owned(),
            span: a.span,
            rule: PlacementRule::Shared(blocks.device(b.node)),
            data_direct: blocks.is_for_data_direct(a.node) || blocks.is_for_data_direct(b.node),
        }
        .into());
    }
    let taken = tops.iter().map(|top| top.span).chain(space.blocked().iter()).collect();
    let placed = Placer::new(&window, &taken).place_all(blocks.requests());
    let placed = placed.map_err(|error| blocks.no_place(error, &window, suggested))?;
    tops.extend(placed.into_iter().map(|placed| TopBlock { node: placed.tag, span: placed.span }));
    let mut out = Placements {
        spans: vec![None; blocks.tree.nodes.len()],
        bars: vec![Vec::new(); blocks.devices.len()],
    };
    for TopBlock { node, span } in tops {
        *out.spans.get_mut(node).ok_or(PlanError::Internal("a placement is of no node"))? = Some(span);
    }
    for node in 0..blocks.tree.nodes.len() {
        place_inside(blocks, node, &mut out)?;
    }
    Ok(out)
}

/// Places what is in the block of `node`, which has its place.
fn place_inside(blocks: &Blocks<'_>, node: usize, out: &mut Placements) -> Result<(), PlanError> {
    let (Some(block), Some(span)) = (blocks.block(node), out.span(node)) else {
        return Ok(());
    };
    let outside = PlanError::Internal("a part lies outside its block");
    let at = |offset: u64, size: u64| {
        let start = span.start().checked_add(offset)?;
        Span::new(start, size).ok()
    };
    let device = blocks.tree.nodes.get(node).and_then(|node| match node.what {
        What::Device(device) => Some((blocks.devices.get(device)?, out.bars.get_mut(device)?)),
        _ => None,
    });
    if let Some((one, bars)) = device {
        for (index, offset) in &block.parts {
            let bar = one.bars.iter().find(|bar| usize::from(bar.index) == *index);
            let bar = bar.and_then(|bar| {
                Some(BarPlan { index: bar.index, kind: bar.kind, span: at(*offset, bar.size)? })
            });
            bars.push(bar.ok_or_else(|| outside.clone())?);
        }
        return Ok(());
    }
    for (below, offset) in &block.parts {
        let part = blocks.block(*below).and_then(|part| at(*offset, part.size));
        *out.spans.get_mut(*below).ok_or_else(|| outside.clone())? =
            Some(part.ok_or_else(|| outside.clone())?);
    }
    Ok(())
}

/// A BAR with a fixed address.
pub(super) struct FixedBar<'a> {
    pub(super) device: &'a Device,
    pub(super) bar: &'a BarDemand,
    pub(super) at: Gpa,
}

/// All BARs of `devices` with fixed addresses.
pub(super) fn fixed_bars<'a>(devices: &'a [DeviceDemand<'_>]) -> impl Iterator<Item = FixedBar<'a>> {
    devices.iter().flat_map(|one| {
        one.bars.iter().filter_map(move |bar| Some(FixedBar { device: one.device, bar, at: bar.at? }))
    })
}

impl FixedBar<'_> {
    /// Name of the BAR, for messages.
    pub(super) fn name(&self) -> String {
        format!("BAR {}", self.bar.index)
    }
}

/// The error for a device with fixed BARs that overlap those of `other`.
fn shared(one: &DeviceDemand<'_>, other: &str) -> PlanError {
    let first = fixed_bars(std::slice::from_ref(one)).next();
    let span = first.and_then(|fixed| Some((Span::new(fixed.at, fixed.bar.size).ok()?, fixed)));
    match span {
        Some((span, fixed)) => AssignedRule::Place {
            device: one.device.id.clone(),
            what: fixed.name(),
            span,
            rule: PlacementRule::Shared(other.to_owned()),
            data_direct: fixed.bar.data_direct,
        }
        .into(),
        None => PlanError::Internal("a device without fixed BARs overlaps another"),
    }
}

/// The function that `device` becomes behind `bridge`, a spare port that it is plugged into while the guest runs; it has
/// `registers` unless it is a virtio device. The bus and the windows are the plan's, and the guest may move the BARs inside.
///
/// # Errors
/// [`PlanError::SpareWindow`] when the port's windows are too small, [`PlanError::Bar`] for BARs that no function has.
pub fn plug(
    device: &Device,
    registers: Option<&DeviceRegisters>,
    bridge: &BridgePlan,
) -> Result<FunctionPlan, PlanError> {
    let demand = DeviceDemand::plugged(device, registers)?;
    let address = bridge.only_device().ok_or(PlanError::Internal("a port has no bus behind it"))?;
    let mut bars = inside(device, &demand.bars, false, bridge.window32)?;
    bars.extend(inside(device, &demand.bars, true, bridge.window64)?);
    bars.sort_by_key(|bar| bar.index);
    let role = FunctionRole::Endpoint { device: device.clone(), assigned: None };
    Ok(FunctionPlan { address, role, bars, msix_vectors: demand.msix_vectors })
}

fn inside(
    device: &Device,
    needed: &[BarDemand],
    high: bool,
    window: Option<Span<Guest>>,
) -> Result<Vec<BarPlan>, PlanError> {
    let items: Vec<Item> = needed.iter().filter(|bar| bar.kind.is_high() == high).map(bar_item).collect();
    let fault = |_| PlanError::Internal("a function's BARs exceed 64 bits");
    let Some(block) = pack(&items, BRIDGE_UNIT).map_err(fault)? else { return Ok(Vec::new()) };
    let (size, largest) = (block.size, window.map_or(0, |window| window.size()));
    let Some(window) = window.filter(|_| size <= largest) else {
        let source = PlacerError {
            tag: (),
            size,
            align: block.align,
            largest,
            short_by: size.saturating_sub(largest),
        };
        let (device, bits) = (device.id.clone(), if high { 64 } else { 32 });
        return Err(PlanError::SpareWindow { device, window: bits, source });
    };
    let place = |(index, offset): (usize, u64)| {
        let bar = needed.iter().find(|bar| usize::from(bar.index) == index)?;
        let span = Span::new(window.start().checked_add(offset)?, bar.size).ok()?;
        Some(BarPlan { index: bar.index, kind: bar.kind, span })
    };
    Ok(block.parts.into_iter().filter_map(place).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_has_room_for_a_quarter_more_in_the_next_power_of_two() {
        let gib = |needed: u64| with_spare(needed << 30) >> 30;
        assert_eq!([0, 51, 52, 100, 103].map(gib), [64, 64, 128, 128, 256]);
        assert_eq!([1 << 63, u64::MAX].map(with_spare), [1 << 63; 2]);
    }
}
