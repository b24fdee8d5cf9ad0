//! Clients of the broker that keep the memory of a pool, or send it to another user, also beyond the end of the broker.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod in_flight;
mod small_host;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;

use egm_device::Mapping;
use egm_device::broker::{Client, SliceRequest};
use egm_fixtures::pool::Pool;
use in_flight::{receive, send};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, kill_process};

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

fn take(region: &str, wait: bool) -> SliceRequest {
    SliceRequest { name: "vm".into(), regions: vec![region.into()], size: QUOTA, align: 0, class: None, wait }
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
    broker: Process,
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
        let rules =
            r#"{"rules": [{"name": "r", "user": 4001, "regions": ["hugetlb", "memfd"], "quota": "4MiB"}]}"#;
        fs::write(folder.path().join("policy.json"), rules).unwrap();
        let broker = start(folder.path());
        Self { folder, test, region, broker }
    }

    /// Ends the broker by `signal`; `change` happens before the next one starts on the same host.
    fn restart(&mut self, signal: Signal, change: impl FnOnce(&Path)) {
        kill_process(Pid::from_child(&self.broker.0), signal).unwrap();
        self.broker.0.wait().unwrap();
        change(&self.folder.path().join("host"));
        self.broker = start(self.folder.path());
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
        text.lines().find_map(answer).unwrap_or_else(|| panic!("{text}"))
    }

    /// An owner that keeps its slice until it is killed.
    fn keep(&self) -> Process {
        let mut keeper = self.run_as(OWNER, "keep", null()).stdout(Stdio::piped()).spawn().unwrap();
        let text = BufReader::new(keeper.stdout.take().unwrap());
        let keeper = Process(keeper);
        assert_eq!(text.lines().find_map(|line| answer(&line.unwrap())).unwrap(), "taken");
        keeper
    }

    /// Asserts that the owner gets no second slice of its quota's size.
    fn refuses_more(&self) {
        let (unread, to) = pair();
        let answer = self.send_and_return(to);
        assert!(answer.contains("quota"), "a second slice of the quota's size: {answer}");
        assert!(receive(&unread).is_none(), "a second slice");
    }

    /// Asserts that the owner gets a slice of its quota's size: the broker repeats its check on its own.
    fn grants_again(&self) {
        let output = self.run_as(OWNER, "wait", null()).output().unwrap();
        assert!(String::from_utf8(output.stdout).unwrap().contains("answer: true"));
    }
}

/// A broker that answers, on the host in `folder`. What it prints goes to the file `notes`.
fn start(folder: &Path) -> Process {
    let socket = folder.join("socket");
    let mut broker = Command::new(env!("CARGO_BIN_EXE_egm-device"));
    broker.arg("broker").arg("--root").arg(folder.join("host"));
    broker.arg("--policy").arg(folder.join("policy.json")).arg("--socket").arg(&socket);
    broker.stderr(fs::File::create(folder.join("notes")).unwrap());
    let mut broker = Process(broker.spawn().unwrap());
    while Client::connect(&socket).is_err() {
        assert!(broker.0.try_wait().unwrap().is_none(), "the broker ended");
        std::thread::yield_now();
    }
    broker
}

fn answer(line: &str) -> Option<String> {
    Some(line.split_once(ANSWER)?.1.to_owned())
}

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
}

fn null() -> OwnedFd {
    fs::File::open("/dev/null").unwrap().into()
}

/// Runs a user's process in its role.
fn play(role: &str) -> ! {
    let variable = |name| PathBuf::from(std::env::var_os(name).unwrap());
    let region = variable(REGION).into_os_string().into_string().unwrap();
    let client = Client::connect(&variable(SOCKET)).unwrap();
    match role {
        "send" => match client.take(&take(&region, false), |_| ()) {
            Ok(lease) => {
                send(&std::io::stdin(), lease.file());
                let returned = lease.return_slice(&NEVER);
                println!(
                    "{ANSWER}{}",
                    returned.map_or_else(|error| error.to_string(), |()| "returned".into())
                );
            }
            Err(error) => println!("{ANSWER}{error}"),
        },
        "wait" => {
            let lease = client.take(&take(&region, true), |_| ()).unwrap();
            println!("{ANSWER}{}", lease.return_slice(&NEVER).is_ok());
        }
        "keep" => {
            let lease = client.take(&take(&region, false), |_| ()).unwrap();
            let memory = lease.backing().unwrap();
            let _mapping = Mapping::new(memory.as_ref(), 0, QUOTA, 0).unwrap();
            println!("{ANSWER}taken");
            park();
        }
        _ => park(),
    }
    std::process::exit(0)
}

fn park() -> ! {
    loop {
        std::thread::park();
    }
}

/// The world of a test, unless this process is one of its users.
fn world(test: &'static str, region: &'static str) -> Option<World> {
    if let Ok(role) = std::env::var(ROLE) {
        play(&role);
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can be two users");
        return None;
    }
    Some(World::new(test, region))
}

/// Memory in flight to another user counts for its owner until nothing holds it any more, also when the broker that granted it
/// is `killed`.
fn stays_on_the_account(test: &'static str, region: &'static str, killed: bool) {
    let Some(mut world) = world(test, region) else { return };
    let (near, far) = pair();
    let other = Process(world.run_as(OTHER, "hold", near).stdout(Stdio::null()).spawn().unwrap());
    let answer = world.send_and_return(far);
    assert!(answer.contains("another process still has the memory"), "{answer}");
    if killed {
        world.restart(Signal::KILL, |_| ());
    }
    world.refuses_more();
    drop(other);
    world.grants_again();
}

/// Memory that a client maps counts for its owner while brokers end by `signal` and begin.
fn outlives_brokers(test: &'static str, region: &'static str, signal: Signal) {
    let Some(mut world) = world(test, region) else { return };
    let keeper = world.keep();
    for _ in 0..2 {
        world.restart(signal, |_| ());
        world.refuses_more();
    }
    drop(keeper);
    world.grants_again();
    world.grants_again();
}

#[test]
fn a_memfd_in_flight_to_another_user_stays_on_the_account_of_its_owner() {
    let test = "a_memfd_in_flight_to_another_user_stays_on_the_account_of_its_owner";
    stays_on_the_account(test, "local", false);
}

#[test]
fn a_memfd_in_flight_stays_on_the_account_of_its_owner_when_the_broker_is_killed() {
    let test = "a_memfd_in_flight_stays_on_the_account_of_its_owner_when_the_broker_is_killed";
    stays_on_the_account(test, "local", true);
}

#[test]
fn a_memfd_that_is_mapped_stays_on_the_account_of_its_owner_when_brokers_are_killed() {
    let test = "a_memfd_that_is_mapped_stays_on_the_account_of_its_owner_when_brokers_are_killed";
    outlives_brokers(test, "local", Signal::KILL);
}

#[test]
fn a_memfd_that_is_mapped_stays_on_the_account_of_its_owner_when_brokers_are_stopped() {
    let test = "a_memfd_that_is_mapped_stays_on_the_account_of_its_owner_when_brokers_are_stopped";
    outlives_brokers(test, "local", Signal::TERM);
}

/// A record that is broken or of an earlier boot names no memory. The broker starts, and prints whether accounts are lost.
fn is_on_no_account(test: &'static str, change: impl FnOnce(&Path), is_lost: bool) {
    let Some(mut world) = world(test, "local") else { return };
    let _keeper = world.keep();
    world.restart(Signal::KILL, change);
    world.grants_again();
    let notes = fs::read_to_string(world.folder.path().join("notes")).unwrap();
    assert_eq!(notes.contains("may count on no account"), is_lost, "{notes}");
}

#[test]
fn a_broker_with_a_torn_record_starts_and_reports_that_accounts_are_lost() {
    let test = "a_broker_with_a_torn_record_starts_and_reports_that_accounts_are_lost";
    let tear = |host: &Path| {
        let record =
            fs::File::options().write(true).open(host.join("var/lib/egm-device/ledger.json")).unwrap();
        record.set_len(record.metadata().unwrap().len() / 2).unwrap();
    };
    is_on_no_account(test, tear, true);
}

#[test]
fn a_record_of_an_earlier_boot_charges_no_account() {
    let test = "a_record_of_an_earlier_boot_charges_no_account";
    let boot = |host: &Path| {
        fs::write(host.join("proc/sys/kernel/random/boot_id"), "the next boot\n").unwrap();
        fs::remove_dir_all(host.join("run/egm-device")).unwrap();
    };
    is_on_no_account(test, boot, false);
}

/// [`world`] with pages of 2 MiB, which the host may not have.
fn in_huge_pages(test: &'static str, check: impl FnOnce(&'static str, &'static str)) {
    let is_user = std::env::var_os(ROLE).is_some();
    let pool = if is_user { None } else { Pool::reserve(2 * PAGES, 2 << 10) };
    if is_user || pool.is_some() {
        check(test, "hugetlb");
    }
}

#[test]
fn hugetlb_pages_in_flight_to_another_user_stay_on_the_account_of_their_owner() {
    let test = "hugetlb_pages_in_flight_to_another_user_stay_on_the_account_of_their_owner";
    in_huge_pages(test, |test, region| stays_on_the_account(test, region, false));
}

#[test]
fn hugetlb_pages_in_flight_stay_on_the_account_of_their_owner_when_the_broker_is_killed() {
    let test = "hugetlb_pages_in_flight_stay_on_the_account_of_their_owner_when_the_broker_is_killed";
    in_huge_pages(test, |test, region| stays_on_the_account(test, region, true));
}

#[test]
fn hugetlb_pages_that_are_mapped_stay_on_the_account_of_their_owner_when_brokers_are_killed() {
    let test = "hugetlb_pages_that_are_mapped_stay_on_the_account_of_their_owner_when_brokers_are_killed";
    in_huge_pages(test, |test, region| outlives_brokers(test, region, Signal::KILL));
}
