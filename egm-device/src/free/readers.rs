//! Looks at processes with a limit on the time of each. A user can make the kernel wait for a file system of the
//! user's own while the kernel holds a lock that a reader of the mappings needs.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{Pid, gettid};

use super::Inode;
use super::timeout::{Observed, Progress, Reached, ScanTimeout, observe};

/// A VFIO object that the kernel shows without a name: a device (before Linux 6.17), a mapping of one, an iommufd.
pub(super) const UNNAMED: &str = "unnamed";

/// An object that a process has.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum KernelObject {
    /// A mapping of a file's bytes.
    Mapping(Inode, Range<u64>),
    /// A descriptor of a file, with the number of the device that the file is.
    Descriptor(Inode, Option<(u32, u32)>),
    /// A file of this path, registered with io_uring.
    Registered(PathBuf),
    /// An io_uring that does not show its files now.
    HiddenRing,
    /// Buffers registered with an io_uring: pinned pages, of which the kernel does not name the file.
    RingBuffers,
    /// Descriptors in flight in a Unix socket.
    InFlight,
    /// Unknown objects: the process keeps its readers waiting.
    Silent,
    /// A VFIO group or device by name, or an object without one ([`UNNAMED`]).
    Device(String),
}

impl KernelObject {
    /// Whether the kernel shows which file or device it is.
    pub(super) fn is_named(&self) -> bool {
        match self {
            Self::Descriptor(..) | Self::Registered(_) | Self::Mapping(..) => true,
            Self::Device(name) => name != UNNAMED,
            Self::HiddenRing | Self::RingBuffers | Self::InFlight | Self::Silent => false,
        }
    }
}

/// Most threads that wait for processes.
const MAX_STUCK: usize = 256;

/// Findings of a look at a process, and whether they are complete.
pub(super) type LookResult = (Vec<KernelObject>, io::Result<()>);

pub(super) type LookTask = Box<dyn FnOnce() -> LookResult + Send>;

/// Looks, which a reader takes in order. A reader that is left behind takes no further ones.
type LookQueue = Arc<Mutex<VecDeque<(Subject, LookTask)>>>;

/// A thread that looks at one process after another. One that is kept waiting for too long is left behind, and another
/// takes its place.
pub(super) struct Readers {
    /// Limit of one look.
    timeout: Duration,
    progress: Arc<Progress>,
    /// Subjects that threads left behind wait for.
    stuck: Arc<StuckReaders>,
    reader: Option<Reader>,
}

#[derive(Default)]
struct StuckReaders(Mutex<BTreeMap<Subject, usize>>);

/// Subject of a look, for which one stuck reader blocks further tries: a user's processes, or one process of root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Subject {
    uid: u32,
    root: Option<u32>,
    is_at_mappings: bool,
}

impl Subject {
    /// Mappings, or else descriptors, of process `pid` of user `uid`.
    pub(super) fn new(uid: u32, pid: u32, is_at_mappings: bool) -> Self {
        Self { uid, root: (uid == 0).then_some(pid), is_at_mappings }
    }
}

struct Reader {
    looks: Sender<LookQueue>,
    /// In the order of the looks, with what each cost.
    results: Receiver<(Result<LookResult, LookError>, Duration)>,
    /// Id of its thread, once that runs.
    thread: Arc<OnceLock<Pid>>,
    /// Whether it is left behind. Guarded by the lock of the stuck readers.
    is_left: Arc<AtomicBool>,
}

/// Reason that a process was not looked at.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LookError {
    /// It, or the same of another process of its user, keeps its readers waiting.
    Silent,
    /// This process has no thread for it.
    NoThread,
}

impl StuckReaders {
    fn users(&self) -> MutexGuard<'_, BTreeMap<Subject, usize>> {
        lock(&self.0)
    }

    /// Why nothing looks at `subject` now.
    fn refusal(&self, subject: Subject) -> Option<LookError> {
        let users = self.users();
        if users.contains_key(&subject) {
            return Some(LookError::Silent);
        }
        (users.values().sum::<usize>() >= MAX_STUCK).then_some(LookError::NoThread)
    }
}

impl Readers {
    /// Readers that each process keeps waiting for `timeout` at most.
    pub(super) fn new(timeout: Duration, progress: Arc<Progress>) -> Self {
        Self { timeout, progress, stuck: Arc::default(), reader: None }
    }

    /// Ends the thread that reads: a process that confines itself later has no thread without a filter.
    pub(super) fn release(&mut self) {
        self.reader = None;
    }

    /// The results of `looks`, in their order. A subject that does not answer costs one wait, until it does.
    pub(super) fn look(&mut self, looks: Vec<(Subject, LookTask)>) -> Vec<Result<LookResult, LookError>> {
        let subjects: Vec<Subject> = looks.iter().map(|(subject, _)| *subject).collect();
        let looks = Arc::new(Mutex::new(VecDeque::from(looks)));
        let mut results = Vec::with_capacity(subjects.len());
        while results.len() < subjects.len() {
            let reader = self.reader.take().map_or_else(|| Reader::start(&self.stuck), Ok);
            let Ok(reader) = reader else { break };
            if reader.looks.send(Arc::clone(&looks)).is_ok() && self.receive(&reader, &subjects, &mut results)
            {
                self.reader = Some(reader);
            }
        }
        results.resize_with(subjects.len(), || Err(LookError::NoThread));
        results
    }

    /// Adds the results of `reader` for `subjects` without one; false if the reader is left behind.
    fn receive(
        &self,
        reader: &Reader,
        subjects: &[Subject],
        results: &mut Vec<Result<LookResult, LookError>>,
    ) -> bool {
        while let Some(subject) = subjects.get(results.len()) {
            match self.result(reader, *subject) {
                Ok(result) => results.push(result),
                Err(lost) => {
                    results.push(Err(lost));
                    return false;
                }
            }
        }
        true
    }

    /// The next result of `reader`, which is of a look at `subject`.
    ///
    /// # Errors
    /// The reader is left behind.
    fn result(&self, reader: &Reader, subject: Subject) -> Result<Result<LookResult, LookError>, LookError> {
        let (mut timeout, mut counted) = (ScanTimeout::of(self.timeout), Duration::ZERO);
        loop {
            let begun = Instant::now();
            match reader.results.recv_timeout(timeout.next_check()) {
                Ok((result, cost)) => {
                    // Looks that end before a check add up.
                    self.progress.step(cost.saturating_sub(counted));
                    return Ok(result);
                }
                Err(RecvTimeoutError::Disconnected) => return Err(LookError::NoThread),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let cost = timeout.check(begun.elapsed(), reader.observe());
            counted = counted.saturating_add(cost);
            self.progress.step(cost);
            if timeout.is_over() {
                // The thread sends under this lock, so it is either done by now or finds itself left behind.
                let mut users = self.stuck.users();
                return reader.results.try_recv().map(|(result, _)| result).map_err(|_| {
                    reader.is_left.store(true, Ordering::Relaxed);
                    let count = users.entry(subject).or_default();
                    *count = count.saturating_add(1);
                    LookError::Silent
                });
            }
        }
    }
}

impl Reader {
    fn start(stuck: &Arc<StuckReaders>) -> io::Result<Self> {
        let (looks, asked) = channel::<LookQueue>();
        let (answers, results) = channel();
        let thread = Arc::new(OnceLock::new());
        let (stuck, this) = (Arc::clone(stuck), Arc::clone(&thread));
        let is_left = Arc::<AtomicBool>::default();
        let left_behind = Arc::clone(&is_left);
        let run = move || {
            let _ = this.set(gettid()); // once: this is its only thread
            for looks in asked {
                let next = || lock(&looks).pop_front();
                let mut reached = Reached::now();
                while let Some((subject, look)) = next() {
                    let result = stuck.refusal(subject).map_or_else(|| Ok(look()), Err);
                    let (before, now) = (reached, Reached::now());
                    reached = now;
                    let mut users = stuck.users();
                    if left_behind.load(Ordering::Relaxed)
                        || answers.send((result, before.cost(now))).is_err()
                    {
                        // It was left behind: its user is read again from now on.
                        let left = users.get(&subject).map_or(0, |count| count.saturating_sub(1));
                        if left == 0 {
                            users.remove(&subject)
                        } else {
                            users.insert(subject, left)
                        };
                        return;
                    }
                }
            }
        };
        thread::Builder::new().name("scan-process".to_owned()).spawn(run)?;
        Ok(Self { looks, results, thread, is_left })
    }

    /// Its thread, as the kernel shows it.
    fn observe(&self) -> Option<Observed> {
        self.thread.get().map_or(Some(Observed::NOT_RUN), |thread| observe(*thread))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    use rustix::time::{ClockId, clock_gettime};

    use super::super::timeout::CHECK;
    use super::*;
    use crate::sys;

    const NOTHING: LookResult = (Vec::new(), Ok(()));

    fn mappings(uid: u32, pid: u32) -> Subject {
        Subject::new(uid, pid, true)
    }

    fn nothing(subject: Subject) -> (Subject, LookTask) {
        (subject, Box::new(|| NOTHING))
    }

    /// Results of `looks`, without what they found.
    fn results(readers: &mut Readers, looks: Vec<(Subject, LookTask)>) -> Vec<Result<(), LookError>> {
        readers.look(looks).into_iter().map(|result| result.map(drop)).collect()
    }

    #[test]
    fn a_process_that_does_not_answer_costs_its_user_alone() {
        let mut readers = Readers::new(Duration::from_millis(200), Arc::default());
        let (go, wait) = channel::<()>();
        let silent = move || {
            let _ = wait.recv();
            NOTHING
        };
        let looks = vec![
            nothing(mappings(1001, 1)),
            (mappings(1000, 2), Box::new(silent)),
            nothing(mappings(1000, 3)),
            nothing(Subject::new(1000, 3, false)),
            nothing(mappings(1001, 4)),
        ];
        let silent = Err(LookError::Silent);
        assert_eq!(results(&mut readers, looks), [Ok(()), silent, Err(LookError::Silent), Ok(()), Ok(())]);
        assert_eq!(results(&mut readers, vec![nothing(mappings(1000, 2))]), [Err(LookError::Silent)]);
        drop(go);
        while results(&mut readers, vec![nothing(mappings(1000, 2))]) != [Ok(())] {
            thread::yield_now();
        }
    }

    #[test]
    fn the_thread_of_a_reader_that_is_released_ends() {
        let mut readers = Readers::new(Duration::MAX, Arc::default());
        assert_eq!(results(&mut readers, vec![nothing(mappings(1000, 1))]), [Ok(())]);
        let id = Arc::clone(&readers.reader.as_ref().unwrap().thread);
        readers.release();
        let task = format!("/proc/self/task/{}", id.get().unwrap().as_raw_nonzero());
        while std::path::Path::new(&task).exists() {
            thread::yield_now();
        }
        assert_eq!(results(&mut readers, vec![nothing(mappings(1000, 1))]), [Ok(())], "it starts again");
    }

    /// Else its result is lost, and those of later looks count for the processes before.
    #[test]
    fn a_reader_that_is_left_behind_takes_no_further_look() {
        let readers = Readers::new(CHECK, Arc::default());
        let reader = Reader::start(&readers.stuck).unwrap();
        let (go, wait) = channel::<()>();
        let silent = move || {
            let _ = wait.recv();
            NOTHING
        };
        let subject = mappings(1000, 1);
        let looks = [(subject, Box::new(silent) as LookTask), nothing(mappings(1001, 2))];
        let looks = Arc::new(Mutex::new(VecDeque::from(looks)));
        reader.looks.send(Arc::clone(&looks)).unwrap();
        assert!(matches!(readers.result(&reader, subject), Err(LookError::Silent)));
        // It answers before the end that it sends to is gone.
        drop(go);
        assert!(reader.results.recv().is_err(), "a result that belongs to no look");
        assert_eq!((lock(&looks).len(), readers.stuck.users().len()), (1, 0));
    }

    #[test]
    fn root_s_processes_are_inspected_one_by_one_and_too_many_silent_ones_are_reported() {
        let mut readers = Readers::new(Duration::MAX, Arc::default());
        let stuck = Arc::clone(&readers.stuck);
        for pid in 1..u32::try_from(MAX_STUCK).unwrap() {
            stuck.users().insert(mappings(0, pid), 1);
        }
        let looks = || vec![nothing(mappings(0, 1)), nothing(mappings(0, 1 << 20))];
        assert_eq!(results(&mut readers, looks()), [Err(LookError::Silent), Ok(())]);
        stuck.users().insert(mappings(1000, 7), 1);
        assert_eq!(results(&mut readers, looks()), [Err(LookError::Silent), Err(LookError::NoThread)]);
    }

    /// Returns when this thread has used `time` of a processor.
    fn use_processor(time: Duration) {
        let used = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
        let end = used() + time;
        while used() < end {
            std::hint::spin_loop();
        }
    }

    /// A user can have any number of processes.
    #[test]
    fn short_looks_cost_together_what_they_take() {
        let progress = Arc::<Progress>::default();
        let mut readers = Readers::new(Duration::MAX, Arc::clone(&progress));
        let spin = || {
            use_processor(CHECK / 4);
            NOTHING
        };
        let begun = progress.now();
        readers.look((0..16).map(|pid| (mappings(1000, pid), Box::new(spin) as LookTask)).collect());
        let cost = begun.cost(progress.now(), Duration::ZERO);
        assert!(cost >= 2 * CHECK, "{cost:?} of {:?}", 4 * CHECK);
    }

    /// The first processor that this thread may use.
    fn processor() -> CpuSet {
        let allowed = sched_getaffinity(None).unwrap();
        let mut first = CpuSet::new();
        first.set((0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap());
        first
    }

    /// The reader runs at the lowest priority, on a processor that another thread keeps busy: this takes seconds.
    #[test]
    fn a_reader_that_gets_hardly_any_processor_time_is_not_left_behind() {
        let (processor, is_over) = (processor(), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                sched_setaffinity(None, &processor).unwrap();
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let starved = move || {
                sched_setaffinity(None, &processor).unwrap();
                sys::run_when_idle();
                use_processor(CHECK);
                NOTHING
            };
            // Far more than it uses, and far less than the seconds that it takes, on a machine of any speed.
            let mut readers = Readers::new(50 * CHECK, Arc::default());
            let result = results(&mut readers, vec![(mappings(1000, 1), Box::new(starved))]);
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(result, [Ok(())]);
        });
    }
}
