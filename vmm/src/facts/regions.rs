//! Carve-outs of the host's memory, and their held and clean spans: as `egm-device` finds and records them.

use std::path::Path;

use egm_device::ledger::{Identity, Ledger, Paths, States};
use egm_device::owner::Owner;
use egm_device::region::{HostFacts, HostFile, Region, RegionKind, Survey};

use crate::facts::{FactsError, HeldGpu, HeldSpan, HostRegion, Trust};

/// Memory of the host below `root`, and its regions.
pub(super) fn of(root: &Path) -> Result<(HostFacts, Vec<HostRegion>), FactsError> {
    let Survey { host, regions, .. } = Survey::of(root, &HostFile::load_all(root, None)?);
    let ledger = ledger(root)?;
    let regions = regions.into_iter().map(|region| with_states(region, ledger.as_ref()));
    Ok((host, regions.collect::<Result<_, _>>()?))
}

/// Regions of EGM that GPUs may reach, on the host below `root`; quick on a host without any.
///
/// # Errors
/// [`FactsError`] for a host file.
pub(crate) fn egm(root: &Path) -> Result<Vec<Region>, FactsError> {
    if !has_egm(root) {
        return Ok(Vec::new());
    }
    let mut regions = Survey::of(root, &HostFile::load_all(root, None)?).regions;
    regions.retain(|region| matches!(region.kind, RegionKind::Egm { .. }));
    Ok(regions)
}

/// Whether a driver for EGM is loaded.
pub(super) fn has_egm(root: &Path) -> bool {
    root.join("sys/class/egm").exists()
}

/// The ledger, where there is one and this process may read it: a plan needs no privilege, and the launch reads it again.
/// Without it no owner and no clean span is known.
fn ledger(root: &Path) -> Result<Option<Ledger>, FactsError> {
    let paths = Paths::below(root);
    if std::fs::read_dir(&paths.run).is_err() || std::fs::read_dir(&paths.state).is_err() {
        return Ok(None);
    }
    let boot = |source| FactsError::Read { path: root.join("proc/sys/kernel/random/boot_id"), source };
    Ok(Some(Ledger::open(paths, Identity::read(root).map_err(boot)?)?))
}

fn with_states(region: Region, ledger: Option<&Ledger>) -> Result<HostRegion, FactsError> {
    let Some(ledger) = ledger else {
        return Ok(HostRegion { region, held: Vec::new(), clean: Vec::new(), gpus: Vec::new() });
    };
    let States { held, gpus, clean, retired, .. } = ledger.states(&region)?;
    let owner =
        |owner: Option<&Owner>| owner.map_or_else(|| "an unknown process".to_owned(), Owner::to_string);
    let held = held.iter().map(|held| HeldSpan {
        span: held.span,
        owner: owner(held.owner.as_ref()),
        trust: Trust::of(held.owner.as_ref()),
    });
    let gpus = gpus.iter().map(|gpu| HeldGpu {
        function: gpu.function,
        owner: gpu.party().owner,
        trust: gpu.party().domain.map_or(Trust::Alone, Trust::Domain),
    });
    let (held, gpus, clean) = (held.collect(), gpus.collect(), clean.iter().collect());
    Ok(HostRegion { region: Region { retired, ..region }, held, clean, gpus })
}
