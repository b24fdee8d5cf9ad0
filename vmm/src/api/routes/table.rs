//! The table of requests, and the surfaces that have them.

use super::Operation::{self, Missing};
use super::Route;
use crate::api::amend::Change;
use crate::api::cycle::{Language, Next};
use crate::api::http::Method::{self, Get, Put};

/// A surface of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Surface {
    /// `/api/v1/`, with requests of cloud-hypervisor.
    CloudHypervisor,
    /// `/egm/v1/`, with requests of our own.
    Own,
}

impl Surface {
    pub(super) const fn prefix(self) -> &'static str {
        match self {
            Self::CloudHypervisor => "/api/v1/",
            Self::Own => "/egm/v1/",
        }
    }

    pub(super) const fn title(self) -> &'static str {
        match self {
            Self::CloudHypervisor => "egm-vmm: requests of cloud-hypervisor (v54)",
            Self::Own => "egm-vmm: requests of its own",
        }
    }
}

const FIXED: &str = "change the configuration, and start the machine again";
pub(super) const NO_MIGRATION: &str = "use vm.snapshot, and vm.restore in a program of the other host";

const fn route(method: Method, path: &'static str, operation: Operation, line: &'static str) -> Route {
    Route { method, path, operation, line }
}

/// Every request, in the order of the document.
pub(in crate::api) const ROUTES: &[Route] = &[
    route(Get, "/api/v1/vmm.ping", Operation::Ping, "version and process"),
    route(
        Put,
        "/api/v1/vmm.shutdown",
        Operation::End(Next::End),
        "end the machine and the program; `serve`: answered when slices are returned",
    ),
    route(
        Put,
        "/api/v1/vm.create",
        Operation::Create(Language::CloudHypervisor),
        "`serve`: create the machine of the body, a `VmConfig`",
    ),
    route(Put, "/api/v1/vm.boot", Operation::Boot, "`serve`: start the machine; answered when its vCPUs run"),
    route(
        Get,
        "/api/v1/vm.info",
        Operation::Info,
        "processors, memory, payload, console, state, PCI addresses",
    ),
    route(
        Get,
        "/api/v1/vm.counters",
        Operation::Counters,
        "mistakes and failures that virtio devices counted",
    ),
    route(Put, "/api/v1/vm.power-button", Operation::PowerButton, "press the guest's power button"),
    route(
        Put,
        "/api/v1/vm.pause",
        Operation::Pause,
        "let the vCPUs wait outside the guest; answered when they do; devices go on",
    ),
    route(Put, "/api/v1/vm.resume", Operation::Resume, "let the vCPUs of a paused machine run"),
    route(
        Put,
        "/api/v1/vm.snapshot",
        Operation::Snapshot,
        "write the state of the paused machine into the folder of the body, a `VmSnapshotConfig`",
    ),
    route(
        Put,
        "/api/v1/vm.restore",
        Operation::Restore,
        "`serve`: make the machine of the snapshot of the body, a `RestoreConfig`; answered when it is paused, or runs",
    ),
    route(
        Put,
        "/api/v1/vm.add-device",
        Operation::Add(Change::AddDevice),
        "plug a host function, a `DeviceConfig`, into a spare port; answered with its address in the guest",
    ),
    route(
        Put,
        "/api/v1/vm.remove-device",
        Operation::RemoveDevice,
        "request a device of a hot-plug port back from the guest; the event `device`, `removed` follows",
    ),
    route(
        Put,
        "/api/v1/vm.add-disk",
        Operation::Add(Change::AddDisk),
        "plug a disk, a `DiskConfig`, into a spare port; `serve`: add it before the start",
    ),
    route(
        Put,
        "/api/v1/vm.add-net",
        Operation::Add(Change::AddNet),
        "plug an interface, a `NetConfig`, into a spare port; `serve`: add it before the start",
    ),
    route(
        Put,
        "/api/v1/vm.add-vsock",
        Operation::Add(Change::AddVsock),
        "plug a vsock device, a `VsockConfig`, into a spare port; `serve`: add it before the start",
    ),
    route(
        Put,
        "/api/v1/vm.add-user-device",
        Operation::Add(Change::AddUserDevice),
        "plug a vfio-user device, a `UserDeviceConfig`, into a spare port; `serve`: add it before the start",
    ),
    route(
        Put,
        "/api/v1/vm.resize",
        Operation::Amend(Change::Resize, FIXED),
        "`serve`: set the numbers of vCPUs and bytes of memory before the start",
    ),
    route(
        Put,
        "/api/v1/vm.shutdown",
        Operation::End(Next::Stay),
        "end the machine; `serve`: it stays created, `run`: the program ends with it",
    ),
    route(
        Put,
        "/api/v1/vm.reboot",
        Operation::End(Next::Boot),
        "`serve`: end the machine and start it again, answered when it has ended; `run`: reset the guest in place",
    ),
    route(
        Put,
        "/api/v1/vm.delete",
        Operation::End(Next::Delete),
        "`serve`: end the machine, if it runs, and remove its configuration",
    ),
    route(
        Get,
        "/api/v1/openapi.json",
        Operation::OpenApi(Surface::CloudHypervisor),
        "OpenAPI document of `/api/v1/`",
    ),
    route(Get, "/egm/v1/machine", Operation::Machine, "name, state, process, version, configuration"),
    route(
        Put,
        "/egm/v1/machine",
        Operation::Create(Language::Own),
        "`serve`: create the machine of the body, a configuration of ours",
    ),
    route(
        Get,
        "/egm/v1/plan",
        Operation::Plan,
        "the plan of the machine, as `egm-vmm plan --json` prints it",
    ),
    route(
        Put,
        "/egm/v1/devices",
        Operation::Plug,
        "plug a device, an entry of `devices` in a configuration, into a spare port; query `dry-run=1`: plan it only",
    ),
    route(
        Get,
        "/egm/v1/devices",
        Operation::PluggedDevices,
        "devices that were plugged in while the guest ran, as entries of `devices` in a configuration",
    ),
    route(
        Put,
        "/egm/v1/snapshot",
        Operation::SnapshotWithDevices,
        "as `vm.snapshot`, with devices that the restored machine plugs in: a `NewSnapshot`; query `dry-run=1`: check it only",
    ),
    route(
        Put,
        "/egm/v1/upgrade",
        Operation::Upgrade,
        "`serve`: another program takes the running machine over, a `NewUpgrade`; answered before its execution; query `dry-run=1`: check it only",
    ),
    route(
        Get,
        "/egm/v1/upgrade",
        Operation::UpgradeOutcome,
        "the last upgrade of this process; answered when it is over",
    ),
    route(Get, "/egm/v1/slices", Operation::Slices, "region, offset, owner and retired bytes of each slice"),
    route(
        Put,
        "/egm/v1/slices",
        Operation::PlugSlice,
        "grant a slice, an entry of `egm` in a configuration, and plug it in as a device; query `dry-run=1`: plan it only",
    ),
    route(Get, "/egm/v1/interrupts", Operation::Interrupts, "interrupt lines, and messages that vectors use"),
    route(Get, "/egm/v1/timings", Operation::Timings, "duration of each stage of the start"),
    route(
        Get,
        "/egm/v1/events",
        Operation::Events,
        "events, as JSON lines or server-sent events by `Accept`",
    ),
    route(Get, "/egm/v1/metrics", Operation::Metrics, "numbers in Prometheus' text format"),
    route(Get, "/egm/v1/log-level", Operation::LogLevel, "least severity of messages that are printed"),
    route(
        Put,
        "/egm/v1/log-level",
        Operation::SetLogLevel,
        "set the least severity that is printed, also for later machines",
    ),
    route(
        Get,
        "/egm/v1/requests",
        Operation::Requests,
        "this table as JSON, with the requests that are not built",
    ),
    route(Get, "/egm/v1/openapi.json", Operation::OpenApi(Surface::Own), "OpenAPI document of `/egm/v1/`"),
    missing("/api/v1/vm.send-migration", NO_MIGRATION),
    missing("/api/v1/vm.receive-migration", NO_MIGRATION),
    missing("/api/v1/vm.coredump", "use the guest's own crash kernel (kdump)"),
    missing("/api/v1/vm.add-fs", "share files by a disk or by the network"),
    missing("/api/v1/vm.add-pmem", "use a disk, or a slice of an fsdax region"),
    missing("/api/v1/vm.add-vdpa", "use a tap, or an assigned NIC"),
    missing("/api/v1/vm.add-generic-vhost-user", "use a vfio-user device"),
    missing("/api/v1/vm.resize-disk", FIXED),
    missing("/api/v1/vm.resize-zone", FIXED),
    missing("/api/v1/vm.nmi", "use the guest's console (SysRq)"),
];

/// A request of cloud-hypervisor's that is not built.
const fn missing(path: &'static str, remedy: &'static str) -> Route {
    route(Put, path, Missing(remedy), remedy)
}
