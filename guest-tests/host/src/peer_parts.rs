//! What the story of stock QEMU is made of: a host of files for `egm-device`, servers of slices on it, and QEMU's command line
//! as `egm-device export qemu` writes it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;

use crate::command::Tool;
use crate::emulator::Emulator;
use crate::error::LabError;
use crate::initramfs;
use crate::process::bound_to_us;
use crate::run::Runner;

/// Bytes of the slice in a machine from its start: no power of two, so that its BAR has more.
pub(crate) const SIZE: u64 = 6 << 20;
/// A server waits so long for its guest to give the slice back.
const PATIENCE: &str = "60";
/// The folder is a host with one node, whose ledger nobody else has; no part of it needs root.
const HOST: [(&str, &str); 7] = [
    ("proc/cmdline", ""),
    ("proc/iomem", "00100000-3fffffff : System RAM\n"),
    ("proc/sys/kernel/random/boot_id", "a boot\n"),
    ("etc/machine-id", "a host\n"),
    ("sys/devices/system/node/online", "0\n"),
    ("sys/devices/system/node/node0/cpulist", "0\n"),
    ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 1048576 kB\n"),
];

/// The files of the story.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    runner: &'a Runner,
    emulator: &'a Emulator,
    folder: PathBuf,
}

/// What `egm-device export --json` prints.
#[derive(Debug, Deserialize)]
struct Export {
    command: Vec<String>,
    notes: Vec<String>,
}

impl<'a> Parts<'a> {
    /// Writes them into `folder`.
    pub(crate) fn make(
        runner: &'a Runner,
        emulator: &'a Emulator,
        folder: PathBuf,
    ) -> Result<Self, LabError> {
        let parts = Self { runner, emulator, folder };
        if parts.host().exists() {
            fs::remove_dir_all(parts.host()).map_err(LabError::file("remove", parts.host()))?;
        }
        for (name, text) in HOST {
            write(&parts.host().join(name), text.as_bytes())?;
        }
        let kernel = runner.tools.kernel(false);
        write(&parts.folder.join("initramfs.cpio"), &initramfs::guest(&runner.tools.agent, None, kernel)?)?;
        Ok(parts)
    }

    fn host(&self) -> PathBuf {
        self.folder.join("host")
    }

    /// QEMU's monitor.
    pub(crate) fn monitor(&self) -> PathBuf {
        self.folder.join("qmp.sock")
    }

    /// Where the slice to be plugged in is served.
    pub(crate) fn spare(&self) -> PathBuf {
        self.folder.join("spare.sock")
    }

    /// A machine with the slice, whose kernel gets `words`, as it is exported.
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
        let json = Tool::new(&self.runner.tools.device.to_string_lossy(), "egm-device")
            .args(["export", "qemu", "--json"])
            .args(["--config".as_ref(), config.as_os_str()])
            .args(["--root".as_ref(), self.host().as_os_str()])
            .args(["--sockets".as_ref(), self.folder.as_os_str()])
            .bytes()?;
        serde_json::from_slice(&json).map_err(|error| strange(&error.to_string()))
    }

    /// QEMU for that machine: the exported words, but emulated, with a monitor and a spare port. The port has room for a slice:
    /// QEMU's firmware leaves 2 MiB.
    pub(crate) fn qemu(&self, words: &str) -> Result<Command, LabError> {
        let exported = self.export(words)?.command;
        let kvm =
            exported.iter().any(|word| word == "q35,accel=kvm") && exported.iter().any(|word| word == "host");
        if !kvm {
            return Err(strange("it does not ask for KVM and its processor"));
        }
        let mut command = self.emulator.command();
        command.args(exported.iter().skip(1).map(|word| match word.as_str() {
            "q35,accel=kvm" => "q35,accel=tcg",
            "host" => "max",
            word => word,
        }));
        let monitor = format!("unix:{},server=on,wait=off", self.monitor().display());
        let port = "pcie-root-port,id=spare,bus=pcie.0,chassis=99,slot=99,pref64-reserve=64M";
        command.args(["-qmp", &monitor, "-device", port]);
        Ok(command)
    }

    /// Serves the machine's slice, by the command that the export names.
    pub(crate) fn serve(&self) -> Result<Server, LabError> {
        const COMMAND: &str = "egm-device serve ";
        let notes = self.export("")?.notes;
        let command =
            notes.iter().find_map(|note| note.split_once(COMMAND)).map(|(_, words)| words.to_owned());
        let words = command.ok_or_else(|| strange("it does not say how the slice is served"))?;
        self.start(words.split(' '))
    }

    /// Serves the spare slice: without MSI-X, because QEMU (11.1.3) aborts when a vfio-user function that has it is unplugged.
    pub(crate) fn serve_spare(&self) -> Result<Server, LabError> {
        let socket = self.spare();
        let words = ["--region", "local", "--size", "4MiB", "--name", "spare", "--no-msix", "--socket"];
        self.start(words.into_iter().chain([&*socket.to_string_lossy()]))
    }

    fn start<'w>(&self, words: impl Iterator<Item = &'w str>) -> Result<Server, LabError> {
        let mut command = Command::new(&self.runner.tools.device);
        command.arg("serve").args(words).args(["--patience", PATIENCE, "--root"]).arg(self.host());
        let mut command = bound_to_us(command);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut server = Server(child.map_err(LabError::file("run", &self.runner.tools.device))?);
        let mut line = String::new();
        match server.0.stdout.take().map(|out| BufReader::new(out).read_line(&mut line)) {
            Some(Ok(1..)) => Ok(server),
            _ => Err(LabError::Content {
                what: "egm-device serve".into(),
                problem: "it does not serve".into(),
            }),
        }
    }

    /// How many slices the ledger has given out.
    pub(crate) fn granted(&self) -> Result<usize, LabError> {
        let shown = Tool::new(&self.runner.tools.device.to_string_lossy(), "egm-device")
            .args(["ledger", "show", "--json"])
            .args(["--root".as_ref(), self.host().as_os_str()])
            .text()?;
        Ok(shown.matches("\"owner\"").count())
    }
}

/// A server of a slice, which is killed with this value.
#[derive(Debug)]
pub(crate) struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // Fails for one that has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Server {
    /// Asks it to end; its guest is asked for the slice.
    pub(crate) fn ask(&self) -> std::io::Result<()> {
        Ok(kill_process(Pid::from_child(&self.0), Signal::TERM)?)
    }

    /// Its exit code, once it has ended.
    pub(crate) fn wait(&mut self) -> std::io::Result<Option<i32>> {
        Ok(self.0.wait()?.code())
    }

    /// What is in its memory of `size` bytes: a file that has no name.
    pub(crate) fn memory(&self, size: u64) -> std::io::Result<Vec<u8>> {
        for entry in fs::read_dir(format!("/proc/{}/fd", self.0.id()))? {
            let path = entry?.path();
            let is_memory =
                fs::read_link(&path).is_ok_and(|link| link.to_string_lossy().starts_with("/memfd:"));
            if is_memory && fs::metadata(&path)?.len() == size {
                return fs::read(path);
            }
        }
        Err(std::io::Error::other("the server has no memory of the slice's size"))
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), LabError> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(LabError::file("make", folder))?;
    fs::write(path, bytes).map_err(LabError::file("write", path))
}

fn strange(problem: &str) -> LabError {
    LabError::Content { what: "what egm-device export qemu prints".into(), problem: problem.into() }
}
