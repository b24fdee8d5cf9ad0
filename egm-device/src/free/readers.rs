//! Looks at processes, none of which can keep a scan waiting: a user can have the kernel wait for a file system of the user's own
//! while it holds what a reader of the mappings needs.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Major and minor number of a file's device, and its inode.
pub(super) type Inode = (u32, u32, u64);

/// An object that a process has.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum What {
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
    /// A VFIO group or device by name, or an object without one ([`UNNAMED`](super::scan::UNNAMED)).
    Device(String),
}

/// Most threads that wait for processes.
const MAX_STUCK: usize = 256;

/// Findings of a look at a process, and whether they are complete.
pub(super) type Looked = (Vec<What>, io::Result<()>);

type Look = Box<dyn FnOnce() -> Looked + Send>;

/// A thread that looks at one process after another. One that waits too long is left behind, and another takes its place.
pub(super) struct Readers {
    patience: Duration,
    /// Users with a process that a thread left behind waits for.
    stuck: Arc<Stuck>,
    reader: Option<Reader>,
}

#[derive(Default)]
struct Stuck(Mutex<BTreeMap<Subject, usize>>);

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
    looks: Sender<(Subject, Look)>,
    looked: Receiver<Looked>,
}

/// Reason that a process was not looked at.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NotLooked {
    /// It, or the same of another process of its user, keeps its readers waiting.
    Silent,
    /// This process has no thread for it.
    NoThread,
}

impl Stuck {
    fn users(&self) -> MutexGuard<'_, BTreeMap<Subject, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Readers {
    /// Readers that wait for each process for `patience` at most.
    pub(super) fn new(patience: Duration) -> Self {
        Self { patience, stuck: Arc::default(), reader: None }
    }

    /// The result of `look` at `subject`, which costs one wait until it answers.
    pub(super) fn look(
        &mut self,
        subject: Subject,
        look: impl FnOnce() -> Looked + Send + 'static,
    ) -> Result<Looked, NotLooked> {
        let users = self.stuck.users();
        if users.contains_key(&subject) {
            return Err(NotLooked::Silent);
        }
        if users.values().sum::<usize>() >= MAX_STUCK {
            return Err(NotLooked::NoThread);
        }
        drop(users);
        let reader = match self.reader.take() {
            Some(reader) => reader,
            None => Reader::start(&self.stuck).map_err(|_| NotLooked::NoThread)?,
        };
        reader.looks.send((subject, Box::new(look))).map_err(|_| NotLooked::NoThread)?;
        match reader.looked.recv_timeout(self.patience) {
            Ok(looked) => {
                self.reader = Some(reader);
                Ok(looked)
            }
            Err(RecvTimeoutError::Disconnected) => Err(NotLooked::NoThread),
            Err(RecvTimeoutError::Timeout) => {
                // The thread sends under this lock, so it is either done by now or finds itself left behind.
                let mut users = self.stuck.users();
                if let Ok(looked) = reader.looked.try_recv() {
                    drop(users);
                    self.reader = Some(reader);
                    return Ok(looked);
                }
                let count = users.entry(subject).or_default();
                *count = count.saturating_add(1);
                drop(reader);
                Err(NotLooked::Silent)
            }
        }
    }
}

impl Reader {
    fn start(stuck: &Arc<Stuck>) -> io::Result<Self> {
        let (looks, asked) = channel::<(Subject, Look)>();
        let (answers, looked) = channel();
        let stuck = Arc::clone(stuck);
        let run = move || {
            for (subject, look) in asked {
                let looked = look();
                let mut users = stuck.users();
                if answers.send(looked).is_err() {
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
        };
        thread::Builder::new().name("scan-process".to_owned()).spawn(run)?;
        Ok(Self { looks, looked })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Looked = (Vec::new(), Ok(()));

    fn mappings(uid: u32, pid: u32) -> Subject {
        Subject::new(uid, pid, true)
    }

    #[test]
    fn a_process_that_does_not_answer_costs_its_user_alone() {
        let mut readers = Readers::new(Duration::from_millis(1));
        let (go, wait) = channel::<()>();
        let silent = move || {
            let _ = wait.recv();
            NOTHING
        };
        assert_eq!(readers.look(mappings(1000, 1), silent).unwrap_err(), NotLooked::Silent);
        assert_eq!(readers.look(mappings(1000, 2), || NOTHING).unwrap_err(), NotLooked::Silent);
        readers.patience = Duration::MAX;
        assert!(readers.look(Subject::new(1000, 2, false), || NOTHING).is_ok(), "descriptors");
        assert!(readers.look(mappings(1001, 3), || NOTHING).is_ok());
        drop(go);
        while readers.look(mappings(1000, 1), || NOTHING).is_err() {
            thread::yield_now();
        }
    }

    #[test]
    fn root_s_processes_are_looked_at_one_by_one_and_too_many_silent_ones_are_said() {
        let mut readers = Readers::new(Duration::ZERO);
        let (go, wait) = channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        for pid in 0..u32::try_from(MAX_STUCK).unwrap() {
            let wait = Arc::clone(&wait);
            let silent = move || {
                let _ = wait.lock().unwrap().recv();
                NOTHING
            };
            assert_eq!(readers.look(mappings(0, pid), silent).unwrap_err(), NotLooked::Silent);
        }
        assert_eq!(readers.look(mappings(0, 1 << 20), || NOTHING).unwrap_err(), NotLooked::NoThread);
        drop(go);
    }
}
