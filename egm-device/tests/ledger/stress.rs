//! Processes that take, fill, check and return slices as fast as they can, while they are killed at any instruction and
//! the record is damaged.
//!
//! The memory is its own witness: an owner fills its slice with a word of its own and reads that back before the
//! return, and every slice must come as zeroes. Two owners, or one unscrubbed page, end the test.
//!
//! The memory is one that each slice opens anew, as `/dev/mem`, and one that a process opens once, as an EGM device on
//! a kernel that lets others open it too. Hostile owners have children that keep a slice after the owner was killed:
//! mapped, as a descriptor in flight in a socket, or pinned by an io_uring. No other owner may get it before they end. Other owners release
//! every lock that they can reach, and hold locks of their own.
//!
//! Each takes 5 seconds, or `EGM_STRESS_SECONDS`. The long run needs a test runner without a timeout:
//! ```text
//! EGM_STRESS_SECONDS=660 cargo test --profile lab -p egm-device --test ledger-stress -- --nocapture
//! ```

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod hostile;
#[path = "../in_flight/mod.rs"]
mod in_flight;
mod ring;

use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, pipe};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{env, fs};

use egm_device::ledger::{Memory, Watch};
use egm_device::region::Region;
use egm_device::{Backing, Lease, Mapping};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, geteuid, pidfd_open, set_parent_process_death_signal};

use hostile::{Keep, forge, survive};

use common::{egm_region, fill, is_full_of, is_zero, ledger, region, request, set};

const UNOBSERVED: Watch<'static> = Watch::unobserved();
const PAGES: u64 = 64;
const WORKERS: usize = 4;
/// The longest life of a worker, approximately.
const LIFE: Duration = Duration::from_millis(20 * WORKERS as u64);

/// Set for the processes that are killed, and for their children: they run this same test.
const FOLDER: &str = "EGM_STRESS_FOLDER";
const SEED: &str = "EGM_STRESS_SEED";
/// Set for the children: offset, size and word.
const SLICE: &str = "EGM_STRESS_SLICE";

type Opened = fn(&Path, u64) -> (Region, Arc<dyn Memory>);

/// Variant of the test: kind of memory, and behaviour of its owners.
#[derive(Clone, Copy)]
struct Variant {
    /// Name of the test that runs it.
    test: &'static str,
    region: Opened,
    /// Ways in which children of owners keep a slice after the owner's end.
    children: Option<Keep>,
    /// Whether owners release locks and hold others.
    forges: bool,
}

impl Variant {
    /// The user of children that the ledger finds only by the recorded user of the last owner, because the kernel does
    /// not name the file that they keep. Each test has its own, since tests run at the same time.
    fn tenant(self) -> Option<u32> {
        match self.children? {
            Keep::Mapped => None,
            Keep::InFlight => Some(0x3fff_0011),
            Keep::Pinned => Some(0x3fff_0012),
        }
    }
}

const ANEW: Variant = Variant {
    test: "processes_that_are_killed_at_any_instruction_never_share_a_byte_nor_see_an_old_one",
    region,
    children: None,
    forges: false,
};

const ONCE: Variant = Variant {
    test: "nor_do_they_where_a_process_opens_the_memory_once_and_leaves_children_that_map_it",
    region: egm_region,
    children: Some(Keep::Mapped),
    forges: false,
};

const FORGED: Variant = Variant {
    test: "nor_do_they_where_owners_forge_locks_and_die_with_memory_that_others_map",
    region,
    children: Some(Keep::Mapped),
    forges: true,
};

const PASSED_ON: Variant = Variant {
    test: "nor_do_they_where_owners_leave_descriptors_in_flight_in_sockets",
    region,
    children: Some(Keep::InFlight),
    forges: true,
};

const PINNED: Variant = Variant {
    test: "nor_do_they_where_owners_die_with_pages_that_a_ring_of_another_process_keeps_pinned",
    region,
    children: Some(Keep::Pinned),
    forges: true,
};

/// A linear congruential generator: only its upper bits are used.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn index(&mut self, limit: usize) -> usize {
        usize::try_from(self.below(1 << 20)).unwrap() % limit
    }
}

/// A slice of a worker.
struct Holding {
    word: u64,
    lease: Lease,
    /// A child that keeps the slice too.
    child: Option<Child>,
    /// A lock outside the ledger.
    _forged: Option<File>,
}

impl Holding {
    fn new(way: Variant, lease: Lease, random: &mut Random) -> Self {
        if !is_zero(&lease) {
            wrong("not scrubbed", &lease);
        }
        let word = random.below(u64::MAX) | 1;
        fill(&lease, word);
        let child = way.children.is_some() && random.below(4) == 0;
        let child = child.then(|| spawn_survivor(way, &lease, word));
        Self { word, child, _forged: way.forges.then(|| forge(&lease)), lease }
    }

    fn check(&self) {
        if !is_full_of(&self.lease, self.word) {
            wrong("somebody else wrote", &self.lease);
        }
    }

    fn end(mut self, properly: bool) {
        self.check();
        if let Some(child) = &mut self.child {
            // An owner that ends a lease must first end the processes that it gave the memory to.
            child.kill().unwrap();
            child.wait().unwrap();
        }
        if properly {
            // A refusal is allowed: the record may be damaged at any time.
            let _ = self.lease.return_slice(&UNOBSERVED);
        }
    }
}

fn spawn_survivor(way: Variant, lease: &Lease, word: u64) -> Child {
    let mut child = Command::new("/proc/self/exe");
    if let Some(tenant) = way.tenant().filter(|_| geteuid().is_root()) {
        child.uid(tenant).gid(tenant);
    }
    let kept = if way.children == Some(Keep::Pinned) {
        let ring = ring::ring().unwrap();
        ring::pin(&ring, &Mapping::new(lease, 0, lease.size(), 0).unwrap());
        ring
    } else {
        lease.file().try_clone().unwrap().into()
    };
    child
        .args(["--exact", way.test, "--nocapture"])
        .env(SLICE, format!("{} {} {word}", lease.offset(), lease.size()))
        .stdin(kept)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Exits with code 3 when something is wrong: any other end but SIGKILL is a bug of the test.
fn wrong(what: &str, lease: &Lease) -> ! {
    eprintln!("process {}: {what}: {lease:?}", std::process::id());
    std::process::exit(3)
}

/// Takes, checks and returns slices until it is killed.
fn work(folder: &Path, way: Variant, mut random: Random) -> ! {
    // However the test ends, its workers do not go on.
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let (region, memory) = (way.region)(folder, PAGES);
    let ledger = ledger(folder);
    let mut held: Vec<Holding> = Vec::new();
    loop {
        // Refusals are allowed: the region may be full, or the record damaged.
        match random.below(16) {
            0..8 if held.len() < 4 => {
                let mut wanted = request("worker", 1 + random.below(PAGES / 4));
                if let Some(tenant) = way.tenant() {
                    wanted.owner.uid = tenant;
                }
                if let Ok(lease) = ledger.grant_from(&memory, &region, &wanted, &UNOBSERVED) {
                    held.push(Holding::new(way, lease, &mut random));
                }
            }
            0..13 if !held.is_empty() => {
                held.swap_remove(random.index(held.len())).end(random.below(4) > 0);
            }
            13 => drop(ledger.scrub(&memory, &region, None, &UNOBSERVED)),
            14 => drop(ledger.repair(std::slice::from_ref(&region))),
            15 => drop(ledger.states(&region)),
            _ => held.iter().for_each(Holding::check),
        }
    }
}

/// The processes that are killed.
struct Workers<'a> {
    folder: &'a Path,
    way: Variant,
    /// Standard error of the workers and their children.
    complaints: PipeWriter,
    children: Vec<Child>,
    killed: u64,
}

impl<'a> Workers<'a> {
    fn new(folder: &'a Path, way: Variant, complaints: PipeWriter, random: &mut Random) -> Self {
        let mut workers = Self { folder, way, complaints, children: Vec::new(), killed: 0 };
        workers.children = (0..WORKERS).map(|_| workers.spawn(random)).collect();
        workers
    }

    fn spawn(&self, random: &mut Random) -> Child {
        Command::new(env::current_exe().unwrap())
            .args(["--exact", self.way.test, "--nocapture"])
            .env(FOLDER, self.folder)
            .env(SEED, random.below(u64::MAX).to_string())
            .stdout(Stdio::null())
            .stderr(self.complaints.try_clone().unwrap())
            .spawn()
            .unwrap()
    }

    /// Waits for a worker to end by itself, which none may, for as long as `timeout`.
    fn none_ends_within(&mut self, timeout: Duration) {
        let pidfd = |child: &Child| pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap();
        let pidfds: Vec<_> = self.children.iter().map(pidfd).collect();
        let mut ended: Vec<_> = pidfds.iter().map(|pidfd| PollFd::new(pidfd, PollFlags::IN)).collect();
        let ended = poll(&mut ended, Some(&Timespec::try_from(timeout).unwrap())).unwrap();
        assert_eq!(ended, 0, "a worker has ended after {} kills", self.killed);
    }

    fn kill(&mut self, mut victim: Child) {
        victim.kill().unwrap();
        let status = victim.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "{status}, after {} kills", self.killed);
        self.killed += 1;
    }

    /// The successor starts first, while the victim has its slices.
    fn replace_one(&mut self, random: &mut Random) {
        let next = self.spawn(random);
        let victim = random.index(self.children.len());
        let victim = std::mem::replace(&mut self.children[victim], next);
        self.kill(victim);
    }
}

/// Damages the record as no crash does: truncates, overwrites or removes it. Not its number too: that is a new ledger.
fn tear(folder: &Path, random: &mut Random) {
    let record = folder.join("var/lib/egm-device/ledger.json");
    let newest = folder.join("run/egm-device/ledger.newest");
    let Ok(mut bytes) = fs::read(&record) else { return };
    match random.below(4) {
        0 if newest.exists() => drop(fs::remove_file(&record)),
        1 => drop(fs::remove_file(newest)),
        0 | 2 => {
            bytes.truncate(bytes.len() / 2);
            fs::write(&record, bytes).unwrap();
        }
        _ => {
            let n = bytes.len() / 2;
            bytes[n] ^= 1;
            fs::write(&record, bytes).unwrap();
        }
    }
}

/// Collects all lines until the last possible writer has ended.
fn listen(complaints: PipeReader) -> JoinHandle<Vec<String>> {
    let print = |line: &String| eprintln!("{line}");
    thread::spawn(move || BufReader::new(complaints).lines().map_while(Result::ok).inspect(print).collect())
}

fn stress(way: Variant) {
    if let Some(folder) = env::var_os(FOLDER) {
        if let Ok(slice) = env::var(SLICE) {
            survive(way.children.unwrap(), &slice, &Path::new(&folder).join("memory"), LIFE);
        }
        work(folder.as_ref(), way, Random(env::var(SEED).unwrap().parse().unwrap()));
    }
    let seconds = env::var("EGM_STRESS_SECONDS").map_or(5, |text| text.parse().unwrap());
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let (region, memory) = (way.region)(folder.path(), PAGES);
    // A child of another user reads the memory while its ring has it pinned.
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let seed = std::process::id().into();
    println!("seed {seed}");
    let (mut random, begun, mut torn) = (Random(seed), Instant::now(), 0u64);
    let (complaints, complain) = pipe().unwrap();
    let complaints = listen(complaints);
    let mut workers = Workers::new(folder.path(), way, complain, &mut random);
    while begun.elapsed() < Duration::from_secs(seconds) {
        let life = u64::try_from(LIFE.as_micros()).unwrap();
        workers.none_ends_within(Duration::from_micros(random.below(life / WORKERS as u64)));
        if random.below(16) == 0 {
            tear(folder.path(), &mut random);
            torn += 1;
        }
        workers.replace_one(&mut random);
    }
    while let Some(worker) = workers.children.pop() {
        workers.kill(worker);
    }
    let killed = workers.killed;
    drop(workers);
    assert_eq!(complaints.join().unwrap(), [""; 0]);
    // Nothing is lost: one owner gets all of it, and it is zero.
    let ledger = ledger(folder.path());
    let is_free = |_: &u32| {
        ledger.review(&region).unwrap();
        ledger.states(&region).unwrap().held.is_empty()
    };
    (0..1000).find(is_free).unwrap();
    // A child's mapping is gone a moment after its standard error, and its end is not this process's to wait for.
    let all = |_| {
        let lease = ledger.grant_from(&memory, &region, &request("last", PAGES), &UNOBSERVED);
        lease.inspect_err(|error| println!("{error}")).ok()
    };
    let lease = (0..1000).find_map(all).unwrap();
    assert!(is_zero(&lease));
    lease.return_slice(&UNOBSERVED).unwrap();
    assert_eq!(ledger.states(&region).unwrap().clean, set(0, PAGES));
    let replaced = ledger.look().unwrap().0.sequence;
    println!("stress: {seconds} s, {killed} kills, {torn} torn records, {replaced} replacements");
    assert!(killed > 0 && replaced > 0);
}

#[test]
fn processes_that_are_killed_at_any_instruction_never_share_a_byte_nor_see_an_old_one() {
    stress(ANEW);
}

#[test]
fn nor_do_they_where_a_process_opens_the_memory_once_and_leaves_children_that_map_it() {
    stress(ONCE);
}

#[test]
fn nor_do_they_where_owners_forge_locks_and_die_with_memory_that_others_map() {
    stress(FORGED);
}

#[test]
fn nor_do_they_where_owners_leave_descriptors_in_flight_in_sockets() {
    stress(PASSED_ON);
}

#[test]
fn nor_do_they_where_owners_die_with_pages_that_a_ring_of_another_process_keeps_pinned() {
    if ring::ring().is_some() {
        stress(PINNED);
    }
}
