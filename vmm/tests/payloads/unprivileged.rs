//! A machine that an unprivileged user starts: its memory is on a tmpfs that a child mounts in a user namespace.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use egm_fixtures::payload::Ports;
use rustix::fs::{major, minor};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::pages::host_has_huge_pages;
use crate::{kvm, line};

/// A user that this host has no other process of.
const UID: u32 = 0x4000_0002;

/// Runs a program as the user, in a mount namespace where every user may open /dev/kvm, as on hosts that distributions
/// set up. Arguments: an empty folder, the device's major and minor number, the user, the program and its arguments.
const ENTER: &str = r#"
mount -t tmpfs -o mode=755 kvm "$1"
mknod -m 666 "$1/kvm" c "$2" "$3"
mount --bind "$1/kvm" /dev/kvm
user=$4
shift 4
exec setpriv --reuid="$user" --regid="$user" --clear-groups "$@"
"#;

/// Where the user may read a machine's files.
struct Home {
    folder: TempDir,
    config: PathBuf,
}

impl Home {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("vm.json");
        let machine = json!({
            "memory": { "size": "512MiB", "prefault": true },
            "boot": { "kernel": "kernel" },
            "console": "stdio",
        });
        fs::write(&config, machine.to_string()).unwrap();
        fs::write(folder.path().join("kernel"), egm_fixtures::payload::halt(Ports::USUAL)).unwrap();
        fs::create_dir(folder.path().join("dev")).unwrap();
        chown(folder.path(), Some(UID), None).unwrap();
        Self { folder, config }
    }

    fn command(&self, verb: &str) -> Command {
        let device = fs::metadata("/dev/kvm").unwrap().rdev();
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-ec", ENTER, "sh"]).arg(self.folder.path().join("dev"));
        command.args([major(device), minor(device), UID].map(|number| number.to_string()));
        command.arg(env!("CARGO_BIN_EXE_egm-vmm")).arg(verb).arg(&self.config).stdin(Stdio::null());
        command
    }

    /// The pages of the machine's RAM, by the plan that the user gets.
    fn planned(&self) -> Value {
        let output = self.command("plan").arg("--json").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        plan["backings"][0]["pages"].clone()
    }
}

/// KiB of guest memory of a process that are in huge pages of a file.
fn in_huge_pages(process: &Path) -> u64 {
    let smaps = fs::read_to_string(process.join("smaps")).unwrap();
    let sizes = smaps.lines().filter_map(|line| line.strip_prefix("ShmemPmdMapped:"));
    sizes.map(|size| size.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap()).sum()
}

#[test]
fn an_unprivileged_user_s_machine_has_huge_pages_or_its_plan_states_why_not() {
    if !kvm() {
        return;
    }
    if !geteuid().is_root() {
        return println!("skipped: only root starts a program as another user");
    }
    let contiguous = host_has_huge_pages();
    let home = Home::new();
    let pages = home.planned();
    let mut machine = home.command("run").stdout(Stdio::piped()).spawn().unwrap();
    assert_eq!(line(machine.stdout.as_mut().unwrap()), "ready\n");
    let process = PathBuf::from(format!("/proc/{}", machine.id()));
    let status = fs::read_to_string(process.join("status")).unwrap();
    let huge = in_huge_pages(&process);
    kill_process(Pid::from_child(&machine), Signal::TERM).unwrap();
    assert_eq!(machine.wait().unwrap().code(), Some(0));
    assert!(status.contains(&format!("Uid:\t{UID}\t{UID}")), "{status}");
    assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
    match &pages["why_not_larger"] {
        Value::Null if !contiguous => {}
        Value::Null => assert!(huge >= 486 << 10, "{huge} KiB of 512 MiB: {pages}"),
        why => assert!(huge < 486 << 10, "{huge} KiB of 512 MiB in huge pages, but the plan has {why}"),
    }
}
