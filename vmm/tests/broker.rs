//! A machine with a slice from a broker.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use egm_address::ByteSize;
use egm_device::broker::{Client, LedgerSource, Server, SliceRequest};
use egm_device::ledger::{Identity, Ledger, Paths};
use egm_device::policy::Policy;
use egm_device::region::{Region, RegionKind};
use egm_device::retired::Retired;
use egm_fixtures::payload::{Entry, Ports};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use serde_json::json;

/// A pool that has room for one machine's slice.
fn region() -> Region {
    Region {
        name: "local".into(),
        kind: RegionKind::Memfd,
        node: None,
        size: ByteSize::new(64 << 20),
        page_size: ByteSize::new(4096),
        base: None,
        functions: Vec::new(),
        retired: Retired::default(),
    }
}

/// A request that waits for `mib` MiB of the pool.
fn take(mib: u64) -> SliceRequest {
    let regions = vec!["memfd".into()];
    SliceRequest { name: "next".into(), regions, size: mib << 20, align: 0, class: None, wait: true }
}

/// A broker of root's, in this process.
fn broker(folder: &Path) -> Ledger {
    let identity = Identity { machine: Some("host".into()), boot: "boot".into() };
    let ledger = Ledger::open(Paths::below(folder), identity).unwrap();
    let source = Arc::new(LedgerSource::new(ledger.clone(), vec![region()]));
    let mut server = Server::listen(&folder.join("socket"), Policy::root_only(), source).unwrap();
    std::thread::spawn(move || server.run());
    ledger
}

/// Why the tests cannot run here.
fn skipped() -> bool {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        println!("skipped: /dev/kvm: {error}");
        return true;
    }
    if !geteuid().is_root() {
        println!("skipped: the policy of this test grants slices to root alone");
        return true;
    }
    false
}

fn command(folder: &Path, name: &str, regions: &[&str]) -> Command {
    command_of(folder, name, &json!([{ "region": regions, "size": "48MiB", "node": 1 }]))
}

fn command_of(folder: &Path, name: &str, slices: &serde_json::Value) -> Command {
    let config = json!({
        "name": name,
        "memory": { "size": "15MiB" },
        "egm": slices,
        "boot": { "kernel": "kernel" },
    });
    let path = folder.join(format!("{name}.json"));
    std::fs::write(&path, config.to_string()).unwrap();
    let mut command = Command::new("timeout");
    command.args(["--foreground", "--signal=KILL", "60", env!("CARGO_BIN_EXE_egm-vmm"), "run"]);
    command.arg(path).arg("--broker").arg(folder.join("socket"));
    command
}

#[test]
fn a_granted_slice_is_the_machines_alone_until_its_end() {
    if skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let ledger = broker(folder.path());
    std::fs::write(folder.path().join("kernel"), egm_fixtures::payload::halt(Ports::USUAL)).unwrap();

    let mut first = command(folder.path(), "vm1", &["egm", "memfd"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let mut byte = [0];
    while byte != *b"\n" {
        first.stdout.as_mut().unwrap().read_exact(&mut byte).unwrap();
    }
    let held = ledger.states(&region()).unwrap().held;
    let names: Vec<_> = held.iter().map(|held| held.owner.as_ref().unwrap().name.as_str()).collect();
    assert_eq!((names.as_slice(), held[0].span.size()), (["vm1"].as_slice(), 48 << 20));

    let second = command(folder.path(), "vm2", &["egm", "memfd"]).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(3), "{said}");
    assert!(
        said.contains("cannot borrow slice \"egm0\" from the broker") && said.contains("does not fit"),
        "{said}"
    );

    std::fs::write(folder.path().join("kernel"), egm_fixtures::payload::hello(Ports::USUAL, Entry::Pvh))
        .unwrap();
    let third = command(folder.path(), "vm3", &["memfd", "local"]).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&third.stderr);
    assert_eq!(third.status.code(), Some(0), "{said}");
    assert!(
        said.contains("note: egm0 comes from \"local\"") && said.contains("\"memfd\" was unavailable"),
        "{said}"
    );

    kill_process(Pid::from_child(&first), Signal::TERM).unwrap();
    assert_eq!(first.wait().unwrap().code(), Some(0));
    // The broker takes a pool's slice back a moment after the process is gone: a waiting request then gets all of it.
    let all = take(64);
    assert!(Client::connect(&folder.path().join("socket")).unwrap().take(&all, |_| ()).is_ok());
}

/// Two machines that each kept a pool's slice and waited for a second one would wait for ever.
#[test]
fn a_machine_that_waits_holds_no_slice_of_a_pool() {
    if skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let _ledger = broker(folder.path());
    let connect = || Client::connect(&folder.path().join("socket")).unwrap();
    let first = connect().take(&take(24), |_| ()).unwrap();
    std::fs::write(folder.path().join("kernel"), egm_fixtures::payload::hello(Ports::USUAL, Entry::Pvh))
        .unwrap();
    let slice =
        |mib: u64, node: u32| json!({ "region": ["memfd"], "size": format!("{mib}MiB"), "node": node });
    let mut machine = command_of(folder.path(), "vm", &json!([slice(24, 1), slice(40, 2)]))
        .arg("--wait")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(machine.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.any(|line| line.contains("egm1")), "the machine does not wait for its second slice");

    let (granted, grant) = mpsc::channel();
    let second = connect();
    std::thread::spawn(move || granted.send(Box::new(second.take(&take(40), |_| ()).unwrap())));
    let second =
        grant.recv_timeout(Duration::from_secs(30)).expect("the machine keeps a slice while it waits");
    for lease in [first, *second] {
        lease.return_slice(&AtomicBool::new(false)).unwrap();
    }
    let rest: Vec<_> = said.filter(|line| line.contains("waits")).collect();
    assert!(rest.len() <= 1, "each slice is announced once: {rest:?}");
    assert_eq!(machine.wait().unwrap().code(), Some(0), "{rest:?}");
}
