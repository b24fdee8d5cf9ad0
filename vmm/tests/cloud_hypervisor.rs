//! Documents of cloud-hypervisor's API on our command line, and the program by the name `cloud-hypervisor`.
//!
//! Help and plans are in `tests/cloud/`, and were reviewed. After an intended change, write them anew and read the
//! difference:
//! ```text
//! EGM_GOLDEN=write cargo test -p egm-vmm --test cloud_hypervisor && git diff vmm/tests/cloud
//! ```

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

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

/// The lines of kata-containers and of libvirt.
#[test]
fn options_of_the_other_name_are_refused_and_not_ignored_while_there_is_no_api() {
    by_name(|program| {
        for (line, options) in [
            (
                "--api-socket /run/vc/vm/s/clh-api.sock -v --seccomp false",
                "--api-socket /run/vc/vm/s/clh-api.sock, --seccomp false, -v",
            ),
            (
                "--api-socket fd=21 --event-monitor path=/run/e",
                "--api-socket fd=21, --event-monitor path=/run/e",
            ),
            ("--log-file /var/log/c -vv", "--log-file /var/log/c, -v"),
        ] {
            let output = run(program, line);
            let text = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(CONFIGURATION), "{text}");
            let wanted = format!("error: cannot honour {options}: by this name egm-vmm serves no API yet");
            assert!(text.starts_with(&wanted), "{text}");
            for command in ["egm-vmm serve --api PATH", "egm-vmm plan --from cloud-hypervisor FILE"] {
                assert!(text.contains("  help: ") && text.contains(command), "{text}");
            }
        }
        for line in ["--kernel /vmlinuz", "--seccomp maybe", "run vm.json"] {
            assert_eq!(run(program, line).status.code(), Some(CONFIGURATION), "{line}");
        }
    });
}
