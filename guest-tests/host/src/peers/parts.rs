//! Parts of the scenarios with peers: a host of files for `egm-device`, servers of slices on it, and the monitor's
//! command line as `egm-vmm export` writes it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::engine::command::Tool;
use crate::engine::error::LabError;
use crate::engine::logs;
use crate::hosts::served::{Server, serve};
use crate::images::emulator::Emulator;
use crate::images::initramfs;
use crate::images::portable::Portable;
use crate::runner::machine::Runner;

/// Bytes of the slice in a machine from its start: no power of two, so that its BAR is larger.
pub(crate) const SIZE: u64 = 6 << 20;
/// Seconds that a server waits for its guest to return the slice.
const TIMEOUT: u32 = 60;
/// Files that make the folder a host with one node and a ledger of its own; no part of it needs root.
const HOST: [HostFile; 7] = [
    HostFile { path: "proc/cmdline", text: "" },
    HostFile { path: "proc/iomem", text: "00100000-3fffffff : System RAM\n" },
    HostFile { path: "proc/sys/kernel/random/boot_id", text: "a boot\n" },
    HostFile { path: "etc/machine-id", text: "a host\n" },
    HostFile { path: "sys/devices/system/node/online", text: "0\n" },
    HostFile { path: "sys/devices/system/node/node0/cpulist", text: "0\n" },
    HostFile { path: "sys/devices/system/node/node0/meminfo", text: "Node 0 MemTotal: 1048576 kB\n" },
];

/// A file of that host.
struct HostFile {
    path: &'static str,
    text: &'static str,
}

/// The files of the scenario.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    runner: &'a Runner,
    /// The monitor's name in `egm-vmm export`.
    monitor: &'static str,
    folder: PathBuf,
}

/// Output of `egm-vmm export --json`.
#[derive(Debug, Deserialize)]
struct Export {
    command: Vec<String>,
    notes: Vec<String>,
}

/// A region in the output of `egm-device ledger show --json`.
#[derive(Debug, Deserialize)]
struct States {
    held: Vec<serde_json::Value>,
}

impl<'a> Parts<'a> {
    /// Writes them into `folder`, for `monitor`.
    pub(crate) fn make(runner: &'a Runner, monitor: &'static str, folder: PathBuf) -> Result<Self, LabError> {
        let parts = Self { runner, monitor, folder };
        if parts.host().exists() {
            fs::remove_dir_all(parts.host()).map_err(LabError::file("remove", parts.host()))?;
        }
        for HostFile { path, text } in HOST {
            write(&parts.host().join(path), text.as_bytes())?;
        }
        let kernel = runner.tools.kernel(false);
        write(&parts.folder.join("initramfs.cpio"), &initramfs::guest(&runner.tools.agent, None, kernel)?)?;
        Ok(parts)
    }

    fn host(&self) -> PathBuf {
        self.folder.join("host")
    }

    /// Socket for commands to the monitor.
    pub(crate) fn control(&self) -> PathBuf {
        self.folder.join("control.sock")
    }

    /// Socket of a virtio-vsock device.
    pub(crate) fn vsock(&self) -> PathBuf {
        self.folder.join("vsock.sock")
    }

    /// Socket of the server of the slice to be plugged in.
    pub(crate) fn spare(&self) -> PathBuf {
        self.folder.join("spare.sock")
    }

    /// The export of a machine with the slice and the kernel words `words`.
    fn export(&self, words: &str) -> Result<Export, LabError> {
        let config = self.folder.join("peer.json");
        let machine = serde_json::json!({
            "name": "peer",
            "arch": "x86_64",
            "cpus": { "count": 1 },
            "memory": { "size": "512MiB" },
            "egm": [{ "region": "local", "size": SIZE, "node": 0, "as": "device" }],
            "boot": {
                "kernel": self.runner.tools.kernel(false).image(),
                "initramfs": self.folder.join("initramfs.cpio"),
                "cmdline": format!("console=ttyS0 panic=-1 {words}"),
            },
        });
        write(&config, machine.to_string().as_bytes())?;
        let json = Tool::new(&self.runner.tools.vmm.to_string_lossy(), "egm-vmm")
            .args(["export", self.monitor, "--json"])
            .args(["--config".as_ref(), config.as_os_str()])
            .args(["--root".as_ref(), self.host().as_os_str()])
            .args(["--sockets".as_ref(), self.folder.as_os_str()])
            .bytes()?;
        serde_json::from_slice(&json).map_err(|error| strange(&error.to_string()))
    }

    /// QEMU for that machine: the exported words, but emulated, with a monitor and a spare port. The port has room for a slice:
    /// QEMU's firmware leaves 2 MiB.
    pub(crate) fn qemu(&self, emulator: &Emulator, words: &str) -> Result<Command, LabError> {
        let exported = self.export(words)?.command;
        let kvm =
            exported.iter().any(|word| word == "q35,accel=kvm") && exported.iter().any(|word| word == "host");
        if !kvm {
            return Err(strange("it does not request KVM and its processor"));
        }
        let mut command = emulator.command();
        command.args(exported.iter().skip(1).map(|word| match word.as_str() {
            "q35,accel=kvm" => "q35,accel=tcg",
            "host" => "max",
            word => word,
        }));
        let monitor = format!("unix:{},server=on,wait=off", self.control().display());
        let port = "pcie-root-port,id=spare,bus=pcie.0,chassis=99,slot=99,pref64-reserve=64M";
        command.args(["-qmp", &monitor, "-device", port]);
        Ok(command)
    }

    /// cloud-hypervisor for that machine: the exported words, with a socket for its API. A run that was killed may have left that.
    pub(crate) fn cloud_hypervisor(&self, program: &Portable, words: &str) -> Result<Command, LabError> {
        let exported = self.export(words)?.command;
        logs::remove(&self.control())?;
        logs::remove(&self.vsock())?;
        let mut command = program.command();
        command.args(exported.iter().skip(1)).arg("--api-socket").arg(self.control());
        Ok(command)
    }

    /// Serves the machine's slice.
    pub(crate) fn serve(&self) -> Result<Server, LabError> {
        self.serve_for(TIMEOUT)
    }

    /// The same with another timeout, by the command that the export names.
    pub(crate) fn serve_for(&self, timeout: u32) -> Result<Server, LabError> {
        const COMMAND: &str = "egm-device serve ";
        let notes = self.export("")?.notes;
        let command =
            notes.iter().find_map(|note| note.split_once(COMMAND)).map(|(_, words)| words.to_owned());
        let words = command.ok_or_else(|| strange("it does not say how the slice is served"))?;
        self.start(words.split(' '), timeout)
    }

    /// Serves the spare slice: without MSI-X, because QEMU (11.1.3) aborts when a vfio-user function that has it is unplugged.
    pub(crate) fn serve_spare(&self) -> Result<Server, LabError> {
        let socket = self.spare();
        let words = ["--region", "local", "--size", "4MiB", "--name", "spare", "--no-msix", "--socket"];
        self.start(words.into_iter().chain([&*socket.to_string_lossy()]), TIMEOUT)
    }

    fn start<'w>(&self, words: impl Iterator<Item = &'w str>, timeout: u32) -> Result<Server, LabError> {
        let mut command = Command::new(&self.runner.tools.device);
        let timeout = timeout.to_string();
        command.arg("serve").args(words).args(["--timeout", &timeout, "--root"]).arg(self.host());
        serve(command, Stdio::inherit())
    }

    /// Number of slices that the ledger has granted.
    pub(crate) fn granted(&self) -> Result<usize, LabError> {
        let shown = Tool::new(&self.runner.tools.device.to_string_lossy(), "egm-device")
            .args(["ledger", "show", "--json"])
            .args(["--root".as_ref(), self.host().as_os_str()])
            .bytes()?;
        let regions: Vec<States> = LabError::json("egm-device ledger show", &shown)?;
        Ok(regions.iter().map(|region| region.held.len()).sum())
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), LabError> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(LabError::file("make", folder))?;
    fs::write(path, bytes).map_err(LabError::file("write", path))
}

fn strange(problem: &str) -> LabError {
    LabError::Content { what: "what egm-vmm export prints".into(), problem: problem.into() }
}
