//! Attacks of hostile owners on memory: forged locks, and processes that keep the memory and outlive them.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use egm_device::{Backing, Lease, Mapping};
use nix::fcntl::{FcntlArg, fcntl};
use nix::unistd::dup2_stdin;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, getppid, pidfd_open};

use crate::common::{Window, is_full_of};
use crate::in_flight::{receive, send};

/// Ways in which a child keeps a slice.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    Mapped,
    InFlight,
    /// Standard input is an io_uring that has it pinned.
    Pinned,
}

/// Releases all locks of the memory's description, and takes one of another.
pub(crate) fn forge(lease: &Lease) -> File {
    let lock = |file: &File, kind: i32| {
        let (l_type, l_whence) = (kind.try_into().unwrap(), libc::SEEK_SET.try_into().unwrap());
        let lock = libc::flock { l_type, l_whence, l_start: 0, l_len: 0, l_pid: 0 };
        let _ = fcntl(file, FcntlArg::F_OFD_SETLK(&lock));
    };
    lock(lease.file(), libc::F_UNLCK);
    let other =
        File::options().write(true).open(format!("/proc/self/fd/{}", lease.file().as_raw_fd())).unwrap();
    lock(&other, libc::F_WRLCK);
    other
}

/// Keeps the slice (offset, size, word) of `memory` (standard input) for longer than its owner may
/// live.
pub(crate) fn survive(keep: Keep, slice: &str, memory: &Path, life: Duration) -> ! {
    let numbers: Vec<u64> = slice.split(' ').map(|number| number.parse().unwrap()).collect();
    let [offset, size, word] = *numbers else { panic!("{slice}") };
    let file = File::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let slice = Window(file, offset, size);
    let owner = getppid().and_then(|owner| pidfd_open(owner, PidfdFlags::empty()).ok());
    let mut owner: Vec<_> = owner.iter().map(|owner| PollFd::new(owner, PollFlags::IN)).collect();
    let mut wait_while = |is_well: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while begun.elapsed() < life && is_well() {
            // The processors are for the owners: until its owner ends, this process polls once a millisecond.
            let look = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            poll(&mut owner, Some(&look)).unwrap();
        }
        is_well()
    };
    let is_well = match keep {
        Keep::Mapped => {
            let mapping = Mapping::new(&slice, 0, size, 0).unwrap();
            // Only the mapping is left: this process's own memory shows its content.
            let witness =
                Window(File::open("/proc/self/mem").unwrap(), mapping.start().addr().get() as u64, size);
            drop(slice);
            dup2_stdin(File::open("/dev/null").unwrap()).unwrap();
            wait_while(&|| is_full_of(&witness, word))
        }
        Keep::InFlight => {
            let (near, far) = UnixStream::pair().unwrap();
            send(&near, slice.file());
            drop(slice);
            dup2_stdin(File::open("/dev/null").unwrap()).unwrap();
            wait_while(&|| true) && is_full_of(&Window(receive(&far).unwrap().into(), offset, size), word)
        }
        Keep::Pinned => {
            let open = || File::open(memory).unwrap();
            wait_while(&|| true) && is_full_of(&Window(open(), offset, size), word)
        }
    };
    if !is_well {
        eprintln!("process {}: somebody got {size:#x} bytes at {offset:#x}", std::process::id());
    }
    std::process::exit(0)
}
