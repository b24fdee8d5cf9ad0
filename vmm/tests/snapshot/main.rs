//! Snapshots by the real program: a guest goes on in another process from where it was.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod upgrade;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use egm_fixtures::payload::{Entry, Payload, Ports, Width};
use egm_vmm::config;
use egm_vmm::facts::{Scope, of_host};
use egm_vmm::plan::{FunctionRole, Plan, WindowKind, plan};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-vmm");
const CONFIGURATION: i32 = 2;
const HOST: i32 = 3;
/// Characters of console output that show that a guest runs.
const SOME: usize = 200;

/// Whether machines can run here; prints why not.
fn kvm() -> bool {
    match File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => true,
        Err(error) => {
            println!("skipped: /dev/kvm: {error}");
            false
        }
    }
}

/// A payload that counts for ever: for each number, a virtio-rng device of the root bus fills a buffer, and memory and a
/// register must have the same number. It prints a character for each 64 numbers, in the order of the characters.
fn counts(plan: &Plan) -> Vec<u8> {
    const SCRATCH: u32 = 0x30_0000;
    const COUNT: u32 = SCRATCH + 0x4000;
    let (available, used) = (SCRATCH + 0x1000, SCRATCH + 0x2000);
    let port = |owner| plan.port(owner).unwrap();
    let ports = Ports {
        serial: port("serial"),
        sleep: port("sleep"),
        reset: port("reset"),
        pvpanic: port("pvpanic"),
    };
    let mut payload = Payload::new(ports);
    let is_endpoint = |role: &FunctionRole| matches!(role, FunctionRole::Endpoint { .. });
    let function = plan.pci.iter().find(|function| is_endpoint(&function.role)).unwrap();
    let ecam = plan.window(WindowKind::Ecam).unwrap().start().get();
    let config = ecam + (u64::from(function.address.devfn()) << 12);
    let bar = plan.window(WindowKind::PciMemory32).unwrap().start().get();
    let low = u32::try_from(bar).unwrap();
    let mut write = |at: u64, width, value| {
        payload.code.at(at);
        payload.code.mov_eax(value);
        payload.code.store(width);
    };
    for (register, value) in [(0x10, low), (0x14, 0), (0x04, 6)] {
        write(config + register, Width::Long, value);
    }
    // virtio 1.3, clauses 3.1.1 and 4.1.4.3: status, VERSION_1, one queue.
    write(bar + 0x14, Width::Byte, 3);
    write(bar + 0x08, Width::Long, 1);
    write(bar + 0x0c, Width::Long, 1);
    write(bar + 0x14, Width::Byte, 11);
    for (register, offset) in [(0x20, 0), (0x28, 0x1000), (0x30, 0x2000)] {
        write(bar + register, Width::Long, SCRATCH + offset);
    }
    write(bar + 0x1c, Width::Word, 1);
    write(bar + 0x14, Width::Byte, 15);
    // Descriptor 0: four bytes for the device to write. Every entry of the available ring is 0.
    for (at, value) in [(SCRATCH, SCRATCH + 0x3000), (SCRATCH + 8, 4), (SCRATCH + 12, 2)] {
        write(at.into(), Width::Long, value);
    }
    let code = &mut payload.code;
    code.mov_edi(0);
    let next = code.here();
    code.raw(&[0x89, 0xf8, 0x83, 0xc0, 1]); // mov eax, edi; add eax, 1
    code.at((available + 2).into());
    code.store(Width::Word);
    code.at(bar + 0x3000);
    code.mov_eax(0);
    code.store(Width::Word);
    let answered = code.here();
    code.at((used + 2).into());
    code.mov_eax(0);
    code.load(Width::Word);
    code.raw(&[0x29, 0xf8, 0x25]).dword(0xffff); // sub eax, edi; and eax
    code.compare(Width::Long, 1);
    code.jne(answered);
    code.at(COUNT.into());
    code.load(Width::Long);
    code.raw(&[0x39, 0xf8]); // cmp eax, edi
    payload.expect_equal("memory and register have one number");
    let code = &mut payload.code;
    code.raw(&[0x83, 0xc7, 1, 0x89, 0xf8]); // add edi, 1; mov eax, edi
    code.store(Width::Long);
    code.raw(&[0x25]).dword(63); // and eax
    code.compare(Width::Long, 0);
    code.jne(next);
    code.raw(&[0x89, 0xf8, 0xc1, 0xe8, 6, 0x25]).dword(63); // mov eax, edi; shr eax, 6; and eax
    code.raw(&[0x05]).dword(0x20); // add eax
    code.port(ports.serial);
    code.output(Width::Byte);
    code.jmp(next);
    payload.finish(Entry::Pvh)
}

/// A folder with machines that have one console file.
struct Machines {
    folder: TempDir,
}

/// A program with an API; it is ended with the test.
struct Machine<'a> {
    machines: &'a Machines,
    child: Child,
}

impl Machines {
    fn new(more: Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = json!({
            "memory": { "size": "16MiB" },
            "boot": { "kernel": "payload.elf" },
            "devices": [{ "id": "random", "type": "virtio-rng", "root_port": false }],
            "console": { "type": "file", "path": "console" },
        });
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        let file = folder.path().join("vm.json");
        fs::write(&file, config.to_string()).unwrap();
        let spec = config::load(&file).unwrap();
        let plan = plan(&spec, &of_host(&Scope::of(&spec)).unwrap()).unwrap();
        fs::write(folder.path().join("payload.elf"), counts(&plan)).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, words: &str) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(words.split(' ')).current_dir(self.folder.path()).stdin(Stdio::null());
        command.env_remove("XDG_RUNTIME_DIR").stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// The program of `words` with an API.
    fn start(&self, words: &str) -> Machine<'_> {
        let child = self.command(&format!("{words} --api vm.sock")).spawn().unwrap();
        let mut machine = Machine { machines: self, child };
        while UnixStream::connect(self.path("vm.sock")).is_err() {
            if machine.child.try_wait().unwrap().is_some() {
                panic!("{:?}", machine.end());
            }
            std::thread::yield_now();
        }
        machine
    }

    /// Makes "snap" a copy of "keep".
    fn fresh(&self) {
        let (keep, snap) = (self.path("keep"), self.path("snap"));
        let _ = fs::remove_dir_all(&snap);
        fs::create_dir(&snap).unwrap();
        for entry in fs::read_dir(&keep).unwrap().map(Result::unwrap) {
            fs::copy(entry.path(), snap.join(entry.file_name())).unwrap();
        }
    }

    /// The output of a program that cannot restore the snapshot "snap".
    fn refused(&self) -> String {
        let output = self.command("run --restore snap").output().unwrap();
        let text = text(&output.stderr);
        assert!(text.starts_with("error: cannot restore snap: ") && text.contains("help: "), "{text}");
        text
    }

    fn console(&self) -> Vec<u8> {
        fs::read(self.path("console")).unwrap_or_default()
    }

    /// Waits until the console file has `more` characters than now.
    fn wait_for(&self, more: usize) {
        let length = self.console().len() + more;
        while self.console().len() < length {
            std::thread::yield_now();
        }
    }

    /// Each character follows the one before it: no number is lost, and none comes twice.
    #[track_caller]
    fn check_console(&self) {
        let console = self.console();
        for (index, byte) in (1..).zip(&console) {
            assert_eq!(
                *byte,
                0x20 + u8::try_from(index & 63).unwrap(),
                "character {index} of {}",
                text(&console)
            );
        }
    }
}

impl Machine<'_> {
    fn ctl(&self, words: &str) -> Output {
        self.machines.command(&format!("ctl --api vm.sock {words}")).output().unwrap()
    }

    #[track_caller]
    fn done(&self, words: &str) {
        let output = self.ctl(words);
        assert!(output.status.success(), "{words}: {output:?}");
    }

    /// Whether it maps the file `name`.
    fn maps(&self, name: &str) -> bool {
        fs::read_to_string(format!("/proc/{}/maps", self.child.id())).unwrap().contains(name)
    }

    fn events(&self) -> Vec<String> {
        let lines = text(&self.ctl("events").stdout);
        let event =
            |line: &str| serde_json::from_str::<Value>(line).unwrap()["event"].as_str().unwrap().to_owned();
        lines.lines().map(event).collect()
    }

    /// The messages of a request that is refused with `code`.
    #[track_caller]
    fn refused(&self, words: &str, code: i32) -> String {
        let output = self.ctl(words);
        assert_eq!(output.status.code(), Some(code), "{words}: {output:?}");
        text(&output.stderr)
    }

    /// Ends it as an operator does; code and messages.
    fn end(mut self) -> (Option<i32>, String) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let mut messages = String::new();
        std::io::Read::read_to_string(&mut self.child.stderr.take().unwrap(), &mut messages).unwrap();
        (self.child.wait().unwrap().code(), messages)
    }
}

impl Drop for Machine<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A snapshot "snap" of a machine that has ended.
fn snapshot(more: Value) -> Machines {
    let machines = Machines::new(more);
    let machine = machines.start("run vm.json");
    machines.wait_for(SOME);
    machine.done("pause");
    machine.done("snapshot snap");
    let (code, messages) = machine.end();
    assert_eq!(code, Some(0), "{messages}");
    machines
}

#[test]
fn a_guest_goes_on_in_another_process_from_where_it_was() {
    if !kvm() {
        return;
    }
    let machines = snapshot(json!({}));
    fs::remove_file(machines.path("payload.elf")).unwrap();
    let before = machines.console().len();
    let machine = machines.start("run --restore snap");
    machines.wait_for(SOME);
    assert!(machine.maps("snap/memory"), "private memory is read on demand");
    let (code, messages) = machine.end();
    assert_eq!(code, Some(0), "{messages}");
    assert!(machines.console().len() >= before + SOME);
    machines.check_console();
    let machine = machines.start("run --restore snap --prefault");
    machines.wait_for(SOME);
    assert!(!machine.maps("snap/memory"), "all memory is copied in");
    assert_eq!(machine.end().0, Some(0));
    let memory = fs::metadata(machines.path("snap/memory")).unwrap();
    assert!(memory.len() > 15 << 20 && memory.blocks() * 512 < 1 << 20, "it has holes: {memory:?}");
}

/// Two processors, memory that its plan has in files, and a guest that could be reset.
#[test]
fn a_snapshot_of_a_restored_machine_is_restored_by_the_api_and_waits_until_it_is_resumed() {
    if !kvm() {
        return;
    }
    let machines = snapshot(json!({
        "cpus": { "count": 2 },
        "on_reset": "reboot",
        "memory": { "size": "16MiB", "page_size": "4K" },
        "egm": [{ "region": "local", "size": "6MiB", "node": 1 }],
    }));
    let machine = machines.start("run --restore snap");
    machines.wait_for(SOME);
    machine.done("pause");
    machine.done("snapshot again");
    assert_eq!(machine.events(), ["restored", "resumed", "paused", "snapshot"]);
    assert_eq!(machine.end().0, Some(0));
    let serve = machines.start("serve");
    serve.done("restore again");
    let info: Value = serde_json::from_slice(&serve.ctl("machine --json").stdout).unwrap();
    assert_eq!(info["state"], "paused");
    let before = machines.console().len();
    // These take longer than many characters of a guest that runs.
    (0..20).for_each(|_| serve.done("ping"));
    assert_eq!(machines.console().len(), before, "it waits");
    serve.done("resume");
    machines.wait_for(SOME);
    machines.check_console();
    let refused = serve.refused("restore snap", HOST);
    assert!(refused.contains("a machine is created already"), "{refused}");
    serve.done("put /api/v1/vm.delete");
    let second = machines.console().len();
    serve.done("restore again --prefault --resume");
    machines.wait_for(SOME);
    let console = machines.console();
    assert_eq!(
        console[second..second + SOME],
        console[before..before + SOME],
        "it goes on as the one before"
    );
    serve.done("put /api/v1/vm.shutdown");
    assert_eq!(serve.end().0, Some(0));
}

#[test]
fn a_snapshot_that_fails_leaves_no_file_and_a_machine_that_goes_on() {
    if !kvm() {
        return;
    }
    let machines = Machines::new(json!({}));
    let machine = machines.start("run vm.json");
    machines.wait_for(SOME);
    let refused = machine.refused("snapshot snap", HOST);
    assert!(refused.contains("the machine is not paused"), "{refused}");
    machine.done("pause");
    fs::create_dir(machines.path("used")).unwrap();
    fs::write(machines.path("used/memory"), "").unwrap();
    let refused = machine.refused("snapshot used", HOST);
    assert!(refused.contains("used: the folder has memory already"), "{refused}");
    assert_eq!(fs::read_dir(machines.path("used")).unwrap().count(), 1);
    assert!(!machines.path("snap").exists());
    let refused = machine.refused("snapshot missing/snap", HOST);
    assert!(refused.contains("cannot make the folder"), "{refused}");
    let full = machines.path("full");
    fs::create_dir(&full).unwrap();
    let size = std::ffi::CString::new("size=8k").unwrap();
    let mounted = mount("egm-vmm-test", &full, "tmpfs", MountFlags::empty(), Some(size.as_c_str()));
    match mounted {
        Ok(()) => {
            let refused = machine.refused("snapshot full", HOST);
            assert!(refused.contains("cannot write memory: ") && refused.contains("free space"), "{refused}");
            assert_eq!(fs::read_dir(&full).unwrap().count(), 0);
            unmount(&full, UnmountFlags::DETACH).unwrap();
        }
        Err(error) => println!("skipped: a full file system: {error}"),
    }
    machine.done("resume");
    machines.wait_for(SOME);
    machine.done("pause");
    machine.done("snapshot snap");
    assert_eq!(machine.end().0, Some(0));
    machines.check_console();
}

/// Changes `file` of the snapshot by `change`, and its digest as well.
fn forge(machines: &Machines, file: &str, change: impl FnOnce(&mut Value)) {
    let edit = |path: &Path, change: &mut dyn FnMut(&mut Value)| {
        let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        change(&mut value);
        fs::write(path, value.to_string()).unwrap();
    };
    let path = machines.path(&format!("snap/{file}.json"));
    let mut change = Some(change);
    edit(&path, &mut |value| change.take().unwrap()(value));
    if file != "snapshot" {
        let digest: String =
            Sha256::digest(fs::read(&path).unwrap()).iter().map(|byte| format!("{byte:02x}")).collect();
        edit(&machines.path("snap/snapshot.json"), &mut |manifest| manifest[file] = json!(digest));
    }
}

#[test]
fn a_state_that_was_made_up_is_refused_by_the_value_that_does_not_fit() {
    if !kvm() {
        return;
    }
    let machines = snapshot(json!({}));
    fs::rename(machines.path("snap"), machines.path("keep")).unwrap();
    type Forge = fn(&mut Value);
    let state: [(&str, Forge); 14] = [
        ("other \"windows\"", |state| state["guest"]["windows"] = json!("[]")),
        ("0 vCPUs in place of 1", |state| state["vcpus"] = json!([])),
        ("state.json is damaged", |state| state["unknown"] = json!(1)),
        ("state.json is damaged", |state| state["devices"]["random"]["registers"]["status"] = json!(-1)),
        ("device \"random\": no driver leads", |state| {
            state["devices"]["random"]["registers"]["status"] = json!(0x20);
        }),
        ("no queue of 64 entries has 3", |state| {
            state["devices"]["random"]["registers"]["queues"][0]["size"] = json!(3);
        }),
        ("it has no vector 9", |state| {
            state["devices"]["random"]["registers"]["queues"][0]["vector"] = json!(9);
        }),
        ("a queue lies outside of guest memory", |state| {
            state["devices"]["random"]["registers"]["queues"][0]["driver"] = json!(1_u64 << 60);
        }),
        ("its driver uses the feature bits 0x1", |state| {
            state["devices"]["random"]["registers"]["driver_feature"] = json!(1_u64 << 32 | 1);
        }),
        ("0 vectors in place of", |state| state["devices"]["random"]["msix"] = json!([])),
        ("no bridge 00/00.0", |state| state["bridges"] = json!({})),
        ("0 devices in place of 1", |state| state["devices"] = json!({})),
        ("its state does not fit the machine: ", |state| {
            state["unplugged"] = json!([{ "type": "virtio-gpu" }]);
        }),
        ("31 devices for 30 spare ports", |state| {
            state["unplugged"] = json!(vec![json!({ "type": "virtio-rng" }); 31]);
        }),
    ];
    for (words, change) in state {
        machines.fresh();
        forge(&machines, "state", change);
        let refused = machines.refused();
        assert!(refused.contains(words), "{words}: {refused}");
    }
}

#[test]
fn files_that_were_changed_or_belong_to_another_snapshot_are_refused() {
    if !kvm() {
        return;
    }
    let machines = snapshot(json!({}));
    fs::rename(machines.path("snap"), machines.path("keep")).unwrap();
    machines.fresh();
    forge(&machines, "snapshot", |manifest| manifest["format"] = json!(99));
    assert!(machines.refused().contains("it has format 99"));
    machines.fresh();
    forge(&machines, "snapshot", |manifest| manifest["architecture"] = json!("riscv64"));
    assert!(machines.refused().contains("it is of a machine of riscv64"));
    machines.fresh();
    forge(&machines, "snapshot", |manifest| manifest["memory"][0]["size"] = json!(u64::MAX));
    assert!(machines.refused().contains("cut short"));
    machines.fresh();
    forge(&machines, "machine", |machine| machine["memory"] = json!({ "size": "17MiB" }));
    assert!(
        text(&machines.command("run --restore snap").output().unwrap().stderr)
            .contains("other guest addresses")
    );
    for (name, words) in
        [("state.json", "state.json was changed"), ("machine.json", "machine.json was changed")]
    {
        machines.fresh();
        let file = File::options().write(true).open(machines.path("snap").join(name)).unwrap();
        file.write_all_at(b" ", 0).unwrap();
        assert!(machines.refused().contains(words), "{name}");
    }
    machines.fresh();
    let memory = File::options().write(true).open(machines.path("snap/memory")).unwrap();
    memory.set_len(memory.metadata().unwrap().len() - 4096).unwrap();
    assert!(machines.refused().contains("cut short"));
    machines.fresh();
    fs::remove_file(machines.path("snap/snapshot.json")).unwrap();
    assert!(machines.refused().contains("cannot read snapshot.json"));
    let output = machines.command("run vm.json --restore keep").output().unwrap();
    assert_eq!(output.status.code(), Some(CONFIGURATION), "{output:?}");
}
