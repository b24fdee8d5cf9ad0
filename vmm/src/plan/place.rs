//! Blocks of BARs in the windows: what each slot of bus 0 needs, and where it goes.

use egm_address::{ByteSize, Gpa, Guest, PlaceError, Placer, Request, Span, SpanSet};

use crate::plan::blocks::{Block, Item, PackError, pack};
use crate::plan::pci::{BRIDGE_UNIT, PAGE, Wanted, WantedBar, with_spare};
use crate::plan::space::Space;
use crate::plan::tree::Slot;
use crate::plan::{BarPlan, PassedRule, PlaceRule, PlanError, passed};

/// What one slot of bus 0 needs in one window: a block of devices, each a block of BARs by index.
pub(super) struct SlotBlock {
    block: Block,
    devices: Vec<(usize, Block)>,
}

/// The blocks of all slots in one window; `None` for a slot without BARs there.
pub(super) struct Blocks<'a> {
    pub(super) wanted: &'a [Wanted<'a>],
    high: bool,
    slots: Vec<Option<SlotBlock>>,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(wanted: &'a [Wanted<'a>], slots: &[Slot], high: bool) -> Result<Self, PlanError> {
        let slots = slots.iter().map(|slot| slot_block(wanted, slot, high)).collect::<Result<_, _>>()?;
        Ok(Self { wanted, high, slots })
    }

    fn items(&self) -> impl Iterator<Item = Item> {
        let blocks = self.slots.iter().enumerate();
        blocks.filter_map(|(slot, block)| block.as_ref().map(|block| block.block.item(slot)))
    }

    /// Spans of slots that must be somewhere.
    pub(super) fn fixed(&self) -> Result<Vec<(usize, Span<Guest>)>, PlanError> {
        let span = |item: Item| Some((item.tag, Span::new(Gpa::new(item.at?), item.size)));
        let spans = self.items().filter_map(span);
        spans
            .map(|(slot, span)| Ok((slot, span.map_err(|_| PlanError::Internal("a fixed block wraps"))?)))
            .collect()
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

    /// First device of a slot, for messages.
    fn device(&self, slot: usize) -> String {
        let block = self.slots.get(slot).and_then(Option::as_ref);
        let first = block.and_then(|block| block.devices.first());
        let wanted = first.and_then(|(device, _)| self.wanted.get(*device));
        wanted.map_or_else(String::new, |wanted| wanted.device.id.clone())
    }

    fn no_place(
        &self,
        error: PlaceError<usize>,
        spans: &SpanSet<Guest>,
        suggested: Option<ByteSize>,
    ) -> PlanError {
        let PlaceError { tag, size, align, largest, short_by } = error;
        match spans.iter().next() {
            Some(span) => PlanError::Window {
                device: self.device(tag),
                window: if self.high { "64-bit" } else { "32-bit" },
                span,
                source: PlaceError { tag: (), size, align, largest, short_by },
                suggested,
            },
            None => PlanError::Internal("a device needs a window that was not placed"),
        }
    }
}

fn slot_block(wanted: &[Wanted<'_>], slot: &Slot, high: bool) -> Result<Option<SlotBlock>, PlanError> {
    let unit = if slot.is_behind_port() { BRIDGE_UNIT } else { PAGE };
    let mut devices = Vec::new();
    for &member in slot.members() {
        let Some(one) = wanted.get(member) else { continue };
        let bars: Vec<Item> =
            one.bars.iter().filter(|bar| bar.kind.is_high() == high).map(bar_item).collect();
        let block = pack(&bars, unit).map_err(|error| bar_error(one, &error))?;
        devices.extend(block.map(|block| (member, block)));
    }
    let items: Vec<Item> = devices.iter().map(|(member, block)| block.item(*member)).collect();
    let block = pack(&items, unit).map_err(|error| device_error(wanted, &error))?;
    Ok(block.map(|block| SlotBlock { block, devices }))
}

fn bar_item(bar: &WantedBar) -> Item {
    let size = bar.size.max(PAGE);
    Item { tag: bar.index.into(), size, align: size, at: bar.at.map(Gpa::get) }
}

fn bar_error(wanted: &Wanted<'_>, error: &PackError) -> PlanError {
    let (PackError::TooLarge(tag) | PackError::Overlap(tag, _)) = *error;
    let Some(bar) = wanted.bars.iter().find(|bar| usize::from(bar.index) == tag) else {
        return PlanError::Internal("a block has a BAR that the device lacks");
    };
    let why = match error {
        PackError::TooLarge(_) => "the device's BARs together exceed 64 bits",
        PackError::Overlap(..) => "another BAR of the device is fixed at the same addresses",
    };
    PlanError::Bar { device: wanted.device.id.clone(), index: bar.index, size: bar.size, why }
}

fn device_error(wanted: &[Wanted<'_>], error: &PackError) -> PlanError {
    let (PackError::TooLarge(tag) | PackError::Overlap(tag, _)) = *error;
    let other = match error {
        PackError::TooLarge(_) => None,
        PackError::Overlap(_, other) => wanted.get(*other),
    };
    match (wanted.get(tag), other) {
        (Some(one), Some(other)) => passed::shared(one, &other.device.id),
        (Some(one), None) => bar_error(one, &PackError::TooLarge(0)),
        _ => PlanError::Internal("a block has a device that the machine lacks"),
    }
}

/// What a device, or all of a slot, got in one window.
#[derive(Default, Clone)]
pub(super) struct Placed {
    pub(super) window: Option<Span<Guest>>,
    pub(super) bars: Vec<BarPlan>,
}

/// What slots and devices got in one window, by index.
pub(super) struct Places {
    pub(super) slots: Vec<Option<Span<Guest>>>,
    pub(super) devices: Vec<Placed>,
}

/// Places every slot's block.
pub(super) fn place(
    blocks: &Blocks<'_>,
    window: Option<Span<Guest>>,
    space: &Space,
) -> Result<Places, PlanError> {
    let window: SpanSet<Guest> = window.into_iter().collect();
    let suggested = if blocks.high { Some(ByteSize::new(with_spare(blocks.needed()?))) } else { None };
    let mut spans = blocks.fixed()?;
    spans.sort_by_key(|(_, span)| *span);
    if let Some([a, b]) = spans.array_windows().find(|[a, b]| a.1.overlaps(b.1)) {
        return Err(PassedRule::Place {
            device: blocks.device(a.0),
            what: "its block of BARs".to_owned(),
            span: a.1,
            rule: PlaceRule::Shared(blocks.device(b.0)),
        }
        .into());
    }
    let taken = spans.iter().map(|(_, span)| *span).chain(space.blocked().iter()).collect();
    let placed = Placer::new(&window, &taken).place_all(blocks.requests());
    let placed = placed.map_err(|error| blocks.no_place(error, &window, suggested))?;
    spans.extend(placed.into_iter().map(|placement| (placement.tag, placement.span)));
    let mut out = Places {
        slots: vec![None; blocks.slots.len()],
        devices: vec![Placed::default(); blocks.wanted.len()],
    };
    for (slot, span) in spans {
        let Some((block, place)) =
            blocks.slots.get(slot).and_then(Option::as_ref).zip(out.slots.get_mut(slot))
        else {
            return Err(PlanError::Internal("a placement is of no slot"));
        };
        *place = Some(span);
        place_devices(blocks, block, span, &mut out.devices)?;
    }
    Ok(out)
}

/// Tells the devices of one slot, which lies at `span`.
fn place_devices(
    blocks: &Blocks<'_>,
    slot: &SlotBlock,
    span: Span<Guest>,
    out: &mut [Placed],
) -> Result<(), PlanError> {
    let at = |base: Gpa, offset: u64, size: u64| {
        let span = base.checked_add(offset).and_then(|start| Span::new(start, size).ok());
        span.ok_or(PlanError::Internal("a BAR lies outside its block"))
    };
    for (device, block) in &slot.devices {
        let offset = slot.block.parts.iter().find(|(tag, _)| tag == device).map(|(_, offset)| *offset);
        let (Some(offset), Some(wanted), Some(out)) =
            (offset, blocks.wanted.get(*device), out.get_mut(*device))
        else {
            return Err(PlanError::Internal("a placement is of no device"));
        };
        let window = at(span.start(), offset, block.size)?;
        out.window = Some(window);
        for (index, offset) in &block.parts {
            let bar = wanted.bars.iter().find(|bar| usize::from(bar.index) == *index);
            let bar = bar.ok_or(PlanError::Internal("a placement is of no BAR"))?;
            let span = at(window.start(), *offset, bar.size)?;
            out.bars.push(BarPlan { index: bar.index, kind: bar.kind, span });
        }
    }
    Ok(())
}
