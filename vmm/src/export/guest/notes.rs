//! Notes: settings of a machine that no monitor here gets, and steps before it starts.

use egm_config::{BarPlacements, Clique, Device, DeviceKind, EgmSlice, PciTopology, Spec};

use super::{Guest, function};
use crate::export::command::quoted;
use crate::export::words::text;

/// The VFIO variant driver of coherent GPUs, which alone gives a guest their memory.
const COHERENT: &str = "nvgrace_gpu_vfio_pci";

impl Guest {
    /// The step that makes the slice called `id` a device.
    pub(super) fn serve(&self, slice: &EgmSlice, id: &str) -> String {
        format!(
            "{id} is a device, served before the machine starts: egm-device serve --region {} --size {} --pxm {} --name \
             {}-{id} --socket {}",
            slice.regions.first().map_or("REGION", String::as_str),
            slice.size,
            slice.node,
            self.machine.name,
            quoted(text(&self.socket(id)))
        )
    }

    /// The step that binds the host's functions to VFIO: GPUs on EGM have a driver of their own.
    pub(super) fn bind(&self) -> Vec<String> {
        [true, false].into_iter().filter_map(|coherent| self.bind_command(coherent)).collect()
    }

    /// The command for the GPUs on EGM (`coherent`), or for all other functions; `None` where there are none.
    fn bind_command(&self, coherent: bool) -> Option<String> {
        let ours = self.devices.iter().filter(|placed| placed.initiators.is_some() == coherent);
        let ours: Vec<String> =
            ours.filter_map(|placed| function(&placed.kind)).map(|one| one.to_string()).collect();
        if ours.is_empty() {
            return None;
        }
        let driver = if coherent { format!(" --driver {COHERENT}") } else { String::new() };
        let functions = ours.join(" ");
        Some(format!(
            "functions are bound to VFIO before the machine starts: egm-vmm bind {functions}{driver}"
        ))
    }
}

/// Note on several functions with automatic cliques: egm-vmm uses the host's switches, which are not read here.
fn automatic_cliques(machine: &Spec) -> Option<String> {
    let automatic = |device: &&Device| matches!(device.kind, DeviceKind::Vfio { clique: Clique::Auto, .. });
    let ids: Vec<&str> = machine.devices.iter().filter(automatic).map(|device| device.id.as_str()).collect();
    (ids.len() > 1).then(|| {
        format!(
            "{}: \"clique\": \"auto\" is left out, which numbers GPUs that share a switch of the host: write \"clique\": N \
             where \"egm-vmm plan\" shows P2P clique N",
            ids.join(", ")
        )
    })
}

/// Notes on settings of the configuration that no monitor here gets.
pub(super) fn unsaid(machine: &Spec) -> Vec<String> {
    let assigned = |device: &&Device| matches!(device.kind, DeviceKind::Vfio { .. });
    let mut notes = Vec::new();
    notes.extend(automatic_cliques(machine));
    if machine.pcie.topology == PciTopology::Mirror && machine.devices.iter().filter(assigned).count() > 1 {
        notes.push(
            "the host's PCI Express switches are not shown: each function has a root port or slot of its own"
                .to_owned(),
        );
    }
    if machine.pcie.spare.is_some() {
        notes.push(
            "pcie.spare is left out: give the monitor ports or slots of its own for what is plugged in"
                .to_owned(),
        );
    }
    for device in &machine.devices {
        let DeviceKind::Vfio { bars, p2p, .. } = &device.kind else { continue };
        if *bars != BarPlacements::Guest {
            notes.push(format!("{}: \"bars\" is left out, the guest's firmware places them", device.id));
        }
        if !p2p {
            notes.push(format!(
                "{}: \"p2p\" is left out, other functions of the machine reach its BARs",
                device.id
            ));
        }
    }
    notes
}
