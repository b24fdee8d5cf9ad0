//! BARs at addresses that the configuration fixes.

use egm_address::{Gpa, Guest, Span};
use egm_vfio::host::HostBar;

use crate::config::{BarPlace, BarPlaces, Device, FixedBar};
use crate::plan::demand::wanted::{Wanted, WantedBar};
use crate::plan::map::space::Space;
use crate::plan::units::PAGE;
use crate::plan::{AssignedRule, BarKind, PlaceRule, PlanError};

/// Sets the addresses in `bars` that the configuration fixes.
pub(in crate::plan) fn fix(
    device: &Device,
    places: &BarPlaces,
    host: &[HostBar],
    bars: &mut [WantedBar],
) -> Result<(), PlanError> {
    let start = |index: u8| host.iter().find(|bar| bar.index == index).map_or(0, |bar| bar.start);
    let high = |bar: &WantedBar| bar.kind == BarKind::Memory64Prefetchable;
    let all: Vec<FixedBar> = match places {
        BarPlaces::Guest => Vec::new(),
        BarPlaces::Host => {
            let high = bars.iter().filter(|bar| high(bar));
            high.map(|bar| FixedBar { index: bar.index, place: BarPlace::Host }).collect()
        }
        BarPlaces::Each(places) => places.clone(),
    };
    for FixedBar { index, place } in all {
        let wrong = |why| PlanError::from(AssignedRule::FixedBar { device: device.id.clone(), index, why });
        let bar = bars.iter_mut().find(|bar| bar.index == index);
        let bar = bar.ok_or_else(|| wrong("the function has no such memory BAR"))?;
        if !high(bar) {
            return Err(wrong(
                "it is not 64-bit prefetchable, and only such BARs have a window of their own",
            ));
        }
        let at = match place {
            BarPlace::At(at) => at,
            BarPlace::Host if start(index) == 0 => return Err(wrong("the host gave it no address")),
            BarPlace::Host => Gpa::new(start(index)),
        };
        if !at.is_aligned(bar.size.max(PAGE)) {
            return Err(wrong("its address is not a multiple of its size"));
        }
        bar.at = Some(at);
    }
    Ok(())
}

/// Checks that fixed BARs lie where BARs may be.
pub(in crate::plan) fn check_fixed(wanted: &[Wanted<'_>], space: &Space) -> Result<(), PlanError> {
    for (device, bar, at) in fixed(wanted) {
        let span = Span::<Guest>::new(at, bar.size.max(PAGE));
        let beyond = || PlaceRule::Beyond { limit: space.limit, bits: space.bits };
        let Ok(span) = span else {
            return Err(AssignedRule::FixedBar {
                device: device.id.clone(),
                index: bar.index,
                why: "it runs past the end of the 64-bit address space",
            }
            .into());
        };
        let rule = match space.blocked().iter().find(|blocked| blocked.overlaps(span)) {
            _ if at < space.top => PlaceRule::Memory(space.top),
            _ if span.end().get() > space.limit => beyond(),
            Some(blocked) => PlaceRule::Reserved(blocked),
            None => continue,
        };
        let (device, data_direct) = (device.id.clone(), bar.data_direct);
        return Err(AssignedRule::Place { device, what: what(bar), span, rule, data_direct }.into());
    }
    Ok(())
}

fn what(bar: &WantedBar) -> String {
    format!("BAR {}", bar.index)
}

fn fixed<'a>(wanted: &'a [Wanted<'_>]) -> impl Iterator<Item = (&'a Device, &'a WantedBar, Gpa)> {
    let bars = wanted.iter().flat_map(|one| one.bars.iter().map(move |bar| (one.device, bar)));
    bars.filter_map(|(device, bar)| Some((device, bar, bar.at?)))
}

/// The error for a device with fixed BARs that overlap those of `other`.
pub(in crate::plan) fn shared(one: &Wanted<'_>, other: &str) -> PlanError {
    let first = fixed(std::slice::from_ref(one)).next();
    let span = first.and_then(|(_, bar, at)| Some((bar, Span::new(at, bar.size).ok()?)));
    match span {
        Some((bar, span)) => AssignedRule::Place {
            device: one.device.id.clone(),
            what: what(bar),
            span,
            rule: PlaceRule::Shared(other.to_owned()),
            data_direct: bar.data_direct,
        }
        .into(),
        None => PlanError::Internal("a device without fixed BARs overlaps another"),
    }
}
