//! The threads that a machine has before its vCPUs run. Each confines itself, in a signal handler: the kernel lets no
//! thread give another one a filter of its own.

use std::fs;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::Pid;
use seccompiler::BpfProgram;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use super::error::SandboxError;
use super::restrictions::{Failure, Restrictions, Step};
use super::sys;
use super::table::ThreadKind;

/// Time that a thread has for its handler: far more than it takes on a busy host.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time in which a thread gets its name, or ends.
pub(super) const NAMING: Duration = Duration::from_secs(2);
/// Pause between two checks.
const PAUSE: Duration = Duration::from_micros(50);

/// Threads that the kernel runs in this process: `PF_IO_WORKER`, `PF_USER_WORKER`, `PF_KTHREAD` (`include/linux/sched.h`).
/// They make no system calls.
const OF_KERNEL: u64 = 0x10 | 0x4000 | 0x20_0000;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Thread {
    pub(super) id: Pid,
    /// Name that its start gave it, cut after 15 bytes.
    pub(super) name: String,
}

/// All threads of this process but the calling one and the kernel's.
///
/// # Errors
/// [`SandboxError::Prepare`].
pub(super) fn others() -> Result<Vec<Thread>, SandboxError> {
    let failed = |source| SandboxError::Prepare { step: "list the threads of this process", source };
    let own = rustix::thread::gettid();
    let mut others = Vec::new();
    for task in fs::read_dir("/proc/self/task").map_err(failed)? {
        // One that has ended meanwhile has no text.
        let Ok(stat) = fs::read_to_string(task.map_err(failed)?.path().join("stat")) else { continue };
        others.extend(parse(&stat).filter(|thread| thread.id != own));
    }
    Ok(others)
}

/// The thread of a text of `/proc/PID/task/TID/stat` (proc_pid_stat(5)); `None` for one of the kernel's.
fn parse(stat: &str) -> Option<Thread> {
    let (id, rest) = stat.split_once(" (")?;
    let (name, rest) = rest.rsplit_once(") ")?;
    let flags: u64 = rest.split(' ').nth(6)?.parse().ok()?;
    let id = id.parse().ok().and_then(Pid::from_raw)?;
    (flags & OF_KERNEL == 0).then(|| Thread { id, name: name.to_owned() })
}

/// The threads that `list` returns, with their kinds. Waits up to `limit` while one has no kind: a new thread has its
/// parent's name until it runs, and one that only the start needed may not have ended.
///
/// # Errors
/// Those of `list`, and [`SandboxError::Unknown`].
pub(super) fn with_kinds(
    mut list: impl FnMut() -> Result<Vec<Thread>, SandboxError>,
    limit: Duration,
) -> Result<Vec<(Thread, ThreadKind)>, SandboxError> {
    let end = Instant::now().checked_add(limit);
    let kind = |thread: &Thread| ThreadKind::of_thread(&thread.name);
    loop {
        let threads = list()?;
        let unknown = threads.iter().find(|thread| kind(thread).is_none()).map(|thread| thread.name.clone());
        match unknown {
            None => {
                let pair = |thread: Thread| kind(&thread).map(|kind| (thread, kind));
                return Ok(threads.into_iter().filter_map(pair).collect());
            }
            Some(thread) if end.is_some_and(|end| Instant::now() > end) => {
                return Err(SandboxError::Unknown { thread });
            }
            Some(_) => thread::park_timeout(PAUSE),
        }
    }
}

/// Name of the first of `threads` that is none of `known`.
pub(super) fn started_since(known: &[Pid], threads: Vec<Thread>) -> Option<String> {
    threads.into_iter().find(|thread| !known.contains(&thread.id)).map(|thread| thread.name)
}

/// A thread that is to confine itself.
struct Entry {
    thread: Thread,
    filter: BpfProgram,
    /// [`PENDING`], [`DONE`], or a [`Step`] and the kernel's error: see [`encode`].
    outcome: AtomicI32,
}

const PENDING: i32 = 0;
const DONE: i32 = -1;

/// A failed step in one number; the kernel's errors are below 4096.
fn encode(Failure { step, source }: &Failure) -> i32 {
    let errno = source.raw_os_error().unwrap_or(libc::EINVAL);
    (*step as i32) << 12 | (errno & 0xfff)
}

fn decode(outcome: i32) -> Failure {
    let step = Step::ALL.into_iter().find(|step| *step as i32 == outcome >> 12).unwrap_or(Step::Filter);
    Failure { step, source: io::Error::from_raw_os_error(outcome & 0xfff) }
}

struct Work {
    restrictions: &'static Restrictions,
    entries: Vec<Entry>,
}

/// Input of the handler; set once, because a process confines itself once.
static WORK: OnceLock<Work> = OnceLock::new();

extern "C" fn confine_this(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let own = rustix::thread::gettid();
    let Some(work) = WORK.get() else { return };
    let Some(entry) = work.entries.iter().find(|entry| entry.thread.id == own) else { return };
    let outcome = work.restrictions.confine(&entry.filter).map_or_else(|failure| encode(&failure), |()| DONE);
    entry.outcome.store(outcome, Ordering::Release);
}

/// The signal by which a thread confines itself; vCPUs have the one before it.
fn number() -> i32 {
    SIGRTMIN().saturating_add(1)
}

/// Has each of `threads` confine itself with its filter, and returns when all have done so. Call it once.
///
/// # Errors
/// [`SandboxError`]: some threads may be confined.
pub(super) fn confine(
    threads: Vec<(Thread, BpfProgram)>,
    restrictions: &'static Restrictions,
) -> Result<(), SandboxError> {
    let entry = |(thread, filter)| Entry { thread, filter, outcome: AtomicI32::new(PENDING) };
    let work = WORK.get_or_init(|| Work { restrictions, entries: threads.into_iter().map(entry).collect() });
    let failed = |source: io::Error| SandboxError::Prepare { step: "catch the sandbox's signal", source };
    register_signal_handler(number(), confine_this)
        .map_err(|error| failed(io::Error::from_raw_os_error(error.errno())))?;
    for entry in &work.entries {
        let _ = sys::signal(entry.thread.id, number()); // one that has ended needs no filter
    }
    let end = Instant::now().checked_add(TIMEOUT);
    work.entries.iter().try_for_each(|entry| entry.wait(end))
}

impl Entry {
    fn wait(&self, end: Option<Instant>) -> Result<(), SandboxError> {
        let thread = self.thread.name.clone();
        loop {
            match self.outcome.load(Ordering::Acquire) {
                DONE => return Ok(()),
                PENDING if sys::signal(self.thread.id, 0).is_err() => return Ok(()), // it has ended
                PENDING if end.is_some_and(|end| Instant::now() > end) => {
                    return Err(SandboxError::Silent { thread });
                }
                PENDING => thread::park_timeout(PAUSE),
                outcome => {
                    let Failure { step, source } = decode(outcome);
                    return Err(SandboxError::Refused { thread, step: step.action(), source });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(flags: u64) -> String {
        format!("4712 (a (b) c) S 1 4711 4711 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 3 0 1 0 0\n")
    }

    #[test]
    fn a_thread_has_the_number_and_the_name_that_the_kernel_lists() {
        let thread = parse(&stat(0x40_0040)).unwrap();
        assert_eq!((thread.id.as_raw_pid(), thread.name.as_str()), (4712, "a (b) c"));
    }

    #[test]
    fn workers_of_the_kernel_are_left_out() {
        for flags in [0x10, 0x4000, 0x20_0000] {
            assert_eq!(parse(&stat(0x40_0040 | flags)), None);
        }
        for wrong in ["", "1", "x (y) S 1 1 1 1 1 0", "1 (y) S 1 1"] {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn a_thread_that_has_no_name_yet_is_waited_for_and_one_that_gets_none_is_an_error() {
        let named = |name: &str| Thread { id: rustix::thread::gettid(), name: name.to_owned() };
        let mut lists =
            [vec![named("egm-vmm"), named("blk")], vec![named("console"), named("blk")]].into_iter();
        let found = with_kinds(|| Ok(lists.next().unwrap()), NAMING).unwrap();
        let kinds: Vec<_> = found.into_iter().map(|(_, kind)| kind).collect();
        assert_eq!(kinds, [ThreadKind::Console, ThreadKind::Block]);
        let error = with_kinds(|| Ok(vec![named("blk"), named("unlisted")]), Duration::ZERO).unwrap_err();
        assert!(matches!(error, SandboxError::Unknown { thread } if thread == "unlisted"));
    }

    #[test]
    fn a_thread_that_starts_while_others_are_confined_is_found() {
        let thread = |id, name: &str| Thread { id: Pid::from_raw(id).unwrap(), name: name.to_owned() };
        let now = || vec![thread(7, "blk"), thread(9, "hotplug")];
        let known = [9, 8, 7].map(|id| Pid::from_raw(id).unwrap());
        assert_eq!(started_since(&known, now()), None, "one may have ended");
        assert_eq!(started_since(&known[1..], now()).as_deref(), Some("hotplug"));
    }

    #[test]
    fn a_failed_step_goes_through_one_number() {
        for step in Step::ALL {
            let outcome = encode(&Failure { step, source: io::Error::from_raw_os_error(libc::EACCES) });
            assert!(outcome != PENDING && outcome != DONE);
            let Failure { step: found, source } = decode(outcome);
            assert_eq!((found, source.raw_os_error()), (step, Some(libc::EACCES)));
        }
    }

    #[test]
    fn the_threads_of_this_process_are_found_by_name() {
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let named = thread::Builder::new().name("egm-of-test".to_owned());
        let sleeper = named.spawn(move || wait.recv().is_err()).unwrap();
        // The name is the thread's own first act.
        while !others().unwrap().iter().any(|thread| thread.name == "egm-of-test") {
            thread::yield_now();
        }
        let own = rustix::thread::gettid();
        assert!(others().unwrap().iter().all(|thread| thread.id != own));
        drop(end);
        assert!(sleeper.join().unwrap());
    }
}
