//! Slices that are files of their own: what a return does with the file, and what a bad page of it means.

use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use egm_address::{ByteSize, InRegion, Offset, Span};
use egm_device::Backing;
use egm_device::backing::BackingError;
use egm_device::carve::plan::Request;
use egm_device::free::{Evidence, Hold};
use egm_device::ledger::record::GrantState;
use egm_device::ledger::{GrantError, Memory, UnretireError, Watch};
use egm_device::owner::Owner;
use egm_device::region::{Region, RegionKind, Slice};
use rustix::fs::OFlags;

use crate::common::{PAGE, Window, ledger, region, request, set};
use crate::in_flight;

/// Number of ext4 among file systems.
const EXT4: rustix::fs::FsWord = 0xef53;

/// Files on any medium in the place of a folder of fsdax.
struct Files {
    folder: PathBuf,
    /// Whether the kernel refers to a page.
    is_busy: bool,
    /// Bytes that a file has which cannot be cleared.
    left: Option<Span<InRegion>>,
    calls: Mutex<Vec<&'static str>>,
}

impl Files {
    fn new(folder: &Path, is_busy: bool) -> Arc<Self> {
        Arc::new(Self { folder: folder.to_owned(), is_busy, left: None, calls: Mutex::default() })
    }

    fn path(&self, slice: &Slice) -> PathBuf {
        self.folder.join(format!("{:x}", slice.offset))
    }

    fn window(slice: &Slice, file: File) -> Box<dyn Backing> {
        Box::new(Window(file, 0, slice.size.get()))
    }
}

impl Memory for Files {
    fn open(&self, region: &Region, slice: &Slice, _: &Watch<'_>) -> Result<Box<dyn Backing>, BackingError> {
        let bytes = Span::new(Offset::new(slice.offset), slice.size.get()).unwrap();
        if let Some(left) = self.left.filter(|left| left.overlaps(bytes)) {
            let source = Box::from("it has another name as well");
            return Err(BackingError::Leftover { region: region.name.clone(), bytes: left, source });
        }
        let path = self.path(slice);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).unwrap();
        file.set_len(slice.size.get()).unwrap();
        Ok(Self::window(slice, file))
    }

    fn reopen(&self, _: &Region, slice: &Slice, _: &Watch<'_>) -> Result<Box<dyn Backing>, BackingError> {
        let flags = i32::try_from(OFlags::PATH.bits()).unwrap();
        let name = OpenOptions::new().read(true).custom_flags(flags).open(self.path(slice)).unwrap();
        Ok(Self::window(slice, name))
    }

    fn renew(&self, region: &Region, slice: &Slice, _: &Watch<'_>) -> Result<Box<dyn Backing>, BackingError> {
        if self.is_busy {
            let evidence = vec![Evidence { hold: Hold::BusyPages, pid: None, program: String::new() }];
            let bytes = Span::new(Offset::new(slice.offset), slice.size.get()).unwrap();
            return Err(BackingError::InUse { evidence, region: region.name.clone(), bytes });
        }
        let file = OpenOptions::new().read(true).write(true).open(self.path(slice)).unwrap();
        Ok(Self::window(slice, file))
    }

    fn release(&self, _: &Region, _: &Slice) {
        self.calls.lock().unwrap().push("delete");
    }

    fn set_aside(&self, _: &Region, _: &Slice) -> Result<(), BackingError> {
        self.calls.lock().unwrap().push("set aside");
        Ok(())
    }
}

/// A region of 8 pages, each slice of which is a file in `folder`.
fn files(folder: &Path) -> Region {
    let kind = RegionKind::Fsdax { folder: folder.to_owned(), device: (0, 0) };
    Region { kind, ..region(folder, 8).0 }
}

#[test]
fn a_slice_with_busy_pages_is_quarantined_and_keeps_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = (files(folder.path()), Files::new(folder.path(), true));
    let ledger = ledger(folder.path());
    let shared: Arc<dyn Memory> = memory.clone();
    let lease = ledger.grant_from(&shared, &region, &request("a", 4), &Watch::unobserved()).unwrap();
    let GrantError::StillUsed { evidence, .. } = lease.return_slice(&Watch::unobserved()).unwrap_err() else {
        panic!("another error");
    };
    assert_eq!(evidence[0].hold, Hold::BusyPages);
    assert_eq!(memory.calls.lock().unwrap().len(), 0);
    let states = ledger.states(&region).unwrap();
    assert_eq!((states.held.len(), states.held[0].usage), (1, GrantState::Quarantined));
}

#[test]
fn a_file_with_a_bad_page_is_set_aside_and_no_offset_is_retired() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = (files(folder.path()), Files::new(folder.path(), false));
    let ledger = ledger(folder.path());
    let shared: Arc<dyn Memory> = memory.clone();
    let granted = || ledger.grant_from(&shared, &region, &request("a", 4), &Watch::unobserved()).unwrap();
    let lease = granted();
    // Bytes beyond a file's end raise SIGBUS, as those of bad pages do.
    OpenOptions::new().write(true).open(memory.path(lease.slice())).unwrap().set_len(2 * PAGE).unwrap();
    lease.retire(&set(3, 1)).unwrap();
    lease.return_slice(&Watch::unobserved()).unwrap();
    assert_eq!(*memory.calls.lock().unwrap(), ["set aside"]);
    let states = ledger.states(&region).unwrap();
    assert!(states.retired.spans().is_empty() && states.held.is_empty(), "{states:?}");
    granted().return_slice(&Watch::unobserved()).unwrap();
    assert_eq!(*memory.calls.lock().unwrap(), ["set aside", "delete"]);
}

#[test]
fn bytes_of_files_are_not_unretired() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = (files(folder.path()), Files::new(folder.path(), false));
    let ledger = ledger(folder.path());
    let page = Span::new(Offset::new(0), PAGE).unwrap();
    let refused = ledger.unretire(memory.as_ref(), &region, page, &Owner::this("test"), true).unwrap_err();
    assert!(matches!(refused, UnretireError::SliceFiles { .. }), "{refused}");
}

#[test]
fn a_file_that_cannot_be_cleared_keeps_its_own_bytes_from_grants_and_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let region = files(folder.path());
    let left = Span::new(Offset::new(0), 2 * PAGE).unwrap();
    let files = Files { left: Some(left), ..Arc::into_inner(Files::new(folder.path(), false)).unwrap() };
    let (ledger, memory): (_, Arc<dyn Memory>) = (ledger(folder.path()), Arc::new(files));
    let grant = |pages| ledger.grant_from(&memory, &region, &request("a", pages), &Watch::unobserved());
    let lease = grant(4).unwrap();
    assert_eq!(lease.slice().offset, 2 * PAGE);
    let short = grant(4).unwrap_err();
    assert!(matches!(short, GrantError::Short { .. }), "a return may make room: {short}");
    lease.return_slice(&Watch::unobserved()).unwrap();
    let error = grant(8).unwrap_err();
    assert!(matches!(error, GrantError::Backing(BackingError::Leftover { .. })), "{error}");
    let scrubbed = ledger.scrub(&memory, &region, None, &Watch::unobserved()).unwrap_err();
    assert!(matches!(scrubbed, GrantError::Backing(BackingError::Leftover { .. })), "{scrubbed}");
    let states = ledger.states(&region).unwrap();
    assert_eq!((states.clean.size(), states.dirty, states.held.len()), (6 * PAGE, set(0, 2), 0));
}

#[test]
fn small_pages_of_a_slice_are_shown_from_the_record_without_a_look_at_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = (files(folder.path()), Files::new(folder.path(), false));
    let ledger = ledger(folder.path());
    let shared: Arc<dyn Memory> = memory.clone();
    let lease = ledger.grant_from(&shared, &region, &request("a", 4), &Watch::unobserved()).unwrap();
    // A file of holes has no block that a large page could map.
    let shown = ledger.small_pages(&region).unwrap();
    if rustix::fs::statfs(folder.path()).unwrap().f_type != EXT4 {
        println!(
            "skipped: {} does not lie on ext4, which shows the blocks of a file",
            folder.path().display()
        );
        return;
    }
    assert_eq!(shown, [(Offset::new(lease.slice().offset), ByteSize::new(4 * PAGE))]);
    std::fs::remove_file(memory.path(lease.slice())).unwrap();
    assert_eq!(ledger.small_pages(&region).unwrap(), shown);
}

/// User of the owner of a slice, and of other processes.
const TENANT: u32 = 4001;

/// A process of the owner's user that waits for its input, with `descriptor` of the test.
fn process_with(descriptor: impl Into<Stdio>) -> Child {
    Command::new("/bin/cat").uid(TENANT).stdin(Stdio::piped()).stdout(descriptor).spawn().unwrap()
}

#[test]
fn another_machine_of_the_owners_user_keeps_no_file_that_it_does_not_have() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: a process of another user needs root");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = (files(folder.path()), Files::new(folder.path(), false));
    let ledger = ledger(folder.path());
    let shared: Arc<dyn Memory> = memory.clone();
    let owner = Owner { uid: TENANT, ..Owner::this("a") };
    let granted = || {
        let request = Request::new(4 * PAGE, owner.clone());
        ledger.grant_from(&shared, &region, &request, &Watch::unobserved()).unwrap()
    };
    // What is in flight may be any file, as a VFIO device may map any memory: the kernel names neither.
    let (socket, other) = UnixStream::pair().unwrap();
    in_flight::send(&socket, &File::open("/dev/zero").unwrap());
    let mut machine = process_with(OwnedFd::from(other));
    granted().return_slice(&Watch::unobserved()).unwrap();

    let lease = granted();
    let mut holder = process_with(
        memory.reopen(&region, lease.slice(), &Watch::unobserved()).unwrap().file().try_clone().unwrap(),
    );
    let error = lease.return_slice(&Watch::unobserved()).unwrap_err();
    let GrantError::StillUsed { evidence, .. } = &error else { panic!("{error}") };
    let found: Vec<_> = evidence.iter().map(|evidence| (evidence.hold, evidence.pid)).collect();
    assert_eq!(found, [(Hold::Descriptor, Some(holder.id()))]);
    for process in [&mut machine, &mut holder] {
        drop(process.stdin.take());
        process.wait().unwrap();
    }
}
