//! A core file holds no byte of a slice, whatever the host's filter of core files admits.
//!
//! The code that dumps core runs in a child, which is this very test program.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use egm_device::{Anonymous, Mapping};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};

mod small_host;

/// Set in a child.
const CHILD: &str = "EGM_TEST_CHILD";
const SIZE: u64 = 4 << 20;
/// In the slice of the child. It is put together at run time, so that no copy lies in the program.
const MARKER: [&[u8]; 2] = [b"bytes of the ten", b"ant, in a slice."];
/// In the child's ordinary memory: the core file is one.
const CANARY: [&[u8]; 2] = [b"bytes of the pro", b"gram, on a heap."];

fn map_and_abort() {
    fs::write("/proc/self/coredump_filter", "0x7f").unwrap();
    let mapping = Mapping::new(&Anonymous::new("test", SIZE, None).unwrap(), 0, SIZE, 0).unwrap();
    let marker = MARKER.concat();
    for offset in (0..mapping.size()).step_by(marker.len()) {
        mapping.write(offset, &marker).unwrap();
    }
    drop(marker);
    let _canary = std::hint::black_box(CANARY.concat());
    std::process::abort();
}

/// Number of occurrences of `words` in `core`.
fn count(core: &[u8], words: [&[u8]; 2]) -> usize {
    let words = words.concat();
    core.windows(words.len()).filter(|window| *window == words).count()
}

/// Whether children write core files of any size into their working folder.
fn core_files_stay_here() -> bool {
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    if pattern.starts_with(['|', '/', '@']) || pattern.trim().is_empty() {
        println!("skipped: kernel.core_pattern is \"{}\"", pattern.trim());
        return false;
    }
    let raised = setrlimit(Resource::Core, Rlimit { current: None, maximum: None });
    if let Err(error) = raised {
        println!("skipped: cannot raise RLIMIT_CORE: {error}");
    }
    raised.is_ok()
}

fn core_file(folder: &Path) -> Option<Vec<u8>> {
    let mut entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let core = entries.find(|entry| entry.file_name().to_string_lossy().starts_with("core"))?;
    Some(fs::read(core.path()).unwrap())
}

#[test]
fn a_core_file_has_the_program_s_memory_and_no_byte_of_a_slice() {
    if std::env::var_os(CHILD).is_some() {
        return map_and_abort();
    }
    if !core_files_stay_here() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_core_file_has_the_program_s_memory_and_no_byte_of_a_slice", "--nocapture"]);
    let status = command.env(CHILD, "1").current_dir(folder.path()).status().unwrap();
    assert!(status.core_dumped(), "{status}");
    let core = core_file(folder.path()).unwrap();
    assert!(count(&core, CANARY) > 0, "the core file has nothing");
    assert_eq!(count(&core, MARKER), 0);
}

#[test]
fn the_broker_writes_no_core_file() {
    if !core_files_stay_here() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    small_host::make(folder.path());
    let mut command = Command::new(env!("CARGO_BIN_EXE_egm-device"));
    command.args(["broker", "--socket", "broker.sock", "--root"]).arg(folder.path());
    let mut broker = command.current_dir(folder.path()).stderr(Stdio::null()).spawn().unwrap();
    while !folder.path().join("broker.sock").exists() {
        assert!(broker.try_wait().unwrap().is_none(), "the broker ended");
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&broker), Signal::ABORT).unwrap();
    let status = broker.wait().unwrap();
    assert_eq!((status.signal(), status.core_dumped()), (Some(libc::SIGABRT), false), "{status}");
}
