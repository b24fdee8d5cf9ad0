//! The state of a machine in a snapshot, as `state.json` has it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::board_state::BusState;
use crate::arch::native::state::{ControllersState, VcpuState};
use crate::pci::BridgeState;
use crate::plan::{FunctionPlan, FunctionRole, Plan};
use crate::snapshot::Mismatch;
use crate::virtio::FunctionState;

/// State of all of a machine but its memory.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MachineState {
    /// What the guest has found of the plan, as JSON; see [`guest_view`].
    pub(super) guest: BTreeMap<String, String>,
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
}

/// The parts of `plan` that its guest finds: a restored machine must have the same, whatever the host plans.
pub(super) fn guest_view(plan: &Plan) -> BTreeMap<String, String> {
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
    let view = [
        ("address_bits", json!(plan.address_bits)),
        ("vcpus", plan.vcpus.iter().map(vcpu).collect()),
        ("memory", plan.memory.iter().map(memory).collect()),
        ("windows", json!(plan.windows)),
        ("pci", plan.pci.iter().map(function).collect()),
        ("expanders", json!(plan.expanders)),
        ("lines", json!(plan.lines)),
        ("ports", json!(plan.ports)),
    ];
    view.into_iter().map(|(key, value)| (key.to_owned(), value.to_string())).collect()
}

/// Refuses a machine of `plan` in place of that with the view `saved`, by the first part that differs.
///
/// # Errors
/// [`Mismatch`].
pub(super) fn check_view(saved: &BTreeMap<String, String>, plan: &Plan) -> Result<(), Mismatch> {
    let here = guest_view(plan);
    match here.iter().find(|(key, value)| saved.get(*key) != Some(value)) {
        Some((key, _)) => {
            Err(Mismatch::new(format!("the plan of this host has other \"{key}\" for its guest")))
        }
        None if saved.len() != here.len() => Err(Mismatch::new("it has unknown parts of a plan")),
        None => Ok(()),
    }
}
