//! A machine that root starts for another user: what the kernel reports of its process while the guest runs.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use egm_device::ledger::{Identity, Ledger, Paths};
use egm_device::region::Survey;
use egm_fixtures::payload::Ports;
use egm_fixtures::pool::Pool;
use rustix::process::{Pid, Signal, geteuid, kill_process};
use serde_json::json;
use tempfile::TempDir;

use crate::kvm;

/// Id of the unprivileged user that every distribution has.
const USER: &str = "65534";
/// Name of the machine, and so of its slices' owner.
const NAME: &str = "of-nobody";

/// A machine with a slice of huge pages, of which each slice is a file.
struct Machine {
    folder: TempDir,
    keeper: Child,
    machine: Pid,
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = kill_process(self.machine, Signal::KILL);
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

impl Machine {
    /// Returns when the guest runs.
    fn start() -> Self {
        Self::start_with(&["--user", USER])
    }

    fn start_with(options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = json!({
            "name": NAME,
            "memory": { "size": "15MiB" },
            "egm": [{ "region": "hugetlb", "size": "4MiB", "node": 1 }],
            "boot": { "kernel": "kernel" },
        });
        let file = folder.path().join("vm.json");
        fs::write(&file, config.to_string()).unwrap();
        fs::write(folder.path().join("kernel"), egm_fixtures::payload::halt(Ports::USUAL)).unwrap();
        let mut keeper = Command::new(env!("CARGO_BIN_EXE_egm-vmm"))
            .arg("run")
            .arg(&file)
            .args(options)
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut byte = [0];
        while byte != *b"\n" {
            keeper.stdout.as_mut().unwrap().read_exact(&mut byte).unwrap();
        }
        let machine = child_of(keeper.id());
        Self { folder, keeper, machine }
    }

    fn path(&self, file: &str) -> String {
        format!("/proc/{}/{file}", self.machine.as_raw_nonzero())
    }

    /// Inode and path of each of the machine's descriptors.
    fn descriptors(&self) -> Vec<(u64, String)> {
        let links = fs::read_dir(self.path("fd")).unwrap().map(|entry| entry.unwrap().path());
        let named = links.map(|path| Some((fs::metadata(&path).ok()?.ino(), fs::read_link(&path).ok()?)));
        named.flatten().map(|(inode, path)| (inode, path.display().to_string())).collect()
    }

    /// The exit code, `signal` having been sent to `process`.
    fn end(&mut self, process: Pid, signal: Signal) -> Option<i32> {
        kill_process(process, signal).unwrap();
        self.keeper.wait().unwrap().code()
    }
}

/// The statuses of the machine's threads, but for the kernel's own.
fn statuses(machine: &Machine) -> Vec<String> {
    let threads = fs::read_dir(machine.path("task")).unwrap();
    let statuses = threads.map(|thread| fs::read_to_string(thread.unwrap().path().join("status")).unwrap());
    statuses.filter(|status| !status.starts_with("Name:\tkvm")).collect()
}

/// The inode of the mapping of 4 MiB in a line of `/proc/PID/maps`: the slice, for no other file is so large here.
fn slice_of(line: &str) -> Option<u64> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let (start, end) = words.first()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).unwrap();
    (words.get(1) == Some(&"rw-s") && number(end) - number(start) == 4 << 20)
        .then(|| words[4].parse().unwrap())
}

/// The one process that `parent` has started.
fn child_of(parent: u32) -> Pid {
    let stat = |pid: &str| fs::read_to_string(format!("/proc/{pid}/stat")).ok();
    let is_child = |pid: &String| {
        let stat = stat(pid).unwrap_or_default();
        let after_name = stat.rsplit_once(')').map(|(_, after)| after.to_owned()).unwrap_or_default();
        after_name.split_ascii_whitespace().nth(1) == Some(&parent.to_string())
    };
    let names = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let pid = names.filter(|name| name.bytes().all(|b| b.is_ascii_digit())).find(is_child).unwrap();
    Pid::from_raw(pid.parse().unwrap()).unwrap()
}

/// Whether the host's ledger knows a slice of the machine.
fn is_granted() -> bool {
    let root = Path::new("/");
    let ledger = Ledger::open(Paths::below(root), Identity::read(root).unwrap()).unwrap();
    let survey = Survey::of(root, &[]);
    let held = survey.regions.iter().flat_map(|region| ledger.states(region).unwrap().held);
    held.filter_map(|held| held.owner).any(|owner| owner.name == NAME)
}

fn can_run() -> bool {
    if !geteuid().is_root() {
        println!("skipped: only root starts a machine for another user");
    }
    geteuid().is_root() && kvm()
}

#[test]
fn a_machine_of_a_user_has_no_privilege_and_no_descriptor_of_its_slice_while_it_runs() {
    if !can_run() {
        return;
    }
    let Some(_pool) = Pool::reserve(2, 2 << 10) else { return };
    let mut machine = Machine::start();
    for thread in fs::read_dir(machine.path("task")).unwrap() {
        let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
        for line in [
            "Uid:\t65534\t65534\t65534\t65534",
            "Gid:\t65534\t65534\t65534\t65534",
            "CapPrm:\t0000000000000000",
            "CapEff:\t0000000000000000",
            "NoNewPrivs:\t1",
            "Seccomp:\t2", // mappings stay as they are
        ] {
            assert!(status.contains(line), "{line}: {status}");
        }
        let groups = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap();
        assert!(groups.split_whitespace().all(|group| group != "0"), "{groups}");
    }
    let open = machine.descriptors();
    assert!(open.iter().all(|(_, file)| !file.contains("egm-device")), "{open:?}");
    let maps = fs::read_to_string(machine.path("maps")).unwrap();
    let slice = maps.lines().find_map(slice_of).unwrap();
    assert!(open.iter().all(|(inode, _)| *inode != slice), "{slice}: {open:?}");
    assert!(is_granted());
    let keeper = Pid::from_child(&machine.keeper);
    assert_eq!(machine.end(keeper, Signal::TERM), Some(0), "the keeper forwards the signal");
    assert!(!is_granted());
}

#[test]
fn a_killed_machine_s_slices_are_returned_and_a_killed_keeper_takes_the_machine_with_it() {
    if !can_run() {
        return;
    }
    let Some(_pool) = Pool::reserve(2, 2 << 10) else { return };
    let mut machine = Machine::start();
    let process = machine.machine;
    assert_eq!(machine.end(process, Signal::KILL), Some(128 + 9));
    assert!(!is_granted());

    let mut machine = Machine::start();
    let keeper = Pid::from_child(&machine.keeper);
    assert_eq!(machine.end(keeper, Signal::KILL), None);
    while Path::new(&machine.path("status")).exists() {
        std::thread::yield_now();
    }
    assert!(!is_granted());
}

#[test]
fn a_sandboxed_machine_of_root_leaves_its_slices_to_another_process() {
    if !can_run() {
        return;
    }
    let Some(_pool) = Pool::reserve(2, 2 << 10) else { return };
    let mut machine = Machine::start_with(&["--sandbox", "strict"]);
    for status in statuses(&machine) {
        for line in
            ["CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"]
        {
            assert!(status.contains(line), "{line}: {status}");
        }
    }
    let open = machine.descriptors();
    assert!(open.iter().all(|(_, file)| !file.contains("egm-device")), "{open:?}");
    assert!(is_granted());
    let keeper = Pid::from_child(&machine.keeper);
    assert_eq!(machine.end(keeper, Signal::TERM), Some(0));
    assert!(!is_granted());
}

#[test]
fn the_api_of_a_sandboxed_machine_of_root_is_not_the_keeper_s() {
    if !can_run() {
        return;
    }
    let Some(_pool) = Pool::reserve(2, 2 << 10) else { return };
    let mut machine = Machine::start_with(&["--sandbox", "strict", "--api", "api.sock"]);
    let socket = machine.folder.path().join("api.sock");
    let ask = |request: &str| {
        let mut client = UnixStream::connect(&socket).unwrap();
        write!(client, "{request} HTTP/1.1\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        answer
    };
    let answer = ask("GET /api/v1/vmm.ping");
    assert!(answer.contains(&format!("\"pid\":{}", machine.machine.as_raw_nonzero())), "{answer}");
    // The guest prints its line a moment before the API knows that it runs.
    while !ask("PUT /api/v1/vm.shutdown").starts_with("HTTP/1.1 204 ") {
        std::thread::yield_now();
    }
    assert_eq!(machine.keeper.wait().unwrap().code(), Some(0));
    assert!(!socket.exists() && !is_granted());
}
