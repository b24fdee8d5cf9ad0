//! Claims on GPUs that reach a whole region of the host ([`egm_device::trust`]).

use std::path::Path;

use egm_address::PciAddress;
use egm_device::ledger::{GpuLease, Identity, Ledger, Paths, Watch};
use egm_device::owner::Owner;
use egm_device::region::Region;

use super::error::ReserveError;
use crate::facts::{self, FactsError};
use crate::plan::Plan;

/// Claims the GPUs of `plan` that reach a region, for a machine of `domain`. The claims end with the returned value.
///
/// # Errors
/// [`ReserveError`] when another trust domain has a slice or a GPU of that region, or this user may not use the ledger.
pub fn claim_gpus(plan: &Plan, domain: Option<&str>) -> Result<Option<GpuLease>, ReserveError> {
    let functions: Vec<PciAddress> = plan.assigned_functions().collect();
    let mut regions = Vec::new();
    for function in &functions {
        regions.extend(reached(*function)?);
    }
    let Some(first) = regions.first() else { return Ok(None) };
    let name = first.name.clone();
    regions.sort_by(|one, other| one.name.cmp(&other.name));
    regions.dedup_by(|one, other| one.name == other.name);
    let root = Path::new("/");
    let ledger = Ledger::open(Paths::below(root), Identity::read(root).map_err(ReserveError::Boot)?)?;
    let owner = Owner::this(&plan.name).in_domain(domain.map(str::to_owned));
    let claimed = ledger.claim_gpus(&ledger.memory(), &regions, &functions, &owner, &Watch::unobserved());
    claimed.map_err(|source| ReserveError::Gpus { region: name, source })
}

/// Regions of this host that `function` reaches.
///
/// # Errors
/// [`FactsError`].
pub(crate) fn reached(function: PciAddress) -> Result<Vec<Region>, FactsError> {
    let mut regions = facts::egm_regions(Path::new("/"))?;
    regions.retain(|region| region.functions.contains(&function));
    Ok(regions)
}
