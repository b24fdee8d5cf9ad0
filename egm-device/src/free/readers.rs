//! Looks at processes, none of which can keep a scan waiting: a user can have the kernel wait for a file system of the user's own
//! while it holds what a reader of the mappings needs.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::scan::What;

/// Most threads that wait for processes.
const MAX_STUCK: usize = 256;

/// What a process showed, and whether that is all of it.
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
struct Stuck(Mutex<BTreeMap<u32, usize>>);

struct Reader {
    looks: Sender<(u32, Look)>,
    looked: Receiver<Looked>,
}

/// Why a process was not looked at.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NotLooked {
    /// It, or another process of its user, keeps its readers waiting.
    Silent,
    /// This process has no thread for it.
    NoThread,
}

impl Stuck {
    fn users(&self) -> MutexGuard<'_, BTreeMap<u32, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Readers {
    /// Readers that wait for each process for `patience` at most.
    pub(super) fn new(patience: Duration) -> Self {
        Self { patience, stuck: Arc::default(), reader: None }
    }

    /// The result of `look` at a process of user `uid`. A user other than root costs one wait until the process answers.
    pub(super) fn look(
        &mut self,
        uid: u32,
        look: impl FnOnce() -> Looked + Send + 'static,
    ) -> Result<Looked, NotLooked> {
        let users = self.stuck.users();
        if uid != 0 && users.contains_key(&uid) {
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
        reader.looks.send((uid, Box::new(look))).map_err(|_| NotLooked::NoThread)?;
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
                let count = users.entry(uid).or_default();
                *count = count.saturating_add(1);
                drop(reader);
                Err(NotLooked::Silent)
            }
        }
    }
}

impl Reader {
    fn start(stuck: &Arc<Stuck>) -> io::Result<Self> {
        let (looks, asked) = channel::<(u32, Look)>();
        let (answers, looked) = channel();
        let stuck = Arc::clone(stuck);
        let run = move || {
            for (uid, look) in asked {
                let looked = look();
                let mut users = stuck.users();
                if answers.send(looked).is_err() {
                    // It was left behind: its user is read again from now on.
                    let left = users.get(&uid).map_or(0, |count| count.saturating_sub(1));
                    if left == 0 {
                        users.remove(&uid)
                    } else {
                        users.insert(uid, left)
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

    #[test]
    fn a_process_that_does_not_answer_costs_its_user_alone() {
        let mut readers = Readers::new(Duration::from_millis(1));
        let (go, wait) = channel::<()>();
        let silent = move || {
            let _ = wait.recv();
            NOTHING
        };
        assert_eq!(readers.look(1000, silent).unwrap_err(), NotLooked::Silent);
        assert_eq!(readers.look(1000, || NOTHING).unwrap_err(), NotLooked::Silent, "another of that user's");
        readers.patience = Duration::MAX;
        assert!(readers.look(1001, || NOTHING).is_ok());
        drop(go);
        while readers.look(1000, || NOTHING).is_err() {
            thread::yield_now();
        }
    }

    #[test]
    fn root_s_processes_are_looked_at_one_by_one_and_too_many_silent_ones_are_said() {
        let mut readers = Readers::new(Duration::ZERO);
        let (go, wait) = channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        for _ in 0..MAX_STUCK {
            let wait = Arc::clone(&wait);
            let silent = move || {
                let _ = wait.lock().unwrap().recv();
                NOTHING
            };
            assert_eq!(readers.look(0, silent).unwrap_err(), NotLooked::Silent);
        }
        assert_eq!(readers.look(0, || NOTHING).unwrap_err(), NotLooked::NoThread);
        drop(go);
    }
}
