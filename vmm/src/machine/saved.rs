//! The state of a machine in a snapshot, as `state.json` has it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::board_state::BusState;
use crate::arch::native::state::{ControllersState, VcpuState};
use crate::config::{MAX_SPARE, NewDevice};
use crate::pci::BridgeState;
use crate::plan::{FunctionPlan, FunctionRole, Plan};
use crate::snapshot::{Mismatch, ensure};
use crate::virtio::FunctionState;

/// What a guest has found of a plan, as JSON; see [`guest_view`].
pub(crate) type GuestView = BTreeMap<String, String>;

/// State of all of a machine but its memory.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MachineState {
    /// What the guest has found of the plan, as JSON; see [`guest_view`].
    pub(super) guest: GuestView,
    /// In the order of the plan.
    pub(super) vcpus: Vec<VcpuState>,
    pub(super) controllers: ControllersState,
    /// Devices at I/O ports.
    pub(super) ports: BusState,
    /// Devices at memory addresses.
    pub(super) mmio: BusState,
    /// Bridges by their places in the PCI tree.
    pub(super) bridges: BTreeMap<String, BridgeState>,
    /// Virtio functions by the ids of their devices.
    pub(super) devices: BTreeMap<String, FunctionState>,
    /// Devices that were unplugged for the snapshot, as entries of `"devices"`: they are plugged in when the guest first runs.
    pub(super) unplugged: Vec<Value>,
}

impl MachineState {
    /// The devices that were unplugged for the snapshot.
    ///
    /// # Errors
    /// [`Mismatch`]: more than a machine has ports, or one that no machine can have.
    pub(crate) fn unplugged(&self) -> Result<Vec<NewDevice>, Mismatch> {
        let count = u64::try_from(self.unplugged.len()).unwrap_or(u64::MAX);
        ensure(count <= MAX_SPARE, || format!("{count} devices for {MAX_SPARE} spare ports"))?;
        let parse = NewDevice::from_value;
        let devices = self
            .unplugged
            .iter()
            .map(|device| parse(device).map_err(|error| Mismatch::new(error.to_string())));
        devices.collect()
    }
}

/// The parts of `plan` that its guest finds: a restored machine must have the same, whatever the host plans.
pub(crate) fn guest_view(plan: &Plan) -> GuestView {
    let vcpu = |vcpu: &crate::plan::VcpuPlan| {
        json!([vcpu.index, vcpu.hardware_id, vcpu.socket, vcpu.core, vcpu.thread, vcpu.node])
    };
    let memory = |memory: &crate::plan::MemoryPlan| json!([memory.span, memory.node]);
    let function = |function: &FunctionPlan| {
        let role = match &function.role {
            FunctionRole::Endpoint { device, .. } => json!(device.id),
            bridge => json!(bridge),
        };
        json!([function.address, role, function.bars, function.msix_vectors])
    };
    // A guest that began without lines of spare ports has them in no table, and goes on.
    let lines: Vec<_> = plan.lines.iter().filter(|line| !line.is_of_spare_port()).collect();
    let view = [
        ("address_bits", json!(plan.address_bits)),
        ("vcpus", plan.vcpus.iter().map(vcpu).collect()),
        ("memory", plan.memory.iter().map(memory).collect()),
        ("windows", json!(plan.windows)),
        ("pci", plan.pci.iter().map(function).collect()),
        ("expanders", json!(plan.expanders)),
        ("lines", json!(lines)),
        ("ports", json!(plan.ports)),
    ];
    view.into_iter().map(|(key, value)| (key.to_owned(), value.to_string())).collect()
}

/// Refuses a machine of `plan` in place of that with the view `saved`, by the first part that differs.
///
/// # Errors
/// [`Mismatch`].
pub(crate) fn check_view(saved: &GuestView, plan: &Plan) -> Result<(), Mismatch> {
    let here = guest_view(plan);
    match here.iter().find(|(key, value)| saved.get(*key) != Some(value)) {
        Some((key, _)) => {
            Err(Mismatch::new(format!("the plan of this host has other \"{key}\" for its guest")))
        }
        None if saved.len() != here.len() => Err(Mismatch::new("it has unknown parts of a plan")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::path::Path;

    use super::*;
    use crate::config::Overrides;
    use crate::snapshot::{MACHINE, STATE, StoredSnapshot};

    /// A snapshot as the first version wrote it: two vCPUs, a disk, an entropy device, vsock, a spare port, an EGM node. Prints why
    /// there is none.
    fn first_version() -> Option<tempfile::TempDir> {
        let stored = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/snapshot-1");
        let stored = stored.join(std::env::consts::ARCH);
        if !stored.exists() {
            println!("skipped: no snapshot of this architecture is stored");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        for name in ["snapshot.json", MACHINE, STATE] {
            fs::copy(stored.join(name), folder.path().join(name)).unwrap();
        }
        let manifest: Value =
            serde_json::from_slice(&fs::read(stored.join("snapshot.json")).unwrap()).unwrap();
        let pieces = manifest["memory"].as_array().unwrap();
        let size: u64 = pieces.iter().map(|piece| piece["size"].as_u64().unwrap()).sum();
        let mark = format!("egm-vmm memory {}\n", manifest["id"].as_str().unwrap());
        let memory = File::create(folder.path().join("memory")).unwrap();
        memory.set_len(size + 4096).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&memory, mark.as_bytes(), size).unwrap();
        Some(folder)
    }

    #[test]
    fn a_guest_of_a_program_without_lines_of_spare_ports_goes_on() {
        let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
        let spec = crate::config::load(&configs.join("hotplug.json")).unwrap();
        let facts = crate::facts::load(&configs.join("facts/x86-server.json")).unwrap();
        let mut plan = crate::plan::plan(&spec, &facts).unwrap();
        let (view, count) = (guest_view(&plan), plan.lines.len());
        plan.lines.retain(|line| !line.owner.starts_with("slot "));
        assert!(plan.lines.len() < count);
        check_view(&view, &plan).unwrap();
        plan.lines.pop();
        assert!(check_view(&view, &plan).is_err());
    }

    /// Where this fails, a type has changed: raise the format, and keep a reader for this one.
    #[test]
    fn a_snapshot_of_the_first_version_is_read_as_it_was_written() {
        let Some(folder) = first_version() else { return };
        let snapshot = StoredSnapshot::open(folder.path()).unwrap();
        let state: MachineState = snapshot.state().unwrap();
        assert_eq!((state.vcpus.len(), state.devices.len(), state.unplugged().unwrap().len()), (2, 3, 1));
        let machine = folder.path().join(MACHINE);
        crate::config::parse_with(&machine, snapshot.machine().to_vec(), &Overrides::default()).unwrap();
        let written: Value = serde_json::from_slice(&fs::read(folder.path().join(STATE)).unwrap()).unwrap();
        assert_eq!(serde_json::to_value(&state).unwrap(), written);
    }
}
