//! Processes that take, fill, check and return slices as fast as they can, while they are killed at any instruction and
//! the record is torn up.
//!
//! The memory is its own witness: an owner fills its slice with a word of its own and reads that back before it lets go,
//! and every slice must come as zeroes. Two owners, or one unscrubbed page, end the test.
//!
//! It takes 5 seconds; `EGM_STRESS_SECONDS` says otherwise. The long run, without a test runner that loses patience:
//! ```text
//! EGM_STRESS_SECONDS=660 cargo test --profile lab -p egm-device --test ledger-stress -- --nocapture
//! ```

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs};

use egm_device::Lease;
use egm_device::ledger::Watch;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, set_parent_process_death_signal};

use common::{fill, is_full_of, is_zero, ledger, region, request, set};

const NOBODY: Watch<'static> = Watch::nobody();
const PAGES: u64 = 64;
const WORKERS: usize = 4;
/// The longest life of a worker, about.
const LIFE: Duration = Duration::from_millis(20 * WORKERS as u64);

/// Set for the processes that are killed: they run this same test.
const FOLDER: &str = "EGM_STRESS_FOLDER";
const SEED: &str = "EGM_STRESS_SEED";
const NAME: &str = "processes_that_are_killed_at_any_instruction_never_share_a_byte_nor_see_an_old_one";

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

/// Ends with a code when something is wrong: any other end but SIGKILL is a bug of the test.
fn wrong(what: &str, lease: &Lease) -> ! {
    eprintln!("process {}: {what}: {lease:?}", std::process::id());
    std::process::exit(3)
}

/// Takes, checks and returns slices until it is killed.
fn work(folder: &Path, mut random: Random) -> ! {
    // However the test ends, its workers do not go on.
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let (region, memory) = region(folder, PAGES);
    let ledger = ledger(folder);
    let mut leases: Vec<(u64, Lease)> = Vec::new();
    let check = |word: u64, lease: &Lease| {
        if !is_full_of(lease, word) {
            wrong("somebody else wrote", lease);
        }
    };
    loop {
        // Refusals are part of the game: the region may be full, the record torn up under our feet.
        match random.below(16) {
            0..8 if leases.len() < 4 => {
                let wanted = request("worker", 1 + random.below(PAGES / 4));
                let Ok(lease) = ledger.grant_from(&memory, &region, &wanted, &NOBODY) else { continue };
                if !is_zero(&lease) {
                    wrong("not scrubbed", &lease);
                }
                let word = random.below(u64::MAX) | 1;
                fill(&lease, word);
                leases.push((word, lease));
            }
            0..13 if !leases.is_empty() => {
                let (word, lease) = leases.swap_remove(random.index(leases.len()));
                check(word, &lease);
                if random.below(4) > 0 {
                    let _ = lease.give_back(&NOBODY);
                }
            }
            13 => drop(ledger.scrub(&memory, &region, None, &NOBODY)),
            14 => drop(ledger.repair()),
            15 => drop(ledger.states(&region)),
            _ => leases.iter().for_each(|(word, lease)| check(*word, lease)),
        }
    }
}

/// The processes that are killed.
struct Workers<'a> {
    folder: &'a Path,
    children: Vec<Child>,
    killed: u64,
}

impl<'a> Workers<'a> {
    fn new(folder: &'a Path, random: &mut Random) -> Self {
        let mut workers = Self { folder, children: Vec::new(), killed: 0 };
        workers.children = (0..WORKERS).map(|_| workers.spawn(random)).collect();
        workers
    }

    fn spawn(&self, random: &mut Random) -> Child {
        Command::new(env::current_exe().unwrap())
            .args(["--exact", NAME, "--nocapture"])
            .env(FOLDER, self.folder)
            .env(SEED, random.below(u64::MAX).to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// Waits for a worker to end by itself, which none may, for as long as `patience`.
    fn none_ends_within(&mut self, patience: Duration) {
        let pidfd = |child: &Child| pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap();
        let pidfds: Vec<_> = self.children.iter().map(pidfd).collect();
        let mut ended: Vec<_> = pidfds.iter().map(|pidfd| PollFd::new(pidfd, PollFlags::IN)).collect();
        let ended = poll(&mut ended, Some(&Timespec::try_from(patience).unwrap())).unwrap();
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

/// Tears up the record, as no crash does: cut short, overwritten, gone.
fn tear(folder: &Path, random: &mut Random) {
    let record = folder.join("var/lib/egm-device/ledger.json");
    let Ok(mut bytes) = fs::read(&record) else { return };
    match random.below(4) {
        0 => drop(fs::remove_file(&record)),
        1 => drop(fs::remove_file(folder.join("run/egm-device/ledger.newest"))),
        2 => {
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

#[test]
fn processes_that_are_killed_at_any_instruction_never_share_a_byte_nor_see_an_old_one() {
    if let Some(folder) = env::var_os(FOLDER) {
        work(folder.as_ref(), Random(env::var(SEED).unwrap().parse().unwrap()));
    }
    let seconds = env::var("EGM_STRESS_SECONDS").map_or(5, |text| text.parse().unwrap());
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let (region, memory) = region(folder.path(), PAGES);
    let seed = std::process::id().into();
    println!("seed {seed}");
    let (mut random, begun, mut torn) = (Random(seed), Instant::now(), 0u64);
    let mut workers = Workers::new(folder.path(), &mut random);
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
    // Nothing is lost: one owner gets all of it, and it is zero.
    let ledger = ledger(folder.path());
    assert!(ledger.states(&region).unwrap().held.is_empty());
    let lease = ledger.grant_from(&memory, &region, &request("last", PAGES), &NOBODY).unwrap();
    assert!(is_zero(&lease));
    lease.give_back(&NOBODY).unwrap();
    assert_eq!(ledger.states(&region).unwrap().clean, set(0, PAGES));
    let replaced = ledger.look().unwrap().0.sequence;
    println!("stress: {seconds} s, {} kills, {torn} torn records, {replaced} replacements", workers.killed);
    assert!(workers.killed > 0 && replaced > 0);
}
