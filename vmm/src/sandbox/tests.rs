//! Each kind of thread with its real filter, in a process of its own: what the table permits goes on, and the rest ends the
//! process by name.
#![expect(unsafe_code, reason = "system calls as an attacker makes them")]

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};

use rustix::thread::Pid;

use super::calls::{self, Call};
use super::table::{ALL_PARTS, Condition, KINDS, PermittedCall, REQUESTS, ROWS};
use super::*;

/// What a child process does: see [`act`].
const ACT: &str = "EGM_VMM_TEST_SANDBOX";
/// Printed by a child that was not stopped.
const ALIVE: &str = "the thread goes on";

/// The name of a thread of `kind`, as its start gives it.
const fn name(kind: ThreadKind) -> &'static str {
    match kind {
        ThreadKind::Vcpu => "vcpu0",
        ThreadKind::EventLoop => "egm-vmm",
        ThreadKind::Console => "console",
        ThreadKind::Block => "blk",
        ThreadKind::Hotplug => "hotplug",
        ThreadKind::ServerWatch => "vfio-user",
        ThreadKind::Reaper => "reaper",
        ThreadKind::Api => "api",
    }
}

/// Calls by which an attacker would leave the process. Each is harmless if nothing refuses it.
const ATTACKS: &[(&str, [u64; 6])] = &[
    ("openat", [NONE, 0, 0, 0, 0, 0]),
    ("openat2", [NONE, 0, 0, 0, 0, 0]),
    ("connect", [NONE, 0, 0, 0, 0, 0]),
    ("socket", [2, 1, 0, 0, 0, 0]),
    ("ptrace", [16, 0, 0, 0, 0, 0]),
    ("process_vm_readv", [0; 6]),
    ("kill", [0; 6]),
    ("tgkill", [1, 1, 0, 0, 0, 0]),
    ("execve", [0; 6]),
    ("execveat", [NONE, 0, 0, 0, 0, 0]),
    ("clone", [NONE, 0, 0, 0, 0, 0]),
    ("clone3", [0; 6]),
    ("mmap", [0, 4096, 1 | 4, 0x22, NONE, 0]),
    ("remap_file_pages", [1, 0, 0, 0, 0, 0]),
    ("mprotect", [1, 4096, 1 | 4, 0, 0, 0]),
    ("pkey_mprotect", [1, 4096, 1 | 4, 0, 0, 0]),
    ("io_uring_setup", [0; 6]),
    ("io_uring_register", [NONE, 0, 0, 0, 0, 0]),
    ("memfd_create", [0; 6]),
    ("userfaultfd", [NONE, 0, 0, 0, 0, 0]),
    ("mount", [0; 6]),
    ("unshare", [0; 6]),
    ("bpf", [NONE, 0, 0, 0, 0, 0]),
    ("pidfd_getfd", [NONE, 0, 0, 0, 0, 0]),
    ("setresuid", [NONE, NONE, NONE, 0, 0, 0]),
    ("prctl", [4, 0, 0, 0, 0, 0]),
    ("rt_sigaction", [31, 0, 0, 8, 0, 0]),
    ("ioctl", [NONE, 0xae01, 0, 0, 0, 0]),
    ("bind", [NONE, 0, 0, 0, 0, 0]),
];
/// -1: no descriptor, no user, all flags.
const NONE: u64 = u64::MAX;

/// Calls that do not return here.
const WITHOUT_RETURN: [&str; 3] = ["exit", "exit_group", "rt_sigreturn"];

fn make(call: &Call, arguments: [u64; 6]) -> i64 {
    let number = i64::from(call.number(ARCHITECTURE).unwrap());
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: no argument is the address of something that the kernel could change.
    unsafe { libc::syscall(number, a, b, c, d, e, f) }
}

/// Arguments that `condition` permits, and that mean nothing to the kernel otherwise.
fn permitted(condition: Condition) -> [u64; 6] {
    let mut arguments = [NONE; 6];
    let (index, value) = match condition {
        Condition::Any => return arguments,
        Condition::Anonymous => {
            [arguments[2], arguments[3]] = [0, u64::from(libc::MAP_ANONYMOUS.cast_unsigned())];
            return arguments;
        }
        Condition::Without(index, _) | Condition::Null(index) => (index, 0),
        Condition::OneOf(index, values) => (index, u64::from(values[0])),
        Condition::ThisProcess(index) => (index, u64::from(std::process::id())),
    };
    arguments[usize::from(index)] = value;
    arguments
}

fn restrictions() -> Restrictions {
    Restrictions { ruleset: paths::ruleset(&[]).unwrap(), drops_capabilities: true }
}

impl Sandbox {
    /// A sandbox that refuses nothing, for tests of other modules.
    pub(crate) fn that_logs() -> Arc<Self> {
        let restrictions = Box::leak(Box::new(Restrictions { ruleset: None, drops_capabilities: false }));
        let filter = |kind| filter(Mode::Log, &[], kind).unwrap();
        let (vcpu, event_loop) = (filter(ThreadKind::Vcpu), filter(ThreadKind::EventLoop));
        Arc::new(Self { mode: Mode::Log, parts: Vec::new(), restrictions, vcpu, event_loop })
    }
}

/// Runs `inside` on a thread of `kind` that has confined itself.
fn confined(kind: ThreadKind, inside: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    prepare(Mode::Strict).unwrap();
    sys::keep_allocator_from_files();
    let filter = filter(Mode::Strict, ALL_PARTS, kind).unwrap();
    let body = move || {
        restrictions().confine(&filter).unwrap();
        inside();
    };
    thread::Builder::new().name(name(kind).to_owned()).spawn(body).unwrap()
}

/// The child's part: the kind of a thread, and the call that it makes, or `permitted` for all of the table.
fn act(kind: &str, call: &str) {
    let kind = *KINDS.iter().find(|other| name(**other) == kind).unwrap();
    let calls: Vec<(&Call, [u64; 6])> = match call {
        "permitted" => permitted_calls(kind),
        _ => ATTACKS
            .iter()
            .filter(|(name, _)| *name == call)
            .map(|(name, arguments)| (calls::named(name).unwrap(), *arguments))
            .collect(),
    };
    let inside = move || {
        // What every thread does: memory, locks, output.
        let mut memory = vec![vec![1_u8; 1 << 20], vec![2; 100]];
        memory.swap_remove(0);
        for (call, arguments) in calls {
            make(call, arguments);
        }
        println!("{ALIVE} with {} bytes", memory[0].len());
        std::process::exit(0); // the end of the test harness would make other calls
    };
    let _ = confined(kind, inside).join();
}

/// Every call of the table that a thread of `kind` may make, once with each request.
fn permitted_calls(kind: ThreadKind) -> Vec<(&'static Call, [u64; 6])> {
    let here = |row: &&PermittedCall| row.kinds.contains(&kind) && !WITHOUT_RETURN.contains(&row.call);
    let rows =
        ROWS.iter().filter(here).map(|row| (calls::named(row.call).unwrap(), permitted(row.condition)));
    let ioctl = calls::named("ioctl").unwrap();
    let requests = REQUESTS.iter().filter(|request| request.kinds.contains(&kind));
    let requests = requests.map(|request| (ioctl, [NONE, request.number.into(), NONE, NONE, NONE, NONE]));
    rows.filter(|(call, _)| call.number(ARCHITECTURE).is_some()).chain(requests).collect()
}

/// A command that runs `test` of this module once more, as a child that does `what`.
fn command(test: &str, what: &str) -> Command {
    let (_, module) = module_path!().split_once("::").unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--nocapture", &format!("{module}::{test}")]).env(ACT, what);
    command
}

/// Runs [`command`] to its end.
fn child(test: &str, what: &str) -> Output {
    command(test, what).output().unwrap()
}

/// What a child printed as messages.
fn messages(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Whether the thread of a child was not stopped.
fn goes_on(output: &Output) -> bool {
    String::from_utf8_lossy(&output.stdout).contains(ALIVE)
}

/// Whether this process is a child; then it has done its part.
fn is_child() -> bool {
    let Ok(what) = std::env::var(ACT) else { return false };
    let (kind, call) = what.split_once(' ').unwrap();
    act(kind, call);
    true
}

#[test]
fn each_thread_may_make_every_call_of_its_filter() {
    if is_child() {
        return;
    }
    for kind in KINDS {
        let output =
            child("each_thread_may_make_every_call_of_its_filter", &format!("{} permitted", name(*kind)));
        assert!(output.status.success() && goes_on(&output), "{kind:?}: {}", messages(&output));
    }
}

#[test]
fn each_thread_that_leaves_its_filter_ends_the_process_by_name() {
    if is_child() {
        return;
    }
    for kind in KINDS {
        let permitted: Vec<_> = ROWS
            .iter()
            .filter(|row| row.kinds.contains(kind) && row.condition == Condition::Any)
            .map(|row| row.call)
            .collect();
        for (call, _) in ATTACKS.iter().filter(|(call, _)| !permitted.contains(call)) {
            let thread = name(*kind);
            let test = "each_thread_that_leaves_its_filter_ends_the_process_by_name";
            let output = child(test, &format!("{thread} {call}"));
            let messages = messages(&output);
            let expected =
                format!("error: cannot go on: thread {thread} made the system call {call} (number ");
            assert!(messages.contains(&expected), "{thread} {call}: {messages}");
            assert_eq!(output.status.code(), Some(4), "{thread} {call}: {messages}");
            assert!(!goes_on(&output), "{thread} {call}: {messages}");
        }
    }
}

#[test]
fn a_refused_call_ends_the_process_although_its_messages_are_not_read() {
    if is_child() {
        return;
    }
    let (_reader, writer) = io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    let test = "a_refused_call_ends_the_process_although_its_messages_are_not_read";
    // Hangs when the handler waits for the pipe.
    let status = command(test, "console execve").stdout(Stdio::null()).stderr(writer).status().unwrap();
    assert_eq!(status.code(), Some(4));
}

#[test]
fn a_mapping_gives_no_other_byte_of_its_file_once_mappings_are_kept() {
    if std::env::var_os(ACT).is_none() {
        let output = child("a_mapping_gives_no_other_byte_of_its_file_once_mappings_are_kept", "");
        return assert!(output.status.success() && goes_on(&output), "{}", messages(&output));
    }
    let file = tempfile::tempfile().unwrap();
    file.set_len(2 << 20).unwrap();
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, which nothing else uses.
    let mapped = unsafe {
        libc::mmap(std::ptr::null_mut(), 4096, access, libc::MAP_SHARED, file.as_raw_fd(), 1 << 20)
    };
    assert_ne!(mapped, libc::MAP_FAILED);
    drop(file);
    keep_mappings().unwrap();
    let at = u64::try_from(mapped.addr()).unwrap();
    for (name, arguments) in
        [("remap_file_pages", [at, 4096, 0, 0, 0, 0]), ("mremap", [at, 4096, 8192, 1, 0, 0])]
    {
        assert_eq!(make(calls::named(name).unwrap(), arguments), -1, "{name}");
        assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EPERM), "{name}");
    }
    let mut grown = vec![1_u8; 1 << 20];
    grown.resize(8 << 20, 2);
    assert_eq!((grown[0], grown[(8 << 20) - 1]), (1, 2), "the allocator copies");
    println!("{ALIVE}");
}

/// A line of the kernel's status of a thread of this process.
fn status(thread: Pid, field: &str) -> String {
    let text = fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.unwrap_or_default().trim().to_owned()
}

/// A thread that waits for the returned sender, and its number.
fn waiting(name: &str) -> (std::sync::mpsc::Sender<()>, threads::Thread, JoinHandle<()>) {
    let (end, wait) = channel::<()>();
    let (number, numbered) = channel();
    let body = move || {
        number.send(rustix::thread::gettid()).unwrap();
        let _ = wait.recv();
    };
    let thread = thread::Builder::new().name(name.to_owned()).spawn(body).unwrap();
    let id = numbered.recv().unwrap();
    (end, threads::Thread { id, name: name.to_owned() }, thread)
}

#[test]
fn threads_that_wait_confine_themselves_and_go_on() {
    if std::env::var_os(ACT).is_none() {
        let output = child("threads_that_wait_confine_themselves_and_go_on", "");
        return assert!(output.status.success() && goes_on(&output), "{}", messages(&output));
    }
    prepare(Mode::Strict).unwrap();
    let restrictions: &'static Restrictions = Box::leak(Box::new(restrictions()));
    let all: Vec<_> = ["console", "blk", "hotplug", "vfio-user", "reaper", "api"].map(waiting).into();
    let filtered = |thread: &threads::Thread| {
        let kind = ThreadKind::of_thread(&thread.name).unwrap();
        (thread.clone(), filter(Mode::Strict, ALL_PARTS, kind).unwrap())
    };
    let filters = |thread: Pid| status(thread, "Seccomp_filters").parse::<u32>().unwrap();
    let before = filters(all[0].1.id); // a container's
    threads::confine(all.iter().map(|(_, thread, _)| filtered(thread)).collect(), restrictions).unwrap();
    for (_, thread, _) in &all {
        assert_eq!(filters(thread.id), before + 1, "{}", thread.name);
        let found = ["Seccomp", "NoNewPrivs", "CapPrm", "CapEff"].map(|field| status(thread.id, field));
        let none = "0".repeat(16);
        assert_eq!(found, ["2", "1", &none, &none], "{}", thread.name);
    }
    for (end, _, thread) in all {
        drop(end);
        thread.join().unwrap();
    }
    println!("{ALIVE}");
}

#[test]
fn a_thread_of_no_known_kind_is_an_error_that_names_it() {
    let (end, _, unlisted) = waiting("a-unlisted");
    let program = filter(Mode::Strict, &[], ThreadKind::Vcpu).unwrap();
    let restrictions = Box::leak(Box::new(restrictions()));
    let sandbox = Sandbox {
        mode: Mode::Strict,
        parts: Vec::new(),
        restrictions,
        vcpu: program.clone(),
        event_loop: program,
    };
    // Threads of the test harness have no kind either.
    let error = sandbox.confine_others().unwrap_err();
    assert!(matches!(error, SandboxError::Unknown { .. }), "{error}");
    drop(end);
    unlisted.join().unwrap();
}

#[test]
fn landlock_keeps_a_thread_from_files_that_a_filter_would_let_it_open() {
    let Some(ruleset) = paths::ruleset(&[]).unwrap() else {
        return println!("skipped: this kernel has no Landlock");
    };
    let opened = || File::open("/proc/version").map(drop).map_err(|error| error.kind());
    let restricted = thread::spawn(move || {
        rustix::thread::set_no_new_privs(true).unwrap();
        sys::restrict(std::os::fd::AsFd::as_fd(&ruleset)).unwrap();
        opened()
    });
    assert_eq!(restricted.join().unwrap(), Err(io::ErrorKind::PermissionDenied));
    assert_eq!(opened(), Ok(()), "only that thread is restricted");
}

#[test]
fn a_file_is_removed_in_the_folder_of_a_socket_and_nowhere_else() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let files = folders.each_ref().map(|folder| folder.path().join("api.sock"));
    let own = paths::SocketFolder::of(&files[0], false);
    let Some(ruleset) = paths::ruleset(&[own]).unwrap() else {
        return println!("skipped: this kernel has no Landlock");
    };
    files.iter().for_each(|file| drop(File::create(file).unwrap()));
    let restricted = thread::spawn(move || {
        rustix::thread::set_no_new_privs(true).unwrap();
        sys::restrict(std::os::fd::AsFd::as_fd(&ruleset)).unwrap();
        files.map(|file| fs::remove_file(file).map_err(|error| error.kind()))
    });
    assert_eq!(restricted.join().unwrap(), [Ok(()), Err(io::ErrorKind::PermissionDenied)]);
}

#[test]
fn a_machine_with_a_slice_as_a_device_is_refused_and_one_without_a_keeper_too() {
    let mut spec =
        crate::config::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/egm-device.json"))
            .unwrap();
    let error = |mode, spec: &Spec, here| check(mode, spec, here).err();
    assert!(matches!(error(Mode::Strict, &spec, false), Some(SandboxError::Slice { id }) if id == "egm0"));
    assert!(error(Mode::Off, &spec, true).is_none());
    spec.devices.retain(|device| !matches!(device.kind, crate::config::DeviceKind::Egm { .. }));
    assert!(error(Mode::Strict, &spec, true).is_none(), "memory of the process needs no return");
    spec.egm[0].regions = vec!["hugetlb".to_owned()];
    assert!(matches!(error(Mode::Log, &spec, true), Some(SandboxError::NoKeeper)));
    assert!(error(Mode::Strict, &spec, false).is_none());
}
