//! The machine monitor writes no core file: its memory is the guest's.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]

use std::fs;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use rustix::pipe::fcntl_setpipe_size;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};

#[test]
fn a_program_that_aborts_leaves_no_core_file() {
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    if pattern.starts_with(['|', '/', '@']) || pattern.trim().is_empty() {
        return println!("skipped: kernel.core_pattern is \"{}\"", pattern.trim());
    }
    if let Err(error) = setrlimit(Resource::Core, Rlimit { current: None, maximum: None }) {
        return println!("skipped: cannot raise RLIMIT_CORE: {error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let (mut output, input) = std::io::pipe().unwrap();
    fcntl_setpipe_size(&input, 4096).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_egm-vmm"));
    let mut program = command.arg("schema").stdout(input).current_dir(folder.path()).spawn().unwrap();
    output.read_exact(&mut [0]).unwrap(); // it runs, and cannot end: the schema does not fit the pipe
    kill_process(Pid::from_child(&program), Signal::ABORT).unwrap();
    let status = program.wait().unwrap();
    assert_eq!((status.signal(), status.core_dumped()), (Some(libc::SIGABRT), false), "{status}");
}
