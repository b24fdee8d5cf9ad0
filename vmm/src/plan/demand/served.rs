//! Rules for vfio-user servers: only a running one reports its BARs, and each shares memory by file only.

use std::path::Path;

use crate::config::{Device, DeviceKind, Spec};
use crate::facts::Facts;
use crate::plan::{AssignedRule, BackingPlan, PlanError};

/// Checks that all memory of the machine can be shared with its servers. A device file would share the whole region,
/// other machines' slices included.
///
/// # Errors
/// [`AssignedRule::ServerMemory`].
pub(in crate::plan) fn check_memory(
    spec: &Spec,
    facts: &Facts,
    backings: &[BackingPlan],
) -> Result<(), PlanError> {
    let Some((device, _)) = served(spec).next() else { return Ok(()) };
    // A device's memory is a BAR: servers do not get it, and a note reports that.
    for backing in backings.iter().filter(|backing| !backing.device) {
        let Some(host) = backing.region.as_ref().and_then(|name| facts.region(name)) else { continue };
        if host.region.kind.shares_file() && !egm_address::fault!("region-file-for-a-server") {
            let (device, backing, region) = (device.id.clone(), backing.id.clone(), host.region.name.clone());
            return Err(AssignedRule::ServerMemory { device, backing, region }.into());
        }
    }
    Ok(())
}

/// Notes on servers that the facts do not describe.
pub(in crate::plan) fn notes(spec: &Spec, facts: &Facts) -> Vec<String> {
    let unknown =
        served(spec).filter(|(_, socket)| facts.servers.iter().all(|server| server.socket != *socket));
    let note = |(device, socket): (&Device, &Path)| {
        format!(
            "device \"{}\": its BARs are not in this plan, and move what is placed after them: only its running server reports \
             their sizes; record them with: egm-vmm facts --server {}",
            device.id,
            socket.display()
        )
    };
    unknown.map(note).collect()
}

fn served(spec: &Spec) -> impl Iterator<Item = (&Device, &Path)> {
    spec.devices.iter().filter_map(|device| match &device.kind {
        DeviceKind::VfioUser { socket } => Some((device, socket.as_path())),
        _ => None,
    })
}
