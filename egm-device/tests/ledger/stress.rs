//! Processes that take, fill, check and return slices as fast as they can, while they are killed at any instruction and
//! the record is torn up.
//!
//! The memory is its own witness: an owner fills its slice with a word of its own and reads that back before it lets go,
//! and every slice must come as zeroes. Two owners, or one unscrubbed page, end the test.
//!
//! It takes 10 seconds; `EGM_STRESS_SECONDS` says otherwise. The long run, without a test runner that loses patience:
//! ```text
//! EGM_STRESS_SECONDS=900 cargo test --profile lab -p egm-device --test ledger stress -- --nocapture
//! ```

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use egm_device::ledger::Watch;
use egm_device::{Backing, Lease};

use crate::common::{is_zero, ledger, read, region, request};

const NOBODY: Watch<'static> = Watch::nobody();
const PAGES: u64 = 64;
const WORKERS: usize = 4;
const FOLDER: &str = "EGM_STRESS_FOLDER";
const SEED: &str = "EGM_STRESS_SEED";

/// A linear congruential generator: only its upper bits are used.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

fn spawn(folder: &Path, seed: u64) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "stress::worker", "--ignored", "--nocapture"])
        .env(FOLDER, folder)
        .env(SEED, seed.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// What a leased slice must have in it.
fn pattern(tag: u64, lease: &Lease) -> Vec<u8> {
    tag.to_le_bytes().repeat(usize::try_from(lease.slice().size.get() / 8).unwrap())
}

/// Ends with code 3 when something is wrong: any other end but SIGKILL is a bug of the test.
fn wrong(what: &str, lease: &Lease) -> ! {
    eprintln!("process {}: {what}: {lease:?}", std::process::id());
    std::process::exit(3)
}

#[test]
#[ignore = "a process of the stress test"]
fn worker() {
    let Some(folder) = env::var_os(FOLDER) else { return };
    let folder = Path::new(&folder);
    let mut random = Random(env::var(SEED).unwrap().parse().unwrap());
    let (region, memory) = region(folder, PAGES);
    let ledger = ledger(folder);
    let mut leases: Vec<(u64, Lease)> = Vec::new();
    let check = |tag: u64, lease: &Lease| {
        if read(lease) != pattern(tag, lease) {
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
                let tag = random.below(u64::MAX) | 1;
                fill(&lease, tag);
                leases.push((tag, lease));
            }
            0..13 if !leases.is_empty() => {
                let n = usize::try_from(random.below(4)).unwrap() % leases.len();
                let (tag, lease) = leases.swap_remove(n);
                check(tag, &lease);
                if random.below(4) > 0 {
                    let _ = lease.give_back(&NOBODY);
                }
            }
            13 => drop(ledger.scrub(&memory, &region, None, &NOBODY)),
            14 => drop(ledger.repair()),
            15 => drop(ledger.states(&region)),
            _ => leases.iter().for_each(|(tag, lease)| check(*tag, lease)),
        }
    }
}

fn fill(lease: &Lease, tag: u64) {
    use std::os::unix::fs::FileExt;
    lease.file().write_all_at(&pattern(tag, lease), lease.offset()).unwrap();
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
    let seconds = env::var("EGM_STRESS_SECONDS").map_or(10, |text| text.parse().unwrap());
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let (region, memory) = region(folder.path(), PAGES);
    let seed = std::process::id().into();
    let mut random = Random(seed);
    let mut workers: Vec<Child> =
        (0..WORKERS).map(|_| spawn(folder.path(), random.below(u64::MAX))).collect();
    let (begun, mut killed, mut torn) = (Instant::now(), 0u64, 0u64);
    while begun.elapsed() < Duration::from_secs(seconds) {
        thread::sleep(Duration::from_micros(random.below(20_000)));
        if random.below(16) == 0 {
            tear(folder.path(), &mut random);
            torn += 1;
        }
        let n = usize::try_from(random.below(1 << 20)).unwrap() % WORKERS;
        let mut victim = std::mem::replace(&mut workers[n], spawn(folder.path(), random.below(u64::MAX)));
        victim.kill().unwrap();
        let status = victim.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "seed {seed}: {status}, after {killed} kills");
        killed += 1;
    }
    for mut worker in workers {
        worker.kill().unwrap();
        assert_eq!(worker.wait().unwrap().signal(), Some(9), "seed {seed}");
    }
    // Nothing is lost: one owner gets all of it, and it is zero.
    let ledger = ledger(folder.path());
    let sequence = ledger.look().unwrap().0.sequence;
    let lease = ledger.grant_from(&memory, &region, &request("last", PAGES), &NOBODY).unwrap();
    assert!(is_zero(&lease));
    println!("{killed} kills, {torn} torn records, {sequence} replaced, seed {seed}");
    assert!(killed > 0 && sequence > 0);
}
