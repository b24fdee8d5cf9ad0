//! A scan of `/proc` over all processes: mappings and descriptors of given files, and objects that may hide one.

use std::collections::{BTreeSet, HashSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, FileType, Statx, StatxFlags, statx};
use rustix::io::Errno;

use super::readers::{KernelObject, LookError, LookResult, LookTask, Readers, Subject, UNNAMED};
use super::{FileName, Inode};
use crate::sys;

/// Major numbers of devices that processes have many of: memory devices, terminals.
const COMMON: [u32; 3] = [1, 5, 136];

/// Most looks for processes that have begun since the one before.
const MAX_LOOKS: usize = 16;

/// Number of processes that a reader gets at a time: each hand-over makes two threads wait for a processor.
const AT_ONCE: usize = 64;

/// Most ancestors of a process that are recorded.
const MAX_PARENTS: usize = 16;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ScanResult {
    pub(super) sightings: HashSet<Sighting>,
    /// Processes that this one may not look at.
    pub(super) hidden: BTreeSet<u32>,
    /// Whether a part could not be read.
    pub(super) is_partial: bool,
}

/// A process and an object that it has.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Sighting {
    pub(super) process: Process,
    pub(super) what: KernelObject,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) uid: u32,
    pub(super) program: String,
    /// Its ancestors, the parent first.
    pub(super) parents: Vec<u32>,
}

impl Process {
    /// Whether the process, or one that it descends from, has a pid that `is_wanted`.
    pub(super) fn descends_from(&self, is_wanted: impl Fn(u32) -> bool) -> bool {
        is_wanted(self.pid) || self.parents.iter().copied().any(is_wanted)
    }
}

impl ScanResult {
    /// VFIO groups and devices, by process.
    pub(super) fn devices(&self) -> Vec<(u32, String)> {
        let device = |seen: &Sighting| match &seen.what {
            KernelObject::Device(name) => Some((seen.process.pid, name.clone())),
            _ => None,
        };
        self.sightings.iter().filter_map(device).collect()
    }

    /// Findings of a look at process `pid`; notes what it could not read.
    fn objects(&mut self, pid: u32, result: Result<LookResult, LookError>) -> Vec<KernelObject> {
        let (seen, outcome) = match result {
            Ok(looked) => looked,
            Err(LookError::Silent) => return vec![KernelObject::Silent],
            Err(LookError::NoThread) => (Vec::new(), Err(io::ErrorKind::Other.into())),
        };
        match outcome {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                self.hidden.insert(pid);
            }
            looked => self.is_partial |= looked.is_err_and(|error| !has_ended(&error)),
        }
        seen
    }
}

/// Looks for `asked` files in all processes.
///
/// Processes change meanwhile. A mapping comes to another process by `fork` alone, and a child can have a lower number
/// than its parent, since numbers wrap. So processes that begin during the scan are looked at, too, until there is no
/// new one. A descriptor can move to a table or socket that was already looked at, so all are looked at twice. A move
/// in step with both looks is not found: descriptors of memory that tenants share are for root, and for those that a
/// rule names.
pub(super) fn scan(proc: &Path, asked: &BTreeSet<FileName>, readers: &mut Readers) -> ScanResult {
    let mut found = ScanResult::default();
    let mut scan = Scan { proc, asked: Arc::new(asked.clone()), readers };
    scan.look_at_others(&mut BTreeSet::new(), &mut found);
    let mut seen = BTreeSet::new();
    let mut new = Vec::new();
    for _ in 0..MAX_LOOKS {
        new = scan.look_at_others(&mut seen, &mut found);
        if new.is_empty() {
            return found;
        }
    }
    // Users that start processes faster than the scan looks at them, as a large build does.
    let unseen = |pid| Sighting { process: process(proc, pid), what: KernelObject::Silent };
    found.sightings.extend(new.into_iter().map(unseen).filter(|seen| seen.process.uid != 0));
    found
}

struct Scan<'a> {
    proc: &'a Path,
    asked: Arc<BTreeSet<FileName>>,
    readers: &'a mut Readers,
}

impl Scan<'_> {
    /// Looks at processes that are not among `seen`, and adds them; returns them, too.
    fn look_at_others(&mut self, seen: &mut BTreeSet<u32>, found: &mut ScanResult) -> Vec<u32> {
        let new = self.others(seen, found);
        new.chunks(AT_ONCE).for_each(|some| self.look_at(some, found));
        new
    }

    /// Adds processes that are not among `seen`; returns them, too.
    fn others(&self, seen: &mut BTreeSet<u32>, found: &mut ScanResult) -> Vec<u32> {
        let mut new = Vec::new();
        let Ok(entries) = fs::read_dir(self.proc) else {
            found.is_partial = true;
            return new;
        };
        for entry in entries {
            let Ok(entry) = entry else {
                found.is_partial = true;
                continue;
            };
            if let Some(pid) = number(&entry.file_name()).filter(|pid| seen.insert(*pid)) {
                new.push(pid);
            }
        }
        new
    }

    /// Looks at the processes `pids`: at descriptors first, because their readers do not wait for the mappings' owner.
    fn look_at(&mut self, pids: &[u32], found: &mut ScanResult) {
        let mut looks: Vec<(Subject, LookTask)> = Vec::new();
        for pid in pids.iter().copied() {
            let folder = self.proc.join(pid.to_string());
            let uid = uid(&fs::read_to_string(folder.join("status")).unwrap_or_default());
            for is_at_mappings in [false, true] {
                let (folder, asked) = (folder.clone(), Arc::clone(&self.asked));
                let look = move || -> LookResult {
                    let mut seen = ProcessLook { folder, asked: &asked, seen: Vec::new() };
                    let outcome = if is_at_mappings { seen.at_mappings() } else { seen.at_descriptors(pid) };
                    (seen.seen, outcome)
                };
                looks.push((Subject::new(uid, pid, is_at_mappings), Box::new(look)));
            }
        }
        let mut results = self.readers.look(looks).into_iter();
        for pid in pids.iter().copied() {
            let objects = results.by_ref().take(2).flat_map(|result| found.objects(pid, result));
            let objects: Vec<KernelObject> = objects.collect();
            if !objects.is_empty() {
                let process = process(self.proc, pid);
                let sighting = |what| Sighting { process: process.clone(), what };
                found.sightings.extend(objects.into_iter().map(sighting));
            }
        }
    }
}

/// The real user that a process's `status` names.
fn uid(status: &str) -> u32 {
    let uid = field(status, "Uid:").and_then(|uid| uid.split_ascii_whitespace().next()?.parse().ok());
    uid.unwrap_or(u32::MAX)
}

/// User and name of a process; a process that has ended meanwhile has neither.
fn process(proc: &Path, pid: u32) -> Process {
    let folder = |pid: u32| proc.join(pid.to_string());
    let status = |pid| fs::read_to_string(folder(pid).join("status")).unwrap_or_default();
    let of_this = status(pid);
    let uid = uid(&of_this);
    let program = fs::read_to_string(folder(pid).join("comm")).unwrap_or_default();
    let program = program.trim_end().chars().take(16).flat_map(char::escape_default).collect();
    let parent = |status: &str| field(status, "PPid:")?.trim().parse().ok().filter(|pid| *pid > 1);
    let parents = std::iter::successors(parent(&of_this), |pid: &u32| parent(&status(*pid)));
    Process { pid, uid, program, parents: parents.take(MAX_PARENTS).collect() }
}

/// VFIO groups and devices of this process that have names.
pub(crate) fn own_devices() -> io::Result<BTreeSet<String>> {
    let mut look = ProcessLook { folder: "/proc/self".into(), asked: &BTreeSet::new(), seen: Vec::new() };
    look.at_descriptors(std::process::id())?;
    let named = look.seen.into_iter().filter_map(|what| match what {
        KernelObject::Device(name) if name != UNNAMED => Some(name),
        _ => None,
    });
    Ok(named.collect())
}

/// The scan of one process.
struct ProcessLook<'a> {
    folder: PathBuf,
    asked: &'a BTreeSet<FileName>,
    seen: Vec<KernelObject>,
}

impl ProcessLook<'_> {
    /// Mappings. Where the first thread has ended, only the others show them.
    fn at_mappings(&mut self) -> io::Result<()> {
        match File::open(self.folder.join("maps")).and_then(|maps| self.at_maps(maps)) {
            Ok(true) => return Ok(()),
            // Linux 6.16 has no empty file for such a thread.
            Err(error) if error.raw_os_error() != Some(Errno::SRCH.raw_os_error()) => return Err(error),
            _ => {}
        }
        for thread in fs::read_dir(self.folder.join("task")).into_iter().flatten() {
            let maps = File::open(thread?.path().join("maps")).and_then(|maps| self.at_maps(maps));
            match maps {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) if has_ended(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Records the lines of `maps`; false if there are none.
    fn at_maps(&mut self, maps: File) -> io::Result<bool> {
        let mut any = false;
        // Bytes, since names of files are not Unicode.
        for line in BufReader::new(maps).split(b'\n') {
            any = true;
            let line = line?;
            let text = String::from_utf8_lossy(&line);
            // A mapping of a BAR keeps its device open.
            if text.ends_with("anon_inode:[vfio-device]") || text.contains(" /dev/vfio/") {
                self.seen.push(KernelObject::Device(UNNAMED.to_owned()));
            }
            let Some((inode, bytes)) = mapping(&text) else { continue };
            if self.asked.iter().any(|file| file.inode == inode) {
                self.seen.push(KernelObject::Mapping(inode, bytes));
            }
        }
        Ok(any)
    }

    /// Descriptors, of threads that have a table of their own too.
    fn at_descriptors(&mut self, pid: u32) -> io::Result<()> {
        self.at_table(&self.folder.clone())?;
        for thread in fs::read_dir(self.folder.join("task")).into_iter().flatten().flatten() {
            let Some(tid) = number(&thread.file_name()).filter(|tid| *tid != pid) else { continue };
            if !sys::share_descriptors(pid, tid) {
                match self.at_table(&thread.path()) {
                    Err(error) if !has_ended(&error) => return Err(error),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    fn at_table(&mut self, of: &Path) -> io::Result<()> {
        let table = match fs::read_dir(of.join("fd")) {
            Err(error) if has_ended(&error) => return Ok(()),
            table => table?,
        };
        for entry in table {
            let entry = match entry {
                Err(error) if has_ended(&error) => return Ok(()),
                entry => entry?,
            };
            // Do not query a file system in user space: one that does not answer would hold up the scan.
            match statx(CWD, entry.path(), AtFlags::STATX_DONT_SYNC, StatxFlags::empty()) {
                Ok(found) => {
                    self.at_descriptor(&found, &entry.path(), &of.join("fdinfo").join(entry.file_name()))
                }
                Err(error @ (Errno::ACCESS | Errno::PERM | Errno::NOMEM)) => return Err(error.into()),
                Err(_) => {} // it is closed, or its file system fails
            }
        }
        Ok(())
    }

    fn at_descriptor(&mut self, found: &Statx, link: &Path, info: &Path) {
        let inode = Inode(found.stx_dev_major, found.stx_dev_minor, found.stx_ino);
        let kind = FileType::from_raw_mode(found.stx_mode.into());
        let device =
            (kind == FileType::CharacterDevice).then_some((found.stx_rdev_major, found.stx_rdev_minor));
        if self.asked.iter().any(|file| file.is_opened_as(inode, device)) {
            self.seen.push(KernelObject::Descriptor(inode, device));
        }
        match kind {
            FileType::Socket => self.seen.extend(in_flight(info)),
            FileType::CharacterDevice if !COMMON.contains(&found.stx_rdev_major) => {
                let path = fs::read_link(link).unwrap_or_default();
                // A container's own descriptor pins nothing once its groups are closed.
                if path.starts_with("/dev/vfio") && !path.ends_with("vfio/vfio") {
                    self.seen.push(KernelObject::Device(format!(
                        "{}:{}",
                        found.stx_rdev_major, found.stx_rdev_minor
                    )));
                }
                // Pages stay pinned in it, for the next device that it gets.
                if path == Path::new("/dev/iommu") {
                    self.seen.push(KernelObject::Device(UNNAMED.to_owned()));
                }
            }
            // The kernel hides the type of its anonymous inodes.
            FileType::Unknown | FileType::RegularFile => self.at_anonymous(link, info),
            _ => {}
        }
    }

    fn at_anonymous(&mut self, link: &Path, info: &Path) {
        let name = fs::read_link(link).unwrap_or_default();
        let text = || fs::read_to_string(info).unwrap_or_default();
        if name == Path::new("anon_inode:[io_uring]") {
            self.seen.extend(registered(&text()));
        } else if name == Path::new("anon_inode:[vfio-device]") {
            let text = text();
            let device = field(&text, "vfio-device-syspath:").map_or(UNNAMED, str::trim);
            self.seen.push(KernelObject::Device(device.to_owned()));
        }
    }
}

/// Descriptors in flight, by what the kernel prints of a Unix socket.
fn in_flight(info: &Path) -> Option<KernelObject> {
    let text = fs::read_to_string(info).ok()?;
    let count: u64 = field(&text, "scm_fds:")?.trim().parse().ok()?;
    (count > 0).then_some(KernelObject::InFlight)
}

/// Files and buffers of an io_uring, by what the kernel prints of it. It prints none while the ring is in a system call.
fn registered(text: &str) -> Vec<KernelObject> {
    let Some((_, rest)) = text.split_once("UserFiles:") else { return vec![KernelObject::HiddenRing] };
    let (files, buffers) = rest.split_once("UserBufs:").unwrap_or((rest, ""));
    let files = entries(files).map(|path| KernelObject::Registered(path.replace("\\040", " ").into()));
    let has_buffers = entries(buffers).any(|buffer| buffer != "<none>");
    files.chain(has_buffers.then_some(KernelObject::RingBuffers)).collect()
}

/// Entries of a table of an io_uring, such as `    0: /dev/egm4`; the text begins in the line with their number.
fn entries(text: &str) -> impl Iterator<Item = &str> {
    text.lines().skip(1).map_while(|line| Some(line.trim_start().split_once(": ")?.1))
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name))
}

fn number(name: &OsStr) -> Option<u32> {
    name.to_str()?.parse().ok()
}

/// Whether the process or thread has ended since its name was read.
fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

/// File and bytes of a line such as `7f0000000000-7f0000200000 rw-s 00400000 00:06 1234 /dev/egm4`.
fn mapping(line: &str) -> Option<(Inode, Range<u64>)> {
    let mut fields = line.split_ascii_whitespace();
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end) = fields.next()?.split_once('-')?;
    let size = hex(end)?.checked_sub(hex(start)?)?;
    let offset = hex(fields.nth(1)?)?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    let inode = Inode(number(major)?, number(minor)?, fields.next()?.parse().ok()?);
    Some((inode, offset..offset.checked_add(size)?))
}

#[cfg(test)]
pub(super) mod tests;
