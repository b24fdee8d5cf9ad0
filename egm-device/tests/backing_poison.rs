//! Bad memory in use: which signals become events, and which must still kill.
//!
//! A process may send itself a signal with the kernel's own codes (`rt_tgsigqueueinfo`), so everything but the hardware
//! is tested on any machine. Code that must be killed runs in a child, which is this very test program.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(unsafe_code, reason = "the tests touch bad memory and forge signals")]

use std::io::{BufRead, BufReader, ErrorKind};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

use egm_address::{Offset, Span};
use egm_device::poison::{Cause, Event, EventBatch, GuestFault, PoisonWatch, in_guest};
use egm_device::scrub::{self, ScrubOptions, zero};
use egm_device::{Anonymous, Mapping};

const SIZE: u64 = 1 << 20;
/// Set in a child.
const CHILD: &str = "EGM_TEST_CHILD";

#[repr(C)]
struct Info {
    signal: i32,
    errno: i32,
    code: i32,
    padding: i32,
    address: usize,
    shift: i16,
    rest: [u8; 102],
}

fn info(code: i32, address: usize, shift: i16) -> Info {
    Info { signal: libc::SIGBUS, errno: 0, code, padding: 0, address, shift, rest: [0; 102] }
}

/// A SIGBUS for the calling thread, as the kernel makes them.
fn sigbus(code: i32, address: usize, shift: i16) {
    let info = info(code, address, shift);
    // SAFETY: without memory.
    let thread = unsafe { libc::gettid() };
    // SAFETY: the kernel reads a siginfo_t, 128 bytes, which `Info` has.
    let result = unsafe {
        libc::syscall(libc::SYS_rt_tgsigqueueinfo, std::process::id(), thread, libc::SIGBUS, &raw const info)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

fn memory() -> Mapping {
    Mapping::new(&Anonymous::new("test", SIZE, None).unwrap(), 0, SIZE, 0).unwrap()
}

/// The test `name` in a process of its own, which runs the code after `is_child`.
fn child(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(CHILD, "1");
    command
}

/// The signal that killed the child of `name`.
fn killed_by(name: &str) -> Option<i32> {
    child(name).output().unwrap().status.signal()
}

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Whether this is a process for the test `name` alone; if not, runs it in one, where it must succeed. The handler and
/// its reports belong to a process.
fn alone(name: &str) -> bool {
    if !is_child() {
        assert!(child(name).status().unwrap().success());
    }
    is_child()
}

fn event(offset: u64, cause: Cause) -> Event {
    let span = Span::new(Offset::new(offset), 0x1000).unwrap();
    Event { memory: "egm4".into(), span, cause }
}

#[test]
fn bad_pages_of_a_watched_slice_become_events_and_others_are_counted() {
    if !alone("bad_pages_of_a_watched_slice_become_events_and_others_are_counted") {
        return;
    }
    let mapping = memory();
    let mut watch = PoisonWatch::new().unwrap();
    watch.add("egm4", Offset::new(0x8000), &mapping);
    assert_eq!(watch.take_events(), EventBatch::default());
    let start = mapping.as_ptr().addr();
    sigbus(libc::BUS_MCEERR_AO, start + 0x1234, 12);
    let ((), fault) = in_guest(|| sigbus(libc::BUS_MCEERR_AR, start + 0x5123, 12));
    let page = u64::try_from(start + 0x5000).unwrap();
    assert_eq!(fault, Some(GuestFault { address: page, size: 0x1000 }));
    assert_eq!(in_guest(|| sigbus(libc::BUS_MCEERR_AO, start + 0x1234, 12)), ((), None));
    sigbus(libc::BUS_MCEERR_AO, 0x1000, 12);
    let news = watch.take_events();
    assert_eq!(news.events, [event(0x9000, Cause::Found), event(0xd000, Cause::Consumed)]);
    assert_eq!((news.elsewhere, news.lost), (1, 0));
    sigbus(libc::BUS_MCEERR_AO, start, 12);
    watch.remove(&mapping);
    sigbus(libc::BUS_MCEERR_AO, start, 12);
    let news = watch.take_events();
    assert_eq!((news.events, news.elsewhere), (vec![event(0x8000, Cause::Found)], 1));
}

#[test]
fn a_bad_page_that_our_own_code_reads_kills() {
    if is_child() {
        let _watch = PoisonWatch::new().unwrap();
        in_guest(|| ());
        sigbus(libc::BUS_MCEERR_AR, 0x1000, 12);
        return;
    }
    assert_eq!(killed_by("a_bad_page_that_our_own_code_reads_kills"), Some(libc::SIGBUS));
}

#[test]
fn an_ordinary_sigbus_of_a_truncated_file_kills() {
    if is_child() {
        let _watch = PoisonWatch::new().unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(0x1000).unwrap();
        // SAFETY: a fresh mapping at an address that the kernel chooses.
        let page = unsafe {
            let access = rustix::mm::ProtFlags::READ;
            rustix::mm::mmap(std::ptr::null_mut(), 0x1000, access, rustix::mm::MapFlags::SHARED, &file, 0)
        };
        file.set_len(0).unwrap();
        // SAFETY: mapped readable; that the file is gone is what the test is about.
        unsafe { page.unwrap().cast::<u8>().read_volatile() };
        return;
    }
    assert_eq!(killed_by("an_ordinary_sigbus_of_a_truncated_file_kills"), Some(libc::SIGBUS));
}

/// Waits for the parent in the state of a running guest, in which the handler tolerates most.
fn wait_in_guest() {
    let mapping = memory();
    let mut watch = PoisonWatch::new().unwrap();
    watch.add("egm4", Offset::new(0), &mapping);
    println!("ready {}", mapping.as_ptr().addr());
    in_guest(|| std::io::stdin().read_line(&mut String::new()).unwrap());
}

#[test]
fn a_sigbus_that_another_process_forges_kills_and_the_kernel_keeps_its_own_codes() {
    if is_child() {
        return wait_in_guest();
    }
    let mut child = child("a_sigbus_that_another_process_forges_kills_and_the_kernel_keeps_its_own_codes")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let address = lines.find_map(|line| line.split("ready ").nth(1).map(str::to_owned)).unwrap();
    let address = address.parse().unwrap();
    let send = |code| {
        let info = info(code, address, 12);
        // SAFETY: the kernel reads a siginfo_t, 128 bytes, which `Info` has.
        let sent =
            unsafe { libc::syscall(libc::SYS_rt_sigqueueinfo, child.id(), libc::SIGBUS, &raw const info) };
        if sent == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().kind()) }
    };
    for kernels in [libc::BUS_MCEERR_AO, libc::BUS_MCEERR_AR, libc::BUS_ADRERR] {
        assert_eq!(send(kernels), Err(ErrorKind::PermissionDenied));
    }
    assert_eq!(send(libc::SI_QUEUE), Ok(()));
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGBUS));
}

/// Makes the first page of `mapping` bad, as if a guest had read it: the kernel sends BUS_MCEERR_AR to the calling
/// thread. False where the kernel cannot.
fn poison_first_page(mapping: &Mapping) -> bool {
    mapping.populate(0, 0x2000).unwrap();
    let page = mapping.as_ptr().cast();
    // SAFETY: the page is ours and nothing is kept in it.
    let (result, _) = in_guest(|| unsafe { libc::madvise(page, 0x1000, libc::MADV_HWPOISON) });
    if result != 0 {
        let error = std::io::Error::last_os_error();
        println!("skipped: madvise(MADV_HWPOISON): {error} (needs root and CONFIG_MEMORY_FAILURE)");
    }
    result == 0
}

#[test]
fn memory_that_the_kernel_poisons_is_reported_or_the_kernel_is_named_as_what_cannot() {
    if !alone("memory_that_the_kernel_poisons_is_reported_or_the_kernel_is_named_as_what_cannot") {
        return;
    }
    let mapping = memory();
    let mut watch = PoisonWatch::new().unwrap();
    watch.add("egm4", Offset::new(0), &mapping);
    if poison_first_page(&mapping) {
        assert_eq!(watch.take_events().events, [event(0, Cause::Consumed)]);
    }
}

#[test]
fn a_scrub_that_meets_a_poisoned_page_names_it_and_does_the_rest() {
    if !alone("a_scrub_that_meets_a_poisoned_page_names_it_and_does_the_rest") {
        return;
    }
    let memory = Anonymous::new("test", SIZE, None).unwrap();
    let mapping = Mapping::new(&memory, 0, SIZE, 0).unwrap();
    let _watch = PoisonWatch::new().unwrap();
    if !poison_first_page(&mapping) {
        return;
    }
    let (at, cancel) = (Offset::new(0x8000), AtomicBool::new(false));
    let work = ScrubOptions { near: None, workers: None, pace: None, progress: &|_| {}, cancel: &cancel };
    let span = |offset: u64, size| Span::new(Offset::new(0x8000 + offset), size).unwrap();
    let error = zero(&memory, at, &[span(0, SIZE)].into_iter().collect(), &work).unwrap_err();
    match error.cause {
        scrub::Cause::Bad(bad) => assert_eq!(bad, span(0, 0x1000)),
        other => panic!("{other:?}"),
    }
    zero(&memory, at, &[span(0x1000, SIZE - 0x1000)].into_iter().collect(), &work).unwrap();
}
