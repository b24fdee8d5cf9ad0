//! The guest's address space as a drawing.
//!
//! Sizes run from 4 KiB to many TiB, so height grows with their logarithm: everything can be read, larger is taller, and
//! the numbers beside it say how much. Unused space is drawn as a thin broken band.

use std::fmt::Write;

use egm_device::show::{self, escape};

use crate::plan::Plan;
use crate::plan::render::model::{self, Block, Tone};

const WIDTH: u32 = 640;
/// Where the bands begin, after the addresses.
const BAND_X: u32 = 150;
const BAND_WIDTH: u32 = 250;
const TOP: u32 = 14;
/// A band holds at least one line of text.
const LEAST: u32 = 26;
const GAP: u32 = 22;

/// Height of a band: `LEAST` up to 4 KiB and 3 more for each doubling.
fn height(block: &Block) -> u32 {
    match block.tone {
        Tone::Free => GAP,
        _ => block.span.size().max(4096).ilog2().saturating_sub(12).saturating_mul(3).saturating_add(LEAST),
    }
}

/// The drawing as an SVG element that takes its colours from the page.
pub(super) fn svg(plan: &Plan) -> String {
    let blocks = model::blocks(plan);
    let total: u32 = blocks.iter().map(height).sum::<u32>().saturating_add(TOP * 2);
    let mut out = format!(
        "<svg class=\"map\" viewBox=\"0 0 {WIDTH} {total}\" width=\"{WIDTH}\" height=\"{total}\" role=\"img\" \
         aria-labelledby=\"map-title\">\n<title id=\"map-title\">Guest physical address space of {}, lowest address \
         first; the table below says the same</title>\n",
        escape(&plan.name)
    );
    let mut y = TOP;
    for block in &blocks {
        band(plan, block, y, &mut out);
        y = y.saturating_add(height(block));
    }
    let end = blocks.last().map_or_else(String::new, |block| model::address(plan, block.span.end()));
    let _ =
        writeln!(out, "<text class=\"address\" x=\"{}\" y=\"{}\">{end}</text>\n</svg>", BAND_X - 12, y + 4);
    out
}

fn band(plan: &Plan, block: &Block, y: u32, out: &mut String) {
    let (class, high) = (block.tone.class(), height(block));
    let middle = y + high / 2 + 4;
    let inset = if block.tone == Tone::Free { 0 } else { 1 };
    let _ = writeln!(
        out,
        "<g class=\"{class}\"><title>{}: {}</title>\n\
         <text class=\"address\" x=\"{}\" y=\"{}\">{}</text>\n\
         <line class=\"tick\" x1=\"{}\" x2=\"{BAND_X}\" y1=\"{y}\" y2=\"{y}\"/>\n\
         <rect x=\"{BAND_X}\" y=\"{}\" width=\"{BAND_WIDTH}\" height=\"{}\" rx=\"{}\"/>",
        block.span,
        escape(&block.what),
        BAND_X - 12,
        y + 4,
        model::address(plan, block.span.start()),
        BAND_X - 7,
        y + inset,
        high - 2 * inset,
        3 * inset,
    );
    let size = show::size(block.span.size());
    if block.tone == Tone::Free {
        let centre = BAND_X + BAND_WIDTH / 2;
        let _ = writeln!(out, "<text class=\"gap\" x=\"{centre}\" y=\"{middle}\">{size} free</text></g>");
        return;
    }
    let _ = writeln!(
        out,
        "<text class=\"what\" x=\"{}\" y=\"{middle}\">{}</text>\n\
         <text class=\"size\" x=\"{}\" y=\"{middle}\">{size}</text>\n\
         <text class=\"detail\" x=\"{}\" y=\"{middle}\">{}</text></g>",
        BAND_X + 12,
        escape(&block.what),
        BAND_X + BAND_WIDTH - 12,
        BAND_X + BAND_WIDTH + 12,
        escape(&block.detail),
    );
}
