//! Carve-outs of the host's memory, and what of them is to be had: what `egm-device` finds and keeps.

use std::path::Path;

use egm_device::ledger::{Identity, Ledger, Paths, States};
use egm_device::region::{HostFile, Region, Survey};

use crate::facts::{FactsError, HeldSpan, HostRegion};

/// The regions of the host below `root`.
pub(super) fn of(root: &Path) -> Result<Vec<HostRegion>, FactsError> {
    let survey = Survey::of(root, &HostFile::load_all(root, None)?);
    let ledger = ledger(root)?;
    survey.regions.into_iter().map(|region| with_states(region, ledger.as_ref())).collect()
}

/// The ledger, where there is one and this process may ask it: a plan needs no privilege, and the launch asks again.
/// Without it nobody is known to hold anything, and nothing is known to be clean.
fn ledger(root: &Path) -> Result<Option<Ledger>, FactsError> {
    let paths = Paths::below(root);
    if std::fs::read_dir(&paths.run).is_err() || std::fs::read_dir(&paths.state).is_err() {
        return Ok(None);
    }
    let boot = |source| FactsError::Read { path: root.join("proc/sys/kernel/random/boot_id"), source };
    Ok(Some(Ledger::open(paths, Identity::read(root).map_err(boot)?)?))
}

fn with_states(region: Region, ledger: Option<&Ledger>) -> Result<HostRegion, FactsError> {
    let Some(ledger) = ledger else { return Ok(HostRegion { region, held: Vec::new(), clean: Vec::new() }) };
    let States { held, clean, retired, .. } = ledger.states(&region)?;
    let owner = |owner: Option<_>| {
        owner.map_or_else(|| "an unknown process".to_owned(), |o: egm_device::owner::Owner| o.to_string())
    };
    let held = held.into_iter().map(|held| HeldSpan { span: held.span, owner: owner(held.owner) }).collect();
    Ok(HostRegion { region: Region { retired, ..region }, held, clean: clean.iter().collect() })
}
