//! Decides whether memory is free: no process can reach it, and no device or kernel object pins it.
//!
//! ```text
//!  sole.rs   memory that is a file of its own: the kernel counts its open descriptions
//!  nameless.rs  a memory file of an earlier process: the kernel finds it as long as it exists
//!  scan.rs   what `/proc` shows of every process ──► ScanResult ──judge.rs──► Verdict     (pure)
//!                                                               ──gpu.rs────► processes that have a GPU
//!  readers.rs  one process after another, none for long ── timeout.rs what counts as long
//!  shared_scans.rs  one scan at a time, for all waiting requests
//! ```
//! A lock proves nothing about memory that left this process: the lock of an open file description belongs to every process
//! that has the description.

mod gpu;
mod judge;
mod nameless;
mod readers;
mod scan;
mod shared_scans;
mod sole;
mod timeout;

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{major, makedev, minor};
use serde::{Deserialize, Serialize};

use crate::backing::Backing;
use crate::owner::Owner;

pub use crate::evidence::{Evidence, Hold};
pub(crate) use gpu::{GpuQuestion, users_of_gpu};
pub use nameless::MemoryFile;
pub(crate) use nameless::look_at_nameless;
pub(crate) use scan::own_devices;
pub(crate) use sole::reopen;

/// Most pieces of evidence in a verdict: records and messages stay short.
const MAX_EVIDENCE: usize = 8;

/// Whether memory is free.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// No process can reach it.
    Free,
    /// It is in use, or this process cannot prove that it is not.
    InUse {
        /// The evidence; never empty.
        evidence: Vec<Evidence>,
        /// Bytes of the file in use: all that were asked about, unless mappings alone were found.
        bytes: Vec<Range<u64>>,
    },
}

impl Verdict {
    /// All of `bytes` are in use, because of a hold that no process shows.
    fn held_by(hold: Hold, bytes: &Range<u64>) -> Self {
        Self::InUse { evidence: Evidence::of(hold).to_vec(), bytes: vec![bytes.clone()] }
    }

    /// `bytes` count as in use, because this process cannot read `/proc`.
    pub(crate) fn unknown(bytes: &Range<u64>) -> Self {
        Self::held_by(Hold::CannotLook, bytes)
    }
}

/// A file, by the major and minor number of its device and its inode, as `/proc/PID/maps` prints them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
struct Inode(u32, u32, u64);

/// A file, by what `/proc` shows of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileName {
    inode: Inode,
    /// Number of the character device that the file is; another node can name it, too.
    device: Option<(u32, u32)>,
    /// Its path, as the kernel prints it.
    path: PathBuf,
}

impl FileName {
    /// The name of an open file.
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let path = fs::read_link(sole::path_of(file))?;
        Ok(Self::new(&file.metadata()?, path))
    }

    /// The name of the file at `path`, which is not opened.
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        Ok(Self::new(&fs::metadata(path)?, path.to_owned()))
    }

    fn new(metadata: &Metadata, path: PathBuf) -> Self {
        let (on, number) = (metadata.dev(), metadata.rdev());
        let device = metadata.file_type().is_char_device().then(|| (major(number), minor(number)));
        Self { inode: Inode(major(on), minor(on), metadata.ino()), device, path }
    }

    /// Whether a descriptor with this inode, and this number of a character device, is of the file.
    fn is_opened_as(&self, inode: Inode, device: Option<(u32, u32)>) -> bool {
        self.inode == inode || (device.is_some() && self.device == device)
    }

    /// Whether this is `/dev/mem`, which other programs of root open for reasons of their own.
    fn is_dev_mem(&self) -> bool {
        self.device.is_some_and(|(major, minor)| makedev(major, minor) == makedev(1, 1))
    }
}

/// A question whether bytes are free.
#[derive(Debug, Clone)]
pub struct Question {
    pub(crate) file: FileName,
    pub(crate) bytes: Range<u64>,
    /// Owners that had the bytes and may have left something, where they are known.
    pub(crate) last: Vec<Owner>,
    /// VFIO groups and devices that those owners are recorded to have had.
    pub(crate) devices: BTreeSet<String>,
    /// Whether processes of any user may have had the bytes in this boot.
    pub(crate) was_lost: bool,
    /// Other live grants of the same file.
    pub(crate) others: Vec<OtherGrant>,
}

/// A live grant of other bytes of a file.
#[derive(Debug, Clone)]
pub(crate) struct OtherGrant {
    /// The owner's process, which may have a descriptor of the file; 0 if it is unknown.
    pub(crate) pid: u32,
    /// Bytes of the file.
    pub(crate) bytes: Range<u64>,
}

/// Whether the bytes of `question` are free, by what `/proc` shows.
pub(crate) fn look(question: &Question) -> Verdict {
    shared_scans::look(question)
}

/// Whether memory that is a file of its own is free of all but this process's own descriptors of `backing`, after `owner`.
pub(crate) fn look_at_own_file(backing: &dyn Backing, owner: &Owner) -> Verdict {
    let bytes = backing.offset()..backing.offset().saturating_add(backing.size());
    look_at_file(backing.file(), bytes, vec![owner.clone()])
}

/// As [`look_at_own_file`], for `bytes` of a `file` that the owners `last` had, where they are known.
pub(crate) fn look_at_file(own: &File, bytes: Range<u64>, last: Vec<Owner>) -> Verdict {
    let Ok(file) = FileName::of(own) else { return Verdict::unknown(&bytes) };
    let lease = sole::lease(own);
    // Without leases the scan alone decides, and the owner can have sent a descriptor to any user.
    let was_lost = matches!(lease, Ok(sole::Lease::Unsupported));
    let (devices, others) = (BTreeSet::new(), Vec::new());
    let question = Question { file, bytes: bytes.clone(), last, devices, was_lost, others };
    // While the lease lasts no description can be made of a descriptor that has none (O_PATH).
    let lease = match lease {
        Ok(sole::Lease::Given(lease)) => Some(lease),
        Ok(sole::Lease::Unsupported) => None,
        Ok(sole::Lease::Refused) => {
            return match look(&question) {
                Verdict::Free => Verdict::held_by(Hold::Description, &bytes),
                in_use => in_use,
            };
        }
        Err(_) => return Verdict::unknown(&bytes),
    };
    let verdict = look(&question);
    drop(lease);
    verdict
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::mem::MaybeUninit;
    use std::os::fd::{BorrowedFd, OwnedFd};
    use std::sync::LazyLock;
    use std::sync::atomic::AtomicBool;

    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
        sendmsg, socketpair,
    };

    use super::*;
    use crate::backing::tests::{region, slice};
    use crate::backing::{self, OpenWait};
    use crate::mapping::Mapping;
    use crate::region::RegionKind;

    pub(super) static EGM: LazyLock<FileName> = LazyLock::new(|| FileName {
        inode: Inode(0, 6, 1234),
        device: Some((240, 4)),
        path: PathBuf::from("/dev/egm4"),
    });

    /// Of [`EGM`], which had no owner.
    pub(super) fn question(bytes: Range<u64>) -> Question {
        let (last, devices, others) = (Vec::new(), BTreeSet::new(), Vec::new());
        Question { file: EGM.clone(), bytes, last, devices, was_lost: false, others }
    }

    /// A socket pair with a descriptor of `file` in flight.
    pub(super) fn in_flight(file: BorrowedFd<'_>) -> (OwnedFd, OwnedFd) {
        let (near, far) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let descriptors = [file];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(&near, &[IoSlice::new(b".")], &mut control, SendFlags::empty()).unwrap();
        (near, far)
    }

    #[test]
    fn evidence_names_what_where() {
        let evidence = Evidence { hold: Hold::Mapping, pid: Some(7), program: "qemu".to_owned() };
        assert_eq!(evidence.to_string(), "a mapping in process 7 (qemu)");
        let evidence = Evidence { hold: Hold::CannotLook, pid: None, program: String::new() };
        assert_eq!(evidence.to_string(), "what cannot be looked at");
    }

    #[test]
    fn a_pools_memory_is_free_when_no_other_description_of_it_exists() {
        let region = region(RegionKind::Memfd, 0x4000, 0x1000);
        let wait = OpenWait { progress: &|_| {}, cancel: &AtomicBool::new(false) };
        let memory = backing::open(&region, &slice(0, 0x4000), &wait).unwrap();
        let verdict = || look_at_own_file(memory.as_ref(), &Owner::this("vm"));
        let hold = || match verdict() {
            Verdict::Free => None,
            Verdict::InUse { evidence, .. } => Some((evidence[0].hold, evidence[0].pid)),
        };
        assert_eq!(hold(), None);
        let mapping = Mapping::new(memory.as_ref(), 0x1000, 0x2000, 0).unwrap();
        assert_eq!(hold(), Some((Hold::Mapping, Some(std::process::id()))));
        drop(mapping);
        let mut child = std::process::Command::new("/bin/cat")
            .stdin(std::process::Stdio::piped())
            .stdout(reopen(memory.file()).unwrap())
            .spawn()
            .unwrap();
        assert_eq!(hold(), Some((Hold::Descriptor, Some(child.id()))));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(hold(), None);
    }
}
