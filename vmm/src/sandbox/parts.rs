//! The parts of a machine that need system calls of their own, by its plan. Pure.

use super::KeptDescriptors;
use super::table::MachinePart;
use crate::config::{Console, DeviceKind, EgmSlice, GUEST_MEMFD, LOCAL, OnReset, Spec};
use crate::plan::{FunctionRole, Plan};

/// The parts of the machine of `plan` that keeps `kept`.
pub(super) fn of(plan: &Plan, kept: KeptDescriptors<'_>) -> Vec<MachinePart> {
    let devices = plan.pci.iter().filter_map(|function| match &function.role {
        FunctionRole::Endpoint { device, .. } => part_of(&device.kind),
        _ => None,
    });
    let console = matches!(plan.console, Console::Socket { .. }).then_some(MachinePart::ConsoleSocket);
    let parts = [
        console,
        (plan.on_reset == OnReset::Reboot).then_some(MachinePart::Reset),
        plan.passthrough.is_some().then_some(MachinePart::Function),
        kept.broker.then_some(MachinePart::Broker),
        kept.egm_device.then_some(MachinePart::EgmDevice),
        kept.api.is_some().then_some(MachinePart::ControlApi),
    ];
    devices.chain(parts.into_iter().flatten()).collect()
}

const fn part_of(device: &DeviceKind) -> Option<MachinePart> {
    match device {
        DeviceKind::VirtioBlk { .. } => Some(MachinePart::Disk),
        DeviceKind::VirtioNet { .. } => Some(MachinePart::Net),
        DeviceKind::VirtioVsock { socket: Some(_), .. } => Some(MachinePart::Vsock),
        DeviceKind::VirtioVsock { socket: None, .. } => Some(MachinePart::VhostVsock),
        DeviceKind::Vfio { .. } => Some(MachinePart::Function),
        DeviceKind::VfioUser { .. } => Some(MachinePart::Server),
        // The first needs nothing of its own; a machine with the second is refused: see `SandboxError::Slice`.
        DeviceKind::VirtioRng | DeviceKind::Egm { .. } => None,
    }
}

/// Id of the first slice of `spec` that is a PCI function.
pub(super) fn slice_device(spec: &Spec) -> Option<&str> {
    let slice = spec.devices.iter().find(|device| matches!(device.kind, DeviceKind::Egm { .. }));
    slice.map(|device| device.id.as_str())
}

/// Whether a slice of `spec` may be of a region of the host, and must be returned, unlike memory of the process itself.
pub(crate) fn needs_return(spec: &Spec) -> bool {
    let is_of_process = |region: &String| [LOCAL, "memfd", GUEST_MEMFD].contains(&region.as_str());
    let is_returned = |slice: &EgmSlice| !slice.regions.iter().all(is_of_process);
    spec.egm.iter().any(is_returned)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_slice_that_may_be_of_a_region_needs_its_return_and_memory_of_the_process_does_not() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/egm-device.json");
        let mut spec = crate::config::load(&path).unwrap();
        for (regions, expected) in [
            (vec!["local"], false),
            (vec!["memfd"], false),
            (vec!["guest-memfd", "local"], false),
            (vec!["hugetlb"], true),
            (vec!["egm4", "local"], true),
        ] {
            spec.egm[0].regions = regions.iter().copied().map(str::to_owned).collect();
            assert_eq!(needs_return(&spec), expected, "{regions:?}");
        }
        spec.egm.clear();
        assert!(!needs_return(&spec));
    }
}
