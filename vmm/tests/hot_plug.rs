//! Devices that come to a running machine by cloud-hypervisor's requests. The guest sleeps; scenario `virtio-hotplug` has one
//! that uses them.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use egm_fixtures::payload::{Ports, halt};
use serde_json::{Value, json};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-vmm");

/// A machine with two spare ports, once it runs.
struct Machine {
    folder: TempDir,
    child: Child,
}

impl Machine {
    /// Prints why not where none can run.
    fn running() -> Option<Self> {
        if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
            println!("skipped: /dev/kvm: {error}");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("kernel"), halt(Ports::USUAL)).unwrap();
        let config = json!({
            "memory": { "size": "16MiB" },
            "boot": { "kernel": "kernel" },
            "console": "null",
            "pcie": { "spare": { "ports": 2 } },
        });
        fs::write(folder.path().join("vm.json"), config.to_string()).unwrap();
        let child = Command::new(PROGRAM)
            .args(["run", "vm.json", "--api", "vm.sock"])
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mut machine = Self { folder, child };
        while UnixStream::connect(machine.folder.path().join("vm.sock")).is_err()
            || machine.get("/egm/v1/machine")["state"] != "running"
        {
            assert_eq!(machine.child.try_wait().unwrap(), None, "it ends");
            std::thread::yield_now();
        }
        Some(machine)
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

    fn get(&self, path: &str) -> Value {
        self.ask(&format!("GET {path}"), "").1
    }

    fn add(&self, what: &str, device: &Value) -> (u16, Value) {
        self.ask(&format!("PUT /api/v1/vm.add-{what}"), &device.to_string())
    }
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
    // Without connections of clients, which close a moment later.
    let is_file = |path: &std::path::Path| {
        fs::read_link(path).is_ok_and(|to| !to.to_string_lossy().starts_with("socket:"))
    };
    let files = || {
        let folder = fs::read_dir(format!("/proc/{}/fd", machine.child.id())).unwrap();
        folder.filter(|entry| entry.as_ref().is_ok_and(|entry| is_file(&entry.path()))).count()
    };
    let round = || {
        let disk = json!({ "type": "virtio-blk", "path": "locked.raw" }).to_string();
        let (status, planned) = machine.ask("PUT /egm/v1/devices?dry-run=1", &disk);
        assert_eq!((status, &planned["id"], &planned["slot"]), (200, &json!("blk0"), &json!(1)), "{planned}");
        let (status, refused) = machine.ask("PUT /egm/v1/devices", &disk);
        assert!(status == 409 && refused.to_string().contains("is in use"), "{refused}");
    };
    round();
    let before = files();
    (0..100).for_each(|_| round());
    assert_eq!(files(), before);
    assert!(machine.get("/api/v1/vm.info")["device_tree"].as_object().unwrap().is_empty());
}
