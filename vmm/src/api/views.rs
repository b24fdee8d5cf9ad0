//! JSON bodies of the API, as types with a schema.

use std::collections::BTreeMap;

use egm_address::PciAddress;
use egm_report::program::log::Severity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::cycle::{Created, Cycle, LastEnd};
use super::published::{KnownState, Phase, Published, Stage, microseconds};
use super::shown::ShownConfig;
use crate::hotplug::PluggedDevice;
use crate::kvm::Message;
use crate::machine::{DeviceCounters, Live, PluggedSlice};
use crate::plan::{BarPlan, FunctionPlan, Plan};

/// Version of this program.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The program's version and process: cloud-hypervisor's `VmmPingResponse`.
#[derive(Serialize, JsonSchema)]
pub(super) struct Ping {
    build_version: String,
    version: &'static str,
    /// Process id of the program.
    pid: u32,
    features: Vec<String>,
}

pub(super) fn ping() -> Ping {
    let build_version = format!("egm-vmm v{VERSION}");
    Ping { build_version, version: VERSION, pid: std::process::id(), features: Vec::new() }
}

/// The machine as cloud-hypervisor shows one: its `VmInfo`.
#[derive(Serialize, JsonSchema)]
pub(super) struct VmInfo {
    config: ShownConfig,
    state: VmState,
    /// Guest memory in bytes, slices included.
    memory_actual_size: u64,
    /// Devices by their ids; empty before the machine has a plan.
    device_tree: BTreeMap<String, DeviceNode>,
    /// Name of the reason of the last machine's end, where a machine is created and not started.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_reason: Option<String>,
    /// That reason in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_text: Option<String>,
}

/// State of a machine by cloud-hypervisor's names.
#[derive(Serialize, JsonSchema)]
enum VmState {
    Created,
    Running,
    Paused,
    Shutdown,
}

/// A device of the guest.
#[derive(Serialize, JsonSchema)]
struct DeviceNode {
    id: String,
    resources: Vec<Value>,
    children: Vec<String>,
    /// PCI address in the guest.
    #[schemars(with = "String")]
    pci_bdf: PciAddress,
}

/// `VmInfo` of a created machine without a plan. `last` is the end of the machine before.
pub(super) fn info_of_created(created: &Created, last: Option<&LastEnd>) -> VmInfo {
    VmInfo {
        config: created.shown.clone(),
        state: VmState::Created,
        memory_actual_size: created.shown.memory.size,
        device_tree: BTreeMap::new(),
        last_reason: last.map(|last| last.reason.clone()),
        last_text: last.map(|last| last.text.clone()),
    }
}

/// `VmInfo` of a machine with a plan.
pub(super) fn info(plan: &Plan, state: &KnownState) -> VmInfo {
    let vcpus = u32::try_from(plan.vcpus.len()).unwrap_or(u32::MAX);
    let memory: u64 = plan.memory.iter().map(|piece| piece.span.size()).fold(0, u64::saturating_add);
    let vm_state = match state.phase() {
        Phase::Empty | Phase::Created | Phase::Starting => VmState::Created,
        Phase::Running => VmState::Running,
        Phase::Paused => VmState::Paused,
        Phase::Ending | Phase::Ended => VmState::Shutdown,
    };
    let shown = ShownConfig::new(vcpus, memory, &plan.boot, &plan.console);
    let shown = match state.cycle.as_ref().and_then(Cycle::created) {
        Some(created) => shown.with_consoles(created.shown.serial.clone(), created.shown.console.clone()),
        None => shown,
    };
    VmInfo {
        config: shown.running(plan.address_bits, state.terminal.as_deref()),
        state: vm_state,
        memory_actual_size: memory,
        device_tree: device_tree(plan, state.live.as_ref()),
        last_reason: None,
        last_text: None,
    }
}

/// Each device that the machine has, with its PCI address.
fn device_tree(plan: &Plan, live: Option<&Live>) -> BTreeMap<String, DeviceNode> {
    let devices = live.and_then(Live::devices).unwrap_or_else(|| plan.device_addresses());
    let node = |(id, pci_bdf): (String, PciAddress)| {
        let (resources, children) = (Vec::new(), Vec::new());
        (id.clone(), DeviceNode { id, resources, children, pci_bdf })
    };
    devices.into_iter().map(node).collect()
}

/// A device that was plugged in: cloud-hypervisor's `PciDeviceInfo`.
#[derive(Serialize, JsonSchema)]
pub(super) struct PciDeviceInfo {
    id: String,
    /// PCI address in the guest.
    #[schemars(with = "String")]
    bdf: PciAddress,
}

impl From<PluggedDevice> for PciDeviceInfo {
    fn from(PluggedDevice { id, function, .. }: PluggedDevice) -> Self {
        Self { id, bdf: function.address }
    }
}

/// A device that was plugged in, or that is planned.
#[derive(Serialize, JsonSchema)]
pub(super) struct NewPciDevice {
    id: String,
    /// Number of its slot.
    slot: u16,
    /// PCI address in the guest.
    #[schemars(with = "String")]
    address: PciAddress,
    bars: Vec<NewBar>,
    /// Number of MSI-X vectors.
    msix_vectors: u16,
}

/// A base address register, as the plan places it. The guest may move it.
#[derive(Serialize, JsonSchema)]
struct NewBar {
    /// Register number, 0 to 5.
    index: u8,
    /// Guest address in hexadecimal.
    address: String,
    /// Size in bytes.
    size: u64,
}

impl From<PluggedDevice> for NewPciDevice {
    fn from(PluggedDevice { id, slot, function }: PluggedDevice) -> Self {
        let FunctionPlan { address, bars, msix_vectors, .. } = function;
        let bar = |bar: BarPlan| NewBar {
            index: bar.index,
            address: format!("{:#x}", bar.span.start().get()),
            size: bar.span.size(),
        };
        Self { id, slot, address, bars: bars.into_iter().map(bar).collect(), msix_vectors }
    }
}

/// A slice that was plugged in as a device, or that is planned.
#[derive(Serialize, JsonSchema)]
pub(super) struct NewPciSlice {
    #[serde(flatten)]
    device: NewPciDevice,
    /// Name of the region; `None` for memory of the machine itself, and where a broker is yet to choose it.
    region: Option<String>,
    /// First byte, counted in the region; `None` where a broker is yet to choose it.
    offset: Option<u64>,
}

impl From<PluggedSlice> for NewPciSlice {
    fn from(PluggedSlice { device, backing }: PluggedSlice) -> Self {
        let offset = backing.as_ref().map(|backing| backing.offset);
        Self { device: device.into(), region: backing.and_then(|backing| backing.region), offset }
    }
}

/// Name of a counter in answers: its words, joined.
pub(super) fn counter_name(words: &str) -> String {
    words.replace(' ', "_")
}

/// Least severity of the messages that the program prints.
#[derive(Serialize, JsonSchema)]
pub(super) struct LogLevel {
    #[schemars(with = "LevelName")]
    pub(super) level: Severity,
}

/// The same as a request.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewLogLevel {
    #[schemars(with = "LevelName")]
    pub(super) level: Severity,
}

/// Names of [`Severity`].
#[derive(JsonSchema)]
#[schemars(inline, rename_all = "lowercase")]
#[expect(dead_code, reason = "only its schema is used")]
enum LevelName {
    Error,
    Warn,
    Info,
    Debug,
}

/// cloud-hypervisor's `VmCounters`: a number for each device and counter.
pub(super) type Counters = BTreeMap<String, BTreeMap<String, u64>>;

pub(super) fn counters(devices: &[DeviceCounters]) -> Counters {
    let of = |device: &DeviceCounters| -> BTreeMap<String, u64> {
        device.counters.iter().map(|(words, number)| (counter_name(words), *number)).collect()
    };
    devices.iter().map(|device| (device.id.clone(), of(device))).collect()
}

/// The machine of the program, which may have none yet (`egm-vmm serve`).
#[derive(Serialize, JsonSchema)]
pub(super) struct Machine {
    /// Name of the machine, once its configuration is read.
    name: Option<String>,
    state: Phase,
    /// Name of the reason of its end.
    ended: Option<&'static str>,
    /// Name of the reason of the last machine's end (`egm-vmm serve`).
    last_reason: Option<String>,
    /// That reason in words.
    last_text: Option<String>,
    /// Process id of the program.
    pid: u32,
    /// Version of the program.
    version: &'static str,
    /// Configuration file (`egm-vmm run`).
    config: Option<String>,
    /// Microseconds since the start of the program, or of its last execution.
    uptime_us: u64,
}

pub(super) fn machine(machine: &Published, state: &KnownState) -> Machine {
    let last = state.cycle.as_ref().and_then(Cycle::last);
    Machine {
        name: state.name().map(str::to_owned),
        state: state.phase(),
        ended: state.ended,
        last_reason: last.map(|last| last.reason.clone()),
        last_text: last.map(|last| last.text.clone()),
        pid: std::process::id(),
        version: VERSION,
        config: machine.config.as_ref().map(|path| path.to_string_lossy().into_owned()),
        uptime_us: microseconds(machine.begun.elapsed()),
    }
}

/// The stages of the start so far.
#[derive(Serialize, JsonSchema)]
pub(super) struct Timings {
    stages: Vec<Stage>,
    /// Microseconds of all stages.
    total_us: u64,
}

pub(super) fn timings(state: &KnownState) -> Timings {
    let total_us = state.stages.iter().map(|stage| stage.duration_us).fold(0, u64::saturating_add);
    Timings { stages: state.stages.clone(), total_us }
}

/// Interrupt lines of the plan, and the messages that the guest's drivers have set up.
#[derive(Serialize, JsonSchema)]
pub(super) struct Interrupts {
    lines: Vec<InterruptLine>,
    messages: Vec<InterruptMessage>,
}

/// An interrupt line of the guest.
#[derive(Serialize, JsonSchema)]
struct InterruptLine {
    /// Global system interrupt number.
    gsi: u32,
    /// Source of the interrupt: `serial`, or a host function: `gpu0 INTA`.
    owner: String,
}

/// A message interrupt that a vector uses.
#[derive(Serialize, JsonSchema)]
struct InterruptMessage {
    /// Global system interrupt number.
    gsi: u32,
    /// PCI address of the function in the guest.
    function: String,
    /// Address that the function writes to.
    address: u64,
    /// Number that it writes there.
    data: u32,
}

pub(super) fn interrupts(plan: &Plan, live: Option<&Live>) -> Interrupts {
    let lines = plan.lines.iter().map(|line| InterruptLine { gsi: line.gsi, owner: line.owner.clone() });
    let message = |message: &Message| {
        let [bus, devfn] = message.sender.to_be_bytes();
        InterruptMessage {
            gsi: message.gsi,
            function: format!("0000:{bus:02x}:{:02x}.{}", devfn >> 3, devfn & 7),
            address: message.address,
            data: message.data,
        }
    };
    let messages = live.and_then(Live::messages).unwrap_or_default();
    Interrupts { lines: lines.collect(), messages: messages.iter().map(message).collect() }
}
