//! Who maps bytes of a file, as `/proc` tells.
//!
//! For memory whose file opens once: its descriptions are one, so no lock tells the mapping of a slice from that of another, and
//! a process that was handed the descriptor can map a slice still when its owner has ended.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{major, minor};
use rustix::io::Errno;

/// Of this process: who asks for one slice shares the scan with who asks for another.
static SCANS: LazyLock<Arc<Scans>> =
    LazyLock::new(|| Scans::new(PATIENCE, |asked| scan(Path::new("/proc"), asked)));
/// How long who asks waits. A process can keep a reader of its mappings waiting for as long as it likes: by a file system of its own
/// behind one of them.
const PATIENCE: Duration = Duration::from_secs(5);

/// A file as `/proc/PID/maps` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Name {
    major: u32,
    minor: u32,
    inode: u64,
}

/// Bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Bytes {
    of: Name,
    start: u64,
    end: u64,
}

/// What a scan came to.
#[derive(Debug, Default, PartialEq, Eq)]
struct Found {
    /// What was asked for and is mapped, in part at least.
    mapped: BTreeSet<Bytes>,
    /// Processes that this one may not look at.
    hidden: BTreeSet<u32>,
    /// Something could not be read: what is not found may be mapped all the same.
    is_partial: bool,
}

/// Whether any process maps any of `bytes` of `file`, the calling one included. What cannot be found out counts as mapped, and so
/// does that process `holder`, who was given them, may not be looked at.
///
/// Other processes that this one may not look at (`CAP_SYS_PTRACE`), or cannot see (of an outer PID namespace), are left out, and
/// so is who holds only a descriptor.
pub(crate) fn is_mapped(file: &File, bytes: &Range<u64>, holder: Option<u32>) -> bool {
    let Ok(metadata) = file.metadata() else { return true };
    let device = metadata.dev();
    let of = Name { major: major(device), minor: minor(device), inode: metadata.ino() };
    SCANS.is_mapped(Bytes { of, start: bytes.start, end: bytes.end }, holder)
}

type Scan = dyn Fn(&BTreeSet<Bytes>) -> Found + Send + Sync;

/// One scan at a time, for all that was asked before it began: nobody makes this process read `/proc` more by asking more often. It
/// has a thread of its own, for nobody may wait for it for ever.
struct Scans {
    patience: Duration,
    scan: Box<Scan>,
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Default)]
struct State {
    runs: bool,
    /// For the next scan. (One that runs may have passed whoever maps this since.)
    asked: BTreeSet<Bytes>,
    /// What the next scan will have found.
    next: Arc<OnceLock<Found>>,
}

impl Scans {
    fn new(
        patience: Duration,
        scan: impl Fn(&BTreeSet<Bytes>) -> Found + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { patience, scan: Box::new(scan), state: Mutex::default(), over: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_mapped(self: &Arc<Self>, bytes: Bytes, holder: Option<u32>) -> bool {
        let begun = Instant::now();
        let mut state = self.state();
        state.asked.insert(bytes);
        let next = Arc::clone(&state.next);
        loop {
            if let Some(found) = next.get() {
                let is_hidden = holder.is_some_and(|holder| found.hidden.contains(&holder));
                return found.is_partial || is_hidden || found.mapped.contains(&bytes);
            }
            if !state.runs {
                let asked = std::mem::take(&mut state.asked);
                (state.runs, state.next) = (true, Arc::default());
                let (scans, found) = (Arc::clone(self), Arc::clone(&next));
                let scan = move || scans.finish(&found, (scans.scan)(&asked));
                drop(state);
                if thread::Builder::new().name("mapped".to_owned()).spawn(scan).is_err() {
                    self.finish(&next, Found { is_partial: true, ..Found::default() });
                }
                state = self.state();
                continue;
            }
            let left = self.patience.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return true;
            }
            (state, _) = self.over.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A scan is over, and has come to `found`.
    fn finish(&self, all: &OnceLock<Found>, found: Found) {
        let mut state = self.state();
        let _ = all.set(found); // nobody else had it to do
        state.runs = false;
        self.over.notify_all();
    }
}

/// Looks for all that is `asked` in all processes.
fn scan(proc: &Path, asked: &BTreeSet<Bytes>) -> Found {
    let mut found = Found::default();
    let Ok(entries) = fs::read_dir(proc) else { return Found { is_partial: true, ..found } };
    for entry in entries {
        let Ok(entry) = entry else {
            found.is_partial = true;
            continue;
        };
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        match scan_process(&entry.path(), asked, &mut found.mapped) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                found.hidden.insert(process);
            }
            looked => found.is_partial |= looked.is_err_and(|error| !has_ended(&error)),
        }
    }
    found
}

/// Adds what a process maps. Where its first thread has ended, only the others say so.
fn scan_process(process: &Path, asked: &BTreeSet<Bytes>, mapped: &mut BTreeSet<Bytes>) -> io::Result<()> {
    match File::open(process.join("maps")).and_then(|maps| scan_maps(maps, asked, mapped)) {
        Ok(true) => return Ok(()),
        // Linux 6.16 has no empty file for such a thread.
        Err(error) if error.raw_os_error() != Some(Errno::SRCH.raw_os_error()) => return Err(error),
        _ => {}
    }
    for thread in fs::read_dir(process.join("task")).into_iter().flatten() {
        let maps = File::open(thread?.path().join("maps")).and_then(|maps| scan_maps(maps, asked, mapped));
        match maps {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) if has_ended(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Adds what who has these `maps` maps of what is `asked`. False: it maps nothing at all.
fn scan_maps(maps: File, asked: &BTreeSet<Bytes>, mapped: &mut BTreeSet<Bytes>) -> io::Result<bool> {
    let mut any = false;
    // Bytes, since names of files are not Unicode.
    for line in BufReader::new(maps).split(b'\n') {
        any = true;
        let Some((of, at)) = mapping(&String::from_utf8_lossy(&line?)) else { continue };
        // What begins behind the mapping is no part of it.
        let near = Bytes { of, start: 0, end: 0 }..Bytes { of, start: at.end, end: 0 };
        mapped.extend(asked.range(near).filter(|bytes| at.start < bytes.end));
    }
    Ok(any)
}

/// That the process, or thread, has ended since its name was read.
fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

/// File and bytes of a line such as `7f0000000000-7f0000200000 rw-s 00400000 00:06 1234 /dev/egm4`.
fn mapping(line: &str) -> Option<(Name, Range<u64>)> {
    let mut fields = line.split_ascii_whitespace();
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end) = fields.next()?.split_once('-')?;
    let size = hex(end)?.checked_sub(hex(start)?)?;
    let offset = hex(fields.nth(1)?)?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    let name = Name { major: number(major)?, minor: number(minor)?, inode: fields.next()?.parse().ok()? };
    Some((name, offset..offset.checked_add(size)?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;

    use super::*;
    use crate::backing::tests::{region, slice};
    use crate::backing::{self, Patience};
    use crate::mapping::Mapping;
    use crate::region::RegionKind;

    const EGM: Name = Name { major: 0, minor: 6, inode: 1234 };

    fn bytes(of: Name, range: Range<u64>) -> Bytes {
        Bytes { of, start: range.start, end: range.end }
    }

    #[test]
    fn a_line_names_a_file_and_its_bytes() {
        let line = "7f0000000000-7f0000200000 rw-s 00400000 00:06 1234                       /dev/egm4";
        assert_eq!(mapping(line), Some((EGM, 0x40_0000..0x60_0000)));
        assert_eq!(
            mapping("00400000-00401000 r--p 00000000 103:1f 7 /a b (deleted)"),
            Some((Name { major: 0x103, minor: 0x1f, inode: 7 }, 0..0x1000))
        );
        for wrong in
            ["", "7f-8f", "8f-7f rw-s 0 00:06 1", "0-1000 rw-s fffffffffffffff0 00:06 1", "x-y r 0 0:0 0"]
        {
            assert_eq!(mapping(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn only_who_maps_those_bytes_of_that_file_is_found() {
        let proc = tempfile::tempdir().unwrap();
        let process = |pid: &str, maps: &[u8]| {
            fs::create_dir(proc.path().join(pid)).unwrap();
            fs::write(proc.path().join(pid).join("maps"), maps).unwrap();
        };
        process("1", b"");
        process("self", b"0-1000 rw-s 00400000 00:06 1234 /dev/egm4\n");
        fs::create_dir(proc.path().join("2")).unwrap();
        process("30", b"0-1000 rw-p 0 00:00 0 \xff\n1000-3000 rw-s 00400000 00:06 1234 /dev/egm4\n");
        let found = |asked: &[Bytes]| {
            let found = scan(proc.path(), &asked.iter().copied().collect());
            assert!(!found.is_partial);
            found.mapped.into_iter().collect::<Vec<_>>()
        };
        let [inside, across] = [bytes(EGM, 0x40_1000..0x40_2000), bytes(EGM, 0x30_0000..0x40_0001)];
        assert_eq!(found(&[inside]), [inside]);
        let [before, behind] = [bytes(EGM, 0..0x40_0000), bytes(EGM, 0x40_2000..0x50_0000)];
        let other_file = bytes(Name { inode: 1235, ..EGM }, 0..u64::MAX);
        let other_device = bytes(Name { minor: 7, ..EGM }, 0..u64::MAX);
        assert_eq!(found(&[before, inside, across, behind, other_file, other_device]), [across, inside]);
        assert!(scan(&proc.path().join("nothing"), &[inside].into()).is_partial);
        // The first thread of a process has ended, and others have not.
        process("50", b"");
        fs::create_dir_all(proc.path().join("50/task/51")).unwrap();
        fs::write(proc.path().join("50/task/51/maps"), b"0-1000 rw-s 0 00:06 77 /dev/egm5\n").unwrap();
        let of_thread = bytes(Name { inode: 77, ..EGM }, 0..0x1000);
        assert_eq!(found(&[of_thread]), [of_thread]);
        // What cannot be read is not known to map nothing.
        fs::create_dir_all(proc.path().join("4/maps")).unwrap();
        assert!(scan(proc.path(), &[other_file].into()).is_partial);
    }

    /// A user has 64 connections, and may return what is mapped still on all of them.
    #[test]
    fn one_scan_serves_all_who_asked_before_it_began_and_none_who_asked_after() {
        let (begins, begun) = mpsc::channel();
        let (go, wait) = mpsc::channel();
        let wait = Mutex::new(wait);
        let scans = Scans::new(Duration::MAX, move |asked| {
            begins.send(asked.len()).unwrap();
            wait.lock().unwrap().recv().unwrap()
        });
        let (scans, of) = (&scans, |slice: u64| bytes(EGM, slice..slice + 1));
        thread::scope(|scope| {
            let first = scope.spawn(|| scans.is_mapped(of(0), None));
            assert_eq!(begun.recv(), Ok(1));
            let more: Vec<_> =
                (0..64).map(|n| scope.spawn(move || (n, scans.is_mapped(of(n), None)))).collect();
            while scans.state().asked.len() < 64 {
                thread::yield_now();
            }
            go.send(Found::default()).unwrap();
            assert!(!first.join().unwrap());
            assert_eq!(begun.recv(), Ok(64), "the first one's asked again: it was asked for since");
            go.send(Found { mapped: [of(0), of(7)].into(), ..Found::default() }).unwrap();
            for asked in more {
                let (n, mapped) = asked.join().unwrap();
                assert_eq!(mapped, [0, 7].contains(&n), "{n}");
            }
        });
        assert!(begun.try_recv().is_err(), "two scans");
    }

    #[test]
    fn a_process_that_keeps_the_scan_waiting_keeps_nobody_else_and_counts_as_mapping_all() {
        let (go, wait) = mpsc::channel::<()>();
        let wait = Mutex::new(wait);
        let scans = Scans::new(Duration::ZERO, move |_| {
            let _ = wait.lock().unwrap().recv();
            Found::default()
        });
        let asked = || scans.is_mapped(bytes(EGM, 0..1), None);
        assert!(asked() && asked());
        drop(go);
    }

    #[test]
    fn who_was_given_the_bytes_and_may_not_be_looked_at_is_not_known_to_have_let_go() {
        let found = || Found { hidden: [7].into(), ..Found::default() };
        let scans = Scans::new(Duration::MAX, move |_| found());
        let mapped = |holder| scans.is_mapped(bytes(EGM, 0..1), holder);
        assert_eq!([Some(7), Some(8), None].map(mapped), [true, false, false]);
    }

    /// (Root may look at everybody, so the test runs itself once more as somebody else.)
    #[test]
    fn a_process_of_another_user_is_hidden_from_who_has_no_right_to_look() {
        if rustix::process::geteuid().is_root() {
            let mut child = std::process::Command::new("/proc/self/exe");
            child.args([
                "--exact",
                "mapped::tests::a_process_of_another_user_is_hidden_from_who_has_no_right_to_look",
            ]);
            let output = child.uid(0x4000_0000).gid(0x4000_0000).output().unwrap();
            assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
            return;
        }
        if fs::metadata("/proc/1").unwrap().uid() == rustix::process::geteuid().as_raw() {
            println!("skipped: here the first process is this user's");
            return;
        }
        let found = scan(Path::new("/proc"), &[bytes(EGM, 0..1)].into());
        assert!(found.hidden.contains(&1) && !found.hidden.contains(&std::process::id()), "{found:?}");
    }

    #[test]
    fn the_kernel_names_a_mapping_like_that() {
        let region = region(RegionKind::Memfd, 0x4000, 0x1000);
        let patience = Patience { progress: &|_| {}, cancel: &AtomicBool::new(false) };
        let memory = backing::open(&region, &slice(0, 0x4000), &patience).unwrap();
        let mapping = Mapping::new(memory.as_ref(), 0x1000, 0x2000, 0).unwrap();
        assert!(is_mapped(memory.file(), &(0x2000..0x4000), None));
        assert!(!is_mapped(memory.file(), &(0..0x1000), None));
        drop(mapping);
        assert!(!is_mapped(memory.file(), &(0..0x4000), None));
    }
}
