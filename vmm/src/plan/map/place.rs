//! Blocks of BARs in the windows: what each node of the tree needs, and where it goes.

use egm_address::{ByteSize, Gpa, Guest, PlaceError, Placer, Request, Span, SpanSet};

use crate::plan::demand::wanted::{Wanted, WantedBar};
use crate::plan::map::blocks::{Block, Item, PackError, pack};
use crate::plan::map::fixed;
use crate::plan::map::space::Space;
use crate::plan::map::tree::{ROOT, Tree, What};
use crate::plan::units::{BRIDGE_UNIT, PAGE, with_spare};
use crate::plan::{AssignedRule, BarPlan, PlaceRule, PlanError};

/// The blocks of all nodes in one window, by node: a device's of its BARs, a bridge's of what is behind it. `None` for
/// a node without BARs there, and for bus 0, which has the whole window.
pub(in crate::plan) struct Blocks<'a> {
    pub(in crate::plan) wanted: &'a [Wanted<'a>],
    tree: &'a Tree,
    high: bool,
    blocks: Vec<Option<Block>>,
}

impl<'a> Blocks<'a> {
    pub(in crate::plan) fn new(
        wanted: &'a [Wanted<'a>],
        tree: &'a Tree,
        high: bool,
    ) -> Result<Self, PlanError> {
        let mut blocks: Vec<Option<Block>> = tree.nodes.iter().map(|_| None).collect();
        // What is behind a node follows it, so it is packed before.
        for number in (ROOT.saturating_add(1)..tree.nodes.len()).rev() {
            let block = match tree.nodes.get(number).map(|node| (node.what, node.above)) {
                Some((What::Device(device), above)) => device_block(wanted.get(device), above == ROOT, high)?,
                Some((What::Spare(spare), _)) => {
                    let size = if high { spare.window64 } else { spare.window32 }.get();
                    Some(Block { parts: Vec::new(), size, align: size, at: None })
                }
                _ => {
                    let item = |below: usize| Some(blocks.get(below)?.as_ref()?.item(below));
                    let items: Vec<Item> = tree.on(number).filter_map(item).collect();
                    pack(&items, BRIDGE_UNIT).map_err(|error| bridge_error(wanted, tree, &error))?
                }
            };
            if let Some(place) = blocks.get_mut(number) {
                *place = block;
            }
        }
        Ok(Self { wanted, tree, high, blocks })
    }

    fn block(&self, node: usize) -> Option<&Block> {
        self.blocks.get(node)?.as_ref()
    }

    fn items(&self) -> impl Iterator<Item = Item> {
        self.tree.tops().filter_map(|node| self.block(node).map(|block| block.item(node)))
    }

    /// Spans of blocks that must be somewhere.
    pub(in crate::plan) fn fixed(&self) -> Result<Vec<(usize, Span<Guest>)>, PlanError> {
        let span = |item: Item| Some((item.tag, Span::new(Gpa::new(item.at?), item.size)));
        let spans = self.items().filter_map(span);
        spans
            .map(|(node, span)| Ok((node, span.map_err(|_| PlanError::Internal("a fixed block wraps"))?)))
            .collect()
    }

    pub(in crate::plan) fn requests(&self) -> Vec<Request<usize>> {
        let free = self.items().filter(|item| item.at.is_none());
        free.map(|item| Request { tag: item.tag, size: item.size, align: item.align }).collect()
    }

    /// Bytes from the start of a window to the end of its last block, were the window large enough and nothing fixed.
    pub(in crate::plan) fn needed(&self) -> Result<u64, PlanError> {
        let whole = Span::new(Gpa::new(0), u64::MAX).into_iter().collect();
        let placed = Placer::new(&whole, &SpanSet::default()).place_all(self.requests());
        let placed = placed.map_err(|error| self.no_place(error, &whole, None))?;
        Ok(placed.iter().map(|placement| placement.span.end().get()).max().unwrap_or(0))
    }

    /// First device of a block, for messages.
    fn device(&self, node: usize) -> String {
        let first = self.tree.devices(node).find_map(|device| self.wanted.get(device));
        first.map_or_else(|| "pcie.spare".to_owned(), |wanted| wanted.device.id.clone())
    }

    fn is_for_data_direct(&self, node: usize) -> bool {
        let mut devices = self.tree.devices(node).filter_map(|device| self.wanted.get(device));
        devices.any(|wanted| wanted.bars.iter().any(|bar| bar.data_direct))
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

fn device_block(wanted: Option<&Wanted<'_>>, direct: bool, high: bool) -> Result<Option<Block>, PlanError> {
    let wanted = wanted.ok_or(PlanError::Internal("the tree has a device that nobody wants"))?;
    let bars: Vec<Item> = wanted.bars.iter().filter(|bar| bar.kind.is_high() == high).map(bar_item).collect();
    pack(&bars, if direct { PAGE } else { BRIDGE_UNIT }).map_err(|error| bar_error(wanted, &error))
}

pub(in crate::plan) fn bar_item(bar: &WantedBar) -> Item {
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

/// Tags are nodes here; what collides, or is too large, is some device behind them.
fn bridge_error(wanted: &[Wanted<'_>], tree: &Tree, error: &PackError) -> PlanError {
    let (PackError::TooLarge(tag) | PackError::Overlap(tag, _)) = *error;
    let first = |node| tree.devices(node).find_map(|device| wanted.get(device));
    let other = match error {
        PackError::TooLarge(_) => None,
        PackError::Overlap(_, other) => first(*other),
    };
    match (first(tag), other) {
        (Some(one), Some(other)) => fixed::shared(one, &other.device.id),
        (Some(one), None) => bar_error(one, &PackError::TooLarge(0)),
        _ => PlanError::Internal("a block has a device that the machine lacks"),
    }
}

/// Address ranges of nodes and devices in one window, by number.
pub(in crate::plan) struct Places {
    pub(in crate::plan) spans: Vec<Option<Span<Guest>>>,
    pub(in crate::plan) bars: Vec<Vec<BarPlan>>,
}

/// Places every block.
pub(in crate::plan) fn place(
    blocks: &Blocks<'_>,
    window: Option<Span<Guest>>,
    space: &Space,
) -> Result<Places, PlanError> {
    let window: SpanSet<Guest> = window.into_iter().collect();
    let suggested = if blocks.high { Some(ByteSize::new(with_spare(blocks.needed()?))) } else { None };
    let mut tops = blocks.fixed()?;
    tops.sort_by_key(|(_, span)| *span);
    if let Some([a, b]) = tops.array_windows().find(|[a, b]| a.1.overlaps(b.1)) {
        return Err(AssignedRule::Place {
            device: blocks.device(a.0),
            what: "its block of BARs".to_owned(),
            span: a.1,
            rule: PlaceRule::Shared(blocks.device(b.0)),
            data_direct: blocks.is_for_data_direct(a.0) || blocks.is_for_data_direct(b.0),
        }
        .into());
    }
    let taken = tops.iter().map(|(_, span)| *span).chain(space.blocked().iter()).collect();
    let placed = Placer::new(&window, &taken).place_all(blocks.requests());
    let placed = placed.map_err(|error| blocks.no_place(error, &window, suggested))?;
    tops.extend(placed.into_iter().map(|placement| (placement.tag, placement.span)));
    let mut out =
        Places { spans: vec![None; blocks.tree.nodes.len()], bars: vec![Vec::new(); blocks.wanted.len()] };
    for (node, span) in tops {
        *out.spans.get_mut(node).ok_or(PlanError::Internal("a placement is of no node"))? = Some(span);
    }
    for node in 0..blocks.tree.nodes.len() {
        place_inside(blocks, node, &mut out)?;
    }
    Ok(out)
}

/// Places what is in the block of `node`, which has its place.
fn place_inside(blocks: &Blocks<'_>, node: usize, out: &mut Places) -> Result<(), PlanError> {
    let (Some(block), Some(span)) = (blocks.block(node), out.spans.get(node).copied().flatten()) else {
        return Ok(());
    };
    let outside = PlanError::Internal("a part lies outside its block");
    let at = |offset: u64, size: u64| {
        let start = span.start().checked_add(offset)?;
        Span::new(start, size).ok()
    };
    let device = blocks.tree.nodes.get(node).and_then(|node| match node.what {
        What::Device(device) => Some((blocks.wanted.get(device)?, out.bars.get_mut(device)?)),
        _ => None,
    });
    if let Some((wanted, bars)) = device {
        for (index, offset) in &block.parts {
            let bar = wanted.bars.iter().find(|bar| usize::from(bar.index) == *index);
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
