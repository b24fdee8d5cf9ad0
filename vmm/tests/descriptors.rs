//! What a machine or a device opens is closed when it has ended: a process may run one machine after another.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use egm_fixtures::payload::{Entry, Ports};
use egm_vmm::facts::{Scope, of_host};
use egm_vmm::machine::{BuildError, Ended, ExitReason, build};
use egm_vmm::reserve::{Leases, Servers};
use egm_vmm::resources::Resources;
use egm_vmm::virtio::blk::{Block, Disk};
use egm_vmm::virtio::rng::Rng;
use egm_vmm::virtio::vsock::{Backend, HostSockets, Vsock};
use egm_vmm::virtio::{Activation, Interrupt, VirtioDevice};
use egm_vmm::{config, plan};
use event_manager::{EventManager, SubscriberOps};
use serde_json::json;
use tempfile::TempDir;
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

/// Descriptors are the process's, and `cargo test` runs these tests in one.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Every open descriptor and what it is, but for the one that lists them.
fn open() -> BTreeMap<String, PathBuf> {
    let list = fs::read_dir("/proc/self/fd").unwrap();
    let named = list.filter_map(|entry| {
        let entry = entry.unwrap();
        Some((entry.file_name().into_string().unwrap(), fs::read_link(entry.path()).ok()?))
    });
    named.filter(|(_, what)| !what.ends_with("fd")).collect()
}

/// Builds and runs a machine with kernel `kernel` and every device that needs no help of the host.
fn run(folder: &Path, kernel: &[u8]) -> Result<Ended, BuildError> {
    fs::write(folder.join("kernel"), kernel).unwrap();
    fs::File::create(folder.join("disk")).unwrap().set_len(1 << 20).unwrap();
    let file = folder.join("vm.json");
    let text = json!({
        "cpus": { "count": 2 },
        "memory": { "size": "64MiB" },
        "boot": { "kernel": "kernel" },
        "console": { "type": "socket", "path": "console" },
        "devices": [
            { "type": "virtio-blk", "path": "disk" },
            { "type": "virtio-rng" },
            { "type": "virtio-vsock", "cid": 3, "socket": "vsock" },
        ],
    });
    fs::write(&file, text.to_string()).unwrap();
    let spec = config::load(&file).unwrap();
    let facts = of_host(&Scope::of(&spec)).unwrap();
    let plan = plan::plan(&spec, &facts).unwrap();
    let resources =
        Resources::open(&plan, &facts, &Leases::default(), Servers::default(), &|_, _| {}).unwrap();
    build(&plan, resources, &Arc::default()).map(|machine| machine.run(&|_| ()))
}

#[test]
fn a_machine_that_ended_or_could_not_be_built_leaves_no_descriptor_open() {
    if let Err(error) = fs::File::options().read(true).write(true).open("/dev/kvm") {
        return println!("skipped: /dev/kvm: {error}");
    }
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    // The handler of SIGBUS stays, with one descriptor for the whole process.
    drop(egm_device::poison::PoisonWatch::new().unwrap());
    let before = open();
    let ended = run(folder.path(), &egm_fixtures::payload::hello(Ports::USUAL, Entry::Pvh)).unwrap();
    assert_eq!(ended.reason, ExitReason::PoweredOff);
    assert_eq!(open(), before);
    assert!(run(folder.path(), b"no kernel").is_err());
    assert_eq!(open(), before);
}

/// A driver that only looks at memory.
struct Deaf;

impl Interrupt for Deaf {
    fn queue(&self, _index: u16) {}
    fn config(&self) {}
    fn queue_eventfd(&self, _index: u16) -> Option<Arc<EventFd>> {
        None
    }
}

/// The activation by a driver that enabled every queue.
fn activation(device: &dyn VirtioDevice) -> Activation {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10_0000)]).unwrap();
    let queue = |(base, size): (u64, &u16)| {
        let mut queue = Queue::new(*size).unwrap();
        queue.try_set_desc_table_address(GuestAddress(base)).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(base + 0x4000)).unwrap();
        queue.try_set_used_ring_address(GuestAddress(base + 0x8000)).unwrap();
        queue.set_ready(true);
        Some(queue)
    };
    let queues = (0..).step_by(0x1_0000).zip(device.queue_sizes()).map(queue).collect();
    Activation { memory, queues, features: device.features(), interrupt: Arc::new(Deaf) }
}

/// Runs `device` ten times, `between` a driver's start and its reset, and gives it a way to turn the event loop.
fn resets<D: VirtioDevice + 'static>(device: D, mut between: impl FnMut(&mut dyn FnMut())) {
    let device = Arc::new(Mutex::new(device));
    let mut events: EventManager<Arc<Mutex<D>>> = EventManager::new().unwrap();
    events.add_subscriber(device.clone());
    let mut turn = || while events.run_with_timeout(0).unwrap() > 0 {};
    let before = open();
    for _ in 0..10 {
        let given = activation(&*device.lock().unwrap());
        device.lock().unwrap().activate(given).unwrap();
        between(&mut turn);
        device.lock().unwrap().reset();
        while !device.lock().unwrap().is_quiescent() {
            turn();
        }
        assert_eq!(open(), before);
    }
}

#[test]
fn a_device_that_is_reset_gives_back_what_it_opened_for_its_driver() {
    let _alone = alone();
    resets(Rng::new().unwrap(), |turn| turn());
    let disk = tempfile::tempfile().unwrap();
    disk.set_len(1 << 20).unwrap();
    resets(Block::new(Disk::new(disk, false).unwrap(), "disk").unwrap(), |turn| turn());
}

#[test]
fn connections_of_host_programs_are_closed_by_a_reset() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("vsock");
    let sockets = HostSockets::bind(&path).unwrap();
    resets(Vsock::new(3, Backend::Userspace(sockets)).unwrap(), |turn| {
        let mut program = UnixStream::connect(&path).unwrap();
        let before = open();
        turn();
        assert_eq!(open().len(), before.len() + 1, "the device has the other end");
        program.write_all(b"CONNECT 5\n").unwrap();
        turn();
    });
}
