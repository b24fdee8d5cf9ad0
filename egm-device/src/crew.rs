//! Threads that share work. If the host starts fewer of them than requested, or none, the work is only slower: limits
//! of threads (`ulimit -u`, `TasksMax=`) count other programs too, and may be reached at any time.

use std::panic::resume_unwind;
use std::thread::{self, Builder, ScopedJoinHandle};

use egm_address::CpuSet;
use rustix::thread::{CpuSet as Affinity, sched_setaffinity};

use crate::sys;

/// Work for some threads, which take their shares themselves: it is done when the first of them finds no share left.
pub(crate) struct Job<'a, T> {
    /// Number of threads to start at most.
    pub(crate) threads: usize,
    /// The host processors near its memory, if known.
    pub(crate) near: Option<&'a CpuSet>,
    /// Whether it runs only on idle processors.
    pub(crate) idle: bool,
    /// The work of each thread.
    pub(crate) work: Box<dyn Fn() -> T + Sync + 'a>,
}

impl<T> Job<'_, T> {
    fn on_a_thread_of_its_own(&self) -> T {
        pin(self.near);
        if self.idle && !egm_address::fault!("scrub-on-busy-processors") {
            sys::run_when_idle();
        }
        (self.work)()
    }
}

/// Runs `jobs` in parallel, each with as many of its threads as the host starts. The calling thread does jobs that got
/// none; its affinity and its scheduling class stay its caller's choice.
pub(crate) fn run<T: Send>(jobs: &[Job<'_, T>]) -> Vec<T> {
    thread::scope(|scope| {
        let crews: Vec<Vec<ScopedJoinHandle<'_, T>>> = jobs
            .iter()
            .map(|job| {
                let start = |_| Builder::new().spawn_scoped(scope, || job.on_a_thread_of_its_own()).ok();
                (0..job.threads).map_while(start).collect()
            })
            .collect();
        let left = jobs.iter().zip(&crews).filter(|(_, crew)| crew.is_empty());
        let mut outcomes: Vec<T> = left.map(|(job, _)| (job.work)()).collect();
        let join =
            |thread: ScopedJoinHandle<'_, T>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        outcomes.extend(crews.into_iter().flatten().map(join));
        outcomes
    })
}

/// Lets this thread run on the processors `near` only. One that may not be pinned goes on, only from further away.
pub fn pin(near: Option<&CpuSet>) {
    if let Some(near) = near.filter(|near| !near.is_empty()) {
        let mut affinity = Affinity::new();
        for cpu in
            near.iter().filter_map(|cpu| usize::try_from(cpu).ok()).filter(|cpu| *cpu < Affinity::MAX_CPU)
        {
            affinity.set(cpu);
        }
        let _ = sched_setaffinity(None, &affinity);
    }
}
