//! One scan at a time, for all waiting requests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::judge::judge;
use super::readers::{Readers, UNNAMED};
use super::scan::{ScanResult, scan};
use super::timeout::{Progress, ScanTimeout};
use super::{FileName, Question, Verdict};

/// The scans of this process: requests about different memory share them.
static SHARED_SCANS: LazyLock<Arc<SharedScans>> = LazyLock::new(|| {
    let progress = Arc::<Progress>::default();
    let readers = Mutex::new(Readers::new(PROCESS_TIMEOUT, Arc::clone(&progress)));
    let scan = move |asked: &_| {
        let mut readers = readers.lock().unwrap_or_else(PoisonError::into_inner);
        let found = scan(Path::new("/proc"), asked, &mut readers);
        readers.release();
        found
    };
    SharedScans::new(VERDICT_TIMEOUT, progress, scan)
});

/// Longest time that processes may keep a verdict waiting.
const VERDICT_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest time that one process may keep a verdict waiting. A process can keep a reader of its mappings waiting for as long
/// as it likes, by a file system of its own behind one of them.
const PROCESS_TIMEOUT: Duration = Duration::from_secs(1);

/// Most processes of which VFIO devices are remembered.
const MAX_REMEMBERED: usize = 4096;

/// Looks at all processes for `files`; `None` when it takes too long.
pub(super) fn find(files: &[FileName]) -> Option<Arc<OnceLock<ScanResult>>> {
    SHARED_SCANS.wait(files)
}

/// Looks at all processes for the answer to `question`.
pub(super) fn look(question: &Question) -> Verdict {
    SHARED_SCANS.look(question)
}

/// Looks at all processes once, for the answers to all `questions`.
pub(super) fn look_at_all(questions: &[Question]) -> Vec<Verdict> {
    SHARED_SCANS.look_at_all(questions)
}

type Scan = dyn Fn(&BTreeSet<FileName>) -> ScanResult + Send + Sync;

/// A scan serves all requests that came before it began, so more requests do not make this process read `/proc` more
/// often. It has a thread of its own, because it may never end.
struct SharedScans {
    timeout: Duration,
    /// Progress of the scans: a wait costs less while they make some.
    progress: Arc<Progress>,
    scan: Box<Scan>,
    state: Mutex<ScanState>,
    over: Condvar,
}

#[derive(Default)]
struct ScanState {
    runs: bool,
    /// For the next scan. A scan that runs may have passed a process that has got the memory since.
    asked: BTreeSet<FileName>,
    /// The result of the next scan.
    next: Arc<OnceLock<ScanResult>>,
    /// VFIO groups and devices of processes, as scans saw them.
    devices: BTreeMap<u32, BTreeSet<String>>,
}

impl SharedScans {
    fn new(
        timeout: Duration,
        progress: Arc<Progress>,
        scan: impl Fn(&BTreeSet<FileName>) -> ScanResult + Send + Sync + 'static,
    ) -> Arc<Self> {
        let (state, over) = (Mutex::default(), Condvar::new());
        Arc::new(Self { timeout, progress, scan: Box::new(scan), state, over })
    }

    fn state(&self) -> MutexGuard<'_, ScanState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(self: &Arc<Self>, question: &Question) -> Verdict {
        let found = self.wait(std::slice::from_ref(&question.file));
        self.answer(question, found.as_deref())
    }

    fn look_at_all(self: &Arc<Self>, questions: &[Question]) -> Vec<Verdict> {
        let files: Vec<FileName> = questions.iter().map(|question| question.file.clone()).collect();
        let found = self.wait(&files);
        questions.iter().map(|question| self.answer(question, found.as_deref())).collect()
    }

    /// The answer to `question`, by what a scan found.
    fn answer(&self, question: &Question, found: Option<&OnceLock<ScanResult>>) -> Verdict {
        let Some(found) = found else { return Verdict::unknown(&question.bytes) };
        let state = self.state();
        let seen = question.last.iter().filter_map(|owner| state.devices.get(&owner.pid));
        let devices = seen.flatten().chain(&question.devices).cloned().collect();
        drop(state);
        found.get().map_or(Verdict::Free, |found| judge(question, found, &devices, std::process::id()))
    }

    /// The result of a scan that began after this call; `None` when it takes too long.
    fn wait(self: &Arc<Self>, files: &[FileName]) -> Option<Arc<OnceLock<ScanResult>>> {
        let mut timeout = ScanTimeout::of(self.timeout);
        let mut state = self.state();
        state.asked.extend(files.iter().cloned());
        let next = Arc::clone(&state.next);
        loop {
            if next.get().is_some() {
                return Some(next);
            }
            if !state.runs {
                let asked = std::mem::take(&mut state.asked);
                (state.runs, state.next) = (true, Arc::default());
                let (shared_scans, found) = (Arc::clone(self), Arc::clone(&next));
                let scan = move || shared_scans.finish(&found, (shared_scans.scan)(&asked));
                drop(state);
                if thread::Builder::new().name("scan".to_owned()).spawn(scan).is_err() {
                    self.finish(&next, ScanResult { is_partial: true, ..ScanResult::default() });
                }
                state = self.state();
                continue;
            }
            if timeout.is_over() {
                return None;
            }
            let (begun, before) = (Instant::now(), self.progress.now());
            (state, _) =
                self.over.wait_timeout(state, timeout.next_check()).unwrap_or_else(PoisonError::into_inner);
            timeout.spend(before.cost(self.progress.now(), begun.elapsed()));
        }
    }

    /// Ends a scan with what it `found`.
    fn finish(&self, result: &OnceLock<ScanResult>, found: ScanResult) {
        let mut state = self.state();
        for (pid, device) in found.devices().into_iter().filter(|(_, name)| name != UNNAMED) {
            if state.devices.len() < MAX_REMEMBERED || state.devices.contains_key(&pid) {
                state.devices.entry(pid).or_default().insert(device.to_owned());
            }
        }
        let _ = result.set(found); // only this scan sets it
        state.runs = false;
        self.over.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::free::Inode;
    use crate::free::scan::tests::mapped;
    use crate::free::tests::{EGM, question};

    fn of(inode: u64) -> FileName {
        FileName { inode: Inode(0, 6, inode), ..EGM.clone() }
    }

    fn is_free(shared_scans: &Arc<SharedScans>, inode: u64) -> bool {
        shared_scans.look(&Question { file: of(inode), ..question(0..1) }) == Verdict::Free
    }

    /// A user has 64 connections, and may return what is mapped still on all of them.
    #[test]
    fn one_scan_serves_all_requests_from_before_it_began_and_none_from_after() {
        let (begins, begun) = mpsc::channel();
        let (go, wait) = mpsc::channel();
        let wait = Mutex::new(wait);
        let shared_scans = SharedScans::new(Duration::MAX, Arc::default(), move |asked| {
            begins.send(asked.len()).unwrap();
            wait.lock().unwrap().recv().unwrap()
        });
        let shared_scans = &shared_scans;
        thread::scope(|scope| {
            let first = scope.spawn(|| is_free(shared_scans, 0));
            assert_eq!(begun.recv(), Ok(1));
            let more: Vec<_> = (0..64).map(|n| scope.spawn(move || (n, is_free(shared_scans, n)))).collect();
            while shared_scans.state().asked.len() < 64 {
                thread::yield_now();
            }
            go.send(ScanResult::default()).unwrap();
            assert!(first.join().unwrap());
            assert_eq!(begun.recv(), Ok(64), "the first one's file again: it was asked for since");
            go.send(mapped(&[of(0), of(7)], 0..1)).unwrap();
            for asked in more {
                let (n, is_free) = asked.join().unwrap();
                assert_eq!(is_free, ![0, 7].contains(&n), "{n}");
            }
        });
        assert!(begun.try_recv().is_err(), "two scans");
    }

    #[test]
    fn a_process_that_keeps_the_scan_waiting_keeps_no_request_and_nothing_counts_as_free() {
        let (go, wait) = mpsc::channel::<()>();
        let wait = Mutex::new(wait);
        let shared_scans = SharedScans::new(Duration::ZERO, Arc::default(), move |_| {
            let _ = wait.lock().unwrap().recv();
            ScanResult::default()
        });
        assert!(!is_free(&shared_scans, 0) && !is_free(&shared_scans, 0));
        drop(go);
    }
}
