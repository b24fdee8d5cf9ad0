//! Bad memory in use: what becomes an event, and what must still kill.
//!
//! A process may send itself a signal with the kernel's own codes (`rt_tgsigqueueinfo`), so everything but the hardware is
//! tested on any machine. What must kill runs in a child, which is this very test program.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(unsafe_code, reason = "the tests touch bad memory and forge signals")]

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use egm_address::{Offset, Span};
use egm_device::poison::{Cause, Event, News, Watch, in_guest};
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

/// A SIGBUS for the calling thread, as the kernel makes them.
fn sigbus(code: i32, address: usize, shift: i16) {
    let info = Info { signal: libc::SIGBUS, errno: 0, code, padding: 0, address, shift, rest: [0; 102] };
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

/// Runs the test `name` in a child that does what stands behind `is_child`; the signal that killed it.
fn killed_by(name: &str) -> Option<i32> {
    let program = std::env::current_exe().unwrap();
    let child =
        Command::new(program).args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
    child.status.signal()
}

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

fn event(offset: u64, cause: Cause) -> Event {
    let span = Span::new(Offset::new(offset), 0x1000).unwrap();
    Event { region: "egm4".into(), span, cause }
}

#[test]
fn bad_pages_of_a_watched_slice_become_events_and_others_are_counted() {
    if is_child() {
        return;
    }
    let mapping = memory();
    let mut watch = Watch::new().unwrap();
    watch.add("egm4", Offset::new(0x8000), &mapping);
    assert_eq!(watch.news(), News::default());
    let start = mapping.as_ptr().addr();
    sigbus(libc::BUS_MCEERR_AO, start + 0x1234, 12);
    in_guest(|| sigbus(libc::BUS_MCEERR_AR, start + 0x5000, 12));
    sigbus(libc::BUS_MCEERR_AO, 0x1000, 12);
    let news = watch.news();
    assert_eq!(news.events, [event(0x9000, Cause::Found), event(0xd000, Cause::Consumed)]);
    assert_eq!((news.elsewhere, news.lost), (1, 0));
    watch.remove(&mapping);
    sigbus(libc::BUS_MCEERR_AO, start, 12);
    assert_eq!(watch.news().elsewhere, 1);
}

#[test]
fn a_bad_page_that_our_own_code_reads_kills() {
    if is_child() {
        let _watch = Watch::new().unwrap();
        in_guest(|| ());
        sigbus(libc::BUS_MCEERR_AR, 0x1000, 12);
        return;
    }
    assert_eq!(killed_by("a_bad_page_that_our_own_code_reads_kills"), Some(libc::SIGBUS));
}

#[test]
fn an_ordinary_sigbus_of_a_truncated_file_kills() {
    if is_child() {
        let _watch = Watch::new().unwrap();
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

#[test]
fn a_sigbus_from_another_process_kills() {
    if is_child() {
        let _watch = Watch::new().unwrap();
        // SAFETY: without memory.
        unsafe { libc::raise(libc::SIGBUS) };
        return;
    }
    assert_eq!(killed_by("a_sigbus_from_another_process_kills"), Some(libc::SIGBUS));
}

#[test]
fn memory_that_the_kernel_poisons_is_told_or_the_kernel_is_named_as_what_cannot() {
    if is_child() {
        return;
    }
    let mapping = memory();
    let mut watch = Watch::new().unwrap();
    watch.add("egm4", Offset::new(0), &mapping);
    mapping.populate(0, 0x2000).unwrap();
    // SAFETY: the page is ours and nothing is kept in it.
    let result = unsafe { libc::madvise(mapping.as_ptr().cast(), 0x1000, libc::MADV_HWPOISON) };
    if result != 0 {
        let error = std::io::Error::last_os_error();
        println!("skipped: madvise(MADV_HWPOISON): {error} (needs root and CONFIG_MEMORY_FAILURE)");
        return;
    }
    let events = watch.news().events;
    assert!(events.iter().any(|e| e.span.start() == Offset::new(0)), "{events:?}");
}
