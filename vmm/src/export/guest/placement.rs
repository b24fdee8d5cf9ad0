//! Where a slice's bytes lie in its region, and what a monitor cannot do about that place.

use std::collections::BTreeMap;

use egm_address::{Offset, Span, SpanSet};
use egm_config::{EgmSlice, PageSize};

use super::{GuestError, Source};
use egm_device::carve::plan::{PlacementError, Request, place};
use egm_device::owner::Owner;
use egm_device::region::{Region, RegionKind, Slice, Survey};

/// The first of a slice's wishes that the host can give, and the region that it comes from.
pub(super) fn source<'s>(
    index: usize,
    slice: &EgmSlice,
    survey: &'s Survey,
    taken: &mut BTreeMap<String, Vec<Slice>>,
) -> Result<(Source, Option<&'s Region>), GuestError> {
    let own = |page_size, host_nodes| Source::Own { page_size, host_nodes, prefault: false };
    let mut short = None;
    for wanted in &slice.regions {
        if wanted == "local" || wanted == "memfd" {
            return Ok((own(slice.page_size, slice.host_nodes.clone()), None));
        }
        let called = |region: &&Region| region.name == *wanted || region.kind.word() == wanted;
        for region in survey.regions.iter().filter(called) {
            match &region.kind {
                RegionKind::Hugetlb => {
                    // Arm kernels have pools of sizes that no configuration names: not for a machine.
                    let Some(page) = PageSize::of_pool(region.page_size.get()) else { continue };
                    let nodes = region.node.map(|node| [node].into_iter().collect());
                    return Ok((own(page, nodes), Some(region)));
                }
                RegionKind::Memfd => return Ok((own(slice.page_size, slice.host_nodes.clone()), None)),
                // Only the ledger makes the files of slices.
                RegionKind::GuestMemfd | RegionKind::Fsdax { .. } => {}
                // Only the broker creates the devices of its slices.
                kind if kind.has_slice_devices() => {}
                RegionKind::Egm { device }
                | RegionKind::Reserved { device }
                | RegionKind::Devdax { device, .. } => {
                    let path = device.to_str().map(str::to_owned);
                    let path = path.ok_or_else(|| GuestError::Device { region: region.name.clone() })?;
                    match find(region, slice, taken) {
                        Ok(offset) => {
                            let offset = file_offset(region, offset);
                            let page = region.page_size.get();
                            return Ok((Source::File { path, offset, page }, Some(region)));
                        }
                        Err(error) => short = short.or(Some(error)),
                    }
                }
            }
        }
    }
    Err(match short {
        Some(source) => GuestError::NoPlacement { index, source: Box::new(source) },
        None => GuestError::NoRegion { index, regions: slice.regions.clone() },
    })
}

/// Offsets of `/dev/mem` are host physical addresses.
fn file_offset(region: &Region, offset: u64) -> u64 {
    let base = match (&region.kind, region.base) {
        (RegionKind::Reserved { .. }, Some(base)) => base.get(),
        _ => 0,
    };
    base.saturating_add(offset)
}

/// The offset in its region of a slice, past those that this machine has of it already.
fn find(
    region: &Region,
    slice: &EgmSlice,
    taken: &mut BTreeMap<String, Vec<Slice>>,
) -> Result<u64, PlacementError> {
    let ours = taken.entry(region.name.clone()).or_default();
    let busy = ours.iter().filter_map(|s| Span::new(Offset::new(s.offset), s.size.get()).ok()).collect();
    // The owner does not affect the placement.
    let owner = Owner { name: String::new(), uid: 0, pid: 0, started: 0, domain: None };
    let request = Request::new(slice.size.get(), owner);
    let huge = Request { align: 1 << 30, ..request.clone() };
    let found = place(region, &busy, &SpanSet::EMPTY, &huge)
        .or_else(|_| place(region, &busy, &SpanSet::EMPTY, &request))?;
    let offset = found.offset;
    ours.push(found);
    Ok(offset)
}

/// Notes on the slice at `offset` of its device, which the monitor opens itself: it has no record in the ledger, and its
/// bad pages are no holes.
pub(super) fn notes(id: &str, region: &Region, offset: u64, size: u64) -> Vec<String> {
    let name = &region.name;
    let first = offset.saturating_sub(file_offset(region, 0));
    let end = first.saturating_add(size);
    let mut notes = vec![format!(
        "{id}: the ledger does not record bytes {first:#x} to {end:#x} of {name}, so egm-vmm and other exports use them, \
         too: start no other machine on {name}, or write \"as\": \"device\""
    )];
    let slice: SpanSet<_> = Span::new(Offset::new(first), size).into_iter().collect();
    let bad = slice.size().saturating_sub(slice.minus(region.retired.spans()).size());
    if bad > 0 {
        notes.push(format!(
            "{id}: {bad:#x} bytes of it are retired, and this monitor cannot leave holes: the guest may touch bad \
             memory; write \"as\": \"device\", or run the machine with egm-vmm"
        ));
    }
    notes
}
