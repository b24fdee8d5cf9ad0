//! Documents of cloud-hypervisor's API on our command line, and the program by the name `cloud-hypervisor`.
//!
//! Help and plans are in `tests/cloud/`, and were reviewed. After an intended change, write them anew and read the
//! difference:
//! ```text
//! EGM_GOLDEN=write cargo test -p egm-vmm --test cloud_hypervisor && git diff vmm/tests/cloud
//! ```

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use egm_fixtures::payload::{Entry, Ports, halt, hello};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::io::{FdFlags, fcntl_setfd};
use serde_json::{Value, json};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-vmm");
const FOLDER: &str = "tests/cloud";
const HOST: &str = "../configs/facts/x86-server.json";
/// Exit code of a wrong configuration or command line (vmm/src/error.rs).
const CONFIGURATION: i32 = 2;

/// `program` with the arguments in `line`, in a terminal of 80 columns.
fn run(program: &Path, line: &str) -> Output {
    let mut command = Command::new(program);
    command.args(line.split_whitespace()).env("COLUMNS", "80").stdin(Stdio::null()).output().unwrap()
}

/// What egm-vmm prints for `line`: notes and errors, then the output.
fn printed(line: &str) -> (Option<i32>, String) {
    let output = run(Path::new(PROGRAM), line);
    (output.status.code(), String::from_utf8([output.stderr, output.stdout].concat()).unwrap())
}

/// Compares `text` with the file `name`, or writes it.
fn golden(name: &str, text: &str) {
    let path = Path::new(FOLDER).join(name);
    if std::env::var_os("EGM_GOLDEN").is_some_and(|value| value == "write") {
        fs::write(&path, text).unwrap();
    } else {
        let stored = fs::read_to_string(&path).unwrap_or_default();
        assert!(stored == text, "{} is different, see the top of this file; now:\n{text}", path.display());
    }
}

/// Runs `test` with the program by the name cloud-hypervisor.
fn by_name(test: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("cloud-hypervisor");
    symlink(PROGRAM, &program).unwrap();
    test(&program);
}

#[test]
fn documents_of_clients_have_the_plans_that_were_reviewed() {
    for name in ["minimal", "kata", "libvirt"] {
        let line = format!("plan --from cloud-hypervisor {FOLDER}/{name}.json --facts {HOST}");
        let (code, text) = printed(&line);
        assert_eq!(code, Some(0), "{text}");
        golden(&format!("{name}.plan.txt"), &text);
    }
}

#[test]
fn help_is_that_which_was_reviewed() {
    for command in ["plan", "check"] {
        let (code, text) = printed(&format!("{command} --help"));
        assert_eq!(code, Some(0), "{text}");
        golden(&format!("{command}.help.txt"), &text);
    }
    by_name(|program| {
        let output = run(program, "--help");
        assert_eq!(output.status.code(), Some(0));
        golden("cloud-hypervisor.help.txt", &String::from_utf8(output.stdout).unwrap());
    });
}

#[test]
fn standard_input_is_a_document_too() {
    let mut command = Command::new(PROGRAM);
    command.args(["plan", "--from", "cloud-hypervisor", "-", "--json", "--facts", HOST]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(br#"{"payload":{"kernel":"/vmlinuz"}}"#).unwrap();
    let plan: Value = serde_json::from_slice(&child.wait_with_output().unwrap().stdout).unwrap();
    assert_eq!(plan["name"], "stdin");
}

#[test]
fn refusals_of_plan_and_check_are_all_shown_with_lines_and_remedies() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("create.json");
    fs::write(&path, "{ \"payload\": { \"kernel\": \"/vmlinuz\" },\n  \"watchdog\": true,\n  \"fs\": [] , \"tpm\": { \"socket\": \"s\" } }")
        .unwrap();
    for command in ["plan", "check"] {
        let (code, text) = printed(&format!("{command} --from cloud-hypervisor {}", path.display()));
        assert_eq!(code, Some(CONFIGURATION), "{text}");
        for wanted in [
            "create.json:2:3: watchdog: cannot watch the guest: the machine has no watchdog",
            "  help: leave watchdog out",
            "create.json:3:14: tpm: cannot offer a TPM: the machine has none",
            "  help: leave tpm out",
        ] {
            assert!(text.contains(wanted), "no {wanted} in\n{text}");
        }
        assert_eq!(text.matches("error: ").count(), 2, "{text}");
    }
}

#[test]
fn check_judges_the_machine_of_a_document() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("create.json");
    fs::write(
        &path,
        r#"{ "payload": { "kernel": "/no/such/kernel" }, "disks": [{ "path": "/no/such/disk" }] }"#,
    )
    .unwrap();
    let (code, text) = printed(&format!("check --from cloud-hypervisor {}", path.display()));
    assert_eq!(code, Some(CONFIGURATION), "{text}");
    for wanted in ["machine create cannot start", "cannot open boot.kernel", "cannot open disk"] {
        assert!(text.contains(wanted), "no {wanted} in\n{text}");
    }
}

#[test]
fn a_document_is_one_file_of_a_known_monitor() {
    let (code, text) = printed("check --from cloud-hypervisor 0000:41:00.0 0000:42:00.0");
    assert_eq!(code, Some(CONFIGURATION), "{text}");
    assert!(text.contains("cannot read 2 documents: --from takes one"), "{text}");
    let (code, text) = printed("check --from cloud-hypervisor");
    assert!(code == Some(CONFIGURATION) && text.contains("cannot read 0 documents"), "{text}");
    let (code, text) = printed("plan --from cloud-hypervisr x.json");
    assert!(code == Some(CONFIGURATION) && text.contains("cloud-hypervisor"), "{text}");
}

/// libvirt reads the first line, and refuses versions below 15.
#[test]
fn the_version_by_the_other_name_is_one_that_libvirt_reads() {
    by_name(|program| {
        for option in ["--version", "-V"] {
            let output = run(program, option);
            let text = String::from_utf8(output.stdout).unwrap();
            let version = text.lines().next().unwrap().strip_prefix("cloud-hypervisor v").unwrap();
            let numbers: Vec<u32> = version.split('.').map(|number| number.parse().unwrap()).collect();
            assert!(output.status.success() && numbers.len() == 3 && numbers[0] >= 15, "{text}");
            assert!(text.contains("\negm-vmm "), "{text}");
        }
    });
}

/// The program by that name while it serves.
struct Served {
    folder: TempDir,
    child: Child,
}

impl Served {
    /// Starts it with the words of `line`; FOLDER stands for its folder, which has a kernel that sleeps.
    fn start(folder: TempDir, line: &str) -> Self {
        let program = folder.path().join("cloud-hypervisor");
        symlink(PROGRAM, &program).unwrap();
        fs::write(folder.path().join("halt.elf"), halt(Ports::USUAL)).unwrap();
        let line = line.replace("FOLDER", folder.path().to_str().unwrap());
        let mut command = Command::new(program);
        command.args(line.split_whitespace()).current_dir("/").stdin(Stdio::null());
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        Self { folder, child }
    }

    fn connect(&mut self) -> UnixStream {
        loop {
            if let Ok(client) = UnixStream::connect(self.folder.path().join("api")) {
                return client;
            }
            assert_eq!(self.child.try_wait().unwrap(), None, "it ends");
            std::thread::yield_now();
        }
    }

    /// The status and the body of the answer to a request with `body`.
    fn ask(&mut self, line: &str, body: &str) -> (u16, String) {
        let mut client = self.connect();
        let length = body.len();
        let request =
            format!("{line} HTTP/1.1\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}");
        client.write_all(request.as_bytes()).unwrap();
        answer(client)
    }

    /// Requires that `request` is carried out; sends it as libvirt's libcurl sends one without a body.
    #[track_caller]
    fn put(&mut self, request: &str) {
        const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
        let mut client = self.connect();
        let head = format!(
            "PUT /api/v1/{request} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\nTransfer-Encoding: chunked\r\n\
             Expect: 100-continue\r\nConnection: close\r\n\r\n"
        );
        client.write_all(head.as_bytes()).unwrap();
        let mut interim = [0; INTERIM.len()];
        client.read_exact(&mut interim).unwrap();
        assert_eq!(interim, INTERIM);
        client.write_all(b"0\r\n\r\n").unwrap();
        assert_eq!(answer(client), (204, String::new()), "{request}");
    }

    /// The machine once it runs.
    fn wait_until_running(&mut self) -> Value {
        loop {
            let info: Value = serde_json::from_str(&self.ask("GET /api/v1/vm.info", "").1).unwrap();
            if info["state"] == "Running" {
                return info;
            }
            std::thread::yield_now();
        }
    }

    /// Its exit code, and its output and messages.
    fn end(mut self) -> (Option<i32>, String, TempDir) {
        let mut text = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        (self.child.wait().unwrap().code(), text, self.folder)
    }
}

/// Status and body of the answer on `client`.
fn answer(mut client: UnixStream) -> (u16, String) {
    let mut text = String::new();
    client.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
    (head.strip_prefix("HTTP/1.1 ").unwrap()[..3].parse().unwrap(), body.to_owned())
}

#[test]
fn kata_s_command_line_serves_the_api_and_removes_its_socket() {
    let line = "--api-socket FOLDER/api -v --seccomp false --log-file FOLDER/log";
    let mut served = Served::start(tempfile::tempdir().unwrap(), line);
    let (status, ping) = served.ask("GET /api/v1/vmm.ping", "");
    let ping: Value = serde_json::from_str(&ping).unwrap();
    assert_eq!((status, ping["pid"].as_u64()), (200, Some(served.child.id().into())));
    served.put("vmm.shutdown");
    let (code, text, folder) = served.end();
    assert_eq!((code, text.as_str()), (Some(0), ""));
    assert!(folder.path().join("log").exists() && !folder.path().join("api").exists());
}

/// libvirt 11 listens itself, and reads events from a pipe that it opens after the program's start.
#[test]
fn libvirt_s_command_line_serves_its_listener_and_writes_each_event() {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        return println!("skipped: /dev/kvm: {error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("api")).unwrap();
    fcntl_setfd(&listener, FdFlags::empty()).unwrap();
    let pipe = folder.path().join("events");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let line = format!("--api-socket fd={} --event-monitor path=FOLDER/events", listener.as_raw_fd());
    let mut served = Served::start(folder, &line);
    drop(listener);
    let reader = std::thread::spawn(|| fs::read_to_string(pipe).unwrap());
    let document = json!({
        "cpus": { "boot_vcpus": 1, "max_vcpus": 1 },
        "memory": { "size": 64 << 20 },
        "payload": { "kernel": served.folder.path().join("halt.elf") },
        "console": { "mode": "Pty" },
    });
    let created = served.ask("PUT /api/v1/vm.create", &document.to_string());
    assert_eq!(created, (204, String::new()));
    served.put("vm.boot");
    served.put("vm.pause");
    let snapshot = format!("file://{}", served.folder.path().join("snapshot").display());
    let to = json!({ "destination_url": snapshot }).to_string();
    assert_eq!(served.ask("PUT /api/v1/vm.snapshot", &to), (204, String::new()));
    served.put("vm.resume");
    served.put("vm.reboot");
    let terminal = served.wait_until_running()["config"]["console"]["file"].as_str().unwrap().to_owned();
    served.put("vm.shutdown");
    served.put("vm.delete");
    let from = json!({ "source_url": snapshot }).to_string();
    assert_eq!(served.ask("PUT /api/v1/vm.restore", &from), (204, String::new()));
    for request in ["vm.resume", "vm.shutdown", "vm.delete", "vmm.shutdown"] {
        served.put(request);
    }
    let (code, messages, folder) = served.end();
    assert_eq!(code, Some(0), "{messages}");
    assert!(messages.contains(&format!("console: {terminal}\n")), "{terminal}: {messages}");
    assert!(folder.path().join("api").exists(), "libvirt removes its socket");
    let expected = "vmm:starting vm:booting vm:booted vm:paused vm:snapshotting vm:snapshotted vm:resumed \
                    vm:rebooting vm:booting vm:booted vm:rebooted vm:shutdown vm:deleted vm:restoring vm:restored \
                    vm:paused vm:resumed vm:shutdown vm:deleted vmm:shutdown";
    assert_eq!(events(&reader.join().unwrap()), expected);
}

/// Source and event of each object in the file of events.
fn events(text: &str) -> String {
    let objects = text.split_terminator("\n\n").map(|object| serde_json::from_str::<Value>(object).unwrap());
    let name = |object: Value| {
        format!("{}:{}", object["source"].as_str().unwrap(), object["event"].as_str().unwrap())
    };
    objects.map(name).collect::<Vec<_>>().join(" ")
}

#[test]
fn the_program_ends_with_its_guest_and_a_start_that_fails_is_no_end() {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        return println!("skipped: /dev/kvm: {error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let kernel = folder.path().join("hello.elf");
    let line = "--api-socket path=FOLDER/api --event-monitor path=FOLDER/events";
    let mut served = Served::start(folder, line);
    let document = json!({ "payload": { "kernel": kernel }, "memory": { "size": 64 << 20 },
        "serial": { "mode": "Null" }, "console": { "mode": "Off" } });
    assert_eq!(served.ask("PUT /api/v1/vm.create", &document.to_string()).0, 204);
    assert_eq!(served.ask("PUT /api/v1/vm.boot", "").0, 500, "there is no kernel");
    fs::write(&kernel, hello(Ports::USUAL, Entry::Pvh)).unwrap();
    let disk = json!({ "path": served.folder.path().join("disk"), "id": "disk0" });
    fs::write(served.folder.path().join("disk"), vec![0; 1 << 20]).unwrap();
    assert_eq!(served.ask("PUT /api/v1/vm.add-disk", &disk.to_string()), (204, String::new()));
    let _ = served.ask("PUT /api/v1/vm.boot", ""); // the guest may be gone before the answer
    let (code, messages, folder) = served.end();
    assert_eq!(code, Some(0), "{messages}");
    let text = fs::read_to_string(folder.path().join("events")).unwrap();
    let expected = "vmm:starting vm:booting vm:booting vm:booted vm:shutdown vm:deleted vmm:shutdown";
    assert_eq!(events(&text), expected);
}

#[test]
fn options_and_descriptors_that_cannot_take_effect_are_refused_with_a_remedy() {
    by_name(|program| {
        for (line, reason, remedy) in [
            (
                "--api-socket s --seccomp true",
                "cannot filter system calls (--seccomp true)",
                "--seccomp false",
            ),
            (
                "--api-socket s --seccomp log",
                "cannot filter system calls (--seccomp log)",
                "--sandbox strict",
            ),
            (
                "--api-socket fd=0",
                "cannot serve the API at descriptor 0: it is not a listening Unix stream socket",
                "name a path",
            ),
            ("--api-socket fd=999", "cannot serve the API at descriptor 999", "name a path"),
            (
                "--api-socket s --event-monitor path=/no/such/folder/e",
                "cannot write events to /no/such/folder/e",
                "name a file",
            ),
            (
                "--api-socket s --log-file /no/such/folder/l",
                "cannot write messages to /no/such/folder/l",
                "name a file",
            ),
        ] {
            let output = run(program, line);
            let text = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(CONFIGURATION), "{text}");
            assert!(text.starts_with(&format!("error: {reason}")), "{text}");
            assert!(text.split_once("\n  help: ").is_some_and(|(_, help)| help.contains(remedy)), "{text}");
        }
        for line in ["--kernel /vmlinuz", "--seccomp maybe", "run vm.json", "--api-socket fd=x", "-v"] {
            assert_eq!(run(program, line).status.code(), Some(CONFIGURATION), "{line}");
        }
    });
}
