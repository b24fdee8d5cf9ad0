//! The broker with the ledger under it: its grants are memory, locked and recorded.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a failure fails the test")]

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, mpsc};

use egm_address::{ByteSize, Hpa};
use egm_device::backing::BackingError;
use egm_device::broker::{Client, GrantFailure, LedgerSource, Server, SliceRequest, Source};
use egm_device::carve::plan::Request;
use egm_device::ledger::{Identity, Ledger, Memory, Paths, Watch};
use egm_device::owner::Owner;
use egm_device::policy::Policy;
use egm_device::region::{Region, RegionKind, Slice};
use egm_device::retired::Retired;
use egm_device::{Backing, Mapping};

const SIZE: u64 = 8 << 20;

fn region() -> Region {
    Region {
        name: "local".into(),
        kind: RegionKind::Memfd,
        node: None,
        size: ByteSize::new(SIZE),
        page_size: ByteSize::new(4096),
        base: None,
        functions: Vec::new(),
        retired: Retired::new((0..2000).map(|page| (page * 4096, 4096)), SIZE, 4096),
    }
}

#[test]
fn a_granted_slice_is_in_the_ledger_under_its_client_and_usable_as_memory() {
    let folder = tempfile::tempdir().unwrap();
    let identity = Identity { machine: Some("host".into()), boot: "boot".into() };
    let ledger = Ledger::open(Paths::below(folder.path()), identity).unwrap();
    let path = folder.path().join("socket");
    let source = Arc::new(LedgerSource::new(ledger.clone(), vec![region()]));
    let mut server = Server::listen(&path, Policy::root_only(), source).unwrap();
    std::thread::spawn(move || server.run());

    let take = SliceRequest {
        name: "vm7".into(),
        regions: vec!["egm".into(), "memfd".into()],
        size: SIZE,
        align: 0,
        class: None,
        wait: false,
    };
    let lease = Client::connect(&path).unwrap().take(&take, |_| ()).unwrap();
    assert_eq!(*lease.region(), region(), "its retired pages are more than a packet holds");
    let held = ledger.states(&region()).unwrap().held;
    let owner = held[0].owner.as_ref().unwrap();
    assert_eq!((owner.name.as_str(), owner.pid), ("vm7", std::process::id()));
    assert!(owner.is_alive());

    let memory = lease.backing().unwrap();
    assert_eq!((memory.size(), memory.offset()), (SIZE, 0));
    drop(Mapping::new(memory.as_ref(), 0, SIZE, 0).unwrap());
    drop(memory);

    let refused = Client::connect(&path).unwrap().take(&take, |_| ()).unwrap_err().to_string();
    assert!(refused.contains("rule \"root\": 8MiB does not fit in \"local\" now"), "{refused}");
    lease.return_slice(&AtomicBool::new(false)).unwrap();
    assert!(
        ledger.states(&region()).unwrap().held.is_empty(),
        "the kernel counts no other description of it"
    );
}

#[test]
fn a_broker_of_a_copied_host_opens_no_device() {
    let folder = tempfile::tempdir().unwrap();
    let identity = Identity { machine: Some("host".into()), boot: "boot".into() };
    let ledger = Ledger::open(Paths::below(folder.path()), identity).unwrap();
    let device = folder.path().join("mem");
    std::fs::write(&device, "precious").unwrap();
    for kind in [RegionKind::Reserved { device: device.clone() }, RegionKind::Egm { device: device.clone() }]
    {
        let region = Region { kind, base: Some(Hpa::new(1 << 30)), retired: Retired::default(), ..region() };
        let source = LedgerSource::new(ledger.clone(), vec![region]);
        let request = Request::new(4096, Owner::this("vm"));
        let Err(GrantFailure::Failed(why)) = source.grant("local", &request, &AtomicBool::new(false)) else {
            panic!("the device was opened");
        };
        assert!(why.contains("--root names a copy of another host"), "{why}");
    }
    assert_eq!(std::fs::read(&device).unwrap(), b"precious");
}

/// Plain files in the place of `/dev/mem`; each open of region "stuck" reports so and waits for the test.
struct Stuck {
    file: PathBuf,
    opens: Mutex<mpsc::Sender<()>>,
    go: Mutex<mpsc::Receiver<()>>,
}

struct Window(File, u64, u64);

impl Backing for Window {
    fn file(&self) -> &File {
        &self.0
    }
    fn offset(&self) -> u64 {
        self.1
    }
    fn size(&self) -> u64 {
        self.2
    }
    fn page_size(&self) -> u64 {
        4096
    }
    fn is_invisible(&self) -> bool {
        true
    }
    fn outlives_power(&self) -> bool {
        false
    }
}

impl Memory for Stuck {
    fn open(&self, region: &Region, slice: &Slice, _: &Watch<'_>) -> Result<Box<dyn Backing>, BackingError> {
        if region.name == "stuck" {
            self.opens.lock().unwrap().send(()).unwrap();
            // The end of the test drops the sender.
            let _ = self.go.lock().unwrap().recv();
        }
        let file = File::options().read(true).write(true).open(&self.file).unwrap();
        Ok(Box::new(Window(file, slice.offset, slice.size.get())))
    }
}

#[test]
fn a_scrub_of_idle_memory_that_the_kernel_keeps_waiting_holds_up_no_other_region() {
    let folder = tempfile::tempdir().unwrap();
    let identity = Identity { machine: Some("host".into()), boot: "boot".into() };
    let ledger = Ledger::open(Paths::below(folder.path()), identity).unwrap();
    let file = folder.path().join("memory");
    File::create(&file).unwrap().set_len(SIZE).unwrap();
    let region = |name: &str, base| Region {
        name: name.into(),
        kind: RegionKind::Reserved { device: file.clone() },
        base: Some(Hpa::new(base)),
        retired: Retired::default(),
        ..region()
    };
    let regions = vec![region("stuck", 1 << 30), region("other", 2 << 30)];
    let ((opens, opened), (go, goes)) = (mpsc::channel(), mpsc::channel());
    let memory = Stuck { file: file.clone(), opens: Mutex::new(opens), go: Mutex::new(goes) };
    let source = LedgerSource::new(ledger, regions).reaching(Arc::new(memory)).scrubbing(1 << 40);
    let path = folder.path().join("socket");
    let mut server = Server::listen(&path, Policy::root_only(), Arc::new(source)).unwrap();
    std::thread::spawn(move || server.run());
    opened.recv().unwrap();
    let take = SliceRequest {
        name: "vm".into(),
        regions: vec!["other".into()],
        size: 4096,
        align: 0,
        class: None,
        wait: false,
    };
    let lease = Client::connect(&path).unwrap().take(&take, |_| ()).unwrap();
    assert_eq!(lease.region().name, "other");
    drop(go);
}
