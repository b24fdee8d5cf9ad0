//! Threads that share work. A host that gives fewer of them than were asked for, or none, makes the work slower and nothing
//! else: limits of threads (`ulimit -u`, `TasksMax=`) are about other programs too, and may be reached at any time.

use std::panic::resume_unwind;
use std::thread::{self, Builder, ScopedJoinHandle};

use egm_address::CpuSet;

use crate::prefault::pin;
use crate::sys;

/// Work for some threads, which take their shares themselves: it is done when the first of them finds nothing left.
pub(crate) struct Job<'a, T> {
    /// Threads that it is worth.
    pub(crate) threads: usize,
    /// The host processors near its memory, if known.
    pub(crate) near: Option<&'a CpuSet>,
    /// Whether it is for processors that have nothing else to do.
    pub(crate) idle: bool,
    /// What each thread does.
    pub(crate) work: Box<dyn Fn() -> T + Sync + 'a>,
}

impl<T> Job<'_, T> {
    fn on_a_thread_of_its_own(&self) -> T {
        pin(self.near);
        if self.idle {
            sys::run_when_idle();
        }
        (self.work)()
    }
}

/// Does `jobs` at once, each with as many of its threads as the host gives. The calling thread does what got none; where it
/// runs, and how urgently, stays its caller's choice.
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
