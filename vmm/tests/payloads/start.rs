//! The cost of a start, in counts of the kernel: a time would be the machine's.

use std::fs;
use std::process::{Command, Stdio};

use egm_fixtures::payload::{Ports, halt};

use crate::{kvm, line, small};

/// Maximum of read(2) calls of a start on a host with one node. Each file takes two.
const READS: u64 = 60;
/// Further read(2) calls for each further node.
const READS_OF_NODE: u64 = 16;
/// The event loop, the console's output, the vCPU.
const THREADS: [&str; 3] = ["console", "egm-vmm", "vcpu0"];

/// The number behind `name` in a file of lines such as `syscr: 60`.
fn number(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim().parse().unwrap()
}

#[test]
fn a_start_reads_few_files_and_starts_no_other_thread_than_those_that_run_the_guest() {
    if !kvm() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [file, kernel] = ["vm.json", "halt.elf"].map(|name| folder.path().join(name));
    let mut config = small();
    config["boot"] = serde_json::json!({ "kernel": kernel });
    fs::write(&file, config.to_string()).unwrap();
    fs::write(&kernel, halt(Ports::USUAL)).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_egm-vmm"))
        .arg("run")
        .arg(&file)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let ready = line(child.stdout.as_mut().unwrap());
    let process = format!("/proc/{}", child.id());
    let io = fs::read_to_string(format!("{process}/io")).unwrap();
    let threads = fs::read_dir(format!("{process}/task")).unwrap();
    let threads = threads.map(|thread| fs::read_to_string(thread.unwrap().path().join("comm")).unwrap());
    let mut threads: Vec<String> = threads.map(|name| name.trim_end().to_owned()).collect();
    threads.retain(|name| !name.starts_with("kvm")); // the kernel's own
    threads.sort();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(ready, "ready\n");
    let nodes = fs::read_dir("/sys/devices/system/node").into_iter().flatten().flatten();
    let nodes = nodes.filter(|entry| entry.path().join("meminfo").exists()).count();
    let most = READS + READS_OF_NODE * u64::try_from(nodes.saturating_sub(1)).unwrap();
    let reads = number(&io, "syscr:");
    println!("{reads} reads, {nodes} nodes");
    assert!(reads <= most, "{reads} reads, more than {most}");
    assert_eq!(threads, THREADS);
}
