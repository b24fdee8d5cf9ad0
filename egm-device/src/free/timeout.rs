//! Limits for the time that processes may keep a scan waiting. Pure, except for [`observe`], which reads `/proc`.
//!
//! The limit is not one of the wall clock: on busy processors a reader is slow although no process keeps it waiting.
//! Time counts while the reader is blocked or uses a processor, and not while it waits for a processor. A late check
//! costs no more than a punctual one, because the thread that makes the check waits for a processor as well.
#![forbid(unsafe_code)]

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::param::clock_ticks_per_second;
use rustix::thread::Pid;

/// Interval between checks of a thread that has not answered.
pub(super) const CHECK: Duration = Duration::from_millis(20);

/// A thread, as the kernel shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Observed {
    /// Whether it waits for something other than a processor.
    is_blocked: bool,
    /// Processor time that it has used.
    used: Duration,
}

impl Observed {
    /// A thread that has not run yet.
    pub(super) const NOT_RUN: Self = Self { is_blocked: false, used: Duration::ZERO };
}

/// Thread `tid` of this process; `None` where `/proc` does not show it.
pub(super) fn observe(tid: Pid) -> Option<Observed> {
    let stat = fs::read_to_string(format!("/proc/self/task/{tid}/stat")).ok()?;
    observed(&stat, clock_ticks_per_second())
}

/// Parses a line of `/proc/PID/stat` (proc_pid_stat(5)) with times in `ticks` per second.
fn observed(stat: &str, ticks: u64) -> Option<Observed> {
    let (_, fields) = stat.rsplit_once(')')?; // its name may have spaces and parentheses
    let mut fields = fields.split_ascii_whitespace();
    let is_blocked = fields.next()? != "R";
    let (user, system) = (fields.nth(10)?.parse::<u64>().ok()?, fields.next()?.parse::<u64>().ok()?);
    let millis = user.checked_add(system)?.checked_mul(1000)?.checked_div(ticks)?;
    Some(Observed { is_blocked, used: Duration::from_millis(millis) })
}

/// A point in the life of a thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reached {
    at: Instant,
    /// Time that the thread has waited for a processor, as far as the kernel counts it.
    starved: Duration,
}

impl Reached {
    /// The current point of this thread.
    pub(super) fn now() -> Self {
        let schedstat = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        Self { at: Instant::now(), starved: starved(&schedstat).unwrap_or_default() }
    }

    /// Time until `later` in which the thread was blocked or used a processor.
    pub(super) fn cost(self, later: Self) -> Duration {
        let starved = later.starved.saturating_sub(self.starved);
        later.at.saturating_duration_since(self.at).saturating_sub(starved)
    }
}

/// The second figure of `/proc/PID/schedstat` (Documentation/scheduler/sched-stats.rst).
fn starved(schedstat: &str) -> Option<Duration> {
    schedstat.split_ascii_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
}

/// The time that is left of a limit.
#[derive(Debug)]
pub(super) struct ScanTimeout {
    left: Duration,
    /// Processor time that the reader had used at the check before.
    used: Option<Duration>,
}

impl ScanTimeout {
    pub(super) const fn of(left: Duration) -> Self {
        Self { left, used: None }
    }

    pub(super) const fn is_over(&self) -> bool {
        self.left.is_zero()
    }

    pub(super) fn next_check(&self) -> Duration {
        self.left.min(CHECK)
    }

    pub(super) const fn spend(&mut self, time: Duration) {
        self.left = self.left.saturating_sub(time);
    }

    /// Spends, and returns, the cost of a check after a wait of `waited` that found the reader as `observed`.
    pub(super) fn check(&mut self, waited: Duration, observed: Option<Observed>) -> Duration {
        let cost = match observed {
            Some(Observed { is_blocked: false, used }) => {
                // The first check has nothing to compare with: it costs nothing.
                let before = self.used.replace(used);
                before.map_or(Duration::ZERO, |before| used.saturating_sub(before))
            }
            _ => waited.min(CHECK),
        };
        self.spend(cost);
        cost
    }
}

/// Progress of the scans of this process.
#[derive(Debug, Default)]
pub(super) struct Progress {
    steps: AtomicU64,
    kept_waiting: AtomicU64,
}

/// Progress until a moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProgressSoFar {
    steps: u64,
    kept_waiting: Duration,
}

impl Progress {
    /// Counts a look that ended, or a check of one that goes on. Processes kept the scan waiting for `kept_waiting`.
    pub(super) fn step(&self, kept_waiting: Duration) {
        let nanoseconds = u64::try_from(kept_waiting.as_nanos()).unwrap_or(u64::MAX);
        self.kept_waiting.fetch_add(nanoseconds, Ordering::Relaxed);
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn now(&self) -> ProgressSoFar {
        ProgressSoFar {
            steps: self.steps.load(Ordering::Relaxed),
            kept_waiting: Duration::from_nanos(self.kept_waiting.load(Ordering::Relaxed)),
        }
    }
}

impl ProgressSoFar {
    /// Cost of a check `now` after a wait of `waited`: without progress the wait, otherwise the time that processes kept
    /// the scan waiting.
    pub(super) fn cost(self, now: Self, waited: Duration) -> Duration {
        if now.steps == self.steps {
            waited.min(CHECK)
        } else {
            now.kept_waiting.saturating_sub(self.kept_waiting)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATE: Duration = Duration::from_secs(60);
    const SECOND: Duration = Duration::from_secs(1);

    fn runs(millis: u64) -> Option<Observed> {
        Some(Observed { is_blocked: false, used: Duration::from_millis(millis) })
    }

    fn blocked() -> Option<Observed> {
        Some(Observed { is_blocked: true, used: Duration::ZERO })
    }

    /// Number of checks until the timeout is over.
    fn checks(mut observed: impl FnMut(u64) -> Option<Observed>) -> u64 {
        let mut timeout = ScanTimeout::of(SECOND);
        let ends = |n: &u64| {
            timeout.check(LATE, observed(*n));
            timeout.is_over()
        };
        (1..1000).find(ends).unwrap_or(u64::MAX)
    }

    #[test]
    fn a_reader_that_waits_for_a_processor_is_waited_for() {
        assert_eq!(checks(|_| runs(3)), u64::MAX);
    }

    #[test]
    fn a_blocked_reader_costs_each_check_once_however_late_the_check_comes() {
        assert_eq!(checks(|_| blocked()), 50);
        assert_eq!(checks(|_| None), 50, "a thread that is not shown counts as blocked");
        let mut timeout = ScanTimeout::of(SECOND);
        assert_eq!(timeout.check(Duration::from_millis(1), blocked()), Duration::from_millis(1));
    }

    #[test]
    fn a_reader_that_a_process_keeps_busy_costs_the_processor_time_that_it_uses() {
        assert_eq!(checks(|n| runs(5000 + 10 * n)), 101);
        assert_eq!(checks(|n| if n % 2 == 0 { runs(n) } else { blocked() }), 91, "both kinds add up");
    }

    #[test]
    fn a_scan_costs_what_processes_keep_it_waiting_and_one_without_progress_the_checks() {
        let progress = Progress::default();
        let begun = progress.now();
        assert_eq!(begun.cost(progress.now(), LATE), CHECK);
        progress.step(Duration::ZERO);
        assert_eq!(begun.cost(progress.now(), LATE), Duration::ZERO);
        progress.step(SECOND);
        assert_eq!(begun.cost(progress.now(), LATE), SECOND);
    }

    #[test]
    fn a_thread_s_wait_for_a_processor_costs_nothing() {
        let at = Instant::now();
        let reached = |seconds, starved| Reached { at: at + seconds * SECOND, starved: starved * SECOND };
        assert_eq!(reached(0, 4).cost(reached(5, 6)), 3 * SECOND);
        assert_eq!(reached(0, 0).cost(reached(5, 6)), Duration::ZERO);
        assert_eq!(starved("12 3000000000 7\n"), Some(3 * SECOND));
        assert_eq!(["", "12", "12 x 7"].map(starved), [None; 3], "the whole wait counts");
    }

    #[test]
    fn a_thread_is_blocked_unless_it_runs_or_waits_for_a_processor() {
        let line = |state| format!("7 (a) S (b)) {state} 1 7 7 0 -1 4194560 98 0 0 0 250 50 0 0 20 0 1 0 74");
        let thread = |is_blocked| Some(Observed { is_blocked, used: Duration::from_secs(3) });
        assert_eq!(["R", "S", "D"].map(|state| observed(&line(state), 100)), [false, true, true].map(thread));
        assert_eq!(observed("7 (a) R 1 7", 100), None);
        assert_eq!(observed("", 100), None);
        let own = observe(rustix::thread::gettid()).unwrap();
        assert!(!own.is_blocked, "this thread runs");
    }
}
