//! A disk on storage that fails or hangs when it is flushed: a FUSE file system of one file.
//!
//! Messages are those of linux/fuse.h, version 7.31: a header, then a structure that the operation decides.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;

/// Behaviour of the disk once it is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Storage {
    /// A flush ends with EIO.
    Fails,
    /// No request is answered.
    Hangs,
}

/// The mounted file system; every name in it is the disk. Requests in flight end when this is dropped.
pub(crate) struct Mounted {
    folder: TempDir,
    _device: Arc<File>,
}

const DISK_SIZE: u64 = 1 << 20;
const DISK_NODE: u64 = 2;
/// The kernel asks for names and attributes once.
const LONG: u64 = 1 << 32;
/// FOPEN_NOFLUSH: closing sends no request, so that a process with hung storage can end.
const NO_FLUSH: u64 = 1 << 5;

impl Mounted {
    /// Mounts a file system on `storage`; prints why not when mounting is forbidden here.
    pub(crate) fn new(storage: Storage) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let skipped = |error| println!("skipped: FUSE: {error}");
        let device = File::options().read(true).write(true).open("/dev/fuse").map_err(skipped).ok()?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let options = std::ffi::CString::new(options).unwrap();
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("egm-vmm-test", folder.path(), "fuse", flags, Some(options.as_c_str()))
            .map_err(|error| skipped(error.into()))
            .ok()?;
        let device = Arc::new(device);
        let server = Arc::clone(&device);
        thread::spawn(move || serve(&server, storage));
        let mounted = Self { folder, _device: device };
        // The kernel caches what it requests now, and does not request it from a server that no longer answers.
        std::fs::metadata(mounted.disk()).unwrap();
        Some(mounted)
    }

    pub(crate) fn disk(&self) -> PathBuf {
        self.folder.path().join("disk.img")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(self.folder.path(), UnmountFlags::FORCE | UnmountFlags::DETACH);
    }
}

/// Answers until the file system is unmounted, or for ever not.
fn serve(mut device: &File, storage: Storage) {
    let mut request = vec![0; 1 << 18];
    while device.read(&mut request).is_ok() {
        let word = |at| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        let (operation, id, node) = (word(4), &request[8..16], word(16));
        let answer = match operation {
            1 => Ok([&[DISK_NODE, 0, LONG, LONG, 0], attributes(DISK_NODE).as_slice()].concat()), // LOOKUP
            2 | 36 | 42 => continue, // FORGET, INTERRUPT, BATCH_FORGET want no answer
            3 => Ok([&[LONG, 0], attributes(node.into()).as_slice()].concat()), // GETATTR
            14 => Ok(vec![0, NO_FLUSH]), // OPEN
            20 => Err(libc::EIO),    // FSYNC
            26 => Ok(vec![7 | 31 << 32, 0, 0, 1 << 12, 0, 0, 0, 0]), // INIT
            _ => Err(libc::ENOSYS),
        };
        let body: Vec<u8> = answer.iter().flatten().flat_map(|long| long.to_ne_bytes()).collect();
        let length = u32::try_from(16 + body.len()).unwrap();
        let error = answer.err().map_or(0, |errno| -errno);
        let header = [&length.to_ne_bytes()[..], &error.to_ne_bytes(), id, &body].concat();
        let _ = device.write(&header);
        if operation == 14 && storage == Storage::Hangs {
            return;
        }
    }
}

/// `fuse_attr`: number, size, blocks, times, then mode and links, owner, device and block size.
fn attributes(node: u64) -> [u64; 11] {
    let (mode, size) = if node == DISK_NODE { (0o100_644, DISK_SIZE) } else { (0o40_755, 0) };
    [node, size, size / 512, 0, 0, 0, 0, mode << 32, 1, 0, 512]
}
