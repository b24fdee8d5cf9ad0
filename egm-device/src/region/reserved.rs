//! Reserved spans: what an operator says is hidden memory, checked against what the kernel says.

use egm_address::{ByteSize, Host, Span, SpanSet};

use crate::region::facts::HostFacts;
use crate::region::host_file::ReservedSpan;
use crate::region::refused::Reason;
use crate::region::{Region, RegionKind, iomem, is_name, largest_page, words};
use crate::retired::Retired;

/// The region that `wanted` describes.
///
/// # Errors
/// The first rule that it breaks: memory that the kernel, a driver or the firmware has is never handed out.
pub(super) fn region(wanted: &ReservedSpan, facts: &HostFacts) -> Result<Region, Reason> {
    if !is_name(&wanted.name) {
        return Err(Reason::Name);
    }
    let (base, size) = (wanted.base.get(), wanted.size.get());
    let span = Span::new(wanted.base, size).map_err(|_| Reason::NoSpan { base, size })?;
    let page_size = match wanted.page_size {
        Some(page) if (12..=30).any(|shift| page.get() == 1 << shift) => page,
        Some(page) => return Err(Reason::PageSize(page)),
        None => largest_page(base, size).unwrap_or(ByteSize::new(4096)),
    };
    for (what, value) in [("base", base), ("size", size)] {
        if !value.is_multiple_of(page_size.get()) {
            return Err(Reason::Unaligned { what, value, page: page_size });
        }
    }
    check(span, facts)?;
    Ok(Region {
        name: wanted.name.clone(),
        kind: RegionKind::Reserved { device: wanted.device.clone() },
        node: wanted.node.or_else(|| facts.node_of(span)),
        size: wanted.size,
        page_size,
        base: Some(wanted.base),
        functions: Vec::new(),
        retired: Retired::default(),
    })
}

/// Nobody uses `span`, somebody asked the kernel to leave it alone, and it is memory.
fn check(span: Span<Host>, facts: &HostFacts) -> Result<(), Reason> {
    if facts.iomem.is_empty() {
        return Err(Reason::IomemHidden(span));
    }
    if let Some(line) = iomem::in_the_way(&facts.iomem, span) {
        return Err(Reason::InUse { span, line: line.clone() });
    }
    let ram = facts.system_ram();
    let below = ram.iter().filter(|ram| ram.start() < span.start()).map(Span::size).sum();
    if !words::explain(&facts.command_line, span, below) {
        return Err(Reason::Unexplained(span));
    }
    let firmware: SpanSet<Host> = facts.firmware.iter().copied().collect();
    let missing = std::iter::once(span).collect::<SpanSet<Host>>().minus(&firmware);
    if firmware.is_empty() || missing.is_empty() { Ok(()) } else { Err(Reason::NotRam(span)) }
}
