//! Regions that a GPU reaches: exclusive to one trust domain ([`egm_device::trust`]).

use egm_address::PciAddress;
use egm_device::owner::is_same;
use egm_device::trust::{self, Conflict, Holding, Party};

use crate::config::{DeviceKind, Spec};
use crate::facts::{Facts, HostRegion, Trust};
use crate::plan::PlanError;

/// Refuses GPUs of `spec` that would reach another trust domain's slices or meet its GPUs.
pub(super) fn check_gpus(spec: &Spec, facts: &Facts) -> Result<(), PlanError> {
    let gpus = spec.devices.iter().filter_map(|device| match device.kind {
        DeviceKind::Vfio { function, .. } => Some(function),
        _ => None,
    });
    for gpu in gpus {
        for host in facts.regions.iter().filter(|host| host.region.functions.contains(&gpu)) {
            check(spec, host, &[gpu])?;
        }
    }
    Ok(())
}

/// Whether the machine of `spec` may have `gpus` of the region of `host`, or a slice of it when `gpus` is empty.
pub(super) fn check(spec: &Spec, host: &HostRegion, gpus: &[PciAddress]) -> Result<(), Box<Conflict>> {
    let domain = spec.trust_domain.as_deref();
    let hold = |owner: &String, theirs: &Trust, gpu| Holding {
        party: Party { owner: owner.clone(), domain: theirs.domain().map(str::to_owned) },
        is_trusted: *theirs == Trust::Unrecorded || is_same(domain, theirs.domain()),
        gpu,
    };
    let live = host.gpus.iter().map(|gpu| hold(&gpu.owner, &gpu.trust, Some(gpu.function)));
    let slices = host.held.iter().map(|held| hold(&held.owner, &held.trust, None));
    let requester = Party { owner: format!("machine \"{}\"", spec.name), domain: spec.trust_domain.clone() };
    trust::check(&host.region.name, &requester, gpus, live.chain(slices))
}
