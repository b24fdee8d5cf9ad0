//! Regions with one file for all slices: no user gets that file unless a rule or the operator permits it.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "other tests use the rest")]
mod dax_host;

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use dax_host::{DaxHost, MIB};
use egm_device::broker::{BrokerLease, Client, ClientError, SliceRequest};
use egm_vfio_wire::client::Client as Device;
use egm_vfio_wire::socket::{BusyPoll, Connection};
use rustix::process::Uid;
use rustix::thread::set_thread_uid;

const ALICE: u32 = 4001;
const BOB: u32 = 4002;

/// Tests take turns: the device of each host is the same one.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A host with `dax0.0` and sockets that every user can reach; or a line with the reason for none.
fn host() -> Option<(DaxHost, MutexGuard<'static, ()>)> {
    let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can be another user");
        return None;
    }
    let host = match DaxHost::new(16 * MIB) {
        Ok(host) => host,
        Err(why) => {
            println!("skipped: {why}");
            return None;
        }
    };
    for folder in ["", "run"] {
        fs::set_permissions(host.path(folder), Permissions::from_mode(0o755)).unwrap();
    }
    Some((host, turn))
}

/// The result of `work` on a thread of user `uid`.
fn of_user<T: Send>(uid: u32, work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            set_thread_uid(Uid::from_raw(uid)).unwrap(); // of this thread alone
            work()
        });
        thread.join().unwrap()
    })
}

/// A request of user `uid` for 2 MiB of `region`.
fn take(host: &DaxHost, uid: u32, region: &str) -> Result<BrokerLease, ClientError> {
    let take = SliceRequest {
        name: "vm".to_owned(),
        regions: vec![region.to_owned()],
        size: 2 * MIB,
        align: 0,
        class: None,
        wait: false,
    };
    let socket = host.path("run/broker.sock");
    of_user(uid, || Client::connect(&socket).unwrap().take(&take, |_| {}))
}

fn refusal(answer: Result<BrokerLease, ClientError>) -> String {
    match answer {
        Err(ClientError::Refused { why, .. }) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_broker_gives_the_file_of_a_whole_region_to_no_user_without_a_rule_for_it() {
    let Some((host, _turn)) = host() else { return };
    // Memory above all that this machine has, behind a device that is not /dev/mem.
    for (path, text) in [
        ("proc/cmdline", "memmap=16M$0x3f0000000000\n"),
        ("proc/iomem", "00100000-3fffffff : System RAM\n"),
        (
            "hosts/reserved.json",
            r#"{"regions": [{"name": "hidden", "base": "0x3f0000000000", "size": "16MiB", "trusted": true, "device": "/dev/hidden"}]}"#,
        ),
        (
            "policy.json",
            r#"{"rules": [
            {"name": "alice", "user": 4001, "regions": ["devdax", "reserved"]},
            {"name": "bob", "user": 4002, "regions": ["devdax"], "whole_device": true}
        ]}"#,
        ),
    ] {
        fs::create_dir_all(host.path(path).parent().unwrap()).unwrap();
        fs::write(host.path(path), text).unwrap();
    }
    fs::create_dir_all(host.path("sys/firmware/memmap")).unwrap();
    let (policy, files) = (host.path("policy.json"), host.path("hosts"));
    let _broker =
        host.broker_with(&["--policy", policy.to_str().unwrap(), "--host-files", files.to_str().unwrap()]);
    for region in ["dax0.0", "hidden"] {
        let why = refusal(take(&host, ALICE, region));
        assert!(why.contains("rule \"alice\"") && why.contains("\"whole_device\": true"), "{region}: {why}");
    }
    let show = || host.run("ledger show").1;
    assert!(!show().contains("4001"), "{}", show());
    let lease = take(&host, BOB, "dax0.0").unwrap();
    assert!(
        show().lines().any(|line| line.contains("4002") && line.ends_with("granted, with the whole device")),
        "{}",
        show()
    );
    drop(lease);
}

/// `egm-device serve` of 2 MiB of dax0.0 on the host's `run/vm.sock`, which every user can reach.
struct Server(Child);

impl Server {
    fn start(host: &DaxHost, more: &[&str]) -> Self {
        let mut command = host.command(env!("CARGO_BIN_EXE_egm-device"));
        command
            .args(["serve", "--region", "dax0.0", "--size", "2MiB", "--socket", "/run/vm.sock"])
            .args(more);
        let mut server = Self(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("device "), "{line}");
        fs::set_permissions(host.path("run/vm.sock"), Permissions::from_mode(0o666)).unwrap();
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether user `uid` becomes the device's client.
fn is_served(socket: &Path, uid: u32) -> bool {
    of_user(uid, || {
        let connection = Connection::connect(socket, Duration::from_secs(10), BusyPoll::NONE).unwrap();
        Device::new(connection).is_ok()
    })
}

#[test]
fn a_server_gives_the_file_of_a_whole_region_to_no_user_unless_configured_so() {
    let Some((host, _turn)) = host() else { return };
    let socket = host.path("run/vm.sock");
    let server = Server::start(&host, &[]);
    assert!(!is_served(&socket, ALICE), "it would map all slices");
    assert!(is_served(&socket, 0));
    drop(server);
    let _server = Server::start(&host, &["--whole-device"]);
    assert!(is_served(&socket, ALICE));
}
