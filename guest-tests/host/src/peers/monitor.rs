//! Monitors of other projects as vfio-user clients: how each is started, reset, and given functions while its guest runs.

use std::io;
use std::process::Command;

use serde_json::json;

use crate::engine::error::LabError;
use crate::engine::qmp;
use crate::images::emulator::Emulator;
use crate::images::portable::Portable;
use crate::peers::cloud_api;
use crate::peers::parts::Parts;

/// A function that is plugged in.
const SPARE: &str = "spare-slice";

/// A monitor and the files of its scenario.
pub(crate) trait Monitor {
    /// Additional kernel words for its guests.
    const WORDS: &'static str;

    /// The command that starts the machine with the slice, with the kernel words `words`.
    fn command(&self, words: &str) -> Result<Command, LabError>;

    fn reset(&self) -> io::Result<()>;

    /// Plugs the spare slice in.
    fn plug(&self) -> io::Result<()>;

    /// Requests the guest to return it. The guest's check shows that it goes; the machine may end right after that.
    fn unplug(&self) -> io::Result<()>;

    /// Plugs in a device that has no server.
    fn plug_another(&self) -> io::Result<()>;
}

/// QEMU with an emulated processor; commands go by QMP.
#[derive(Debug)]
pub(crate) struct Qemu<'a> {
    pub(crate) parts: &'a Parts<'a>,
    pub(crate) emulator: &'a Emulator,
}

impl Qemu<'_> {
    pub(crate) fn monitor(&self) -> io::Result<qmp::Monitor> {
        qmp::Monitor::connect(&self.parts.control())
    }
}

impl Monitor for Qemu<'_> {
    const WORDS: &'static str = "";

    fn command(&self, words: &str) -> Result<Command, LabError> {
        self.parts.qemu(self.emulator, words)
    }

    fn reset(&self) -> io::Result<()> {
        self.monitor()?.execute("system_reset", json!({}))
    }

    fn plug(&self) -> io::Result<()> {
        let socket = json!({ "type": "unix", "path": self.parts.spare() });
        let device = json!({ "driver": "vfio-user-pci", "id": SPARE, "bus": "spare", "socket": socket });
        self.monitor()?.execute("device_add", device)
    }

    fn unplug(&self) -> io::Result<()> {
        self.monitor()?.execute("device_del", json!({ "id": SPARE }))
    }

    fn plug_another(&self) -> io::Result<()> {
        self.monitor()?.execute("device_add", json!({ "driver": "virtio-rng-pci", "bus": "spare" }))
    }
}

/// cloud-hypervisor on `/dev/kvm`; commands go by its HTTP API.
#[derive(Debug)]
pub(crate) struct CloudHypervisor<'a> {
    pub(crate) parts: &'a Parts<'a>,
    pub(crate) program: &'a Portable,
}

impl CloudHypervisor<'_> {
    fn put(&self, action: &str, body: Option<&serde_json::Value>) -> io::Result<()> {
        cloud_api::put(&self.parts.control(), action, body)
    }
}

impl Monitor for CloudHypervisor<'_> {
    /// It ignores failed reads of registers, so the guest gets arbitrary bytes instead of ones.
    const WORDS: &'static str = "egm.arg.egm_events.ones=false";

    fn command(&self, words: &str) -> Result<Command, LabError> {
        self.parts.cloud_hypervisor(self.program, words)
    }

    fn reset(&self) -> io::Result<()> {
        self.put("vm.reboot", None)
    }

    fn plug(&self) -> io::Result<()> {
        self.put("vm.add-user-device", Some(&json!({ "socket": self.parts.spare(), "id": SPARE })))
    }

    fn unplug(&self) -> io::Result<()> {
        self.put("vm.remove-device", Some(&json!({ "id": SPARE })))
    }

    fn plug_another(&self) -> io::Result<()> {
        self.put("vm.add-vsock", Some(&json!({ "cid": 3, "socket": self.parts.vsock() })))
    }
}
