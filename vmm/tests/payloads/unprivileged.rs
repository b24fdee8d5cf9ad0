//! A machine that an unprivileged user starts: its memory is on a tmpfs that a child mounts in a user namespace.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use egm_fixtures::payload::Ports;
use rustix::process::{Pid, Signal, geteuid, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{kvm, line};

/// A user that this host has no other process of.
const UID: u32 = 0x4000_0002;

/// Where the user may read a machine's files.
struct Home {
    _folder: TempDir,
    config: PathBuf,
    /// The group that may use KVM.
    group: u32,
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
        chown(folder.path(), Some(UID), None).unwrap();
        Self { _folder: folder, config, group: fs::metadata("/dev/kvm").unwrap().gid() }
    }

    fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_egm-vmm"));
        command.arg(verb).arg(&self.config).uid(UID).gid(self.group).stdin(Stdio::null());
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
fn an_unprivileged_user_s_machine_has_huge_pages_or_its_plan_says_why_not() {
    if !kvm() {
        return;
    }
    if !geteuid().is_root() {
        return println!("skipped: only root starts a program as another user");
    }
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
        Value::Null => assert!(huge >= 486 << 10, "{huge} KiB of 512 MiB: {pages}"),
        why => println!("not in huge pages, as the plan says: {why}"),
    }
}
