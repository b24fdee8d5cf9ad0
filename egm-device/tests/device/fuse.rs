//! A FUSE file system with a server that stops answering: a hostile user can mount, open and send it.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const SETATTR: u32 = 4;
const OPEN: u32 = 14;
const WRITE: u32 = 16;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;

const WRITEBACK_CACHE: u32 = 1 << 16;
const ENOSYS: i32 = -38;

/// Mounted until it is dropped, which fails all requests that wait.
pub(crate) struct Fuse {
    folder: TempDir,
    answers: Arc<AtomicBool>,
    server: Option<JoinHandle<()>>,
    /// Closed after the unmount: until then a close may wait for ever.
    files: Vec<File>,
}

impl Drop for Fuse {
    fn drop(&mut self) {
        let _ = unmount(self.folder.path(), UnmountFlags::FORCE | UnmountFlags::DETACH);
        let _ = self.server.take().map(JoinHandle::join);
    }
}

impl Fuse {
    /// `None`, with the reason printed, where this user may not mount one.
    pub(crate) fn mount() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let opened = OpenOptions::new().read(true).write(true).open("/dev/fuse");
        let device = opened.map_err(|error| println!("skipped: /dev/fuse: {error}")).ok()?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        let options = CString::new(options).unwrap();
        let flags = MountFlags::NODEV | MountFlags::NOSUID;
        let mounted = mount(c"silent", folder.path(), c"fuse", flags, Some(options.as_c_str()));
        mounted.map_err(|error| println!("skipped: cannot mount a FUSE file system: {error}")).ok()?;
        let answers = Arc::new(AtomicBool::new(true));
        let server = std::thread::spawn({
            let answers = answers.clone();
            move || serve(device, &answers)
        });
        let path = folder.path().join("file");
        let mut fuse = Self { folder, answers, server: Some(server), files: Vec::new() };
        let open = || OpenOptions::new().read(true).write(true).open(&path).unwrap();
        fuse.files = (0..2).map(|_| open()).collect();
        fuse.answers.store(false, Ordering::Relaxed);
        // The page cache takes this; the close of any file of the same inode has to write it.
        fuse.files[1].write_all(&[1; 4096]).unwrap();
        Some(fuse)
    }

    /// A file of a server that answers no write, no flush, no close and no file system query any more.
    pub(crate) fn file(&self) -> &File {
        &self.files[0]
    }
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*bytes[at..].first_chunk().unwrap())
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*bytes[at..].first_chunk().unwrap())
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// `struct fuse_attr`: the root is node 1, a folder; the file is node 2.
fn attributes(node: u64) -> Vec<u8> {
    let mode = if node == 1 { 0o4_0755 } else { 0o10_0666 };
    let longs = [node, 1 << 20, 0, 0, 0, 0].into_iter().flat_map(u64::to_le_bytes);
    longs.chain(words(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0])).collect()
}

fn serve(mut device: File, answers: &AtomicBool) {
    let mut request = vec![0; 1 << 18];
    while let Ok(length) = device.read(&mut request) {
        let (opcode, unique, node) = (word(&request, 4), long(&request, 8), long(&request, 16));
        let forever = [u64::from(u32::MAX); 1].map(u64::to_le_bytes).concat();
        let waits = matches!(opcode, WRITE | FLUSH | STATFS | RELEASE);
        let answer: Result<Vec<u8>, i32> = match opcode {
            FORGET | INTERRUPT => continue,
            _ if waits && !answers.load(Ordering::Relaxed) => continue,
            INIT => Ok(words(&[7, 31, 0, WRITEBACK_CACHE, 0, 4096, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
            LOOKUP => {
                let head = [2_u64, 0, u64::from(u32::MAX), u64::from(u32::MAX), 0].map(u64::to_le_bytes);
                Ok([head.concat(), attributes(2)].concat())
            }
            GETATTR | SETATTR => Ok([forever, vec![0; 8], attributes(node)].concat()),
            OPEN => Ok(vec![0; 16]),
            WRITE => Ok(words(&[word(&request, 40 + 16), 0])),
            FLUSH | RELEASE => Ok(vec![]),
            _ => Err(ENOSYS),
        };
        assert!(length >= 40, "a request has a header");
        let (error, body) = answer.map_or_else(|error| (error, vec![]), |body| (0, body));
        let size = u32::try_from(16 + body.len()).unwrap();
        let head = [size.to_le_bytes(), error.to_le_bytes()].concat();
        // The request may have been interrupted, or the file system unmounted.
        let _ = device.write(&[head, unique.to_le_bytes().to_vec(), body].concat());
    }
}
