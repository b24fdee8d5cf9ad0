//! Names and numbers of system calls, on both architectures: those that a filter permits, and those that an attacker
//! would try, so that the report of a refused call names it. Pure.

use crate::config::Architecture;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Call {
    /// Its name in the kernel's tables.
    pub(super) name: &'static str,
    x86_64: Option<u32>,
    aarch64: Option<u32>,
}

impl Call {
    /// Its number; Arm lacks the old forms of calls that have a newer one.
    pub(super) const fn number(&self, arch: Architecture) -> Option<u32> {
        match arch {
            Architecture::X86_64 => self.x86_64,
            Architecture::Aarch64 => self.aarch64,
        }
    }
}

/// A call of both architectures.
const fn both(name: &'static str, x86_64: u32, aarch64: u32) -> Call {
    Call { name, x86_64: Some(x86_64), aarch64: Some(aarch64) }
}

/// A call that is newer than Linux 5.0: such calls have one number everywhere.
const fn new(name: &'static str, number: u32) -> Call {
    both(name, number, number)
}

/// A call of x86 alone.
const fn old(name: &'static str, x86_64: u32) -> Call {
    Call { name, x86_64: Some(x86_64), aarch64: None }
}

pub(super) fn named(name: &str) -> Option<&'static Call> {
    CALLS.iter().find(|call| call.name == name)
}

/// The name of call `number`, if it is in the table.
pub(super) fn name_of(number: u32, arch: Architecture) -> Option<&'static str> {
    CALLS.iter().find(|call| call.number(arch) == Some(number)).map(|call| call.name)
}

/// `arch/x86/entry/syscalls/syscall_64.tbl` and `include/uapi/asm-generic/unistd.h` of Linux, in the order of x86.
pub(super) const CALLS: &[Call] = &[
    both("read", 0, 63),
    both("write", 1, 64),
    old("open", 2),
    both("close", 3, 57),
    old("stat", 4),
    both("fstat", 5, 80),
    old("lstat", 6),
    old("poll", 7),
    both("lseek", 8, 62),
    both("mmap", 9, 222),
    both("mprotect", 10, 226),
    both("munmap", 11, 215),
    both("brk", 12, 214),
    both("rt_sigaction", 13, 134),
    both("rt_sigprocmask", 14, 135),
    both("rt_sigreturn", 15, 139),
    both("ioctl", 16, 29),
    both("pread64", 17, 67),
    both("pwrite64", 18, 68),
    both("readv", 19, 65),
    both("writev", 20, 66),
    old("access", 21),
    both("sched_yield", 24, 124),
    both("mremap", 25, 216),
    both("madvise", 28, 233),
    both("shmget", 29, 194),
    both("shmat", 30, 196),
    both("dup", 32, 23),
    old("dup2", 33),
    both("getpid", 39, 172),
    both("socket", 41, 198),
    both("connect", 42, 203),
    both("sendto", 44, 206),
    both("recvfrom", 45, 207),
    both("sendmsg", 46, 211),
    both("recvmsg", 47, 212),
    both("shutdown", 48, 210),
    both("bind", 49, 200),
    both("listen", 50, 201),
    both("socketpair", 53, 199),
    both("setsockopt", 54, 208),
    both("getsockopt", 55, 209),
    both("clone", 56, 220),
    old("fork", 57),
    old("vfork", 58),
    both("execve", 59, 221),
    both("exit", 60, 93),
    both("wait4", 61, 260),
    both("kill", 62, 129),
    both("fcntl", 72, 25),
    both("flock", 73, 32),
    both("fsync", 74, 82),
    both("fdatasync", 75, 83),
    both("truncate", 76, 45),
    both("ftruncate", 77, 46),
    both("chdir", 80, 49),
    old("rename", 82),
    old("mkdir", 83),
    old("unlink", 87),
    old("symlink", 88),
    old("readlink", 89),
    old("chmod", 90),
    both("ptrace", 101, 117),
    both("setuid", 105, 146),
    both("setgid", 106, 144),
    both("setresuid", 117, 147),
    both("setresgid", 119, 149),
    both("capset", 126, 91),
    both("sigaltstack", 131, 132),
    both("personality", 135, 92),
    both("prctl", 157, 167),
    both("setrlimit", 160, 164),
    both("chroot", 161, 51),
    both("mount", 165, 40),
    both("umount2", 166, 39),
    both("swapon", 167, 224),
    both("reboot", 169, 142),
    old("iopl", 172),
    old("ioperm", 173),
    both("init_module", 175, 105),
    both("delete_module", 176, 106),
    both("gettid", 186, 178),
    both("tkill", 200, 130),
    both("futex", 202, 98),
    both("sched_setaffinity", 203, 122),
    both("sched_getaffinity", 204, 123),
    both("remap_file_pages", 216, 234),
    both("getdents64", 217, 61),
    both("restart_syscall", 219, 128),
    both("clock_gettime", 228, 113),
    both("clock_nanosleep", 230, 115),
    both("exit_group", 231, 94),
    old("epoll_wait", 232),
    both("epoll_ctl", 233, 21),
    both("tgkill", 234, 131),
    both("mbind", 237, 235),
    both("kexec_load", 246, 104),
    both("waitid", 247, 95),
    both("add_key", 248, 217),
    both("keyctl", 250, 219),
    both("openat", 257, 56),
    both("mkdirat", 258, 34),
    both("newfstatat", 262, 79),
    both("unlinkat", 263, 35),
    both("readlinkat", 267, 78),
    both("fchmodat", 268, 53),
    both("faccessat", 269, 48),
    both("ppoll", 271, 73),
    both("unshare", 272, 97),
    both("set_robust_list", 273, 99),
    both("splice", 275, 76),
    both("vmsplice", 278, 75),
    both("epoll_pwait", 281, 22),
    both("timerfd_create", 283, 85),
    both("fallocate", 285, 47),
    both("timerfd_settime", 286, 86),
    both("accept4", 288, 242),
    both("eventfd2", 290, 19),
    both("epoll_create1", 291, 20),
    both("pipe2", 293, 59),
    both("preadv", 295, 69),
    both("pwritev", 296, 70),
    both("rt_tgsigqueueinfo", 297, 240),
    both("perf_event_open", 298, 241),
    both("prlimit64", 302, 261),
    both("open_by_handle_at", 304, 265),
    both("setns", 308, 268),
    both("process_vm_readv", 310, 270),
    both("process_vm_writev", 311, 271),
    both("finit_module", 313, 273),
    both("sched_setattr", 314, 274),
    both("renameat2", 316, 276),
    both("seccomp", 317, 277),
    both("getrandom", 318, 278),
    both("memfd_create", 319, 279),
    both("bpf", 321, 280),
    both("execveat", 322, 281),
    both("userfaultfd", 323, 282),
    both("pkey_mprotect", 329, 288),
    both("statx", 332, 291),
    both("rseq", 334, 293),
    new("pidfd_send_signal", 424),
    new("io_uring_setup", 425),
    new("io_uring_enter", 426),
    new("io_uring_register", 427),
    new("open_tree", 428),
    new("move_mount", 429),
    new("fsopen", 430),
    new("pidfd_open", 434),
    new("clone3", 435),
    new("close_range", 436),
    new("openat2", 437),
    new("pidfd_getfd", 438),
    new("process_madvise", 440),
    new("landlock_restrict_self", 446),
    new("memfd_secret", 447),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_name_and_no_number_is_twice_in_the_table() {
        let names: BTreeSet<_> = CALLS.iter().map(|call| call.name).collect();
        assert_eq!(names.len(), CALLS.len());
        for arch in [Architecture::X86_64, Architecture::Aarch64] {
            let numbers: Vec<_> = CALLS.iter().filter_map(|call| call.number(arch)).collect();
            assert_eq!(numbers.iter().collect::<BTreeSet<_>>().len(), numbers.len(), "{arch:?}");
        }
    }
}
