//! A process without a free descriptor. The limit is the process's, so this test has one of its own.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]

use std::fs::File;
use std::io::Read;
use std::os::unix::net::UnixStream;

use egm_vmm::config;
use egm_vmm::console::Console;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn a_console_client_that_no_descriptor_is_left_for_is_sent_away_and_the_next_one_served() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("console");
    let mut console = Console::open(&config::Console::Socket { path: path.clone() }).unwrap();
    let mut client = UnixStream::connect(&path).unwrap();
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), ..limit }).unwrap();
    let mut all: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    assert_eq!(console.read(&mut [0]), 0);
    // Not in the queue of connections any longer, where it would wake the event loop for ever.
    assert_eq!(client.read(&mut [0]).unwrap(), 0);

    all.clear();
    let mut next = UnixStream::connect(&path).unwrap();
    assert_eq!(console.read(&mut [0]), 0);
    console.write(b"!");
    assert_eq!(next.read(&mut [0]).unwrap(), 1);
}
