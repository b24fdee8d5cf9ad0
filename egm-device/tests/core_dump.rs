//! A core file holds no byte of a slice, whatever the host's filter of core files lets in.
//!
//! What dumps core runs in a child, which is this very test program.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use egm_device::{Anonymous, Mapping};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};
use tempfile::TempDir;

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

/// How often `words` is in `core`.
fn count(core: &[u8], words: [&[u8]; 2]) -> usize {
    let words = words.concat();
    core.windows(words.len()).filter(|window| *window == words).count()
}

/// Where the kernel puts core files, unless it is beside the process.
fn pattern() -> Option<String> {
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    let beside = !pattern.starts_with(['|', '/', '@']) && !pattern.trim().is_empty();
    if !beside {
        println!("skipped: kernel.core_pattern is {}: core files do not stay here", pattern.trim());
    }
    beside.then_some(pattern)
}

/// `command`, which may write a core file of any size into the folder.
fn start(mut command: Command) -> (Child, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let limit = Rlimit { current: None, maximum: None };
    setrlimit(Resource::Core, limit).unwrap();
    command.current_dir(folder.path()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    (command.spawn().unwrap(), folder)
}

fn core_file(folder: &Path) -> Option<Vec<u8>> {
    let entry = fs::read_dir(folder).unwrap().next()?;
    Some(fs::read(entry.unwrap().path()).unwrap())
}

#[test]
fn a_core_file_has_the_program_s_memory_and_no_byte_of_a_slice() {
    if std::env::var_os(CHILD).is_some() {
        return map_and_abort();
    }
    let Some(_) = pattern() else { return };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_core_file_has_the_program_s_memory_and_no_byte_of_a_slice", "--nocapture"]);
    let (mut child, folder) = start({
        command.env(CHILD, "1");
        command
    });
    let status = child.wait().unwrap();
    assert!(status.core_dumped(), "{status}");
    let core = core_file(folder.path()).unwrap();
    assert!(count(&core, CANARY) > 0, "the core file has nothing");
    assert_eq!(count(&core, MARKER), 0);
}
