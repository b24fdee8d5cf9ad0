//! A host of its own for real programs: a mount namespace with a device-DAX region `dax0.0`.
//!
//! Its device is `/dev/zero` by another name: each mapping is memory of its own, which is enough for tests of the
//! ledger's record, but not of the memory's content.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use egm_address::ByteSize;
use egm_device::broker::{BrokerLease, Client, SliceRequest};
use egm_device::ledger::{Identity, Ledger, Paths};
use egm_device::region::{DaxFiles, Region, RegionKind};
use egm_device::retired::Retired;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use serde_json::Value;
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;

/// Script of the shell that becomes the program.
const ENTER: &str = "for path in var/lib var/log run dev sys/bus/dax sys/dev/char sys/firmware/memmap proc/cmdline proc/iomem; do
        [ ! -e \"$HOST/$path\" ] || mount --bind \"$HOST/$path\" \"/$path\"
    done
    exec \"$@\"";

pub(crate) struct DaxHost {
    folder: TempDir,
    size: u64,
}

/// A broker, killed at the end.
pub(crate) struct Broker(Child);

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl DaxHost {
    /// A region of `size` bytes in pages of 2 MiB; or the reason why this host cannot have such a namespace.
    pub(crate) fn new(size: u64) -> Result<Self, String> {
        let host = Self { folder: tempfile::tempdir().map_err(|error| error.to_string())?, size };
        let make = || -> std::io::Result<()> {
            let device = host.path("sys/bus/dax/devices/dax0.0");
            for folder in ["var/lib", "var/log", "run", "dev", "sys/dev/char/1:5"] {
                fs::create_dir_all(host.path(folder))?;
            }
            fs::create_dir_all(&device)?;
            fs::write(device.join("size"), format!("{size}\n"))?;
            fs::write(device.join("align"), format!("{}\n", 2 * MIB))?;
            symlink("../../drivers/device_dax", device.join("driver"))?;
            symlink("../../../bus/dax", host.path("sys/dev/char/1:5/subsystem"))?;
            for (name, minor) in [("null", 3), ("zero", 5), ("dax0.0", 5), ("hidden", 5), ("urandom", 9)] {
                let mode = Mode::from_raw_mode(0o600);
                mknodat(
                    CWD,
                    host.path("dev").join(name),
                    FileType::CharacterDevice,
                    mode,
                    makedev(1, minor),
                )?;
            }
            Ok(())
        };
        make().map_err(|error| format!("no device nodes: {error}"))?;
        let entered = host.command("true").output().map_err(|error| format!("no unshare: {error}"))?;
        if entered.status.success() {
            Ok(host)
        } else {
            Err(format!("no mount namespace: {}", String::from_utf8_lossy(&entered.stderr).trim()))
        }
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    /// `program` in the namespace.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--mount", "/bin/sh", "-ec", ENTER, "sh", program]).env("HOST", self.folder.path());
        command
    }

    /// `egm-device` with these arguments; returns its exit code, standard output and standard error.
    pub(crate) fn run(&self, words: &str) -> (i32, String, String) {
        let mut command = self.command(env!("CARGO_BIN_EXE_egm-device"));
        let output = command.args(words.split(' ')).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
    }

    /// A broker that listens, without an idle scrub.
    pub(crate) fn broker(&self) -> Broker {
        self.broker_with(&[])
    }

    /// The same with `more` options.
    pub(crate) fn broker_with(&self, more: &[&str]) -> Broker {
        let mut command = self.command(env!("CARGO_BIN_EXE_egm-device"));
        command.args(["broker", "--scrub-rate", "0", "--socket", "/run/broker.sock"]).args(more);
        let broker = Broker(command.stdin(Stdio::null()).spawn().unwrap());
        let begun = std::time::Instant::now();
        while Client::connect(&self.path("run/broker.sock")).is_err() {
            assert!(begun.elapsed().as_secs() < 60, "the broker does not listen");
            std::thread::yield_now();
        }
        broker
    }

    /// A slice of `size` bytes from the broker.
    pub(crate) fn lease(&self, size: u64) -> BrokerLease {
        let take = SliceRequest {
            name: "vm".to_owned(),
            regions: vec!["dax0.0".to_owned()],
            size,
            align: 0,
            class: None,
            wait: false,
        };
        Client::connect(&self.path("run/broker.sock")).unwrap().take(&take, |_| {}).unwrap()
    }

    pub(crate) fn region(&self) -> Region {
        Region {
            name: "dax0.0".to_owned(),
            kind: RegionKind::Devdax { device: "/dev/dax0.0".into(), files: DaxFiles::Static },
            node: None,
            size: ByteSize::new(self.size),
            page_size: ByteSize::new(2 * MIB),
            base: None,
            functions: Vec::new(),
            retired: Retired::default(),
        }
    }

    /// The ledger of the programs.
    pub(crate) fn ledger(&self) -> Ledger {
        let identity = Identity::read("/".as_ref()).unwrap();
        Ledger::open(Paths::below(self.folder.path()), identity).unwrap()
    }

    /// The audit log's lines.
    pub(crate) fn log(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.path("var/log/egm-device/audit.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}
