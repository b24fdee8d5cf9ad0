//! Choice of the parts of a function's BARs that are mapped.

use std::cmp::Reverse;
use std::sync::Arc;

use egm_address::{Gpa, InBar, Span};
use egm_vfio::backend::{Backend, RegionIndex};
use egm_vfio::memory::HostMemory;
use egm_vfio::pci::bars::{Piece, cut};
use egm_vfio::pci::shadow::MsixLayout;

use super::error::PassthroughError;
use crate::pci::DecodedBar;
use crate::plan::BarPlan;

/// Most mapped parts of one function. Each is a memory slot, and all of them change when the guest switches memory
/// decoding, which other vCPUs wait for; a server may name thousands.
pub(super) const MOST: usize = 256;

/// A part of a BAR that is mapped.
pub(super) struct MappedPart {
    pub(super) bar: u8,
    /// Bytes of the BAR.
    pub(super) span: Span<InBar>,
    /// Mapping of the bytes in this process.
    pub(super) memory: Arc<dyn HostMemory>,
}

impl MappedPart {
    /// Where it is when its BAR is at `bars`.
    pub(super) fn place(&self, bars: &[DecodedBar]) -> Option<Gpa> {
        let bar = bars.iter().find(|bar| bar.index == self.bar)?;
        bar.span.start().checked_add(self.span.start().get())
    }
}

/// The parts of BARs that the guest may reach directly.
pub(super) struct MappedParts {
    pub(super) mapped: Vec<MappedPart>,
    /// Number of parts that are reached by exits, since there are too many.
    pub(super) left_out: usize,
}

/// A part of a BAR that could be mapped.
struct Mappable<'b> {
    bar: &'b BarPlan,
    span: Span<InBar>,
}

/// Maps the parts of BARs that the guest may reach directly: the largest where there are too many.
pub(super) fn mapped(
    backend: &dyn Backend,
    bars: &[BarPlan],
    msix: Option<MsixLayout>,
) -> Result<MappedParts, PassthroughError> {
    let mut parts = mappable(backend, bars, msix)?;
    parts.sort_by_key(|part| Reverse(part.span.size()));
    let left_out = parts.len().saturating_sub(MOST);
    parts.truncate(if egm_address::fault!("slots-of-a-server-unbounded") { usize::MAX } else { MOST });
    let map = |Mappable { bar, span }: Mappable<'_>| {
        let congruent_to = bar.span.start().get().saturating_add(span.start().get());
        let memory = backend.map(RegionIndex::Bar(bar.index), span, congruent_to)?;
        Ok(MappedPart { bar: bar.index, span, memory })
    };
    let mapped = parts.into_iter().map(map).collect::<Result<_, PassthroughError>>()?;
    Ok(MappedParts { mapped, left_out })
}

fn mappable<'b>(
    backend: &dyn Backend,
    bars: &'b [BarPlan],
    msix: Option<MsixLayout>,
) -> Result<Vec<Mappable<'b>>, PassthroughError> {
    let page = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
    let mut parts = Vec::new();
    for bar in bars {
        let (region, planned) = (backend.region(RegionIndex::Bar(bar.index)), bar.span.size());
        if region.size > planned {
            let function = backend.name().to_owned();
            return Err(PassthroughError::Grown { function, bar: bar.index, real: region.size, planned });
        }
        let own: Vec<Span<InBar>> = msix.iter().flat_map(|layout| layout.in_bar(bar.index)).collect();
        parts.extend(cut(planned, region, &own, page).into_iter().filter_map(|piece| {
            match piece {
                Piece::Mapped(span) if egm_address::fault!("bar-window-a-page-short") => {
                    Span::new(span.start(), span.size().saturating_sub(page))
                        .ok()
                        .map(|short| Mappable { bar, span: short })
                }
                Piece::Mapped(span) => Some(Mappable { bar, span }),
                Piece::Trapped(_) => None,
            }
        }));
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use egm_address::BarOffset;
    use egm_vfio::fake::FakeFunction;

    use super::*;
    use crate::plan::BarKind;

    #[test]
    fn of_too_many_parts_the_largest_are_mapped() {
        let span = |page: u64, pages: u64| Span::new(BarOffset::new(page << 12), pages << 12).unwrap();
        let small = (0..300).map(|n| span(2 * n, 1));
        let areas: Vec<_> = small.chain([span(0x1000, 0x800), span(0x2000, 2)]).collect();
        let size = 0x4000 << 12;
        let fake = FakeFunction::default().with_region(RegionIndex::Bar(2), size, &[], &areas).unwrap();
        let place = Span::new(Gpa::new(size), size).unwrap();
        let bar = BarPlan { index: 2, kind: BarKind::Memory64, span: place };
        let MappedParts { mapped: parts, left_out } = mapped(&fake, &[bar], None).unwrap();
        assert_eq!((parts.len(), left_out), (MOST, 302 - MOST));
        let spans: Vec<_> = parts.iter().map(|part| part.span).collect();
        assert_eq!(spans[..3], [areas[300], areas[301], areas[0]]);
    }
}
