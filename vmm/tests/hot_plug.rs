//! Devices that come to a running machine by cloud-hypervisor's requests. The guest sleeps; scenario `virtio-hotplug` has one
//! that uses them.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use egm_fixtures::payload::{Entry, Payload, Ports, Width, halt};
use egm_vmm::config;
use egm_vmm::facts::{Scope, of_host};
use egm_vmm::plan::{Plan, WindowKind, plan};
use serde_json::{Value, json};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-vmm");

/// A machine with two spare ports, once it runs.
struct Machine {
    folder: TempDir,
    child: Child,
}

impl Machine {
    /// One with a guest that sleeps. Prints why not where none can run.
    fn running() -> Option<Self> {
        Self::with_guest(|_| halt(Ports::USUAL))
    }

    /// The same with the guest for its plan.
    fn with_guest(guest: impl FnOnce(&Plan) -> Vec<u8>) -> Option<Self> {
        if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
            println!("skipped: /dev/kvm: {error}");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("vm.json");
        let config = json!({
            "memory": { "size": "16MiB" },
            "boot": { "kernel": "kernel" },
            "console": { "type": "file", "path": "console" },
            "pcie": { "spare": { "ports": 2 } },
            "on_reset": "reboot",
        });
        fs::write(&file, config.to_string()).unwrap();
        fs::write(folder.path().join("kernel"), guest(&plan_of(&file))).unwrap();
        Some(Self::started(folder, &["run", "vm.json", "--api", "vm.sock"]))
    }

    /// The machine of `arguments` in `folder`, once it runs.
    fn started(folder: TempDir, arguments: &[&str]) -> Self {
        let mut command = Command::new(PROGRAM);
        command.args(arguments).current_dir(folder.path()).stdin(Stdio::null());
        let mut machine = Self { child: command.spawn().unwrap(), folder };
        while UnixStream::connect(machine.folder.path().join("vm.sock")).is_err()
            || machine.get("/egm/v1/machine")["state"] != "running"
        {
            assert_eq!(machine.child.try_wait().unwrap(), None, "it ends");
            std::thread::yield_now();
        }
        machine
    }

    /// `egm-vmm serve` without a machine.
    fn serving(folder: TempDir) -> Self {
        let serve =
            Command::new(PROGRAM).args(["serve", "--api", "vm.sock"]).current_dir(folder.path()).spawn();
        let mut machine = Self { folder, child: serve.unwrap() };
        machine.wait(|machine| UnixStream::connect(machine.folder.path().join("vm.sock")).is_ok());
        machine
    }

    /// Ends the machine; its folder.
    fn end(mut self) -> TempDir {
        assert_eq!(self.ask("PUT /api/v1/vm.shutdown", "").0, 204);
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
        std::mem::replace(&mut self.folder, tempfile::tempdir().unwrap())
    }

    /// Output of a request by `egm-vmm ctl`.
    fn ctl(&self, words: &str) -> Output {
        let mut command = Command::new(PROGRAM);
        command.args(["ctl", "--api", "vm.sock"]).args(words.split(' ')).current_dir(self.folder.path());
        command.output().unwrap()
    }

    fn has_devices(&self, ids: &[&str]) -> bool {
        let tree = self.get("/api/v1/vm.info")["device_tree"].clone();
        tree.as_object().is_some_and(|tree| tree.keys().eq(ids))
    }

    /// Status and body of the answer to `request`.
    fn ask(&self, request: &str, body: &str) -> (u16, Value) {
        let mut client = UnixStream::connect(self.folder.path().join("vm.sock")).unwrap();
        let length = body.len();
        let head = format!("{request} HTTP/1.1\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
        client.write_all((head + body).as_bytes()).unwrap();
        let mut text = String::new();
        client.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
        let status = head.strip_prefix("HTTP/1.1 ").unwrap()[..3].parse().unwrap();
        (status, serde_json::from_str(body).unwrap_or_default())
    }

    /// Waits until `is_true`; the machine may not end meanwhile.
    fn wait(&mut self, is_true: impl Fn(&Self) -> bool) {
        while !is_true(self) {
            assert_eq!(self.child.try_wait().unwrap(), None, "it ends");
            std::thread::yield_now();
        }
    }

    /// Bytes that the guest has printed.
    fn printed(&self) -> u64 {
        fs::metadata(self.folder.path().join("console")).map_or(0, |file| file.len())
    }

    /// Open files but sockets: connections of clients close a moment later.
    fn files(&self) -> usize {
        let is_file =
            |path: &Path| fs::read_link(path).is_ok_and(|to| !to.to_string_lossy().starts_with("socket:"));
        let folder = fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap();
        folder.filter(|entry| entry.as_ref().is_ok_and(|entry| is_file(&entry.path()))).count()
    }

    fn get(&self, path: &str) -> Value {
        self.ask(&format!("GET {path}"), "").1
    }

    fn add(&self, what: &str, device: &Value) -> (u16, Value) {
        self.ask(&format!("PUT /api/v1/vm.add-{what}"), &device.to_string())
    }
}

/// The plan that `egm-vmm run` makes of the configuration at `file`.
fn plan_of(file: &Path) -> Plan {
    let spec = config::load(file).unwrap();
    plan(&spec, &of_host(&Scope::of(&spec)).unwrap()).unwrap()
}

/// Switches the power of the first spare port at each press of its button, and prints then whether it is on.
fn obedient(plan: &Plan) -> Vec<u8> {
    const CONTROL: u64 = 0x58; // Slot Control of a port's PCI Express capability, which is at 0x40
    let port = plan.pci.iter().find(|function| function.role.bridge().is_some()).unwrap().address;
    let control =
        plan.window(WindowKind::Ecam).unwrap().start().get() + (u64::from(port.devfn()) << 12) + CONTROL;
    let mut payload = Payload::new(Ports::USUAL);
    let code = &mut payload.code;
    let again = code.here();
    code.at(control + 2);
    code.load(Width::Word);
    code.raw(&[0x83, 0xe0, 1]); // and eax, 1: attention button pressed
    code.compare(Width::Long, 1);
    code.jne(again);
    code.store(Width::Word);
    code.at(control);
    code.load(Width::Word);
    code.raw(&[0x35]).dword(1 << 10); // xor eax: power controller control
    code.store(Width::Word);
    code.raw(&[0xc1, 0xe8, 10, 0x24, 1, 0x34, b'1']); // shr eax, 10; and al, 1; xor al, '1'
    code.port(Ports::USUAL.serial);
    code.output(Width::Byte);
    code.jmp(again);
    payload.finish(Entry::Pvh)
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_running_machine_takes_a_disk_and_a_vsock_and_refuses_what_it_has() {
    let Some(mut machine) = Machine::running() else { return };
    let image = machine.folder.path().join("disk.raw");
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    let disk = json!({ "path": "disk.raw", "id": "data" });
    let (status, plugged) = machine.add("disk", &disk);
    assert_eq!((status, &plugged["id"]), (200, &json!("data")), "{plugged}");
    assert_eq!(machine.get("/api/v1/vm.info")["device_tree"]["data"]["pci_bdf"], plugged["bdf"]);
    assert_eq!(machine.get("/api/v1/vm.counters")["data"]["failed_requests"], 0);
    assert!(File::open(&image).unwrap().try_lock().is_err(), "the machine has it locked");
    let (status, refused) = machine.add("disk", &json!({ "path": "disk.raw" }));
    assert!(status == 409 && refused[0].as_str().unwrap().contains("already, as \"data\""), "{refused}");
    let (status, refused) = machine.add("disk", &json!({ "path": "missing.raw" }));
    assert!(status == 409 && refused[0].as_str().unwrap().contains("\"blk0\""), "{refused}");
    let (status, vsock) = machine.add("vsock", &json!({ "cid": 3, "socket": "v.sock" }));
    assert_eq!((status, &vsock["id"]), (200, &json!("vsock0")), "{vsock}");
    assert!(machine.folder.path().join("v.sock").exists());
    let (status, refused) = machine.add("vsock", &json!({ "cid": 4, "socket": "w.sock" }));
    assert!(status == 409 && refused[0].as_str().unwrap().contains("vsock"), "{refused}");
    let (status, refused) = machine.add("net", &json!({ "tap": "egm-none" }));
    assert!(status == 409 && refused[0].as_str().unwrap().contains("no slot is free"), "{refused}");
    assert_eq!(machine.ask("PUT /api/v1/vm.shutdown", "").0, 204);
    assert_eq!(machine.child.wait().unwrap().code(), Some(0));
    assert!(File::open(&image).unwrap().try_lock().is_ok(), "it is closed");
    assert!(!machine.folder.path().join("v.sock").exists());
}

#[test]
fn a_hundred_dry_runs_and_refused_plugs_leave_no_descriptor() {
    let Some(machine) = Machine::running() else { return };
    let image = machine.folder.path().join("locked.raw");
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    let image = File::open(image).unwrap();
    image.try_lock().unwrap();
    let round = || {
        let disk = json!({ "type": "virtio-blk", "path": "locked.raw" }).to_string();
        let (status, planned) = machine.ask("PUT /egm/v1/devices?dry-run=1", &disk);
        assert_eq!((status, &planned["id"], &planned["slot"]), (200, &json!("blk0"), &json!(1)), "{planned}");
        let (status, refused) = machine.ask("PUT /egm/v1/devices", &disk);
        assert!(status == 409 && refused.to_string().contains("is in use"), "{refused}");
    };
    round();
    let before = machine.files();
    (0..100).for_each(|_| round());
    assert_eq!(machine.files(), before);
    assert!(machine.has_devices(&[]));
}

#[test]
fn a_thousand_plugs_and_removals_leave_no_descriptor_and_no_slot() {
    let Some(mut machine) = Machine::with_guest(obedient) else { return };
    fs::write(machine.folder.path().join("disk.raw"), vec![0; 1 << 20]).unwrap();
    let disk = json!({ "path": "disk.raw", "id": "data" });
    let mut before = None;
    for round in 0..1000 {
        let (status, plugged) = machine.add("disk", &disk);
        assert_eq!(status, 200, "{round}: {plugged}");
        machine.wait(|machine| machine.printed() == 2 * round + 1);
        let (status, refused) = machine.ask("PUT /api/v1/vm.remove-device", r#"{"id":"data"}"#);
        assert_eq!(status, 204, "{round}: {refused}");
        machine.wait(|machine| machine.printed() == 2 * round + 2);
        machine.wait(|machine| machine.has_devices(&[]));
        let files = machine.files();
        assert_eq!(*before.get_or_insert(files), files, "{round}");
    }
}

#[test]
fn two_hundred_resets_keep_a_plugged_in_disk_and_leave_no_descriptor_and_no_slot() {
    let Some(mut machine) = Machine::running() else { return };
    let ready = |starts: u64| move |machine: &Machine| machine.printed() == starts * 6; // "ready\n"
    machine.wait(ready(1));
    fs::write(machine.folder.path().join("disk.raw"), vec![0; 1 << 20]).unwrap();
    assert_eq!(machine.add("disk", &json!({ "path": "disk.raw", "id": "data" })).0, 200);
    let before = machine.files();
    for starts in 2..=201 {
        let (status, refused) = machine.ask("PUT /api/v1/vm.reboot", "");
        assert_eq!(status, 204, "{refused}");
        machine.wait(ready(starts));
        assert_eq!((machine.files(), machine.has_devices(&["data"])), (before, true), "start {starts}");
    }
    fs::write(machine.folder.path().join("other.raw"), vec![0; 1 << 20]).unwrap();
    let other = json!({ "path": "other.raw", "id": "other" });
    assert_eq!(machine.add("disk", &other).0, 200, "the second port is free");
}

#[test]
fn a_plugged_device_is_unplugged_for_a_snapshot_and_comes_back_in_this_machine_and_the_restored_one() {
    let Some(mut machine) = Machine::with_guest(obedient) else { return };
    let disk = machine.folder.path().join("disk.raw");
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    assert_eq!(machine.add("disk", &json!({ "path": "disk.raw", "id": "data" })).0, 200);
    machine.wait(|machine| machine.printed() == 1);
    let refused = |machine: &Machine, words: &str, why: &str| {
        let output = machine.ctl(words);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(why), "{words}: {output:?}");
    };
    refused(&machine, "snapshot snap", "use vm.pause first");
    assert!(machine.ctl("pause").status.success());
    refused(&machine, "snapshot snap", "snapshot --unplug DIR");
    assert!(machine.ctl("resume").status.success());
    let output = machine.ctl("snapshot --unplug --resume snap");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.ends_with("data is plugged in again\n"), "{output:?}");
    machine.wait(|machine| machine.printed() == 3 && machine.has_devices(&["data"]));
    refused(&machine, "snapshot --unplug snap", "the folder has snapshot.json already");
    assert!(machine.printed() == 3 && machine.has_devices(&["data"]), "nothing is unplugged for that");
    let restore = ["run", "--restore", "snap", "--api", "vm.sock"];
    let mut machine = Machine::started(machine.end(), &restore);
    // A snapshot between the guest's last two instructions has it print again that power is off.
    let printed = |machine: &Machine| fs::read_to_string(machine.folder.path().join("console")).unwrap();
    machine.wait(|machine| matches!(&*printed(machine), "1011" | "10101") && machine.has_devices(&["data"]));
    let plugged = machine.get("/egm/v1/devices");
    assert_eq!((&plugged[0]["id"], plugged[0]["path"].as_str()), (&json!("data"), disk.to_str()));
    let folder = machine.end();
    fs::remove_file(disk).unwrap();
    let mut machine = Machine::started(folder, &restore);
    let missing = |machine: &Machine| {
        let events = machine.ctl("events").stdout;
        String::from_utf8_lossy(&events)
            .contains("\"change\":\"not-plugged\",\"text\":\"cannot plug in device ")
    };
    machine.wait(missing);
    assert!(machine.has_devices(&[]) && machine.get("/egm/v1/machine")["state"] == "running");
}

#[test]
fn slices_come_and_go_as_functions_each_with_a_number_of_its_own_and_leave_no_descriptor() {
    let Some(mut machine) = Machine::with_guest(obedient) else { return };
    let slice = json!({ "region": "local", "size": "2MiB", "node": 0, "as": "device" }).to_string();
    let ids = |machine: &Machine| {
        let slices = machine.get("/egm/v1/slices");
        slices
            .as_array()
            .unwrap()
            .iter()
            .map(|slice| slice["id"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let mut before = None;
    for round in 0..20 {
        let (status, planned) = machine.ask("PUT /egm/v1/slices?dry-run=1", &slice);
        assert!(status == 200 && ids(&machine).is_empty(), "{planned}");
        let (status, plugged) = machine.ask("PUT /egm/v1/slices", &slice);
        assert_eq!((status, &plugged), (200, &planned));
        assert_eq!(plugged["id"], format!("egm{round}"));
        assert_eq!((&plugged["bars"][1]["size"], &plugged["region"]), (&json!(2 << 20), &Value::Null));
        machine.wait(|machine| machine.printed() == 2 * round + 1);
        assert_eq!(ids(&machine), [format!("egm{round}")]);
        let output = machine.ctl(&format!("unplug egm{round}"));
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.ends_with("memory of this process: it is free\n"),
            "{output:?}"
        );
        assert!(machine.has_devices(&[]) && ids(&machine).is_empty());
        machine.wait(|machine| machine.printed() == 2 * round + 2);
        let files = machine.files();
        assert_eq!(*before.get_or_insert(files), files, "{round}");
    }
}

#[test]
fn a_slice_that_no_machine_takes_is_refused_and_leaves_nothing() {
    let Some(machine) = Machine::running() else { return };
    let refused = |slice: Value, status: u16, words: &str| {
        let (is, texts) = machine.ask("PUT /egm/v1/slices", &slice.to_string());
        assert!(is == status && texts.to_string().contains(words), "{slice}: {is}, {texts}");
    };
    let slice = |key: &str, value: Value| {
        let mut slice = json!({ "region": "local", "size": "2MiB", "node": 0, "as": "device" });
        slice[key] = value;
        slice
    };
    refused(slice("as", json!("memory")), 400, "cannot add memory to a guest that runs");
    refused(slice("size", json!("1MiB")), 400, "size: ");
    refused(slice("node", json!(7)), 409, "the guest has no node 7");
    refused(slice("size", json!("2GiB")), 409, "\\\"window64\\\"");
    refused(slice("region", json!("egm99")), 500, "egm99");
    assert_eq!(machine.get("/egm/v1/slices"), json!([]));
    assert_eq!(machine.ask("PUT /egm/v1/slices", &slice("as", json!("device")).to_string()).0, 200);
    let refuse = |words: &str, why: &str| {
        let output = machine.ctl(words);
        assert!(
            !output.status.success() && String::from_utf8_lossy(&output.stderr).contains(why),
            "{output:?}"
        );
    };
    refuse("snapshot --unplug snap", "it is a slice and its bytes would be lost");
    assert!(!machine.folder.path().join("snap").exists());
    machine.end(); // with the slice
}

#[test]
fn a_machine_that_is_restored_and_did_not_run_yet_is_saved_with_the_devices_that_it_waits_for() {
    let Some(machine) = Machine::running() else { return };
    assert!(machine.ctl("pause").status.success());
    let body = |folder: &str, device: Value| json!({ "folder": folder, "unplugged": [device] }).to_string();
    let snap = machine.folder.path().join("snap").to_str().unwrap().to_owned();
    let rng = json!({ "type": "virtio-rng", "id": "noise" });
    assert_eq!(machine.ask("PUT /egm/v1/snapshot?dry-run=1", &body(&snap, rng.clone())).0, 204);
    assert!(!Path::new(&snap).exists());
    assert_eq!(machine.ask("PUT /egm/v1/snapshot", &body("snap", rng.clone())).0, 400, "a relative path");
    assert_eq!(machine.ask("PUT /egm/v1/snapshot", &body(&snap, json!({}))).0, 400, "no device");
    assert_eq!(machine.ask("PUT /egm/v1/snapshot", &body(&snap, rng)).0, 204);
    let mut machine = Machine::serving(machine.end());
    assert!(machine.ctl("restore snap").status.success());
    assert!(machine.ctl("snapshot again").status.success());
    let state = fs::read(machine.folder.path().join("again/state.json")).unwrap();
    let state: Value = serde_json::from_slice(&state).unwrap();
    assert_eq!(state["unplugged"][0]["id"], "noise");
    assert!(machine.ctl("resume").status.success());
    machine.wait(|machine| machine.has_devices(&["noise"]));
}

#[test]
fn a_plugged_device_is_unplugged_for_an_upgrade_and_comes_back_after_it() {
    let Some(machine) = Machine::with_guest(obedient) else { return };
    let mut machine = Machine::serving(machine.end());
    fs::write(machine.folder.path().join("disk.raw"), vec![0; 1 << 20]).unwrap();
    assert!(machine.ctl("create vm.json").status.success() && machine.ctl("boot").status.success());
    assert_eq!(machine.add("disk", &json!({ "path": "disk.raw", "id": "data" })).0, 200);
    machine.wait(|machine| machine.printed() == 1);
    let refused = |machine: &Machine, words: &str, why: &str| {
        let output = machine.ctl(words);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(why), "{words}: {output:?}");
    };
    refused(&machine, "upgrade", "or upgrade --unplug");
    assert!(machine.printed() == 1 && machine.has_devices(&["data"]));
    refused(&machine, "upgrade --unplug --program missing", "No such file or directory");
    assert!(machine.printed() == 1 && machine.has_devices(&["data"]), "a dry run finds that");
    assert!(machine.ctl("upgrade --unplug --dry-run").status.success());
    assert_eq!(machine.printed(), 1);
    let output = machine.ctl("upgrade --unplug");
    assert!(output.status.success(), "{output:?}");
    machine.wait(|machine| machine.printed() == 3 && machine.has_devices(&["data"]));
    assert_eq!(machine.get("/egm/v1/upgrade")["state"], "done");
    assert_eq!(machine.ask("PUT /api/v1/vmm.shutdown", "").0, 204);
    assert_eq!(machine.child.wait().unwrap().code(), Some(0));
}
