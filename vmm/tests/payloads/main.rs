//! egm-vmm and /dev/kvm run small guests of our own, on every host: each test is a claim about the machine.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod pages;
mod programs;
mod start;
mod storage;
mod unprivileged;
mod users;

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use egm_device::region::HostFacts;
use egm_fixtures::payload::{Entry, Ports};
use egm_vmm::config;
use egm_vmm::facts::{Scope, of_host};
use egm_vmm::plan::{Plan, plan};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::programs::Act;
use crate::storage::{Mounted, Storage};

/// A payload that has not ended by then is ended.
const DEADLINE_SECONDS: &str = "60";
/// Random accesses of a payload: a second or two where KVM emulates every instruction.
const FUZZ_STEPS: u32 = 5_000;

/// Whether KVM is available; prints why not.
fn kvm() -> bool {
    match std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => true,
        Err(error) => {
            println!("skipped: /dev/kvm: {error}");
            false
        }
    }
}

/// The plan that `egm-vmm run` makes of the configuration at `file`.
fn plan_of(file: &Path) -> Plan {
    let spec = config::load(file).unwrap();
    plan(&spec, &of_host(&Scope::of(&spec)).unwrap()).unwrap()
}

/// A machine with a payload in it.
struct Guest {
    _folder: TempDir,
    child: Child,
}

/// How a guest ended.
#[derive(Debug)]
struct Ended {
    /// Output of its serial port.
    console: String,
    /// Messages of egm-vmm on standard error.
    messages: String,
    /// 137 when it did not end in time.
    code: Option<i32>,
}

impl Guest {
    /// Starts the machine of `config`, with the payload for its plan as kernel. Paths in `config` are relative to an
    /// empty folder, in which `prepare` may put files.
    fn start(mut config: Value, prepare: impl FnOnce(&Path), payload: impl FnOnce(&Plan) -> Vec<u8>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        prepare(folder.path());
        let file = folder.path().join("payload.json");
        config["boot"] = json!({ "kernel": "payload.elf" });
        std::fs::write(&file, config.to_string()).unwrap();
        std::fs::write(folder.path().join("payload.elf"), payload(&plan_of(&file))).unwrap();
        let child = Command::new("timeout")
            .args(["--foreground", "--signal=KILL", DEADLINE_SECONDS, env!("CARGO_BIN_EXE_egm-vmm"), "run"])
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self { _folder: folder, child }
    }

    /// Waits until the payload has printed a line, then sends the signal by which an operator ends the machine.
    fn terminate_after_a_line(&mut self) {
        let _ = line(self.child.stdout.as_mut().unwrap());
        self.terminate();
    }

    /// The next line of egm-vmm's messages.
    fn message(&mut self) -> String {
        line(self.child.stderr.as_mut().unwrap())
    }

    fn terminate(&self) {
        rustix::process::kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
    }

    fn end(mut self) -> Ended {
        let (mut console, mut messages) = (Vec::new(), Vec::new());
        self.child.stdout.take().unwrap().read_to_end(&mut console).unwrap();
        self.child.stderr.take().unwrap().read_to_end(&mut messages).unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ended { console: text(console), messages: text(messages), code: self.child.wait().unwrap().code() }
    }
}

/// Reads up to the end of a line, and nothing after it.
fn line(from: &mut impl Read) -> String {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        from.read_exact(&mut byte)
            .unwrap_or_else(|e| panic!("{e} after {:?}", String::from_utf8_lossy(&line)));
        line.extend(byte);
    }
    String::from_utf8(line).unwrap()
}

fn small() -> Value {
    json!({ "memory": { "size": "16MiB" }, "console": "stdio" })
}

/// Runs a payload in a small machine to its end.
fn run(payload: impl FnOnce(&Plan) -> Vec<u8>) -> Ended {
    run_in(small(), |_| (), payload)
}

fn run_in(config: Value, prepare: impl FnOnce(&Path), payload: impl FnOnce(&Plan) -> Vec<u8>) -> Ended {
    Guest::start(config, prepare, payload).end()
}

#[track_caller]
fn assert_ok(ended: &Ended) {
    assert!(ended.console.ends_with("ok\n") && ended.code == Some(0), "{ended:?}");
}

/// The guest is to blame, and the message names its fault.
#[track_caller]
fn assert_guest_failed(ended: &Ended, message: &str) {
    assert!(!ended.console.contains("failed"), "{ended:?}");
    assert!(ended.code == Some(1) && ended.messages.contains(message), "{message}: {ended:?}");
}

#[test]
fn a_guest_that_powers_off_ends_well_whichever_way_it_is_entered() {
    if !kvm() {
        return;
    }
    for entry in [Entry::Pvh, Entry::Linux64] {
        let ended = run(|_| egm_fixtures::payload::hello(Ports::USUAL, entry));
        assert_eq!(
            (ended.console.as_str(), ended.code),
            ("!hello\n", Some(0)),
            "{entry:?}: {}",
            ended.messages
        );
    }
}

#[test]
fn every_edge_of_ram_is_where_the_plan_states_and_holes_read_ones() {
    if kvm() {
        assert_ok(&run(programs::memory));
    }
}

/// An EGM slice is put above 4 GiB however small the machine is, so the payload runs in 64-bit mode.
#[test]
fn every_edge_of_an_egm_slice_above_4_gib_is_where_the_plan_states() {
    let config = json!({
        "memory": { "size": "16MiB" },
        "egm": [{ "region": "local", "size": "6MiB", "node": 1 }],
        "console": "stdio",
    });
    if kvm() {
        assert_ok(&run_in(
            config,
            |_| (),
            |plan| {
                assert!(plan.memory_end().get() > 1 << 32);
                programs::memory(plan)
            },
        ));
    }
}

/// The edges again, where the memory is a file of the VM.
#[test]
fn a_slice_of_guest_memfd_is_where_the_plan_states_and_begins_as_zeros() {
    if !kvm() {
        return;
    }
    if !HostFacts::read(Path::new("/")).guest_memfd {
        return println!("skipped: this host's KVM has no guest_memfd that the host can map");
    }
    let slice = json!([{ "region": "guest-memfd", "size": "6MiB", "node": 1 }]);
    let config = json!({ "memory": { "size": "16MiB" }, "egm": slice, "console": "stdio" });
    assert_ok(&run_in(config.clone(), |_| (), programs::memory));
    let mut guest = Guest::start(
        config,
        |_| (),
        |plan| {
            assert!(plan.backings[1].guest_memfd);
            let slice = plan.memory.iter().find(|piece| piece.backing == 1).unwrap().span;
            egm_fixtures::payload::zeros(Ports::USUAL, slice.start().get(), slice.size())
        },
    );
    assert_eq!(line(guest.child.stdout.as_mut().unwrap()).trim_end(), "zeros");
    guest.terminate();
    assert_eq!(guest.end().code, Some(0));
}

#[test]
fn ports_and_registers_answer_as_documented_and_everything_else_with_ones() {
    if kvm() {
        let ended = run(programs::decode);
        assert_ok(&ended);
        assert!(ended.console.contains("one string\n"), "{ended:?}");
    }
}

/// A disk and an entropy device on the root bus, another one behind a root port.
fn with_devices() -> Value {
    json!({
        "memory": { "size": "16MiB" },
        "devices": [
            { "id": "random", "type": "virtio-rng", "root_port": false },
            { "id": "more", "type": "virtio-rng", "root_port": true },
            { "id": "disk", "type": "virtio-blk", "path": "disk.img", "root_port": false },
        ],
        "console": "stdio",
    })
}

/// Runs the payload with four seeds; what egm-vmm said of each.
fn fuzz(payload: fn(&Plan, u32, u32) -> Vec<u8>) -> Vec<String> {
    let seeds: &[u32] = if kvm() { &[1, 2, 3, 4] } else { &[] };
    let disk = |folder: &Path| std::fs::write(folder.join("disk.img"), [0; 1 << 20]).unwrap();
    let messages = seeds.iter().map(|seed| {
        let ended = run_in(with_devices(), disk, |plan| payload(plan, *seed, FUZZ_STEPS));
        assert_ok(&ended);
        ended.messages
    });
    messages.collect()
}

#[test]
fn random_accesses_to_configuration_space_do_no_harm() {
    fuzz(programs::config_fuzz);
}

#[test]
fn random_accesses_to_moved_devices_and_to_ports_do_no_harm() {
    for messages in fuzz(programs::device_fuzz) {
        let counted = messages.starts_with("counted: ") && messages.contains(" wrong register accesses at ");
        assert!(counted && messages.lines().count() == 1 && messages.len() < 1000, "{messages}");
    }
}

#[test]
fn a_reset_a_panic_and_a_triple_fault_are_the_guests_failure() {
    if !kvm() {
        return;
    }
    let port =
        |owner, value| run(|plan| programs::write_port(Ports::USUAL, plan.port(owner).unwrap(), value));
    assert_guest_failed(&port("reset", 1), "reset");
    assert_guest_failed(&port("pvpanic", 1), "panicked");
    assert_guest_failed(&port("pvpanic", 2), "crash kernel");
    assert_guest_failed(&run(|_| programs::triple_fault(Ports::USUAL)), "triple fault");
}

fn with_reboot(mut config: Value) -> Value {
    config["on_reset"] = json!("reboot");
    config
}

#[test]
fn a_guest_that_is_reset_in_place_finds_the_machine_as_at_its_start() {
    if !kvm() {
        return;
    }
    let device = json!({ "id": "random", "type": "virtio-rng", "root_port": false });
    let mut config = with_reboot(small());
    config["devices"] = json!([device]);
    let ended = run_in(config, |_| (), programs::same_after_resets);
    assert_eq!((ended.console.as_str(), ended.code), ("again\nagain\nok\n", Some(0)), "{ended:?}");
}

/// The first vCPU starts the second one at once: that it is reset by then is why each waits for all.
#[test]
fn a_machine_with_a_running_second_processor_is_reset_a_hundred_times_in_one_process() {
    if !kvm() {
        return;
    }
    let mut config = with_reboot(small());
    config["cpus"] = json!({ "count": 2 });
    let ended = run_in(config, |_| (), |plan| programs::second_processor_after_resets(plan, 100));
    assert_ok(&ended);
    assert_eq!(ended.console.lines().filter(|line| *line == "again").count(), 100, "{ended:?}");
}

#[test]
fn the_operator_ends_a_reset_that_waits_for_storage_that_hangs() {
    let Some(mounted) = kvm().then(|| Mounted::new(Storage::Hangs)).flatten() else { return };
    let disk = json!({ "id": "data", "type": "virtio-blk", "path": mounted.disk(), "root_port": false });
    let mut config = with_reboot(small());
    config["devices"] = json!([disk]);
    let mut guest = Guest::start(config, |_| (), |plan| programs::disk_in_use(plan, Act::ResetMachine));
    let waiting = guest.message();
    assert!(waiting.starts_with("note: waiting for disk \"data\" ("), "{waiting}");
    assert!(waiting.ends_with("SIGTERM ends the machine\n"), "{waiting}");
    guest.terminate();
    let waiting = guest.message();
    assert!(waiting.ends_with("one more SIGTERM ends the wait\n"), "{waiting}");
    guest.terminate();
    let ended = guest.end();
    assert_eq!(ended.code, Some(3), "{ended:?}");
    assert!(ended.messages.contains("it did not answer"), "{ended:?}");
}

#[test]
fn the_operator_ends_a_guest_that_sleeps_and_one_that_never_leaves_the_processor() {
    if !kvm() {
        return;
    }
    for payload in [egm_fixtures::payload::halt, egm_fixtures::payload::spin] {
        let mut guest = Guest::start(small(), |_| (), |_| payload(Ports::USUAL));
        guest.terminate_after_a_line();
        let ended = guest.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert_eq!(ended.messages, "stopped by signal 15; disks are flushed\n");
    }
}

/// The lab takes this payload's word for what a slice holds.
#[test]
fn a_payload_distinguishes_memory_that_is_zero_from_memory_that_is_not() {
    if !kvm() {
        return;
    }
    const BYTES: u64 = 4096;
    let (fresh, own_code) = (0x80_0000, u64::from(egm_fixtures::payload::BASE) - BYTES + 64);
    let mut guest =
        Guest::start(small(), |_| (), |_| egm_fixtures::payload::zeros(Ports::USUAL, fresh, BYTES));
    assert_eq!(line(guest.child.stdout.as_mut().unwrap()).trim_end(), "zeros");
    guest.terminate();
    assert_eq!(guest.end().code, Some(0));
    let other = run(|_| egm_fixtures::payload::zeros(Ports::USUAL, own_code, BYTES));
    assert_eq!((other.console.as_str(), other.code), ("failed: every byte is zero\n", Some(0)), "{other:?}");
}

/// A machine with a disk in use on `storage`; the operator has requested its end.
fn ending_on(storage: Storage, act: Act) -> Option<(Mounted, Guest)> {
    let mounted = kvm().then(|| Mounted::new(storage)).flatten()?;
    let config = json!({
        "memory": { "size": "16MiB" },
        "devices": [{ "id": "data", "type": "virtio-blk", "path": mounted.disk(), "root_port": false }],
        "console": "stdio",
    });
    let mut guest = Guest::start(config, |_| (), |plan| programs::disk_in_use(plan, act));
    guest.terminate_after_a_line();
    Some((mounted, guest))
}

#[test]
fn a_disk_that_cannot_be_flushed_is_named_with_the_reason_and_is_the_hosts_fault() {
    for (act, failures) in [(Act::Nothing, 1), (Act::FlushInVain, 2)] {
        let Some((_mounted, guest)) = ending_on(Storage::Fails, act) else { return };
        let ended = guest.end();
        assert_eq!(ended.code, Some(3), "{ended:?}");
        let counted = format!("counted: {failures} failed requests at \"data\"\n");
        for part in [&counted, "disk \"data\" (", "/disk.img) is not flushed", "(os error 5)", "help: "] {
            assert!(ended.messages.contains(part), "no {part:?}: {ended:?}");
        }
        assert!(!ended.console.contains("failed"), "the guest's own flush: {ended:?}");
        assert!(!ended.messages.contains("disks are flushed"), "{ended:?}");
    }
}

/// Whether the flush is that of the end, or of a reset by the guest.
#[test]
fn storage_that_hangs_ends_with_a_second_signal_and_is_named() {
    for act in [Act::Nothing, Act::Reset] {
        let Some((_mounted, mut guest)) = ending_on(Storage::Hangs, act) else { return };
        let waiting = guest.message();
        assert!(waiting.starts_with("note: waiting for disk \"data\" ("), "{waiting}");
        guest.terminate();
        let ended = guest.end();
        assert_eq!(ended.code, Some(3), "{ended:?}");
        for part in ["stopped by signal 15\n", "error: disk \"data\" (", "it did not answer", "help: "] {
            assert!(ended.messages.contains(part), "no {part:?}: {ended:?}");
        }
    }
}

fn console_at(path: &Path) -> Value {
    json!({ "memory": { "size": "16MiB" }, "console": { "type": "file", "path": path } })
}

#[test]
fn a_console_file_on_storage_that_hangs_holds_up_neither_the_guest_nor_the_end() {
    if !kvm() {
        return;
    }
    let Some(mounted) = Mounted::new(Storage::Hangs) else { return };
    let config = console_at(&mounted.disk());
    let ended = run_in(config, |_| (), |_| egm_fixtures::payload::hello(Ports::USUAL, Entry::Pvh));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.messages.contains("note: 7 bytes of console output are lost"), "{ended:?}");
}

#[test]
fn a_console_file_on_a_full_disk_costs_output_that_is_counted() {
    if !kvm() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let size = c"size=4k";
    if let Err(error) = mount("tmpfs", folder.path(), "tmpfs", MountFlags::empty(), Some(size)) {
        return println!("skipped: cannot mount a tmpfs: {error}");
    }
    std::fs::write(folder.path().join("full"), [1; 4096]).unwrap();
    let config = console_at(&folder.path().join("console"));
    let ended = run_in(config, |_| (), |_| egm_fixtures::payload::hello(Ports::USUAL, Entry::Pvh));
    unmount(folder.path(), UnmountFlags::DETACH).unwrap();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.messages.contains("note: 7 bytes of console output are lost"), "{ended:?}");
}
