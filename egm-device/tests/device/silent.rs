//! A process that blocks the readers of its mappings: it keeps memory from others only if it could hold that memory.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use egm_address::ByteSize;
use egm_device::Backing;
use egm_device::backing::BackingError;
use egm_device::carve::plan::Request;
use egm_device::ledger::{GrantError, Identity, Ledger, Memory, Paths, Watch};
use egm_device::owner::Owner;
use egm_device::region::{DaxFiles, Region, RegionKind, Slice};
use egm_device::retired::Retired;

use crate::fuse::Fuse;

#[path = "../window/mod.rs"]
mod window;

const TENANT: u32 = 4002;
const OTHER: u32 = 4003;
const PAGE: u64 = 4096;

/// A plain file in the place of a device.
struct PlainFile(PathBuf);

impl Memory for PlainFile {
    fn open(&self, _: &Region, slice: &Slice, _: &Watch<'_>) -> Result<Box<dyn Backing>, BackingError> {
        let file = File::options().read(true).write(true).open(&self.0).unwrap();
        Ok(Box::new(window::Window(file, slice.offset, slice.size.get())))
    }
}

/// A process of user `uid` that waits in `exec` for ever: this process's files of `fuse` end there, with a write that
/// gets no answer, and the kernel lets no process look at the mappings meanwhile. The thread ends with the file system.
fn silent(fuse: &Fuse, uid: u32) -> JoinHandle<()> {
    assert!(fuse.file().as_raw_fd() >= 0, "the files are open");
    let process = thread::spawn(move || {
        let child = Command::new("/bin/true").uid(uid).gid(uid).spawn();
        child.unwrap().wait().unwrap();
    });
    let is_silent = || {
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        all.filter_map(|entry| std::fs::read_to_string(entry.path().join("status")).ok())
            .any(|status| status.contains("State:\tD") && status.contains(&format!("Uid:\t{uid}\t")))
    };
    while !is_silent() {
        thread::yield_now();
    }
    process
}

#[test]
fn a_process_that_does_not_answer_keeps_a_slice_only_from_the_next_owner_of_its_user_s() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root starts processes of other users");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory");
    std::fs::write(&path, vec![0xee; usize::try_from(PAGE).unwrap()]).unwrap();
    let region = Region {
        name: "test".to_owned(),
        kind: RegionKind::Devdax { device: path.clone(), files: DaxFiles::Static },
        node: None,
        size: ByteSize::new(PAGE),
        page_size: ByteSize::new(PAGE),
        base: None,
        functions: Vec::new(),
        retired: Retired::default(),
    };
    let memory: Arc<dyn Memory> = Arc::new(PlainFile(path));
    let identity = Identity { machine: Some("host".to_owned()), boot: "boot".to_owned() };
    let ledger = Ledger::open(Paths::below(folder.path()), identity).unwrap();
    let tenant = Owner { name: "vm".to_owned(), uid: TENANT, pid: u32::MAX, started: 1, domain: None };
    let take = |owner: &Owner| {
        ledger.grant_from(&memory, &region, &Request::new(PAGE, owner.clone()), &Watch::unobserved())
    };
    for (uid, is_granted) in [(OTHER, true), (TENANT, false)] {
        // An owner that was killed.
        drop(take(&tenant).unwrap());
        let Some(fuse) = Fuse::mount() else { return };
        let process = silent(&fuse, uid);
        let granted = take(&Owner::this("next"));
        drop(fuse);
        process.join().unwrap();
        match granted {
            Ok(_) => assert!(is_granted, "user {uid}"),
            Err(error) => {
                assert!(!is_granted && matches!(error, GrantError::Short { .. }), "user {uid}: {error}");
                assert!(error.to_string().contains("quarantine after vm"), "{error}");
                while take(&Owner::this("next")).is_err() {
                    thread::yield_now();
                }
            }
        }
    }
}
