//! The API of the real program: of one that waits for its configuration, on every host, and of a running machine where
//! there is KVM.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use egm_fixtures::payload::{Entry, Payload, Ports, halt};
use egm_fixtures::terminal;
use rustix::process::{Pid, Signal, geteuid, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-vmm");
/// Exit codes, as `Blame` has them (vfio/report/src/report.rs).
const CONFIGURATION: i32 = 2;
const HOST: i32 = 3;
/// A user that this host has no other process of.
const UID: &str = "1073741827";
/// The unprivileged user that every distribution has.
const UNPRIVILEGED: &str = "65534";

/// A program with an API at `vm.sock` of its folder.
struct Machine {
    folder: TempDir,
    child: Child,
}

/// What an ended program leaves.
#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    messages: String,
}

impl Machine {
    /// One that waits for its configuration: as long as its standard input is open, it starts.
    fn starting() -> Self {
        Self::start("-", &[], |_| ())
    }

    /// One that runs a guest which sleeps; `None` without KVM.
    fn running(words: &[&str]) -> Option<Self> {
        Self::with_guest(words, &halt(Ports::USUAL)).map(|(machine, _)| machine)
    }

    /// One that runs `guest`, which has printed "ready", and its console; `None` without KVM.
    fn with_guest(words: &[&str], guest: &[u8]) -> Option<(Self, BufReader<ChildStdout>)> {
        Self::with_guest_that(words, guest, "exit")
    }

    /// The same, where a reset of the guest does `on_reset`.
    fn with_guest_that(
        words: &[&str],
        guest: &[u8],
        on_reset: &str,
    ) -> Option<(Self, BufReader<ChildStdout>)> {
        if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
            println!("skipped: /dev/kvm: {error}");
            return None;
        }
        let mut machine = Self::start("vm.json", words, |folder| {
            let devices = json!([
                { "id": "random", "type": "virtio-rng", "root_port": false },
                { "id": "disk", "type": "virtio-blk", "path": "disk.raw", "root_port": false },
            ]);
            let slices = json!([{ "region": "local", "size": "6MiB", "node": 1 }]);
            let config = json!({
                "name": "vm1",
                "memory": { "size": "16MiB" },
                "boot": { "kernel": "guest.elf" },
                "devices": devices,
                "egm": slices,
                "console": "stdio",
                "on_reset": on_reset,
                "pcie": { "spare": { "ports": 1 } },
            });
            fs::write(folder.join("disk.raw"), vec![0; 1 << 20]).unwrap();
            fs::write(folder.join("vm.json"), config.to_string()).unwrap();
            fs::write(folder.join("guest.elf"), guest).unwrap();
        });
        let mut line = String::new();
        let mut console = BufReader::new(machine.child.stdout.take().unwrap());
        console.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        // The guest's first words can come before the state of the machine is "running".
        while machine.json("machine --json")["state"] != "running" {
            thread::yield_now();
        }
        Some((machine, console))
    }

    fn start(file: &str, words: &[&str], prepare: impl FnOnce(&Path)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        prepare(folder.path());
        let child = program(folder.path(), &["run", file, "--api", "vm.sock"])
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut machine = Self { folder, child };
        while !machine.listens() {
            assert!(machine.child.try_wait().unwrap().is_none(), "{:?}", machine.end());
            thread::yield_now();
        }
        machine
    }

    fn listens(&self) -> bool {
        UnixStream::connect(self.path()).is_ok()
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("vm.sock")
    }

    fn ctl(&self, words: &str) -> Output {
        let words = ["ctl", "--api", "vm.sock"].into_iter().chain(words.split(' '));
        program(self.folder.path(), &words.collect::<Vec<_>>()).output().unwrap()
    }

    #[track_caller]
    fn json(&self, words: &str) -> Value {
        let output = self.ctl(words);
        assert!(output.status.success(), "{words}: {output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Lets every user connect, and `user` too; the API refuses that user.
    #[track_caller]
    fn assert_refused_to(&self, user: &str) {
        let folder = self.folder.path();
        fs::copy(PROGRAM, folder.join("egm-vmm")).unwrap();
        fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(self.path(), Permissions::from_mode(0o666)).unwrap();
        let mut command = Command::new("setpriv");
        command.args(["--reuid", user, "--regid", user, "--clear-groups"]).arg(folder.join("egm-vmm"));
        let output = command.args(["ctl", "--api", "vm.sock", "ping"]).current_dir(folder).output().unwrap();
        assert_eq!(output.status.code(), Some(HOST), "{output:?}");
        assert!(text(&output.stderr).contains("this user may not use the API"), "{output:?}");
    }

    /// The answer to `bytes` of a client that then closes its side.
    fn exchange(&self, bytes: &[u8]) -> String {
        let mut client = UnixStream::connect(self.path()).unwrap();
        let _ = client.write_all(bytes); // the answer may come before all is sent
        let _ = client.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = client.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    }

    /// Processes that the program started: the machine's, where its own one keeps the slices' locks.
    fn children(&self) -> Vec<String> {
        let process = self.child.id();
        let children = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap();
        let children: Vec<String> = children.split_whitespace().map(str::to_owned).collect();
        assert!(!children.is_empty(), "the machine has a process of its own");
        children
    }

    /// Sends `text` as the rest of its configuration.
    fn configure(&mut self, text: &str) {
        self.child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    }

    fn end(&mut self) -> Ended {
        drop(self.child.stdin.take());
        let mut messages = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut messages).unwrap();
        Ended { code: self.child.wait().unwrap().code(), messages }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn program(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(words).current_dir(folder).env_remove("XDG_RUNTIME_DIR").stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_machine_that_starts_is_visible_to_its_user_alone() {
    let machine = Machine::starting();
    let mode = fs::symlink_metadata(machine.path()).unwrap();
    assert!(mode.file_type().is_socket() && mode.permissions().mode() & 0o777 == 0o600, "{mode:?}");
    let shown = machine.json("machine --json");
    assert_eq!(
        (shown["state"].as_str(), shown["pid"].as_u64()),
        (Some("starting"), Some(machine.child.id().into()))
    );
}

#[test]
fn a_machine_without_a_plan_refuses_what_needs_one() {
    let machine = Machine::starting();
    for verb in ["info", "counters", "plan", "slices", "interrupts", "power-button", "pause", "shutdown"] {
        let output = machine.ctl(verb);
        assert_eq!(output.status.code(), Some(HOST), "{verb}: {output:?}");
        assert!(text(&output.stderr).contains("\n  help: "), "{verb}: {output:?}");
    }
    assert!(text(&machine.ctl("metrics").stdout).contains("state=\"starting\"} 1\n"));
}

#[test]
fn a_start_that_fails_is_the_last_event_and_leaves_no_socket() {
    let mut machine = Machine::starting();
    let mut reader = UnixStream::connect(machine.path()).unwrap();
    reader.write_all(b"GET /egm/v1/events HTTP/1.1\r\nAccept: text/event-stream\r\n\r\n").unwrap();
    let mut head = [0; 15];
    reader.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 200 OK");
    machine.configure("{ \"memroy\": 1 }");
    let ended = machine.end();
    assert_eq!(ended.code, Some(CONFIGURATION), "{ended:?}");
    let mut events = String::new();
    reader.read_to_string(&mut events).unwrap();
    let last = events.lines().rev().find_map(|line| line.strip_prefix("data: ")).unwrap();
    let last: Value = serde_json::from_str(last).unwrap();
    assert_eq!(last["event"], "failed");
    assert!(last["text"].as_str().unwrap().contains("memroy"), "{last}");
    assert!(!machine.path().exists());
}

#[test]
fn hostile_clients_get_their_status_and_the_program_goes_on() {
    let machine = Machine::starting();
    for (request, status) in [
        (b"GET /api/v1/vm.nothing HTTP/1.1\r\n\r\n".to_vec(), "404"),
        (b"DELETE /api/v1/vm.create HTTP/1.1\r\n\r\n".to_vec(), "405"),
        (b"PUT /api/v1/vm.add-net HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}".to_vec(), "409"),
        (b"PUT /api/v1/vm.add-fs HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}".to_vec(), "501"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n".to_vec(), "400"),
        ([b"PUT / HTTP/1.1\r\nContent-Length: 104857600\r\n\r\n".to_vec(), vec![0; 1 << 20]].concat(), "413"),
    ] {
        let answer = machine.exchange(&request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    }
    let idle: Vec<_> = (0..500).filter_map(|_| UnixStream::connect(machine.path()).ok()).collect();
    assert_eq!(idle.len(), 500);
    drop(idle);
    // The thread may see their end a moment later.
    while !machine.ctl("ping").status.success() {
        thread::yield_now();
    }
}

#[test]
fn a_live_socket_is_refused_and_a_dead_one_is_listed_and_replaced() {
    let mut machine = Machine::starting();
    let second = program(machine.folder.path(), &["run", "-", "--api", "vm.sock"]).output().unwrap();
    assert_eq!(second.status.code(), Some(HOST), "{second:?}");
    assert!(text(&second.stderr).contains("cannot listen on API socket vm.sock"), "{second:?}");
    let nowhere = program(machine.folder.path(), &["run", "-", "--api", "no/vm.sock"]).output().unwrap();
    assert_eq!(nowhere.status.code(), Some(CONFIGURATION), "{nowhere:?}");

    let list = |folder: &Path| -> Value {
        let output = program(folder, &["list", "--dir", ".", "--json"]).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let listed = list(machine.folder.path());
    assert_eq!(
        (listed[0]["state"].as_str(), listed.as_array().unwrap().len()),
        (Some("starting"), 1),
        "{listed}"
    );
    machine.child.kill().unwrap();
    machine.child.wait().unwrap();
    assert_eq!(list(machine.folder.path())[0]["state"], "dead");
    let dead = machine.ctl("ping");
    assert_eq!(dead.status.code(), Some(HOST), "{dead:?}");
    let third = program(machine.folder.path(), &["run", "-", "--api", "vm.sock"]).output().unwrap();
    assert_eq!(third.status.code(), Some(CONFIGURATION), "an empty configuration: {third:?}");
    assert!(!machine.path().exists());
    let empty = program(machine.folder.path(), &["list", "--dir", "."]).output().unwrap();
    assert_eq!((text(&empty.stdout).as_str(), empty.status.code()), ("no sockets in .\n", Some(0)));
}

#[test]
fn another_user_is_refused_even_where_the_socket_is_open_to_all() {
    if !geteuid().is_root() {
        return println!("skipped: only root starts a program as another user");
    }
    let machine = Machine::starting();
    machine.assert_refused_to(UID);
    assert!(machine.ctl("ping").status.success());
}

/// The machine's process has no right to remove its socket then: root's keeper does it.
#[test]
fn the_api_of_a_machine_of_a_user_is_root_s_alone_and_its_socket_is_removed() {
    if !geteuid().is_root() {
        return println!("skipped: only root starts a machine for another user");
    }
    for mode in ["off", "strict"] {
        let Some(mut machine) = Machine::running(&["--user", UNPRIVILEGED, "--sandbox", mode]) else {
            return;
        };
        machine.assert_refused_to(UNPRIVILEGED);
        for process in machine.children() {
            let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap();
            assert_eq!(name, "egm-vmm\n", "{mode}: ps and killall show this name");
        }
        let stopped = machine.ctl("shutdown --timeout 0");
        assert!(stopped.status.success(), "{stopped:?}");
        let ended = machine.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(!machine.path().exists());
    }
}

#[test]
fn a_table_on_a_terminal_with_colours_has_no_escaped_ones() {
    let machine = Machine::starting();
    let mut ctl = program(machine.folder.path(), &["ctl", "--api", "vm.sock", "ping"]);
    ctl.env("TERM", "xterm").env_remove("NO_COLOR");
    let shown = terminal::shown(ctl, 80).unwrap();
    assert!(shown.contains("build_version") && shown.contains('\u{1b}'), "{shown}");
    assert!(!shown.contains("\\u{"), "{shown}");
}

/// The blocks of `docs/api.md` are of a machine that starts; `…` stands for any lines.
#[test]
fn the_page_shows_what_the_program_prints() {
    let page = fs::read_to_string("../docs/api.md").unwrap();
    let machine = Machine::starting();
    let mut count = 0;
    for block in page.split("```console\n$ egm-vmm ").skip(1) {
        let (words, shown) = block.split_once("\n```").unwrap().0.split_once('\n').unwrap();
        let words: Vec<&str> = words.split(' ').collect();
        let output = program(machine.folder.path(), &words).output().unwrap();
        let printed = text(&[output.stdout, output.stderr].concat());
        let mut lines = printed.lines();
        for line in shown.lines().filter(|line| *line != "…") {
            assert!(lines.any(|other| other == line), "{words:?}: no line {line:?} in\n{printed}");
        }
        count += 1;
    }
    assert!(count >= 4, "{count} blocks");
}

#[test]
fn a_running_machine_shows_its_plan_slices_and_counters_and_ends_by_the_api() {
    let Some(mut machine) = Machine::running(&[]) else { return };
    let plan = machine.json("plan");
    assert_eq!(
        (plan["name"].as_str(), machine.json("info")["state"].as_str()),
        (Some("vm1"), Some("Running"))
    );
    let slice = machine.json("slices --json")[0].clone();
    assert_eq!((slice["id"].as_str(), slice["size"].as_u64()), (Some("egm0"), Some(6 << 20)));
    assert_eq!(
        (&slice["region"], &slice["owner"]),
        (&Value::Null, &Value::Null),
        "memory of the machine itself"
    );
    assert_eq!(machine.json("counters")["random"]["wrong_register_accesses"], 0);
    assert_eq!(machine.json("interrupts")["lines"], plan["lines"]);
    let stages = machine.json("timings --json")["stages"].clone();
    let stages: Vec<&str> =
        stages.as_array().unwrap().iter().map(|stage| stage["stage"].as_str().unwrap()).collect();
    assert_eq!(stages, ["configuration", "reservation", "resources", "machine", "vcpus"]);
    // This guest has no handler: the press is no end, and the request after it is one.
    let mut follower = program(machine.folder.path(), &["ctl", "--api", "vm.sock", "events", "--follow"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut events = BufReader::new(follower.stdout.take().unwrap()).lines();
    let event = |line: String| serde_json::from_str::<Value>(&line).unwrap();
    assert_eq!(event(events.next().unwrap().unwrap())["event"], "started");
    assert!(machine.ctl("power-button").status.success());
    let stopped = machine.ctl("shutdown --timeout 1");
    assert!(stopped.status.success(), "{stopped:?}");
    let last = event(events.last().unwrap().unwrap());
    assert_eq!((last["event"].as_str(), last["reason"].as_str()), (Some("stopped"), Some("requested")));
    assert_eq!(follower.wait().unwrap().code(), Some(0));
    let ended = machine.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.messages.contains("stopped by the API; disks are flushed\n"), "{ended:?}");
    assert!(!machine.path().exists());
}

/// A guest that prints without end.
fn talk() -> Vec<u8> {
    let mut payload = Payload::new(Ports::USUAL);
    payload.print("ready\n");
    let again = payload.code.here();
    payload.print("talk\n");
    payload.code.jmp(again);
    payload.finish(Entry::Pvh)
}

/// Bytes that a console has printed so far.
fn count(mut console: BufReader<ChildStdout>) -> Arc<AtomicU64> {
    let printed = Arc::<AtomicU64>::default();
    let counted = Arc::clone(&printed);
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(length @ 1..) = console.read(&mut bytes) {
            counted.fetch_add(length as u64, Ordering::Relaxed);
        }
    });
    printed
}

#[test]
fn a_paused_guest_is_silent_until_it_resumes_and_a_paused_machine_can_end() {
    for mode in ["off", "strict"] {
        let Some((mut machine, console)) = Machine::with_guest(&["--sandbox", mode], &talk()) else { return };
        let printed = count(console);
        let now = || printed.load(Ordering::Relaxed);
        let twice = |verb: &str| {
            let (first, second) = (machine.ctl(verb), machine.ctl(verb));
            assert!(first.status.success(), "{verb}: {first:?}");
            assert_eq!(second.status.code(), Some(HOST), "{verb}: {second:?}");
        };
        twice("pause");
        // Output that the console has is printed; then 20 requests take longer than many lines of a guest that runs.
        let (mut before, mut silent) = (now(), 0);
        for request in 0.. {
            assert!(request < 1000, "the guest is not paused");
            assert_eq!(machine.json("machine --json")["state"], "paused");
            silent = if now() == before { silent + 1 } else { 0 };
            before = now();
            if silent == 20 {
                break;
            }
        }
        twice("resume");
        assert_eq!(machine.json("info")["state"], "Running");
        while now() == before {
            assert!(machine.child.try_wait().unwrap().is_none(), "{:?}", machine.end());
            thread::yield_now();
        }
        assert!(machine.ctl("pause").status.success());
        let events = text(&machine.ctl("events").stdout);
        let events: Vec<Value> = events.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let names: Vec<&str> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
        assert_eq!(names, ["started", "paused", "resumed", "paused"]);
        let stopped = machine.ctl("shutdown --timeout 0");
        assert!(stopped.status.success(), "{stopped:?}");
        let ended = machine.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
    }
}

/// The event loop waits for an idle processor, so that the API carries out what follows the pause before the loop turns.
#[test]
fn a_pause_that_ends_just_before_its_machine_has_its_event() {
    for _ in 0..20 {
        let Some(mut machine) = Machine::running(&[]) else { return };
        let mut follower = program(machine.folder.path(), &["ctl", "--api", "vm.sock", "events", "--follow"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut events = BufReader::new(follower.stdout.take().unwrap()).lines();
        let mut event = || {
            let line: Value = serde_json::from_str(&events.next()?.unwrap()).unwrap();
            Some(line["event"].as_str().unwrap().to_owned())
        };
        assert_eq!(event().unwrap(), "started");
        let pid = machine.child.id().to_string();
        for words in [&["taskset", "-acp", "0", &pid][..], &["chrt", "--idle", "--pid", "0", &pid]] {
            assert!(Command::new(words[0]).args(&words[1..]).output().unwrap().status.success(), "{words:?}");
        }
        let requests =
            ["pause", "resume", "shutdown"].map(|verb| format!("PUT /api/v1/vm.{verb} HTTP/1.1\r\n\r\n"));
        machine.exchange(requests.concat().as_bytes());
        let events: Vec<String> = std::iter::from_fn(event).collect();
        assert_eq!(events, ["paused", "resumed", "stopped"]);
        follower.wait().unwrap();
        assert_eq!(machine.end().code, Some(0));
    }
}

#[test]
fn a_guest_starts_again_in_place_by_the_api_unless_a_reset_ends_its_machine() {
    let Some((machine, mut console)) = Machine::with_guest_that(&[], &talk(), "reboot") else { return };
    for _ in 0..2 {
        let rebooted = machine.ctl("reboot");
        assert!(rebooted.status.success(), "{rebooted:?}");
        let mut line = String::new();
        // The reset may cut the line of the guest before it.
        while !line.ends_with("ready\n") {
            line.clear();
            assert_ne!(console.read_line(&mut line).unwrap(), 0, "the machine goes on");
        }
    }
    let events = text(&machine.ctl("events").stdout);
    assert_eq!(events.matches(r#""event":"reset""#).count(), 2, "{events}");
    let machine = Machine::running(&[]).unwrap();
    let refused = machine.ctl("reboot");
    assert_eq!(refused.status.code(), Some(HOST), "{refused:?}");
    assert!(text(&refused.stderr).contains(r#""on_reset": "reboot""#), "{refused:?}");
    assert_eq!(machine.json("machine --json")["state"], "running");
}

/// What a machine with a spare port answers to a function that this host lacks, and to a device that it does not have.
#[test]
fn a_function_that_cannot_be_plugged_in_is_refused_and_the_machine_goes_on() {
    for (mode, is_confined) in [("off", false), ("strict", true)] {
        let Some(mut machine) = Machine::running(&["--sandbox", mode]) else { return };
        let plugged = machine.ctl("plug 0000:ff:1f.7 --id gpu0");
        assert_eq!(plugged.status.code(), Some(HOST), "{mode}: {plugged:?}");
        let refusal = text(&plugged.stderr);
        assert!(refusal.starts_with("error: cannot PUT /egm/v1/devices: "), "{mode}: {refusal}");
        assert_eq!(refusal.contains("sandbox opens none"), is_confined, "{mode}: {refusal}");
        for device in ["gpu0", "disk"] {
            let unplugged = machine.ctl(&format!("unplug {device}"));
            assert_eq!(unplugged.status.code(), Some(CONFIGURATION), "{mode}: {unplugged:?}");
            assert!(text(&unplugged.stderr).contains("has no device"), "{mode}: {unplugged:?}");
        }
        assert_eq!(machine.json("info")["device_tree"].as_object().unwrap().len(), 2);
        let stopped = machine.ctl("shutdown --timeout 0");
        assert!(stopped.status.success(), "{stopped:?}");
        let ended = machine.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
    }
}

/// Clients of cloud-hypervisor send both: the second does not end the wait for disks.
#[test]
fn two_requests_to_stop_flush_the_disks() {
    let Some(mut machine) = Machine::running(&[]) else { return };
    machine.exchange(b"PUT /api/v1/vm.shutdown HTTP/1.1\r\n\r\nPUT /api/v1/vmm.shutdown HTTP/1.1\r\n\r\n");
    let ended = machine.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.messages.contains("disks are flushed\n"), "{ended:?}");
}

#[test]
fn the_end_by_a_signal_is_an_event_too_and_a_stalled_reader_does_not_delay_it() {
    let Some(mut machine) = Machine::running(&[]) else { return };
    let mut reader = UnixStream::connect(machine.path()).unwrap();
    reader.write_all(b"GET /egm/v1/events HTTP/1.1\r\n\r\n").unwrap();
    reader.read_exact(&mut [0; 15]).unwrap();
    let stalled = UnixStream::connect(machine.path()).unwrap();
    (&stalled).write_all(&b"GET /egm/v1/plan HTTP/1.1\r\n\r\n".repeat(500)).unwrap();
    kill_process(Pid::from_child(&machine.child), Signal::TERM).unwrap();
    let ended = machine.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.messages.contains("stopped by signal 15; disks are flushed\n"), "{ended:?}");
    let mut events = String::new();
    reader.read_to_string(&mut events).unwrap();
    assert!(events.lines().last().unwrap().contains("\"reason\":\"signal\""), "{events}");
}
