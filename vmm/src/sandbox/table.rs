//! System calls that each kind of thread may make, and why. Pure.
//!
//! A call that is not here ends the process: a running machine opens no file by its name, starts no process and no thread,
//! and makes no memory executable.

/// A kind of thread that lives while the guest runs. Threads for prefault, scrub and DMA maps end before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ThreadKind {
    /// A vCPU: runs the guest, and answers its accesses to devices.
    Vcpu,
    /// The first thread: virtio, console input, signals, bad memory, and the end of the machine.
    EventLoop,
    /// Carries console output to a reader that may be slow.
    Console,
    /// Reads and writes a disk, on hosts that forbid io_uring.
    Block,
    /// Resets, removes and ends functions.
    Hotplug,
    /// Waits for the end of a vfio-user server.
    ServerWatch,
    /// Waits for the end of a process that receives descriptors.
    Reaper,
    /// Answers clients of the control API. It runs before the machine is built, and longer than the guest.
    Api,
}

use ThreadKind::{Api, Block, Console, EventLoop, Hotplug, Reaper, ServerWatch, Vcpu};

pub(super) const KINDS: &[ThreadKind] = &[Vcpu, EventLoop, Console, Block, Hotplug, ServerWatch, Reaper, Api];

impl ThreadKind {
    /// The kind of the thread that was started with the name `name`, if it has a filter.
    pub(super) fn of_thread(name: &str) -> Option<Self> {
        Some(match name {
            "console" => Console,
            "blk" => Block,
            "hotplug" => Hotplug,
            "vfio-user" => ServerWatch,
            "reaper" => Reaper,
            "api" => Api,
            _ => return None,
        })
    }
}

/// A part that not every machine has. Calls for it are permitted only if the machine has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MachinePart {
    /// What every machine has.
    Always,
    Disk,
    Net,
    /// A virtio socket device of this process.
    Vsock,
    /// The kernel's virtio socket device.
    VhostVsock,
    /// A console that is a socket.
    ConsoleSocket,
    /// A function of the host, or a port for one.
    Function,
    Server,
    /// A slice of a broker.
    Broker,
    /// A slice of an EGM device.
    EgmDevice,
    /// A control API, with a file for its socket.
    ControlApi,
    /// A guest that starts again in place.
    Reset,
}

/// The parts that not every machine has.
#[cfg(test)]
pub(super) const ALL_PARTS: &[MachinePart] = &[
    MachinePart::Disk,
    MachinePart::Net,
    MachinePart::Vsock,
    MachinePart::VhostVsock,
    MachinePart::ConsoleSocket,
    MachinePart::Function,
    MachinePart::Server,
    MachinePart::Broker,
    MachinePart::EgmDevice,
    MachinePart::ControlApi,
    MachinePart::Reset,
];

/// The calls of a row, by their arguments, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Condition {
    Any,
    /// Calls with none of these bits in the argument.
    Without(u8, u32),
    /// Calls with one of these in the lower 32 bits of the argument.
    OneOf(u8, &'static [u32]),
    /// Calls with 0 as the argument.
    Null(u8),
    /// Calls with the number of this process as the argument.
    ThisProcess(u8),
    /// mmap(2) of memory without a file and without execution.
    Anonymous,
}

#[derive(Debug)]
pub(super) struct PermittedCall {
    pub(super) call: &'static str,
    pub(super) condition: Condition,
    /// The threads that may make it.
    pub(super) kinds: &'static [ThreadKind],
    /// The machines that it is for: those with one of these parts.
    pub(super) parts: &'static [MachinePart],
    #[cfg_attr(not(test), expect(dead_code, reason = "for readers, and a test that there is one"))]
    pub(super) reason: &'static str,
}

/// A permitted request of ioctl(2).
#[derive(Debug)]
pub(super) struct PermittedRequest {
    /// Its name in the kernel's headers.
    #[cfg_attr(not(test), expect(dead_code, reason = "for readers, and tests of the number"))]
    pub(super) name: &'static str,
    pub(super) number: u32,
    /// The threads that may send it.
    pub(super) kinds: &'static [ThreadKind],
    /// The machines that it is for: those with one of these parts.
    pub(super) parts: &'static [MachinePart],
    #[cfg_attr(not(test), expect(dead_code, reason = "for readers, and a test that there is one"))]
    pub(super) reason: &'static str,
}

/// A row for every machine.
const fn always(
    call: &'static str,
    condition: Condition,
    kinds: &'static [ThreadKind],
    reason: &'static str,
) -> PermittedCall {
    PermittedCall { call, condition, kinds, parts: EVERY, reason }
}

/// A row for machines with one of `parts`.
const fn with(
    parts: &'static [MachinePart],
    call: &'static str,
    condition: Condition,
    kinds: &'static [ThreadKind],
    reason: &'static str,
) -> PermittedCall {
    PermittedCall { call, condition, kinds, parts, reason }
}

/// Threads that run device models.
const DEVICES: &[ThreadKind] = &[Vcpu, EventLoop, Hotplug];
/// Threads that start virtio devices and end them.
const VIRTIO: &[ThreadKind] = &[Vcpu, EventLoop];

const EVERY: &[MachinePart] = &[MachinePart::Always];
const FUNCTION: &[MachinePart] = &[MachinePart::Function];
const NET: &[MachinePart] = &[MachinePart::Net];
const VHOST: &[MachinePart] = &[MachinePart::Net, MachinePart::VhostVsock];
/// Sockets that the event loop serves.
const SOCKETS: &[MachinePart] = &[MachinePart::Vsock, MachinePart::ConsoleSocket];
/// Sockets with a file that the event loop removes.
const SOCKET_FILES: &[MachinePart] =
    &[MachinePart::Vsock, MachinePart::ConsoleSocket, MachinePart::ControlApi];
const API: &[MachinePart] = &[MachinePart::ControlApi];
const RESET: &[MachinePart] = &[MachinePart::Reset];

const SIGNALS: &[u32] = &[libc::SIGBUS.cast_unsigned(), libc::SIGSEGV.cast_unsigned()];
const DESCRIPTORS: &[u32] = &[libc::F_DUPFD_CLOEXEC.cast_unsigned(), libc::F_GETFD.cast_unsigned()];
const CREDENTIALS: &[u32] = &[libc::SO_PEERCRED.cast_unsigned()];
const SIDES: &[u32] = &[libc::SHUT_WR.cast_unsigned(), libc::SHUT_RDWR.cast_unsigned()];

/// The permitted calls but for ioctl(2).
#[rustfmt::skip] // a table
pub(super) const ROWS: &[PermittedCall] = &[
    always("brk", Condition::Any, KINDS, "memory of the C library's allocator"),
    always("clock_gettime", Condition::Any, KINDS, "the time, on hosts where only the kernel has it"),
    always("close", Condition::Any, KINDS, "descriptors of what ends"),
    always("exit", Condition::Any, KINDS, "the end of a thread"),
    always("exit_group", Condition::Any, KINDS, "the end of the process, of a panic and of a refused call"),
    always("fcntl", Condition::OneOf(1, DESCRIPTORS), KINDS,
        "copies of eventfds, and in builds with debug assertions a look at each descriptor before it is closed"),
    always("futex", Condition::Any, KINDS, "locks, channels, and joins of threads"),
    always("getpid", Condition::Any, KINDS, "the C library, which sends a signal to a thread"),
    always("getrandom", Condition::Any, KINDS, "seeds of hash tables, and the guest's entropy"),
    always("gettid", Condition::Any, KINDS, "the C library, which aborts"),
    always("madvise", Condition::OneOf(2, &[libc::MADV_DONTNEED.cast_unsigned()]), KINDS,
        "pages that the allocator, a thread's stack and the program's start leave"),
    always("mmap", Condition::Anonymous, KINDS, "memory of the allocator, and over a bad page"),
    with(&[MachinePart::Server], "mmap", Condition::Without(2, libc::PROT_EXEC.cast_unsigned()), DEVICES,
        "a BAR of a function, before a vfio-user server gets it; such a machine keeps no file of a whole region"),
    always("mprotect", Condition::Without(2, libc::PROT_EXEC.cast_unsigned()), KINDS, "a heap of the allocator that grows"),
    always("mremap", Condition::Any, KINDS, "a large allocation that grows: strict answers with an error, see `keep_mappings`"),
    always("munmap", Condition::Any, KINDS, "memory of what ends"),
    always("prctl", Condition::OneOf(0, &[libc::PR_GET_NAME.cast_unsigned()]), KINDS,
        "the thread's name in the report of a refused call"),
    always("restart_syscall", Condition::Any, KINDS, "a wait that a stop of the process interrupted"),
    always("rt_sigaction", Condition::OneOf(0, SIGNALS), KINDS, "an unexplained fault, which ends the process as its default does"),
    always("rt_sigprocmask", Condition::Any, KINDS, "the C library, which aborts, sends signals and ends threads"),
    always("rt_sigreturn", Condition::Any, KINDS, "the end of a signal handler"),
    always("sched_yield", Condition::Any, KINDS, "a channel with a busy other end"),
    always("sendto", Condition::Null(4), KINDS, "the handler of SIGTERM, and data on connected sockets"),
    always("sigaltstack", Condition::Any, KINDS, "the end of a thread, which has a stack for its handlers"),
    always("tgkill", Condition::ThisProcess(0), KINDS, "the signal that stops a vCPU, and an abort"),
    always("write", Condition::Any, KINDS, "eventfds, console output, messages"),
    // Several kinds.
    always("read", Condition::Any, &[Vcpu, EventLoop, Console, Hotplug, Api],
        "eventfds, timers, console input and output"),
    always("ppoll", Condition::Any, KINDS, "waits for descriptors, and whether the report of a refused call would wait"),
    always("eventfd2", Condition::Any, DEVICES, "interrupt vectors, and a descriptor in reserve for clients"),
    always("epoll_ctl", Condition::Any, VIRTIO, "descriptors that a device waits for"),
    with(&[MachinePart::Server], "recvfrom", Condition::Any, &[Vcpu, Hotplug], "replies of a vfio-user server"),
    with(&[MachinePart::Vsock], "timerfd_settime", Condition::Any, &[Vcpu], "handshakes of host programs that a reset ends"),
    with(&[MachinePart::Server, MachinePart::Broker], "recvmsg", Condition::Any, DEVICES, "replies of a vfio-user server and of a broker"),
    with(&[MachinePart::Server, MachinePart::Broker], "sendmsg", Condition::Any, DEVICES, "requests to a vfio-user server and to a broker"),
    with(&[MachinePart::Server, MachinePart::Vsock, MachinePart::ConsoleSocket], "shutdown", Condition::Any, DEVICES,
        "connections that end while another thread may wait for them"),
    with(FUNCTION, "pread64", Condition::Any, DEVICES, "registers of functions"),
    with(FUNCTION, "pwrite64", Condition::Any, DEVICES, "registers of functions"),
    // The event loop.
    always("epoll_pwait", Condition::Any, &[EventLoop], "the loop's wait"),
    always("epoll_wait", Condition::Any, &[EventLoop], "the loop's wait"),
    always("recvfrom", Condition::Any, &[EventLoop], "signals, and sockets of the console, of virtio and of servers"),
    always("timerfd_settime", Condition::Any, &[EventLoop], "reports of bad memory that are due again"),
    with(&[MachinePart::Disk], "io_uring_enter", Condition::Any, &[EventLoop],
        "disks; a ring does only what it was made for: see virtio/blk/io/uring.rs"),
    with(&[MachinePart::Net, MachinePart::Vsock], "readv", Condition::Any, &[EventLoop], "packets, from the host to guest memory"),
    with(&[MachinePart::Net, MachinePart::Vsock], "writev", Condition::Any, &[EventLoop], "packets, from guest memory to the host"),
    with(RESET, "lseek", Condition::Any, &[EventLoop], "the kernel and the initramfs, which are read again"),
    with(SOCKETS, "accept4", Condition::Any, &[EventLoop], "clients of the machine's sockets"),
    with(&[MachinePart::Vsock], "socket", Condition::OneOf(0, &[libc::AF_UNIX.cast_unsigned()]), &[EventLoop],
        "a connection of the guest to a host program"),
    with(&[MachinePart::Vsock], "connect", Condition::Any, &[EventLoop], "a connection of the guest to a host program"),
    with(SOCKET_FILES, "statx", Condition::Any, &[EventLoop], "whether a socket's file is still ours"),
    with(SOCKET_FILES, "unlink", Condition::Any, &[EventLoop], "a socket's file, at the end"),
    with(SOCKET_FILES, "unlinkat", Condition::Any, &[EventLoop], "a socket's file, at the end"),
    // The control API. The event loop removes its socket.
    with(API, "accept4", Condition::Any, &[Api], "clients of the API"),
    with(API, "epoll_ctl", Condition::Any, &[Api], "clients that come, send, or take bytes again"),
    with(API, "epoll_pwait", Condition::Any, &[Api], "the wait for clients and events"),
    with(API, "eventfd2", Condition::Any, &[Api], "a descriptor in reserve for clients"),
    with(API, "getsockopt", Condition::OneOf(2, CREDENTIALS), &[Api], "the user of a client"),
    with(API, "recvmsg", Condition::Any, &[Api], "requests of clients, with their descriptors"),
    with(API, "shutdown", Condition::OneOf(1, SIDES), &[Api], "ends of last answers, and of an API that cannot go on"),
    // Others.
    always("clock_nanosleep", Condition::Any, &[Console], "a pause in which output gathers"),
    with(&[MachinePart::Disk], "preadv", Condition::Any, &[Block], "reads of a disk"),
    with(&[MachinePart::Disk], "pwritev", Condition::Any, &[Block], "writes of a disk"),
    with(&[MachinePart::Disk], "fdatasync", Condition::Any, &[Block], "flushes of a disk"),
    with(&[MachinePart::Disk], "fallocate", Condition::Any, &[Block], "discarded and zeroed sectors of a disk"),
    with(&[MachinePart::Server], "wait4", Condition::Any, &[Reaper], "the end of the process that it waits for"),
    with(&[MachinePart::Server], "waitid", Condition::Any, &[Reaper], "the end of the process that it waits for"),
];

/// A request for machines with one of `parts`.
const fn request(
    parts: &'static [MachinePart],
    name: &'static str,
    number: u32,
    kinds: &'static [ThreadKind],
    reason: &'static str,
) -> PermittedRequest {
    PermittedRequest { name, number, kinds, parts, reason }
}

/// The permitted requests. `KVM_RUN` is first, because a filter compares in this order.
#[rustfmt::skip] // a table
pub(super) const REQUESTS: &[PermittedRequest] = &[
    request(EVERY, "KVM_RUN", 0xae80, &[Vcpu], "the guest"),
    request(EVERY, "KVM_GET_REGS", 0x8090_ae81, &[Vcpu], "where the guest was when KVM failed (x86)"),
    request(EVERY, "KVM_GET_SREGS", 0x8138_ae83, &[Vcpu], "whether the guest takes machine checks, and a reset (x86)"),
    request(EVERY, "KVM_GET_MSRS", 0xc008_ae88, &[Vcpu], "whether the guest takes machine checks (x86)"),
    request(EVERY, "KVM_X86_SET_MCE", 0x4040_ae9e, &[Vcpu], "machine checks (x86)"),
    request(RESET, "KVM_SET_REGS", 0x4090_ae82, &[Vcpu], "a reset (x86)"),
    request(RESET, "KVM_SET_SREGS", 0x4138_ae84, &[Vcpu], "a reset (x86)"),
    request(RESET, "KVM_SET_MSRS", 0x4008_ae89, &[Vcpu], "a reset (x86)"),
    request(RESET, "KVM_SET_XSAVE", 0x5000_aea5, &[Vcpu], "a reset (x86)"),
    request(RESET, "KVM_SET_LAPIC", 0x4400_ae8f, &[Vcpu], "a reset (x86)"),
    request(RESET, "KVM_SET_MP_STATE", 0x4004_ae99, &[Vcpu], "a reset (x86)"),
    request(RESET, "KVM_SET_DEBUGREGS", 0x4080_aea2, &[Vcpu], "a reset (x86)"),
    request(RESET, "KVM_SET_XCRS", 0x4188_aea7, &[Vcpu], "a reset (x86)"),
    request(RESET, "KVM_SET_NESTED_STATE", 0x4080_aebf, &[Vcpu], "a reset (x86)"),
    request(RESET, "KVM_SET_IRQCHIP", 0x8208_ae63, &[EventLoop], "a reset (x86)"),
    request(RESET, "KVM_ARM_VCPU_INIT", 0x4020_aeae, &[Vcpu], "a reset (Arm)"),
    request(RESET, "KVM_SET_ONE_REG", 0x4010_aeac, &[Vcpu], "a reset (Arm)"),
    request(API, "KVM_KVMCLOCK_CTRL", 0xaead, &[Vcpu], "the end of a pause, which the guest's watchdog does not count (x86)"),
    request(EVERY, "KVM_GET_ONE_REG", 0x4010_aeab, &[Vcpu], "where the guest was when KVM failed (Arm)"),
    request(EVERY, "KVM_SET_VCPU_EVENTS", 0x4040_aea0, &[Vcpu], "bad memory that the guest read (Arm), and a reset (x86)"),
    request(EVERY, "KVM_IRQ_LINE", 0x4008_ae61, DEVICES, "interrupt lines"),
    request(EVERY, "KVM_IRQFD", 0x4020_ae76, DEVICES, "interrupts that arrive without this process"),
    request(EVERY, "KVM_IOEVENTFD", 0x4040_ae79, DEVICES, "notifications of queues, which move with their BAR"),
    request(EVERY, "KVM_SET_GSI_ROUTING", 0x4008_ae6a, DEVICES, "messages of interrupt vectors"),
    request(FUNCTION, "KVM_SET_DEVICE_ATTR", 0x4018_aee1, &[Vcpu, Hotplug], "functions that KVM knows"),
    request(&[MachinePart::Function, MachinePart::Reset], "KVM_SET_DEVICE_ATTR", 0x4018_aee1, &[EventLoop],
        "functions that KVM knows, and interrupt controllers at a reset (Arm)"),
    request(&[MachinePart::Function, MachinePart::Server], "KVM_SET_USER_MEMORY_REGION", 0x4020_ae46, DEVICES,
        "BARs that the guest reaches without exits"),
    request(FUNCTION, "VFIO_GROUP_UNSET_CONTAINER", 0x3b69, DEVICES, "the end of a function"),
    request(FUNCTION, "VFIO_DEVICE_SET_IRQS", 0x3b6e, DEVICES, "interrupts of functions"),
    request(FUNCTION, "VFIO_DEVICE_RESET", 0x3b6f, DEVICES, "resets of functions"),
    request(FUNCTION, "VFIO_DEVICE_GET_PCI_HOT_RESET_INFO", 0x3b70, DEVICES, "functions that a hot reset affects"),
    request(FUNCTION, "VFIO_DEVICE_PCI_HOT_RESET, VFIO_IOMMU_MAP_DMA", 0x3b71, DEVICES,
        "hot resets, and BARs that other functions reach; both have this number"),
    request(FUNCTION, "VFIO_IOMMU_UNMAP_DMA", 0x3b72, DEVICES, "BARs and memory that functions reach no more"),
    request(FUNCTION, "VFIO_DEVICE_DETACH_IOMMUFD_PT", 0x3b78, DEVICES, "the end of a function"),
    request(FUNCTION, "IOMMU_DESTROY", 0x3b80, DEVICES, "the end of an I/O address space"),
    request(FUNCTION, "IOMMU_IOAS_MAP", 0x3b85, DEVICES, "BARs that other functions reach"),
    request(FUNCTION, "IOMMU_IOAS_UNMAP", 0x3b86, DEVICES, "BARs and memory that functions reach no more"),
    request(FUNCTION, "IOMMU_IOAS_MAP_FILE", 0x3b8f, DEVICES, "BARs that other functions reach"),
    request(NET, "TUNSETOFFLOAD", 0x4004_54d0, VIRTIO, "features that the guest's driver chose"),
    request(NET, "TUNSETQUEUE", 0x4004_54d9, VIRTIO, "queues that the guest's driver uses"),
    request(VHOST, "VHOST_SET_FEATURES", 0x4008_af00, VIRTIO, "start of the kernel's worker"),
    request(VHOST, "VHOST_SET_MEM_TABLE", 0x4008_af03, VIRTIO, "start of the kernel's worker"),
    request(VHOST, "VHOST_SET_VRING_NUM", 0x4008_af10, VIRTIO, "start of the kernel's worker"),
    request(VHOST, "VHOST_SET_VRING_ADDR", 0x4028_af11, VIRTIO, "start of the kernel's worker"),
    request(VHOST, "VHOST_SET_VRING_BASE", 0x4008_af12, VIRTIO, "start of the kernel's worker"),
    request(VHOST, "VHOST_SET_VRING_KICK", 0x4008_af20, VIRTIO, "start of the kernel's worker"),
    request(VHOST, "VHOST_SET_VRING_CALL", 0x4008_af21, VIRTIO, "interrupt vectors of the kernel's worker"),
    request(VHOST, "VHOST_SET_VRING_ERR", 0x4008_af22, VIRTIO, "start of the kernel's worker"),
    request(NET, "VHOST_NET_SET_BACKEND", 0x4008_af30, VIRTIO, "start and stop of the kernel's worker"),
    request(&[MachinePart::VhostVsock], "VHOST_VSOCK_SET_RUNNING", 0x4004_af61, VIRTIO, "start and stop of the kernel's worker"),
    request(&[MachinePart::EgmDevice], "EGM_RETIRED_PAGES_LIST", 0x4564, &[EventLoop], "pages that the host retires meanwhile"),
    request(SOCKETS, "FIONBIO", 0x5421, &[EventLoop], "clients that are never waited for"),
    request(API, "FIONBIO", 0x5421, &[Api], "clients that are never waited for"),
    request(API, "KVM_IRQ_LINE", 0x4008_ae61, &[Api], "the guest's power button"),
    request(EVERY, "TCSETS", 0x5402, KINDS, "the operator's terminal, given back at the end and by a panic"),
    request(EVERY, "TCSETS2", 0x402c_542b, KINDS, "the operator's terminal, given back at the end and by a panic"),
    request(EVERY, "TCGETS", 0x5401, KINDS, "whether messages go to a terminal"),
    request(EVERY, "TCGETS2", 0x802c_542a, KINDS, "whether messages go to a terminal"),
    request(EVERY, "TIOCGWINSZ", 0x5413, KINDS, "the width of a terminal that messages go to"),
];

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::ffi::c_uint;

    use vmm_sys_util::ioctl::{_IOC_NONE, _IOC_WRITE, ioctl_expr};

    use super::*;
    use crate::arch::native::system_call::{self, ARCHITECTURE};
    use crate::sandbox::calls::{name_of, named};

    #[test]
    fn each_row_has_a_reason_a_thread_a_machine_and_a_call_that_exists() {
        for row in ROWS {
            assert!(row.reason.len() > 8 && !row.kinds.is_empty() && !row.parts.is_empty(), "{}", row.call);
            assert!(named(row.call).is_some(), "{}", row.call);
            assert_ne!(row.call, "ioctl", "its requests have a table of their own");
        }
        for request in REQUESTS {
            let PermittedRequest { name, number, reason, kinds, parts } = request;
            assert!(reason.len() > 8 && !kinds.is_empty() && !parts.is_empty(), "{name}");
            let mut of_name = REQUESTS.iter().filter(|other| other.name == *name);
            assert!(of_name.all(|other| other.number == *number), "{name} has two numbers");
        }
    }

    #[test]
    fn no_thread_has_a_call_or_a_request_twice() {
        for kind in KINDS {
            let calls = ROWS.iter().filter(|row| row.kinds.contains(kind));
            let calls = calls.map(|row| (row.call, row.condition == Condition::Anonymous));
            let requests =
                REQUESTS.iter().filter(|request| request.kinds.contains(kind)).map(|request| request.number);
            let (calls, requests): (Vec<_>, Vec<_>) = (calls.collect(), requests.collect());
            assert_eq!(calls.iter().collect::<BTreeSet<_>>().len(), calls.len(), "{kind:?}");
            assert_eq!(requests.iter().collect::<BTreeSet<_>>().len(), requests.len(), "{kind:?}");
        }
    }

    /// Calls by which a process gets what it does not have yet.
    #[test]
    fn no_thread_opens_a_file_starts_a_program_or_makes_code() {
        let never = [
            "open",
            "openat",
            "openat2",
            "open_by_handle_at",
            "creat",
            "memfd_create",
            "execve",
            "execveat",
            "fork",
            "vfork",
            "clone",
            "clone3",
            "ptrace",
            "process_vm_readv",
            "process_vm_writev",
            "kill",
            "tkill",
            "pidfd_open",
            "pidfd_getfd",
            "pidfd_send_signal",
            "mount",
            "unshare",
            "setns",
            "bpf",
            "io_uring_setup",
            "io_uring_register",
            "seccomp",
            "personality",
            "pkey_mprotect",
            "userfaultfd",
            "bind",
            "listen",
            "socketpair",
            "shmat",
            "keyctl",
            "setuid",
            "setresuid",
            "prlimit64",
        ];
        for row in ROWS {
            assert!(!never.contains(&row.call), "{}", row.call);
            if let "mmap" | "mprotect" = row.call {
                let makes_none = matches!(row.condition, Condition::Without(2, 4) | Condition::Anonymous);
                assert!(makes_none, "{}", row.call);
            }
        }
    }

    #[test]
    fn requests_have_the_numbers_of_the_kernel_s_headers() {
        let number = |name: &str| REQUESTS.iter().find(|request| request.name == name).unwrap().number;
        for (name, expected) in [
            ("TUNSETOFFLOAD", libc::TUNSETOFFLOAD),
            ("TUNSETQUEUE", libc::TUNSETQUEUE),
            ("TCSETS", libc::TCSETS),
            ("TCSETS2", libc::TCSETS2),
            ("TCGETS", libc::TCGETS),
            ("TCGETS2", libc::TCGETS2),
            ("TIOCGWINSZ", libc::TIOCGWINSZ),
            ("FIONBIO", libc::FIONBIO),
        ] {
            assert_eq!(number(name), u32::try_from(expected).unwrap(), "{name}");
        }
        for (name, expected) in [
            ("VHOST_SET_FEATURES", vhost::vhost_kern::vhost_binding::VHOST_SET_FEATURES()),
            ("VHOST_SET_MEM_TABLE", vhost::vhost_kern::vhost_binding::VHOST_SET_MEM_TABLE()),
            ("VHOST_SET_VRING_NUM", vhost::vhost_kern::vhost_binding::VHOST_SET_VRING_NUM()),
            ("VHOST_SET_VRING_ADDR", vhost::vhost_kern::vhost_binding::VHOST_SET_VRING_ADDR()),
            ("VHOST_SET_VRING_BASE", vhost::vhost_kern::vhost_binding::VHOST_SET_VRING_BASE()),
            ("VHOST_SET_VRING_KICK", vhost::vhost_kern::vhost_binding::VHOST_SET_VRING_KICK()),
            ("VHOST_SET_VRING_CALL", vhost::vhost_kern::vhost_binding::VHOST_SET_VRING_CALL()),
            ("VHOST_SET_VRING_ERR", vhost::vhost_kern::vhost_binding::VHOST_SET_VRING_ERR()),
            ("VHOST_NET_SET_BACKEND", vhost::vhost_kern::vhost_binding::VHOST_NET_SET_BACKEND()),
            ("VHOST_VSOCK_SET_RUNNING", vhost::vhost_kern::vhost_binding::VHOST_VSOCK_SET_RUNNING()),
        ] {
            assert_eq!(number(name), u32::try_from(expected).unwrap(), "{name}");
        }
    }

    /// Requests of KVM that both architectures have: direction and number as in `linux/kvm.h`, and the size of the argument.
    const OF_KVM: &[(&str, c_uint, c_uint, usize)] = &[
        ("KVM_RUN", _IOC_NONE, 0x80, 0),
        ("KVM_KVMCLOCK_CTRL", _IOC_NONE, 0xad, 0),
        ("KVM_GET_ONE_REG", _IOC_WRITE, 0xab, size_of::<kvm_bindings::kvm_one_reg>()),
        ("KVM_SET_ONE_REG", _IOC_WRITE, 0xac, size_of::<kvm_bindings::kvm_one_reg>()),
        ("KVM_SET_MP_STATE", _IOC_WRITE, 0x99, size_of::<kvm_bindings::kvm_mp_state>()),
        ("KVM_SET_VCPU_EVENTS", _IOC_WRITE, 0xa0, size_of::<kvm_bindings::kvm_vcpu_events>()),
        ("KVM_IRQ_LINE", _IOC_WRITE, 0x61, size_of::<kvm_bindings::kvm_irq_level>()),
        ("KVM_IRQFD", _IOC_WRITE, 0x76, size_of::<kvm_bindings::kvm_irqfd>()),
        ("KVM_IOEVENTFD", _IOC_WRITE, 0x79, size_of::<kvm_bindings::kvm_ioeventfd>()),
        ("KVM_SET_GSI_ROUTING", _IOC_WRITE, 0x6a, size_of::<kvm_bindings::kvm_irq_routing>()),
        ("KVM_SET_DEVICE_ATTR", _IOC_WRITE, 0xe1, size_of::<kvm_bindings::kvm_device_attr>()),
        (
            "KVM_SET_USER_MEMORY_REGION",
            _IOC_WRITE,
            0x46,
            size_of::<kvm_bindings::kvm_userspace_memory_region>(),
        ),
    ];

    /// Requests of VFIO and iommufd, which have no size, by their position in `linux/vfio.h` and `linux/iommufd.h`.
    const OF_VFIO: &[(&str, c_uint)] = &[
        ("VFIO_GROUP_UNSET_CONTAINER", VFIO_BASE + 5),
        ("VFIO_DEVICE_SET_IRQS", VFIO_BASE + 10),
        ("VFIO_DEVICE_RESET", VFIO_BASE + 11),
        ("VFIO_DEVICE_GET_PCI_HOT_RESET_INFO", VFIO_BASE + 12),
        ("VFIO_DEVICE_PCI_HOT_RESET, VFIO_IOMMU_MAP_DMA", VFIO_BASE + 13),
        ("VFIO_IOMMU_UNMAP_DMA", VFIO_BASE + 14),
        ("VFIO_DEVICE_DETACH_IOMMUFD_PT", VFIO_BASE + 20),
        ("IOMMU_DESTROY", IOMMUFD_BASE),
        ("IOMMU_IOAS_MAP", IOMMUFD_BASE + 5),
        ("IOMMU_IOAS_UNMAP", IOMMUFD_BASE + 6),
        ("IOMMU_IOAS_MAP_FILE", IOMMUFD_BASE + 15),
    ];
    /// `VFIO_BASE`, and `IOMMUFD_CMD_BASE`; the type of both is `;`.
    const VFIO_BASE: c_uint = 100;
    const IOMMUFD_BASE: c_uint = 0x80;

    #[test]
    fn requests_of_kvm_vfio_and_iommufd_have_the_numbers_of_their_headers() {
        let kvm = OF_KVM.iter().chain(system_call::OF_KVM);
        let kvm = kvm.map(|(name, direction, number, size)| {
            (*name, ioctl_expr(*direction, kvm_bindings::KVMIO, *number, c_uint::try_from(*size).unwrap()))
        });
        let vfio =
            OF_VFIO.iter().map(|(name, number)| (*name, ioctl_expr(_IOC_NONE, b';'.into(), *number, 0)));
        let expected: BTreeMap<_, _> = kvm.chain(vfio).collect();
        for (name, number) in &expected {
            let request = REQUESTS.iter().find(|request| request.name == *name).unwrap();
            assert_eq!(u64::from(request.number), *number, "{name}");
        }
        let others = REQUESTS.iter().map(|request| request.name).filter(|name| !expected.contains_key(name));
        let prefixes = ["KVM_", "VFIO_", "IOMMU_"];
        let unknown: Vec<_> =
            others.filter(|name| prefixes.iter().any(|prefix| name.starts_with(prefix))).collect();
        assert_eq!(unknown, system_call::KVM_OF_OTHERS, "they are compared with nothing");
    }

    #[test]
    fn a_thread_is_known_by_the_name_that_its_start_gives_it() {
        for (name, kind) in [
            ("console", Console),
            ("blk", Block),
            ("hotplug", Hotplug),
            ("vfio-user", ServerWatch),
            ("reaper", Reaper),
            ("api", Api),
        ] {
            assert_eq!(ThreadKind::of_thread(name), Some(kind));
        }
        for other in ["", "vcpu0", "scan", "consol"] {
            assert_eq!(ThreadKind::of_thread(other), None, "{other}");
        }
    }

    /// Calls of both architectures that a filter permits, with the numbers of the C library's headers, which are those of the
    /// machine that runs the tests.
    const KNOWN: &[(&str, libc::c_long)] = &[
        ("accept4", libc::SYS_accept4),
        ("brk", libc::SYS_brk),
        ("clock_gettime", libc::SYS_clock_gettime),
        ("clock_nanosleep", libc::SYS_clock_nanosleep),
        ("close", libc::SYS_close),
        ("connect", libc::SYS_connect),
        ("epoll_ctl", libc::SYS_epoll_ctl),
        ("epoll_pwait", libc::SYS_epoll_pwait),
        ("eventfd2", libc::SYS_eventfd2),
        ("exit", libc::SYS_exit),
        ("exit_group", libc::SYS_exit_group),
        ("fallocate", libc::SYS_fallocate),
        ("fcntl", libc::SYS_fcntl),
        ("fdatasync", libc::SYS_fdatasync),
        ("futex", libc::SYS_futex),
        ("getpid", libc::SYS_getpid),
        ("getrandom", libc::SYS_getrandom),
        ("getsockopt", libc::SYS_getsockopt),
        ("gettid", libc::SYS_gettid),
        ("io_uring_enter", libc::SYS_io_uring_enter),
        ("ioctl", libc::SYS_ioctl),
        ("lseek", libc::SYS_lseek),
        ("madvise", libc::SYS_madvise),
        ("mmap", libc::SYS_mmap),
        ("mprotect", libc::SYS_mprotect),
        ("mremap", libc::SYS_mremap),
        ("munmap", libc::SYS_munmap),
        ("ppoll", libc::SYS_ppoll),
        ("prctl", libc::SYS_prctl),
        ("pread64", libc::SYS_pread64),
        ("preadv", libc::SYS_preadv),
        ("pwrite64", libc::SYS_pwrite64),
        ("pwritev", libc::SYS_pwritev),
        ("read", libc::SYS_read),
        ("readv", libc::SYS_readv),
        ("recvfrom", libc::SYS_recvfrom),
        ("recvmsg", libc::SYS_recvmsg),
        ("restart_syscall", libc::SYS_restart_syscall),
        ("rt_sigaction", libc::SYS_rt_sigaction),
        ("rt_sigprocmask", libc::SYS_rt_sigprocmask),
        ("rt_sigreturn", libc::SYS_rt_sigreturn),
        ("sched_yield", libc::SYS_sched_yield),
        ("sendmsg", libc::SYS_sendmsg),
        ("sendto", libc::SYS_sendto),
        ("shutdown", libc::SYS_shutdown),
        ("sigaltstack", libc::SYS_sigaltstack),
        ("socket", libc::SYS_socket),
        ("statx", libc::SYS_statx),
        ("tgkill", libc::SYS_tgkill),
        ("timerfd_settime", libc::SYS_timerfd_settime),
        ("unlinkat", libc::SYS_unlinkat),
        ("wait4", libc::SYS_wait4),
        ("waitid", libc::SYS_waitid),
        ("write", libc::SYS_write),
        ("writev", libc::SYS_writev),
    ];

    #[test]
    fn the_numbers_of_permitted_calls_are_those_of_the_kernel() {
        let known: BTreeMap<_, _> = KNOWN.iter().chain(system_call::OLD).copied().collect();
        for (name, number) in &known {
            let call = named(name).unwrap_or_else(|| panic!("{name} is missing"));
            let expected = u32::try_from(*number).unwrap();
            assert_eq!(call.number(ARCHITECTURE), Some(expected), "{name}");
            assert_eq!(name_of(expected, ARCHITECTURE), Some(*name));
        }
        let here = ROWS.iter().filter(|row| named(row.call).unwrap().number(ARCHITECTURE).is_some());
        let unknown: Vec<_> = here.map(|row| row.call).filter(|name| !known.contains_key(name)).collect();
        assert!(unknown.is_empty(), "{unknown:?} are compared with nothing");
    }
}
