//! JSON bodies of the API. Pure but for the machine's counters.

use std::collections::BTreeMap;
use std::path::Path;

use egm_address::PciAddress;
use serde_json::{Map, Value, json};

use super::cycle::{Created, Cycle, LastEnd};
use super::published::{KnownState, Phase, Published, microseconds};
use crate::kvm::Message;
use crate::machine::{DeviceCounters, Live};
use crate::plan::{FunctionRole, Plan};

/// Version of this program.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

pub(super) fn ping() -> Value {
    let build = format!("egm-vmm v{VERSION}");
    json!({ "build_version": build, "version": VERSION, "pid": std::process::id(), "features": [] })
}

/// cloud-hypervisor's `VmInfo` of a machine that is created, and has no plan. `last` is the end of the machine before.
pub(super) fn info_of_created(created: &Created, last: Option<&LastEnd>) -> Value {
    json!({
        "config": created.shown,
        "state": "Created",
        "memory_actual_size": created.shown["memory"]["size"],
        "device_tree": {},
        "last_reason": last.map(|last| &last.reason),
        "last_text": last.map(|last| &last.text),
    })
}

/// cloud-hypervisor's `VmInfo`, with the parts of its `VmConfig` that the plan has.
pub(super) fn info(plan: &Plan, phase: Phase) -> Value {
    let vcpus = plan.vcpus.len();
    let memory: u64 = plan.memory.iter().map(|piece| piece.span.size()).fold(0, u64::saturating_add);
    let state = match phase {
        Phase::Empty | Phase::Created | Phase::Starting => "Created",
        Phase::Running => "Running",
        Phase::Ending | Phase::Ended => "Shutdown",
    };
    // Paths of a command line may be no UTF-8, which JSON must be.
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let mut payload = Map::new();
    payload.insert("kernel".to_owned(), text(&plan.boot.kernel).into());
    payload.insert("cmdline".to_owned(), plan.boot.cmdline.as_str().into());
    payload.extend(plan.boot.initramfs.as_ref().map(|path| ("initramfs".to_owned(), text(path).into())));
    json!({
        "config": {
            "cpus": { "boot_vcpus": vcpus, "max_vcpus": vcpus },
            "memory": { "size": memory },
            "payload": payload,
        },
        "state": state,
        "memory_actual_size": memory,
        "device_tree": device_tree(plan),
    })
}

/// Each device of the plan with its PCI address.
fn device_tree(plan: &Plan) -> Map<String, Value> {
    let endpoints = plan.pci.iter().filter_map(|function| match &function.role {
        FunctionRole::Endpoint { device, .. } => Some((&device.id, function.address)),
        _ => None,
    });
    let node = |(id, address): (&String, PciAddress)| {
        let node = json!({ "id": id, "resources": [], "children": [], "pci_bdf": address });
        (id.clone(), node)
    };
    endpoints.map(node).collect()
}

/// Name of a counter in answers: its words, joined.
pub(super) fn counter_name(words: &str) -> String {
    words.replace(' ', "_")
}

/// cloud-hypervisor's `VmCounters`: a number for each device and counter.
pub(super) fn counters(devices: &[DeviceCounters]) -> Value {
    let of = |device: &DeviceCounters| -> BTreeMap<String, u64> {
        device.counters.iter().map(|(words, number)| (counter_name(words), *number)).collect()
    };
    let devices: BTreeMap<&str, _> = devices.iter().map(|device| (device.id.as_str(), of(device))).collect();
    json!(devices)
}

/// The machine of this process.
pub(super) fn machine(machine: &Published, state: &KnownState) -> Value {
    let created = state.cycle.as_ref().and_then(Cycle::created);
    let name = state.plan.as_ref().map(|plan| &plan.name).or_else(|| created.map(|created| &created.name));
    let last = state.cycle.as_ref().and_then(Cycle::last);
    json!({
        "name": name,
        "state": state.phase(),
        "ended": state.ended,
        "last_reason": last.map(|last| &last.reason),
        "last_text": last.map(|last| &last.text),
        "pid": std::process::id(),
        "version": VERSION,
        "config": machine.config.as_ref().map(|path| path.to_string_lossy()),
        "uptime_us": microseconds(machine.begun.elapsed()),
    })
}

/// The stages of the start.
pub(super) fn timings(state: &KnownState) -> Value {
    let total = state.stages.iter().map(|stage| stage.duration_us).fold(0, u64::saturating_add);
    json!({ "stages": state.stages, "total_us": total })
}

/// Interrupt lines of the plan, and the messages that the guest's drivers have set up.
pub(super) fn interrupts(plan: &Plan, live: Option<&Live>) -> Value {
    let messages = live.and_then(Live::messages).unwrap_or_default();
    let message = |message: &Message| {
        let [bus, devfn] = message.sender.to_be_bytes();
        json!({
            "gsi": message.gsi,
            "function": format!("0000:{bus:02x}:{:02x}.{}", devfn >> 3, devfn & 7),
            "address": message.address,
            "data": message.data,
        })
    };
    json!({ "lines": plan.lines, "messages": messages.iter().map(message).collect::<Vec<_>>() })
}
