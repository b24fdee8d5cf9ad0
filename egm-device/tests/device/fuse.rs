//! A FUSE file system with a server that stops answering: a hostile user can mount, open and send it.
//!
//! The server is a process of its own, in a mount namespace of its own. The kernel closes the files of a killed process,
//! and waits for the server to answer. If the server were a thread of that process, it would be gone by then, and the
//! process would wait for ever.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, Command, Stdio};
use std::sync::Once;
use std::thread;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::mount::{MountFlags, mount};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, set_parent_process_death_signal};

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
const ENOENT: i32 = -2;
const ENOSYS: i32 = -38;

/// Set in a process of this program that runs [`a_killed_process_that_has_its_files_ends`] as another part of it.
const PART: &str = "EGM_TEST_FUSE";
/// A part: the server. Its standard input is a file that its client has locked.
const SERVER: &str = "server";
/// A part: a process that is killed while it has files of the file system.
const VICTIM: &str = "victim";
/// Mount point of the file system, visible in the server's mount namespace alone.
const FOLDER: &str = "/mnt";
/// The look-up of this name stops the server's answers.
const SILENCE: &str = "silence";

/// Served until it is dropped, which fails all requests that wait.
pub(crate) struct Fuse {
    server: Child,
    /// A locked file. When this process ends, the kernel closes its files in the order of their numbers, and so unlocks this
    /// one before it closes a file of the file system.
    lock: File,
    /// Closed after the server's end: until then a close may wait for ever.
    files: Vec<File>,
}

impl Drop for Fuse {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl Fuse {
    /// `None`, with the reason printed, where this user may not mount one.
    pub(crate) fn mount() -> Option<Self> {
        let lock = tempfile::tempfile().unwrap();
        let mut server =
            part(Command::new("unshare").arg("--mount").arg(std::env::current_exe().unwrap()), SERVER)
                .stdin(lock.try_clone().unwrap())
                .spawn()
                .unwrap();
        // After the spawn, which closes a descriptor of this file: a process that does so loses its locks of the file.
        fcntl_lock(&lock, FlockOperation::LockExclusive).unwrap();
        let answer = answer(&mut server);
        let Some(folder) = answer.strip_prefix("mounted ") else {
            server.wait().unwrap();
            println!("skipped: cannot mount a FUSE file system: {answer}");
            return None;
        };
        let mut fuse = Self { server, lock, files: Vec::new() };
        let path = format!("{folder}/file");
        fuse.files = (0..2)
            .map(|_| fuse.under_lock(&OpenOptions::new().read(true).write(true).open(&path).unwrap()))
            .collect();
        assert!(fs::metadata(format!("{folder}/{SILENCE}")).is_err(), "no such file");
        // The page cache takes this; the close of any file of the same inode has to write it.
        fuse.files[1].write_all(&[1; 4096]).unwrap();
        Some(fuse)
    }

    /// `file` by a number above that of the lock.
    fn under_lock(&self, file: &File) -> File {
        rustix::io::fcntl_dupfd_cloexec(file, self.lock.as_raw_fd()).unwrap().into()
    }

    /// A file of a server that answers no write, no flush, no close and no file system query any more.
    pub(crate) fn file(&self) -> &File {
        &self.files[0]
    }
}

/// `command`, which runs this program, as `part` of the test below.
fn part<'a>(command: &'a mut Command, part: &str) -> &'a mut Command {
    let test = concat!(module_path!(), "::a_killed_process_that_has_its_files_ends");
    let (_, test) = test.split_once("::").unwrap();
    command.args(["--exact", "--nocapture", test]).env(PART, part).stdin(Stdio::null()).stdout(Stdio::piped())
}

/// The line that `part` prints to its parent, or its last one.
fn answer(part: &mut Child) -> String {
    let lines = BufReader::new(part.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut last = String::new();
    for line in lines {
        match line.strip_prefix("answer: ") {
            Some(answer) => return answer.to_owned(),
            None => last = line,
        }
    }
    last
}

/// Mounts the file system, serves it, and ends with its client.
fn run_server() {
    // With the thread that started it; the lock is for a client that has files, and may wait before that thread is gone.
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let mounted = || {
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse")?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        let options = CString::new(options)?;
        let flags = MountFlags::NODEV | MountFlags::NOSUID;
        mount(c"silent", FOLDER, c"fuse", flags, Some(options.as_c_str()))?;
        io::Result::Ok(device)
    };
    match mounted() {
        Ok(device) => {
            println!("\nanswer: mounted /proc/{}/root{FOLDER}", std::process::id());
            serve(device);
        }
        Err(error) => println!("\nanswer: {error}"),
    }
}

/// A process that is killed while it has files of the file system ends.
#[test]
fn a_killed_process_that_has_its_files_ends() {
    match std::env::var(PART).as_deref() {
        Ok(SERVER) => return run_server(),
        Ok(VICTIM) => {
            let fuse = Fuse::mount();
            println!("\nanswer: {}", if fuse.is_some() { "ready" } else { "skipped" });
            return drop((io::stdin().read(&mut [0]), fuse));
        }
        _ => {}
    }
    let mut victim = part(&mut Command::new(std::env::current_exe().unwrap()), VICTIM)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let answer = answer(&mut victim);
    if answer != "ready" {
        victim.wait().unwrap();
        return println!("{answer}");
    }
    victim.kill().unwrap();
    let process = pidfd_open(Pid::from_child(&victim), PidfdFlags::empty()).unwrap();
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    let ended = poll(&mut [PollFd::new(&process.as_fd(), PollFlags::IN)], Some(&limit)).unwrap();
    assert_eq!(ended, 1, "process {} waits for its file system", victim.id());
    victim.wait().unwrap();
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

/// Ends this process once its client, which takes the lock before it opens a file, has ended.
fn wait_for_lock() {
    fcntl_lock(io::stdin(), FlockOperation::LockExclusive).unwrap();
    std::process::exit(0);
}

/// `struct fuse_attr`: the root is node 1, a folder; the file is node 2.
fn attributes(node: u64) -> Vec<u8> {
    let mode = if node == 1 { 0o4_0755 } else { 0o10_0666 };
    let longs = [node, 1 << 20, 0, 0, 0, 0].into_iter().flat_map(u64::to_le_bytes);
    longs.chain(words(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0])).collect()
}

fn serve(mut device: File) {
    let (mut answers, end_with_client) = (true, Once::new());
    let mut request = vec![0; 1 << 18];
    while let Ok(length) = device.read(&mut request) {
        let (opcode, unique, node) = (word(&request, 4), long(&request, 8), long(&request, 16));
        let forever = [u64::from(u32::MAX); 1].map(u64::to_le_bytes).concat();
        let waits = matches!(opcode, WRITE | FLUSH | STATFS | RELEASE);
        let answer: Result<Vec<u8>, i32> = match opcode {
            FORGET | INTERRUPT => continue,
            _ if waits && !answers => continue,
            INIT => Ok(words(&[7, 31, 0, WRITEBACK_CACHE, 0, 4096, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
            LOOKUP if request[40..].starts_with(SILENCE.as_bytes()) => {
                answers = false;
                Err(ENOENT)
            }
            LOOKUP => {
                end_with_client.call_once(|| drop(thread::spawn(wait_for_lock)));
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
