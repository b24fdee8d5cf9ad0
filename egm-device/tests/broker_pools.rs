//! Clients of the broker that send the memory of a pool to another user, which leaves it in flight.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod in_flight;
#[path = "../../vmm/tests/payloads/pool.rs"]
mod pool;
mod small_host;

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;

use egm_device::broker::{Client, Take};
use in_flight::{receive, send};
use pool::Pool;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// Slice, and quota of a user.
const QUOTA: u64 = 4 << 20;
const PAGES: u64 = QUOTA >> 21;
const OWNER: u32 = 4001;
const OTHER: u32 = 4002;
const ANSWER: &str = "answer: ";
static NEVER: AtomicBool = AtomicBool::new(false);

/// Set for the processes of the users, which run the test that started them: the broker's socket, the region, the role.
const SOCKET: &str = "EGM_POOL_SOCKET";
const REGION: &str = "EGM_POOL_REGION";
const ROLE: &str = "EGM_POOL_ROLE";

fn take(region: &str, wait: bool) -> Take {
    Take { name: "vm".into(), regions: vec![region.into()], size: QUOTA, align: 0, class: None, wait }
}

/// A process, killed on drop.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A broker with a pool of each kind, and this program where other users can run it.
struct World {
    folder: tempfile::TempDir,
    test: &'static str,
    region: &'static str,
    _broker: Process,
}

impl World {
    fn new(test: &'static str, region: &'static str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        fs::copy(std::env::current_exe().unwrap(), folder.path().join("program")).unwrap();
        let host = folder.path().join("host");
        small_host::make(&host);
        let pool = host.join("sys/devices/system/node/node0/hugepages/hugepages-2048kB");
        fs::create_dir_all(&pool).unwrap();
        for name in ["nr_hugepages", "free_hugepages"] {
            fs::write(pool.join(name), (2 * PAGES).to_string()).unwrap();
        }
        let (policy, socket) = (folder.path().join("policy.json"), folder.path().join("socket"));
        let rules =
            r#"{"rules": [{"name": "r", "user": 4001, "regions": ["hugetlb", "memfd"], "quota": "4MiB"}]}"#;
        fs::write(&policy, rules).unwrap();
        let mut broker = Command::new(env!("CARGO_BIN_EXE_egm-device"));
        broker.arg("broker").arg("--root").arg(&host);
        broker.arg("--policy").arg(&policy).arg("--socket").arg(&socket);
        let mut broker = Process(broker.spawn().unwrap());
        while Client::connect(&socket).is_err() {
            assert!(broker.0.try_wait().unwrap().is_none(), "the broker ended");
            std::thread::yield_now();
        }
        Self { folder, test, region, _broker: broker }
    }

    /// This program as `user`, in `role`.
    fn run_as(&self, user: u32, role: &str, input: OwnedFd) -> Command {
        let mut command = Command::new(self.folder.path().join("program"));
        command.args(["--exact", self.test, "--nocapture"]).uid(user).gid(user).stdin(input);
        command.env(SOCKET, self.folder.path().join("socket")).env(REGION, self.region).env(ROLE, role);
        command
    }

    /// The broker's answer to an owner that sends its slice into the socket `to` and returns it.
    fn send_and_return(&self, to: OwnedFd) -> String {
        let output = self.run_as(OWNER, "send", to).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let answer = text.lines().find_map(|line| Some(line.split_once(ANSWER)?.1.to_owned()));
        answer.unwrap_or_else(|| panic!("{text}"))
    }
}

/// Runs a user's process in its role.
fn play(role: &str) -> ! {
    let variable = |name| PathBuf::from(std::env::var_os(name).unwrap());
    let region = variable(REGION).into_os_string().into_string().unwrap();
    let client = Client::connect(&variable(SOCKET)).unwrap();
    match role {
        "send" => match client.take(&take(&region, false), |_| ()) {
            Ok(loan) => {
                send(&std::io::stdin(), loan.file());
                let returned = loan.give_back(&NEVER);
                println!(
                    "{ANSWER}{}",
                    returned.map_or_else(|error| error.to_string(), |()| "returned".into())
                );
            }
            Err(error) => println!("{ANSWER}{error}"),
        },
        "wait" => {
            let loan = client.take(&take(&region, true), |_| ()).unwrap();
            println!("{ANSWER}{}", loan.give_back(&NEVER).is_ok());
        }
        _ => loop {
            std::thread::park();
        },
    }
    std::process::exit(0)
}

/// Memory in flight to another user counts for its owner until nothing holds it any more.
fn stays_on_the_account(test: &'static str, region: &'static str) {
    if let Ok(role) = std::env::var(ROLE) {
        play(&role);
    }
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can be two users");
    }
    let world = World::new(test, region);
    let pair = || socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    let (near, far) = pair();
    let other = Process(world.run_as(OTHER, "hold", near).stdout(Stdio::null()).spawn().unwrap());
    let answer = world.send_and_return(far);
    assert!(answer.contains("another process still has the memory"), "{answer}");
    let (unread, again) = pair();
    let answer = world.send_and_return(again);
    assert!(answer.contains("quota"), "a second slice of the quota's size: {answer}");
    assert!(receive(&unread).is_none(), "a second slice");
    drop(other);
    // The broker repeats its check on its own.
    let null = fs::File::open(Path::new("/dev/null")).unwrap();
    let output = world.run_as(OWNER, "wait", null.into()).output().unwrap();
    assert!(String::from_utf8(output.stdout).unwrap().contains("answer: true"));
}

#[test]
fn a_memfd_in_flight_to_another_user_stays_on_the_account_of_its_owner() {
    stays_on_the_account("a_memfd_in_flight_to_another_user_stays_on_the_account_of_its_owner", "local");
}

#[test]
fn hugetlb_pages_in_flight_to_another_user_stay_on_the_account_of_their_owner() {
    let test = "hugetlb_pages_in_flight_to_another_user_stay_on_the_account_of_their_owner";
    if std::env::var_os(ROLE).is_some() {
        stays_on_the_account(test, "hugetlb");
    }
    let Some(_pool) = Pool::reserve(2 * PAGES, 2 << 10) else { return };
    stays_on_the_account(test, "hugetlb");
}
