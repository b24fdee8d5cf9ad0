//! The truth of "in use": write locks that the kernel keeps for an open file description.
//!
//! Unlike a process's lock, such a lock conflicts with every other description, threads of one process included, and
//! goes when the last descriptor and the last mapping of its description are gone: never with the process alone.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use egm_address::{Address, Span, SpanSet};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc::{self, flock};

/// First and longest pause between attempts to take the ledger's lock.
const FIRST_PAUSE: Duration = Duration::from_micros(200);
const LAST_PAUSE: Duration = Duration::from_millis(10);

/// Locks `bytes` of `file` for its description; `false` when another description has some of them.
pub(super) fn lock<S>(file: &File, bytes: Span<S>) -> io::Result<bool> {
    match fcntl(file, FcntlArg::F_OFD_SETLK(&write_lock(bytes.start().get(), bytes.size())?)) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(egm_address::fault!("claim-lock-ignored")),
        Err(error) => Err(error.into()),
    }
}

/// Releases the locks of this description of `file` on `bytes`.
pub(super) fn unlock<S>(file: &File, bytes: Span<S>) -> io::Result<()> {
    let l_type = i16::try_from(libc::F_UNLCK).map_err(io::Error::other)?;
    let none = flock { l_type, ..write_lock(bytes.start().get(), bytes.size())? };
    fcntl(file, FcntlArg::F_OFD_SETLK(&none))?;
    Ok(())
}

pub(crate) fn inode(file: &File) -> io::Result<u64> {
    file.metadata().map(|metadata| metadata.ino())
}

/// Locks all of `file`, waiting up to `timeout` for its holder, which works for milliseconds, or is stopped.
///
/// # Errors
/// `TimedOut` when it stayed taken, and those of fcntl(2).
pub(super) fn wait(file: &File, timeout: Duration) -> io::Result<()> {
    let whole = flock { l_len: 0, ..write_lock(0, 1)? };
    let (begun, mut pause) = (Instant::now(), FIRST_PAUSE);
    loop {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&whole)) {
            Ok(_) => return Ok(()),
            Err(Errno::EAGAIN | Errno::EACCES) if begun.elapsed() < timeout => {
                // The kernel's own wait has no end.
                std::thread::sleep(pause);
                pause = LAST_PAUSE.min(pause.saturating_mul(2));
            }
            Err(Errno::EAGAIN | Errno::EACCES) => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// The part of `bytes` of `file` that other descriptions have locked.
pub(super) fn held<S>(file: &File, bytes: Span<S>) -> io::Result<SpanSet<S>> {
    let (mut held, mut ask) = (Vec::new(), vec![bytes]);
    while let Some(span) = ask.pop() {
        // The kernel names any one lock in the way, so both sides of it are queried next.
        let mut lock = write_lock(span.start().get(), span.size())?;
        fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
        if i32::from(lock.l_type) == libc::F_UNLCK {
            continue;
        }
        let start = u64::try_from(lock.l_start).unwrap_or(0);
        let end = match u64::try_from(lock.l_len) {
            Ok(0) | Err(_) => u64::MAX, // to the end of any file
            Ok(size) => start.saturating_add(size),
        };
        let (start, end) = (Address::new(start), Address::new(end));
        let found = Span::between(start, end).and_then(|found| found.intersection(span));
        held.push(found.ok_or(io::ErrorKind::InvalidData)?);
        ask.extend(Span::between(span.start(), start));
        ask.extend(Span::between(end, span.end()));
    }
    Ok(held.into_iter().collect())
}

fn write_lock(start: u64, size: u64) -> io::Result<flock> {
    let number = |n: u64| i64::try_from(n).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    let small = |n: i32| i16::try_from(n).map_err(io::Error::other);
    Ok(flock {
        l_type: small(libc::F_WRLCK)?,
        l_whence: small(libc::SEEK_SET)?,
        l_start: number(start)?,
        l_len: number(size)?,
        l_pid: 0, // the kernel insists for this kind of lock
    })
}

#[cfg(test)]
mod tests {
    use egm_address::{InRegion, Offset};

    use super::*;

    fn span(start: u64, size: u64) -> Span<InRegion> {
        Span::new(Offset::new(start), size).unwrap()
    }

    #[test]
    fn a_lock_is_seen_by_every_other_description_until_the_last_descriptor_is_gone() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let (mine, other) = (path.reopen().unwrap(), path.reopen().unwrap());
        assert!(lock(&mine, span(0x1000, 0x1000)).unwrap());
        assert!(lock(&mine, span(1 << 40, 0x2000)).unwrap());
        assert!(!lock(&other, span(0x1fff, 1)).unwrap());
        let all = span(0, i64::MAX.unsigned_abs());
        let expected = [span(0x1000, 0x1000), span(1 << 40, 0x2000)].into_iter().collect();
        assert_eq!(held(&other, all).unwrap(), expected);
        assert_eq!(held(&other, span(0x1800, 0x10)).unwrap(), SpanSet::from_iter([span(0x1800, 0x10)]));
        assert!(held(&mine, all).unwrap().is_empty());
        let inherited = mine.try_clone().unwrap();
        drop(mine);
        assert!(!lock(&other, span(0x1000, 1)).unwrap());
        drop(inherited);
        assert!(lock(&other, all).unwrap());
        unlock(&other, span(0x2000, 0x1000)).unwrap();
        let third = path.reopen().unwrap();
        assert!(lock(&third, span(0x2000, 0x1000)).unwrap() && !lock(&third, span(0x1fff, 1)).unwrap());
    }

    #[test]
    fn a_place_beyond_what_the_kernel_counts_is_refused() {
        let file = tempfile::tempfile().unwrap();
        assert!(lock(&file, span(1 << 63, 1)).is_err());
    }
}
