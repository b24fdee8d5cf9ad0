//! A host that grants no more threads: memory is made present and scrubbed all the same, and impossible work is refused
//! with a reason.
//!
//! The limit holds for unprivileged users, so each test runs itself again as a user of its own.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "the tests of its sockets use all of it")]
mod broker_world;

use std::collections::HashSet;
use std::fs;
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::thread::{self, ThreadId};

use broker_world::{Broker, G, take};
use egm_address::{Offset, Span};
use egm_device::broker::ClientError;
use egm_device::policy::{Names, parse};
use egm_device::scrub::{ScrubOptions, zero};
use egm_device::{Anonymous, Backing, Mapping, prefault};
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::{Resource, Rlimit, getrlimit, getuid, setrlimit};

const SIZE: u64 = 1 << 20;
/// Number of threads that the child may start.
const MORE: &str = "EGM_TEST_MORE_THREADS";
/// First of the users; each process takes its own.
const USERS: u32 = 0x4000_0000;

/// Runs test `name` again as a user with a limit of `more` more threads.
fn again(name: &str, more: u64) {
    let mut child = Command::new("/proc/self/exe");
    child.args(["--exact", name, "--nocapture"]).env(MORE, more.to_string());
    if getuid().is_root() {
        child.uid(USERS + std::process::id()).gid(USERS);
    }
    let output = child.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{more} more threads: {output:?}");
}

/// In the child: sets its limit and returns the number of threads that it may still start. Elsewhere `None`.
fn limited() -> Option<u64> {
    let more = std::env::var(MORE).ok()?.parse().unwrap();
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let threads = status.lines().find_map(|line| line.strip_prefix("Threads:")).unwrap();
    let most = threads.trim().parse::<u64>().unwrap() + more;
    setrlimit(Resource::Nproc, Rlimit { current: Some(most), maximum: Some(most) }).unwrap();
    if more == 0 {
        assert!(thread::Builder::new().spawn(|| ()).is_err(), "the limit does not hold: nothing is tested");
    }
    Some(more)
}

/// The threads that did some of the work.
#[derive(Default)]
struct Workers(Mutex<HashSet<ThreadId>>);

impl Workers {
    fn note(&self) {
        self.0.lock().unwrap().insert(thread::current().id());
    }

    /// Whether the calling thread worked.
    fn caller(&self) -> bool {
        self.0.lock().unwrap().contains(&thread::current().id())
    }
}

#[test]
fn a_scrub_goes_on_with_the_threads_that_it_gets() {
    let Some(more) = limited() else {
        return [0, 1]
            .into_iter()
            .for_each(|more| again("a_scrub_goes_on_with_the_threads_that_it_gets", more));
    };
    let memory = Anonymous::new("test", SIZE, None).unwrap();
    memory.file().write_all_at(&vec![0x5a; usize::try_from(SIZE).unwrap()], 0).unwrap();
    let (workers, cancel) = (Workers::default(), AtomicBool::new(false));
    let progress = |_| workers.note();
    let work = ScrubOptions {
        near: None,
        workers: NonZeroUsize::new(4),
        pace: None,
        progress: &progress,
        cancel: &cancel,
    };
    zero(&memory, Offset::new(0), &[Span::new(Offset::new(0), SIZE).unwrap()].into_iter().collect(), &work)
        .unwrap();
    let mut bytes = vec![1; usize::try_from(SIZE).unwrap()];
    memory.file().read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    if more == 0 {
        assert!(workers.caller());
    }
}

#[test]
fn memory_is_made_present_by_the_threads_that_there_are() {
    let Some(more) = limited() else {
        let name = "memory_is_made_present_by_the_threads_that_there_are";
        return [0, 1].into_iter().for_each(|more| again(name, more));
    };
    let two = [(); 2].map(|()| Anonymous::new("test", SIZE, None).unwrap());
    let mappings = two.each_ref().map(|memory| Mapping::new(memory, 0, SIZE, 0).unwrap());
    let (workers, caller) = (Workers::default(), thread::current().id());
    let progress = |_| {
        workers.note();
        // A thread that ended would leave its place to the next.
        while thread::current().id() != caller && !workers.0.lock().unwrap().contains(&caller) {
            thread::yield_now();
        }
    };
    prefault(&mappings.each_ref().map(|mapping| (mapping, None)), &progress).unwrap();
    for memory in two {
        let blocks = std::os::unix::fs::MetadataExt::blocks(&memory.file().metadata().unwrap());
        assert_eq!(blocks * 512, SIZE);
    }
    // One thread works on the first mapping, and only the caller is left for the second.
    assert!(workers.caller(), "{more} more threads");
}

/// A slice stays granted when its return gets no thread, and its owner gets a refusal that reports so.
#[test]
fn a_return_that_no_thread_can_work_at_is_refused_and_frees_nothing() {
    let Some(more) = limited() else {
        return again("a_return_that_no_thread_can_work_at_is_refused_and_frees_nothing", 16);
    };
    let user = getuid().as_raw();
    let rule = format!(
        r#"{{"rules": [{{"name": "all", "user": {user}, "regions": ["egm4"], "whole_device": true}}]}}"#
    );
    let broker = Broker::start(parse(&rule, &Names::default()).unwrap(), G);
    let lease = broker.client().take(&take("egm4", G), |_| ()).unwrap();
    let connection = lease.connection().try_clone_to_owned().unwrap();
    let most = getrlimit(Resource::Nproc);
    setrlimit(Resource::Nproc, Rlimit { current: Some(0), ..most }).unwrap();
    let Err(ClientError::Refused { why, .. }) = lease.return_slice(&AtomicBool::new(false)) else { panic!() };
    assert_eq!(why, "the host cannot take the slice back now: it stays on your account, return it again");
    assert!(!broker.source.was_scrubbed(0, G), "with {more} more threads");
    setrlimit(Resource::Nproc, most).unwrap();
    rustix::net::send(&connection, b"\"return\"", SendFlags::NOSIGNAL).unwrap();
    let mut answer = [0; 64];
    let (_, length) = rustix::net::recv(&connection, &mut answer, RecvFlags::empty()).unwrap();
    assert_eq!(answer[..length], *b"\"returned\"");
    assert!(broker.source.was_scrubbed(0, G));
}
