//! A machine with a device of a vfio-user server: what the server receives, and what remains of it.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use egm_fixtures::function::config::Identity;
use egm_fixtures::function::device::{Function, Setup};
use egm_fixtures::payload::{Entry, Ports, halt};
use egm_vfio::host::HostBarKind;
use egm_vfio_wire::message::{DeviceInfo, DmaMap, DmaUnmap, IrqInfo, RegionInfo, SetIrqs};
use egm_vfio_wire::serve::{Device, serve};
use egm_vfio_wire::socket::{BusyPoll, Connection};
use egm_vmm::facts::{Facts, Scope, of_host};
use egm_vmm::machine::{ExitReason, build};
use egm_vmm::plan::Plan;
use egm_vmm::reserve::{Leases, Servers};
use egm_vmm::resources::Resources;
use egm_vmm::{config, plan};
use rustix::io::Errno;
use serde_json::{Value, json};

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-vmm");

const SETUP: Setup = Setup {
    identity: Identity { vendor: 0x10de, device: 0x2342, class: 0x03_0200 },
    bar: 1 << 30,
    memory: 4 << 20,
    vectors: 4,
};

/// A request to a server, in short.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Asked {
    /// Address, bytes, and whether a file came.
    Map(u64, u64, bool),
    /// A file that the server could shrink.
    Shrunk,
    Reset,
    Left,
}

/// A function that records its requests.
struct Recorder {
    function: Function,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Recorder {
    fn note(&self, asked: Asked) {
        self.asked.lock().unwrap().push(asked);
    }
}

impl Device for Recorder {
    fn info(&self) -> DeviceInfo {
        self.function.info()
    }
    fn region(&self, index: u32) -> (RegionInfo, Option<BorrowedFd<'_>>) {
        self.function.region(index)
    }
    fn irq(&self, index: u32) -> IrqInfo {
        self.function.irq(index)
    }
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        self.function.read(region, offset, data);
    }
    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        self.function.write(region, offset, data);
    }
    fn dma_map(&mut self, map: DmaMap, file: Option<OwnedFd>) -> Result<(), Errno> {
        self.note(Asked::Map(map.address, map.size, file.is_some()));
        if file.as_ref().is_some_and(|file| rustix::fs::ftruncate(file, 0).is_ok()) {
            self.note(Asked::Shrunk);
        }
        self.function.dma_map(map, file)
    }
    fn dma_unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        self.function.dma_unmap(unmap)
    }
    fn set_irqs(&mut self, set: SetIrqs<'_>, eventfds: Vec<OwnedFd>) -> Result<(), Errno> {
        self.function.set_irqs(set, eventfds)
    }
    fn reset(&mut self) -> Result<(), Errno> {
        self.note(Asked::Reset);
        self.function.reset()
    }
    fn disconnected(&mut self) {
        self.note(Asked::Left);
        self.function.disconnected();
    }
}

/// A server for one client, and what it was asked when that has left.
fn server(socket: &Path) -> JoinHandle<Vec<Asked>> {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        let (client, _) = listener.accept().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let mut device = Recorder { function: Function::new(SETUP).unwrap(), asked: Arc::clone(&asked) };
        let mut connection = Connection::new(client.into(), Duration::from_secs(20), BusyPoll::NONE).unwrap();
        serve(&mut connection, &mut device).unwrap();
        asked.lock().unwrap().clone()
    })
}

/// A machine with the device of the server at `folder`'s `fn.sock`, up to its plan.
fn planned(folder: &Path) -> (Plan, Facts, Servers) {
    fs::write(folder.join("kernel"), egm_fixtures::payload::hello(Ports::USUAL, Entry::Pvh)).unwrap();
    let file = folder.join("vm.json");
    let text = json!({
        "memory": { "size": "512MiB" },
        "egm": [{ "region": ["guest-memfd", "local"], "size": "32MiB", "node": 1 }],
        "boot": { "kernel": "kernel" },
        "console": "null",
        "devices": [{ "type": "vfio-user", "socket": "fn.sock" }],
    });
    fs::write(&file, text.to_string()).unwrap();
    let spec = config::load(&file).unwrap();
    let servers = Servers::of(&spec.devices).unwrap();
    let facts = Facts { servers: servers.facts(), ..of_host(&Scope::of(&spec)).unwrap() };
    (plan::plan(&spec, &facts).unwrap(), facts, servers)
}

#[test]
fn the_plans_facts_of_a_device_are_its_servers() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(&folder.path().join("fn.sock"));
    let (plan, facts, servers) = planned(folder.path());
    let bars: Vec<_> = facts.servers[0].bars.iter().map(|bar| (bar.index, bar.kind, bar.size)).collect();
    assert_eq!(bars, [(0, HostBarKind::Memory32, 0x4000), (2, HostBarKind::Memory64Prefetchable, SETUP.bar)]);
    assert_eq!(plan.pci.iter().map(|function| function.msix_vectors).max(), Some(4));
    drop(servers);
    assert_eq!(server.join().unwrap(), [Asked::Left]);
}

#[test]
fn a_server_gets_all_of_the_guests_memory_as_files_and_nothing_after_its_end() {
    if let Err(error) = fs::File::options().read(true).write(true).open("/dev/kvm") {
        return println!("skipped: /dev/kvm: {error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let server = server(&folder.path().join("fn.sock"));
    let (plan, facts, servers) = planned(folder.path());
    let resources = Resources::open(&plan, &facts, &Leases::default(), servers, &|_, _| {}).unwrap();
    let ended = build(&plan, resources, &Arc::default()).unwrap().run(&|_| ());
    assert_eq!(ended.reason, ExitReason::PoweredOff);
    drop(ended);
    let asked = server.join().unwrap();
    let is_shared = |(start, size): (u64, u64)| {
        asked.iter().any(|asked| match asked {
            Asked::Map(at, bytes, true) => *at <= start && start + size <= at + bytes,
            _ => false,
        })
    };
    assert!(plan.memory.iter().all(|memory| is_shared((memory.span.start().get(), memory.span.size()))));
    assert!(asked.iter().all(|asked| !matches!(asked, Asked::Map(_, _, false))), "{asked:?}");
    assert!(!asked.contains(&Asked::Shrunk), "a server can shrink the guest's memory: {asked:?}");
    // Before the guest has it, and after.
    assert_eq!(asked.iter().filter(|asked| **asked == Asked::Reset).count(), 2);
    assert_eq!(asked.last(), Some(&Asked::Left));
}

/// The output of `egm-vmm ctl` with `words`, for the machine in `folder`.
fn ctl(folder: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(PROGRAM);
    command.args(["ctl", "--api", "vm.sock", "--json"]).args(words).current_dir(folder).output().unwrap()
}

/// The answer of the machine in `folder` to a `ctl` that succeeds.
#[track_caller]
fn answer(folder: &Path, words: &[&str]) -> Value {
    let output = ctl(folder, words);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A machine in `folder` with `memory` and a spare port, once it runs.
fn running(folder: &Path, memory: &str) -> Child {
    fs::write(folder.join("kernel"), halt(Ports::USUAL)).unwrap();
    let config = json!({
        "memory": { "size": memory },
        "boot": { "kernel": "kernel" },
        "console": "null",
        "pcie": { "spare": { "ports": 1 } },
    });
    fs::write(folder.join("vm.json"), config.to_string()).unwrap();
    let mut machine = Command::new(PROGRAM)
        .args(["run", "vm.json", "--api", "vm.sock"])
        .current_dir(folder)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    while !String::from_utf8_lossy(&ctl(folder, &["machine"]).stdout).contains("\"running\"") {
        assert_eq!(machine.try_wait().unwrap(), None, "it ends");
        std::thread::yield_now();
    }
    machine
}

#[test]
fn a_plugged_device_reaches_the_guests_memory_and_its_server_is_left_at_the_end() {
    if let Err(error) = fs::File::options().read(true).write(true).open("/dev/kvm") {
        return println!("skipped: /dev/kvm: {error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let server = server(&folder.join("fn.sock"));
    let mut machine = running(folder, "64MiB");
    let device = r#"{"type":"vfio-user","socket":"fn.sock"}"#;
    let planned = ctl(folder, &["plug", device, "--dry-run"]);
    assert_eq!(planned.status.code(), Some(3), "{planned:?}");
    let plugged = answer(folder, &["plug", device, "--id", "card"]);
    assert_eq!((&plugged["id"], plugged["bars"][1]["size"].as_u64()), (&json!("card"), Some(SETUP.bar)));
    assert_eq!(answer(folder, &["info"])["device_tree"]["card"]["pci_bdf"], plugged["address"]);
    let again = ctl(folder, &["plug", device]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("already, as \"card\""), "{again:?}");
    assert!(ctl(folder, &["shutdown", "--timeout", "0"]).status.success());
    assert_eq!(machine.wait().unwrap().code(), Some(0));
    let asked = server.join().unwrap();
    let mapped = asked.iter().map(|asked| match asked {
        Asked::Map(_, bytes, true) => *bytes,
        _ => 0,
    });
    assert!(mapped.sum::<u64>() > 60 << 20, "{asked:?}"); // all but holes
    assert!(!asked.contains(&Asked::Shrunk) && asked.contains(&Asked::Reset), "{asked:?}");
    assert_eq!(asked.last(), Some(&Asked::Left));
}
