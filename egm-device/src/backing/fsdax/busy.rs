//! References to pages of a file that outlive its descriptions and mappings: a page in a pipe, direct I/O that never completes.
//!
//! ext4 waits for them (`ext4_break_layouts`) before it changes the length of a file, to its own length as well. That changes
//! neither bytes nor blocks, so the scrub that follows is one of the blocks that the owner had. The file must have a mapping
//! meanwhile, or some kernels look at no page.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::STEP;
use crate::backing::{Backing, Window};
use crate::mapping::{Mapping, base_page};

/// Time limit of the wait for references, as long as that for pins of a device-DAX device.
const LIMIT: Duration = Duration::from_secs(30);
/// The same in the background, where every left file can take as long.
const BACKGROUND: Duration = Duration::from_secs(1);
/// Bytes of a file with pages that the kernel finds in a second at least.
const PACE: u64 = 1 << 30;
/// Interval of looks at the flag that cancels a wait.
const TICK: Duration = Duration::from_millis(20);

/// Device and inode of a file.
type FileId = (u64, u64);

/// Time of the last change of an inode, in seconds and nanoseconds.
type ChangeTime = (i64, i64);

/// A wait for references to pages of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PageWait {
    /// A thread of this process waits since then. Another call for the file would wait as well, without a limit.
    Runs(Instant),
    /// Nothing referred to a page when the inode changed for the last time.
    Over(ChangeTime),
}

static WAITS: Mutex<BTreeMap<FileId, PageWait>> = Mutex::new(BTreeMap::new());
/// Notified at the end of each wait.
static ENDED: Condvar = Condvar::new();

fn waits() -> MutexGuard<'static, BTreeMap<FileId, PageWait>> {
    WAITS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn id(file: &File) -> io::Result<FileId> {
    file.metadata().map(|metadata| (metadata.dev(), metadata.ino()))
}

fn changed(file: &File) -> io::Result<ChangeTime> {
    file.metadata().map(|metadata| (metadata.ctime(), metadata.ctime_nsec()))
}

/// Limits of a caller that waits for references.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WaitTimeout<'a> {
    time: Duration,
    cancel: &'a AtomicBool,
}

impl<'a> WaitTimeout<'a> {
    /// The limit of a request, or of work `in_background`, that `cancel` ends early.
    pub(crate) const fn new(in_background: bool, cancel: &'a AtomicBool) -> Self {
        Self { time: if in_background { BACKGROUND } else { LIMIT }, cancel }
    }

    /// Fails once a wait for pages of `size` bytes that began at `since` is too long (`TimedOut`) or cancelled (`Interrupted`).
    fn check(&self, since: Instant, size: u64) -> io::Result<()> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let limit = self.time.saturating_add(Duration::from_secs(size / PACE));
        if since.elapsed() < limit { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
    }
}

/// Whether a thread of this process still waits for references to pages of `file`.
pub(crate) fn is_awaited(file: &File) -> io::Result<bool> {
    Ok(matches!(waits().get(&id(file)?), Some(PageWait::Runs(_))))
}

/// Whether a wait of this process found that nothing refers to a page of `file`, and nothing changed the file since.
pub(crate) fn is_over(file: &File) -> io::Result<bool> {
    let (id, changed) = (id(file)?, changed(file)?);
    Ok(waits().get(&id) == Some(&PageWait::Over(changed)))
}

/// Waits for the end of a wait for pages of `file`, of `size` bytes, that a thread of this process began earlier, if any.
///
/// # Errors
/// `TimedOut` past the limit, counted from the begin of that wait, and `Interrupted` once cancelled. Others are the kernel's.
pub(crate) fn join(file: &File, size: u64, limit: WaitTimeout<'_>) -> io::Result<()> {
    let id = id(file)?;
    let mut all = waits();
    while let Some(PageWait::Runs(since)) = all.get(&id).copied() {
        limit.check(since, size)?;
        all = ENDED.wait_timeout(all, TICK).unwrap_or_else(PoisonError::into_inner).0;
    }
    Ok(())
}

/// Waits until nothing refers to a page of the file of `backing`, which no process maps or has open.
///
/// # Errors
/// `TimedOut` past the limit and `Interrupted` once cancelled: a thread goes on waiting, with a descriptor of the file. Others
/// are the kernel's.
pub(crate) fn wait(backing: &dyn Backing, limit: WaitTimeout<'_>) -> io::Result<()> {
    if egm_address::fault!("busy-pages-overlooked") {
        return Ok(());
    }
    let window = Window::again(backing, base_page())?;
    apart(id(window.file())?, window.size(), limit, move || {
        touch(&window)?;
        // Linux 6.12 waits for no page of a file without a mapping.
        let mapped = Mapping::new(&window, 0, window.size().min(STEP), 0).map_err(|error| error.source)?;
        set_len(window.file(), window.file().metadata()?.len())?;
        drop(mapped);
        changed(window.file()).map(Some)
    })
}

/// Takes all blocks from `file`, once nothing refers to a page of it.
pub(super) fn empty(file: &File) -> io::Result<()> {
    static NEVER: AtomicBool = AtomicBool::new(false);
    let own = file.try_clone()?;
    apart(id(file)?, 0, WaitTimeout::new(false, &NEVER), move || set_len(&own, 0).map(|()| None))
}

/// A signal of this process may interrupt the wait.
fn set_len(file: &File, length: u64) -> io::Result<()> {
    loop {
        match file.set_len(length) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

/// Lets the kernel find every page of `window`. It looks only at pages that were mapped since it read the file's inode, which it
/// can have forgotten together with them (Linux before 6.15).
fn touch(window: &Window) -> io::Result<()> {
    for at in (0..window.size()).step_by(usize::try_from(STEP).unwrap_or(usize::MAX)) {
        let size = STEP.min(window.size().saturating_sub(at));
        let mapping = Mapping::new(window, at, size, at).map_err(|error| error.source)?;
        let length = mapping.size();
        if mapping.reach(0, length).is_ok() {
            continue;
        }
        let page = mapping.page_size().max(1);
        for from in (0..length).step_by(page) {
            match mapping.reach(from, page.min(length.saturating_sub(from))) {
                // A bad page: the scrub finds it, and no grant uses its file again.
                Err(error) if is_bad(&error.source) => {}
                outcome => outcome.map_err(|error| error.source)?,
            }
        }
    }
    Ok(())
}

fn is_bad(error: &io::Error) -> bool {
    [Errno::FAULT, Errno::HWPOISON].iter().any(|bad| error.raw_os_error() == Some(bad.raw_os_error()))
}

/// Does `work` for a file of `size` bytes on a thread that is never joined, because a reference can keep the kernel waiting
/// without end. It returns when the file changed last, if nothing refers to it from then on.
fn apart(
    id: FileId,
    size: u64,
    limit: WaitTimeout<'_>,
    work: impl FnOnce() -> io::Result<Option<ChangeTime>> + Send + 'static,
) -> io::Result<()> {
    let since = Instant::now();
    let mut all = waits();
    if matches!(all.get(&id), Some(PageWait::Runs(_))) {
        return Err(io::ErrorKind::TimedOut.into());
    }
    all.insert(id, PageWait::Runs(since));
    drop(all);
    let (sender, receiver) = mpsc::sync_channel(1);
    let on_thread = move || {
        // Its descriptor of the file is closed by then.
        let outcome = work();
        end(id, outcome.as_ref().ok().copied().flatten());
        drop(sender.send(outcome));
    };
    if let Err(error) = thread::Builder::new().name("fsdax-pages".into()).spawn(on_thread) {
        end(id, None);
        return Err(error);
    }
    loop {
        match receiver.recv_timeout(TICK) {
            Ok(outcome) => return outcome.map(drop),
            Err(RecvTimeoutError::Timeout) => limit.check(since, size)?,
            Err(RecvTimeoutError::Disconnected) => return Err(io::ErrorKind::Other.into()),
        }
    }
}

fn end(id: FileId, changed: Option<ChangeTime>) {
    let mut all = waits();
    match changed {
        Some(changed) => all.insert(id, PageWait::Over(changed)),
        None => all.remove(&id),
    };
    ENDED.notify_all();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::Anonymous;

    static NEVER: AtomicBool = AtomicBool::new(false);

    #[test]
    fn a_cancelled_wait_is_known_until_it_ends_and_no_second_one_begins() {
        let file = tempfile::tempfile().unwrap();
        let (go, goes) = mpsc::channel();
        let own = file.try_clone().unwrap();
        let work = move || {
            goes.recv().map_err(io::Error::other)?;
            set_len(&own, 0).map(|()| None)
        };
        let cancel = AtomicBool::new(true);
        let cancelled = WaitTimeout::new(false, &cancel);
        let kind = |outcome: io::Result<()>| outcome.unwrap_err().kind();
        assert_eq!(kind(apart(id(&file).unwrap(), 0, cancelled, work)), io::ErrorKind::Interrupted);
        assert!(is_awaited(&file).unwrap());
        assert_eq!(kind(empty(&file)), io::ErrorKind::TimedOut);
        assert_eq!(kind(join(&file, 0, cancelled)), io::ErrorKind::Interrupted);
        let now = WaitTimeout { time: Duration::ZERO, cancel: &NEVER };
        assert_eq!(kind(join(&file, 0, now)), io::ErrorKind::TimedOut);
        go.send(()).unwrap();
        join(&file, 0, WaitTimeout::new(false, &NEVER)).unwrap();
        assert!(!is_awaited(&file).unwrap() && !is_over(&file).unwrap());
        assert!(empty(&file).is_ok());
    }

    #[test]
    fn a_wait_changes_no_byte_and_gives_no_block_up() {
        let memory = Anonymous::new("test", 3 << 20, None).unwrap();
        let mapping = Mapping::new(&memory, 0, 3 << 20, 0).unwrap();
        mapping.write(4096, b"owner").unwrap();
        let blocks = memory.file().metadata().unwrap().blocks();
        assert!(!is_over(memory.file()).unwrap());
        wait(&memory, WaitTimeout::new(false, &NEVER)).unwrap();
        let mut found = [0; 5];
        mapping.read(4096, &mut found).unwrap();
        assert_eq!(&found, b"owner");
        assert!(memory.file().metadata().unwrap().blocks() >= blocks);
        assert!(!is_awaited(memory.file()).unwrap() && is_over(memory.file()).unwrap());
    }
}
