//! References to pages of a file that outlive its descriptions and mappings: a page in a pipe, direct I/O that never completes.
//!
//! ext4 waits for them (`ext4_break_layouts`) before it changes the length of a file, to its own length as well. That changes
//! neither bytes nor blocks, so the scrub that follows is one of the blocks that the owner had. The file must have a mapping
//! meanwhile, or some kernels look at no page.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::mpsc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;

use super::STEP;
use crate::backing::{Backing, Window};
use crate::mapping::{Mapping, base_page};

/// Time limit of the wait for references, as long as that for pins of a device-DAX device.
const LIMIT: Duration = Duration::from_secs(30);
/// Bytes of a file with pages that the kernel finds in a second at least.
const PACE: u64 = 1 << 30;

/// Device and inode of a file.
type Id = (u64, u64);

/// Files that a thread of this process waits for. Each call for one of them would wait as well, without a limit.
static AWAITED: Mutex<BTreeSet<Id>> = Mutex::new(BTreeSet::new());

fn awaited() -> MutexGuard<'static, BTreeSet<Id>> {
    AWAITED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn id(file: &File) -> io::Result<Id> {
    file.metadata().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Whether a thread of this process still waits for references to pages of `file`.
///
/// # Errors
/// The kernel's.
pub(crate) fn is_awaited(file: &File) -> io::Result<bool> {
    Ok(awaited().contains(&id(file)?))
}

/// Waits until nothing refers to a page of the file of `backing`, which no process maps or has open.
///
/// # Errors
/// `TimedOut` past the limit: a thread goes on waiting, with a descriptor of the file. Others are the kernel's.
pub(crate) fn wait(backing: &dyn Backing) -> io::Result<()> {
    if egm_address::fault!("busy-pages-overlooked") {
        return Ok(());
    }
    let window = Window::again(backing, base_page())?;
    let limit = LIMIT.saturating_add(Duration::from_secs(window.size() / PACE));
    apart(id(window.file())?, limit, move || {
        touch(&window)?;
        // Linux 6.12 waits for no page of a file without a mapping.
        let mapped = Mapping::new(&window, 0, window.size().min(STEP), 0).map_err(|error| error.source)?;
        let outcome = set_len(window.file(), window.file().metadata()?.len());
        drop(mapped);
        outcome
    })
}

/// Takes all blocks from `file`, once nothing refers to a page of it.
///
/// # Errors
/// As [`wait`].
pub(super) fn empty(file: &File) -> io::Result<()> {
    let own = file.try_clone()?;
    apart(id(file)?, LIMIT, move || set_len(&own, 0))
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

/// Does `work` for a file on a thread that is never joined, because a reference can keep the kernel waiting without end.
fn apart(id: Id, limit: Duration, work: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    if !awaited().insert(id) {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let (sender, receiver) = mpsc::sync_channel(1);
    let on_thread = move || {
        // Its descriptor of the file is closed by then.
        let outcome = work();
        awaited().remove(&id);
        drop(sender.send(outcome));
    };
    if let Err(error) = thread::Builder::new().name("fsdax-pages".into()).spawn(on_thread) {
        awaited().remove(&id);
        return Err(error);
    }
    receiver.recv_timeout(limit).unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::Anonymous;

    #[test]
    fn a_wait_past_its_limit_is_known_until_it_ends_and_no_second_one_begins() {
        let file = tempfile::tempfile().unwrap();
        let (go, goes) = mpsc::channel();
        let own = file.try_clone().unwrap();
        let work = move || {
            goes.recv().map_err(io::Error::other)?;
            set_len(&own, 0)
        };
        let late = apart(id(&file).unwrap(), Duration::ZERO, work).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        assert!(is_awaited(&file).unwrap());
        assert_eq!(empty(&file).unwrap_err().kind(), io::ErrorKind::TimedOut);
        go.send(()).unwrap();
        while is_awaited(&file).unwrap() {
            thread::yield_now();
        }
        assert!(empty(&file).is_ok());
    }

    #[test]
    fn a_wait_changes_no_byte_and_gives_no_block_up() {
        let memory = Anonymous::new("test", 3 << 20, None).unwrap();
        let mapping = Mapping::new(&memory, 0, 3 << 20, 0).unwrap();
        mapping.write(4096, b"owner").unwrap();
        let blocks = memory.file().metadata().unwrap().blocks();
        wait(&memory).unwrap();
        let mut found = [0; 5];
        mapping.read(4096, &mut found).unwrap();
        assert_eq!(&found, b"owner");
        assert!(memory.file().metadata().unwrap().blocks() >= blocks);
        assert!(!is_awaited(memory.file()).unwrap());
    }
}
