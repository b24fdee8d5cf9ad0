//! Memory files without a name, found again by a process that has no descriptor of them.
//!
//! A memfd has a file handle. The kernel opens it as long as anything refers to the inode, and no later inode gets the same
//! handle. hugetlbfs has no handles: there the scan of `/proc` decides, by the inode's number.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;

use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::{FileName, Hold, Inode, Question, Verdict, shared_scans};
use crate::owner::Owner;
use crate::sys::{self, Handle};

/// Device and inode of no file. In `/proc/PID/maps`, zeroes are those of memory without one.
const NO_FILE: Inode = Inode(u32::MAX, u32::MAX, u64::MAX);

/// A memory file, as a record keeps it for a later process of the same boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryFile {
    inode: Inode,
    /// Its path, as the kernel prints it.
    path: String,
    size: u64,
    /// Its handle, where the file system has one: type and bytes, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    handle: Option<(i32, String)>,
}

/// State of a file that this process has no descriptor of, by the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Existence {
    /// Something refers to it.
    Exists,
    /// Nothing does, so it was freed.
    Gone,
    /// The kernel cannot find it without a descriptor.
    Unknown,
}

impl MemoryFile {
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let name = FileName::of(file)?;
        let hex = |handle: Handle| {
            let digits = handle.bytes.iter().map(|byte| format!("{byte:02x}"));
            (handle.kind, digits.collect::<String>())
        };
        // Where this fails, the scan decides.
        let handle = sys::handle(file).ok().map(hex);
        let path = name.path.to_string_lossy().into_owned();
        Ok(Self { inode: name.inode, path, size: file.metadata()?.len(), handle })
    }

    /// The name that a scan looks for.
    fn name(&self) -> FileName {
        FileName { inode: self.inode, device: None, path: PathBuf::from(&self.path) }
    }

    fn handle(&self) -> Option<Handle> {
        let (kind, digits) = self.handle.as_ref()?;
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let bytes = digits.as_bytes().chunks(2).map(byte).collect::<Option<_>>()?;
        Some(Handle { kind: *kind, bytes })
    }

    /// Whether the file exists, on the file system of `memfd`.
    fn existence(&self, memfd: &File) -> Existence {
        let find = || {
            let handle = self.handle()?;
            let (this, other) = (self.inode, FileName::of(memfd).ok()?.inode);
            ((this.0, this.1) == (other.0, other.1)).then(|| sys::open_handle(memfd, &handle).ok()).flatten()
        };
        match find() {
            Some(Some(_)) => Existence::Exists,
            Some(None) => Existence::Gone,
            None => Existence::Unknown,
        }
    }
}

/// Verdicts on `files`, each with its last owner, in that order. One scan serves all of them.
pub(crate) fn look_at_nameless(files: &[(MemoryFile, Owner)]) -> Vec<Verdict> {
    // All memfds are on one file system, so any of them selects it.
    let any = memfd_create(c"any", MemfdFlags::CLOEXEC).map(File::from);
    let existence = |file: &MemoryFile| any.as_ref().map_or(Existence::Unknown, |any| file.existence(any));
    let asked: Vec<NamelessQuestion> =
        files.iter().map(|(file, owner)| NamelessQuestion::new(file, owner, existence(file))).collect();
    let questions: Vec<Question> = asked.iter().map(|asked| asked.question.clone()).collect();
    let scanned = shared_scans::look_at_all(&questions);
    asked.into_iter().zip(scanned).map(|(asked, scanned)| asked.verdict(scanned)).collect()
}

/// A question about a memory file without a name, with the kernel's part of the answer.
struct NamelessQuestion {
    existence: Existence,
    /// The question of a scan for what the owner left of the file.
    question: Question,
}

impl NamelessQuestion {
    fn new(file: &MemoryFile, owner: &Owner, existence: Existence) -> Self {
        let bytes: Range<u64> = 0..file.size;
        let mut name = file.name();
        if existence == Existence::Gone {
            // Its pages may still be pinned. A mapping with its inode's number is of a later file.
            (name.inode, name.path) = (NO_FILE, PathBuf::new());
        }
        // Where the kernel does not find the file, any user may have a descriptor of it in flight.
        let was_lost = existence == Existence::Unknown;
        let (devices, others) = (BTreeSet::new(), Vec::new());
        let last = vec![owner.clone()];
        Self { existence, question: Question { file: name, bytes, last, devices, was_lost, others } }
    }

    /// The verdict after a scan with the verdict `scanned`.
    fn verdict(&self, scanned: Verdict) -> Verdict {
        match scanned {
            Verdict::Free if self.existence == Existence::Exists => {
                Verdict::held_by(Hold::Description, &self.question.bytes)
            }
            scanned => scanned,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::backing::{Anonymous, Backing};
    use crate::free::reopen;
    use crate::free::tests::in_flight;
    use crate::mapping::Mapping;

    fn holds(file: &MemoryFile) -> Vec<Hold> {
        // The owner is no user of this host: whatever other tests keep in flight is not its own.
        let owner = Owner { uid: 4_000_000, pid: 0, started: 0, ..Owner::this("vm") };
        match look_at_nameless(&[(file.clone(), owner)]).remove(0) {
            Verdict::Free => Vec::new(),
            Verdict::InUse { evidence, .. } => evidence.into_iter().map(|evidence| evidence.hold).collect(),
        }
    }

    fn existence(file: &MemoryFile) -> Existence {
        file.existence(&memfd_create(c"any", MemfdFlags::CLOEXEC).unwrap().into())
    }

    /// Whether this user may open files by their handles.
    fn is_root() -> bool {
        let is_root = rustix::process::geteuid().is_root();
        if !is_root {
            println!("skipped: only root opens files by their handles");
        }
        is_root
    }

    #[test]
    fn a_memfd_exists_as_long_as_anything_refers_to_it() {
        if !is_root() {
            return;
        }
        let memory = Anonymous::new("test", 1 << 20, None).unwrap();
        let file = MemoryFile::of(memory.file()).unwrap();
        let mapping = Mapping::new(&memory, 0, memory.size(), 0).unwrap();
        let given = reopen(memory.file()).unwrap();
        drop(memory);
        assert_eq!(holds(&file), [Hold::Mapping]);
        drop(mapping);
        let sockets = in_flight(given.as_fd());
        drop(given);
        assert_eq!((existence(&file), holds(&file)), (Existence::Exists, vec![Hold::Description]));
        drop(sockets);
        assert_eq!((existence(&file), holds(&file)), (Existence::Gone, vec![]));
    }

    #[test]
    fn a_record_s_handle_that_is_none_decides_nothing() {
        if !is_root() {
            return;
        }
        let memory = Anonymous::new("test", 1 << 20, None).unwrap();
        let file = MemoryFile::of(memory.file()).unwrap();
        let kind = file.handle.as_ref().unwrap().0;
        for digits in ["", "x", "0x", "é", &"00".repeat(200)] {
            let wrong = MemoryFile { handle: Some((kind, digits.to_owned())), ..file.clone() };
            assert_eq!(existence(&wrong), Existence::Unknown, "{digits}");
        }
        let elsewhere = MemoryFile { inode: Inode(0xfff, 1, 2), ..file.clone() };
        assert_eq!(existence(&elsewhere), Existence::Unknown, "a file system without memfds");
        let mapping = Mapping::new(&memory, 0, memory.size(), 0).unwrap();
        let nameless = MemoryFile { handle: None, ..file };
        assert_eq!(existence(&nameless), Existence::Unknown);
        assert!(holds(&nameless).contains(&Hold::Mapping), "the scan decides");
        drop(mapping);
    }
}
