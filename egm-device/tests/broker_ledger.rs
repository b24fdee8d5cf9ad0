//! The broker with the ledger under it: its grants are memory, locked and recorded.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use egm_address::{ByteSize, Hpa};
use egm_device::Mapping;
use egm_device::broker::{Client, LedgerSource, NotMade, Server, Source, Take};
use egm_device::carve::plan::Request;
use egm_device::ledger::{Identity, Ledger, Paths};
use egm_device::owner::Owner;
use egm_device::policy::Policy;
use egm_device::region::{Region, RegionKind};
use egm_device::retired::Retired;

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
fn a_lent_slice_is_in_the_ledger_under_its_client_and_usable_as_memory() {
    let folder = tempfile::tempdir().unwrap();
    let identity = Identity { machine: Some("host".into()), boot: "boot".into() };
    let ledger = Ledger::open(Paths::below(folder.path()), identity).unwrap();
    let path = folder.path().join("socket");
    let source = Arc::new(LedgerSource::new(ledger.clone(), vec![region()]));
    let mut server = Server::listen(&path, Policy::root_only(), source).unwrap();
    std::thread::spawn(move || server.run());

    let take = Take {
        name: "vm7".into(),
        regions: vec!["egm".into(), "memfd".into()],
        size: SIZE,
        align: 0,
        class: None,
        wait: false,
    };
    let loan = Client::connect(&path).unwrap().take(&take, |_| ()).unwrap();
    assert_eq!(*loan.region(), region(), "its retired pages are more than a packet holds");
    let held = ledger.states(&region()).unwrap().held;
    let owner = held[0].owner.as_ref().unwrap();
    assert_eq!((owner.name.as_str(), owner.pid), ("vm7", std::process::id()));
    assert!(owner.is_alive());

    let memory = loan.backing().unwrap();
    assert_eq!((memory.size(), memory.offset()), (SIZE, 0));
    drop(Mapping::new(memory.as_ref(), 0, SIZE, 0).unwrap());
    drop(memory);

    let refused = Client::connect(&path).unwrap().take(&take, |_| ()).unwrap_err().to_string();
    assert!(refused.contains("rule \"root\": 8MiB does not fit in \"local\" now"), "{refused}");
    loan.give_back(&AtomicBool::new(false)).unwrap();
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
        let Err(NotMade::Failed(why)) = source.grant("local", &request, &AtomicBool::new(false)) else {
            panic!("the device was opened");
        };
        assert!(why.contains("--root names a copy of a host"), "{why}");
    }
    assert_eq!(std::fs::read(&device).unwrap(), b"precious");
}
