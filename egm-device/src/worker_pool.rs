//! Threads that share work. If the host starts fewer of them than requested, or none, the work is only slower: limits
//! of threads (`ulimit -u`, `TasksMax=`) count other programs too, and may be reached at any time.

use std::panic::resume_unwind;
use std::thread::{self, Builder, ScopedJoinHandle};

use egm_address::CpuSet;
use rustix::thread::{CpuSet as Affinity, sched_setaffinity};

use crate::sys;

/// Work for some threads, which take their shares themselves: it is done when the first of them finds no share left.
pub(crate) struct Task<'a, T> {
    /// Number of threads to start at most.
    pub(crate) threads: usize,
    /// The host processors near its memory, if known.
    pub(crate) near: Option<&'a CpuSet>,
    /// Whether it runs only on idle processors.
    pub(crate) idle: bool,
    /// The work of each thread.
    pub(crate) work: Box<dyn Fn() -> T + Sync + 'a>,
}

impl<T> Task<'_, T> {
    fn run_pinned(&self) -> T {
        pin(self.near);
        if self.idle && !egm_address::fault!("scrub-on-busy-processors") {
            sys::run_when_idle();
        }
        (self.work)()
    }
}

/// Runs `tasks` in parallel, each with as many of its threads as the host starts. The calling thread does tasks that
/// got none; its affinity and its scheduling class stay its caller's choice.
pub(crate) fn run<T: Send>(tasks: &[Task<'_, T>]) -> Vec<T> {
    thread::scope(|scope| {
        let workers: Vec<Vec<ScopedJoinHandle<'_, T>>> = tasks
            .iter()
            .map(|task| {
                let start = |_| Builder::new().spawn_scoped(scope, || task.run_pinned()).ok();
                (0..task.threads).map_while(start).collect()
            })
            .collect();
        let left = tasks.iter().zip(&workers).filter(|(_, threads)| threads.is_empty());
        let mut outcomes: Vec<T> = left.map(|(task, _)| (task.work)()).collect();
        let join =
            |thread: ScopedJoinHandle<'_, T>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        outcomes.extend(workers.into_iter().flatten().map(join));
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
