//! The host of a command, when its path is mistyped or not all of it is readable.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-device");

#[track_caller]
fn refused(arguments: &[&str], code: i32, parts: &[&str]) {
    let output = Command::new(PROGRAM).args(arguments).output().unwrap();
    check(output, code, parts);
}

#[track_caller]
fn check(output: Output, code: i32, parts: &[&str]) {
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{said}");
    for part in parts {
        assert!(said.contains(part), "no {part:?} in\n{said}");
    }
}

#[test]
fn a_folder_that_holds_no_host_is_refused() {
    let empty = tempfile::tempdir().unwrap();
    let root = empty.path().to_str().unwrap();
    let parts = [root, "cannot read a host below", "help: name with --root"];
    refused(&["regions", "--root", root], 2, &parts);
    refused(&["carve", "advise", "--hypervisor", "1GiB", "--root", root], 2, &parts);
    refused(&["regions", "--root", "/none"], 2, &["cannot read a host below /none"]);
    let parts = ["cannot read host files in /none: it is no folder", "help: name a folder that exists"];
    refused(&["regions", "--host-files", "/none"], 2, &parts);
}

/// A host of 16 GiB, of which 6 GiB are in use and 2 GiB are in a pool.
#[test]
fn a_split_that_leaves_the_host_too_little_has_a_warning() {
    let host = tempfile::tempdir().unwrap();
    let pool = host.path().join("sys/kernel/mm/hugepages/hugepages-2048kB");
    fs::create_dir_all(&pool).unwrap();
    fs::create_dir_all(host.path().join("proc")).unwrap();
    fs::write(pool.join("nr_hugepages"), "1024").unwrap();
    let meminfo = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nHugetlb: 2097152 kB\n";
    fs::write(host.path().join("proc/meminfo"), meminfo).unwrap();
    let advise = |hypervisor: &str, more: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command.args(["carve", "advise", "--how", "hugetlb", "--hypervisor", hypervisor, "--root"]);
        command.arg(host.path()).args(more).output().unwrap()
    };
    let warning =
        "the hypervisor keeps 4 GiB, but this host needs 7 GiB (6 GiB in use now and a reserve of 1 GiB)";
    let text = String::from_utf8(advise("4GiB", &[]).stdout).unwrap();
    assert!(text.contains(&format!("\nwarning: {warning}")), "{text}");
    let enough = String::from_utf8(advise("7GiB", &[]).stdout).unwrap();
    assert!(enough.contains("hugepages=") && !enough.contains("warning"), "{enough}");
    check(advise("4GiB", &["--json"]), 0, &[warning]);
}

#[test]
fn facts_of_another_version_and_what_is_no_record_are_refused_with_the_command_that_records() {
    let folder = tempfile::tempdir().unwrap();
    let facts = folder.path().join("facts.json");
    let recorded = fs::read_to_string("../configs/facts/x86-server.json").unwrap();
    let path = facts.to_str().unwrap();
    let help = "help: record them on their host: egm-vmm facts > facts.json";
    fs::write(&facts, &recorded).unwrap();
    for option in ["--facts", "--recorded"] {
        check(Command::new(PROGRAM).args(["regions", option, path]).output().unwrap(), 0, &[]);
    }
    for (text, reason) in [
        (
            recorded.replacen("\"version\": 3", "\"version\": 2", 1).as_str(),
            "facts.json: they have version 2, and this program reads 3",
        ),
        ("{\"host\": {}, \"regions\": []}", "facts.json: it is output of \"egm-device regions --json\""),
        ("{\"version\": 3}", "not a record of a host"),
    ] {
        fs::write(&facts, text).unwrap();
        refused(&["regions", "--facts", path], 2, &[reason, help]);
    }
    refused(&["regions", "--facts", "/none"], 2, &["cannot read facts from /none", "No such file", help]);
}

/// The record was made without root's rights, and its host has no memory hidden from the kernel.
#[test]
fn a_recorded_host_without_regions_or_addresses_is_described_as_such() {
    let facts = "../configs/facts/x86-server.json";
    let help = "help: record that host as root\n";
    refused(&["carve", "advise", "--hypervisor", "64GiB", "--facts", facts], 3, &["no addresses", help]);
    let parts = ["cannot find region \"egm\": this host has no region\n"];
    refused(&["carve", "plan", "egm", "--size", "2MiB", "--facts", facts], 3, &parts);
}

/// An open of a pipe without a writer would never return.
#[test]
fn facts_are_read_from_a_regular_file_only() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for path in ["/dev/zero", pipe.to_str().unwrap()] {
        refused(&["regions", "--facts", path], 2, &["cannot read facts from", "it is not a regular file"]);
    }
    refused(&["regions", "--facts", "/"], 2, &["cannot read facts from /", "directory"]);
}

#[test]
fn what_was_not_written_is_no_success() {
    for arguments in ["regions", "regions --json", "man", "completions bash"] {
        let full = format!("{PROGRAM} {arguments} > /dev/full");
        let output = Command::new("sh").args(["-c", &full]).output().unwrap();
        check(output, 3, &["error: cannot write to standard output", "No space left", "help: "]);
    }
    let enough = format!("{PROGRAM} completions bash | head -n 1");
    let output = Command::new("bash").args(["-o", "pipefail", "-c", &enough]).output().unwrap();
    check(output, 0, &[]);
}

#[test]
fn each_manual_page_names_its_program_and_its_folder_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("share/man1");
    let run = |arguments: &[&str]| Command::new(PROGRAM).arg("man").args(arguments).output().unwrap();
    check(run(&["--into", pages.to_str().unwrap()]), 0, &[]);
    let source = format!("\"egm-device {}\"", env!("CARGO_PKG_VERSION"));
    for (arguments, file) in [
        (&[][..], "egm-device.1"),
        (&["carve", "grant"], "egm-device-carve-grant.1"),
        (&["man"], "egm-device-man.1"),
    ] {
        let page = fs::read_to_string(pages.join(file)).unwrap();
        let title = page.lines().find(|line| line.starts_with(".TH")).unwrap();
        assert!(title.contains(&source), "{file}: {title}");
        assert_eq!(String::from_utf8(run(arguments).stdout).unwrap(), page, "{file}");
    }
}

#[test]
fn a_user_without_access_to_kvm_gets_a_note_of_what_is_not_known() {
    let closed = fs::metadata("/dev/kvm").is_ok_and(|kvm| kvm.permissions().mode() & 0o006 == 0);
    if !closed || !rustix::process::geteuid().is_root() {
        return println!(
            "skipped: only root can become somebody who may not open /dev/kvm, where there is one"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("egm-device");
    fs::copy(PROGRAM, &program).unwrap();
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let output = Command::new("setpriv").args(nobody).arg(program).arg("regions").output().unwrap();
    check(output, 0, &["note: whether there is guest-memfd is not known: /dev/kvm cannot be opened"]);
}

#[test]
fn the_ledger_is_for_root_and_its_refusal_names_the_command_for_other_users() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can become another user");
    }
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("egm-device");
    fs::copy(PROGRAM, &program).unwrap();
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let output = Command::new("setpriv").args(user).arg(program).args(["ledger", "show"]).output().unwrap();
    check(output, 3, &["error: cannot ", "help: run it as root", "egm-device carve free"]);
}

#[test]
fn host_files_that_others_can_write_are_refused_on_this_host() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can make files that are root's");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.json");
    fs::write(&file, r#"{"regions": []}"#).unwrap();
    let run = |file_mode, uid, folder_mode| {
        fs::set_permissions(&file, Permissions::from_mode(file_mode)).unwrap();
        std::os::unix::fs::chown(&file, Some(uid), None).unwrap();
        fs::set_permissions(folder.path(), Permissions::from_mode(folder_mode)).unwrap();
        Command::new(PROGRAM).args(["regions", "--host-files"]).arg(folder.path()).output().unwrap()
    };
    check(run(0o644, 0, 0o755), 0, &[]);
    check(run(0o666, 0, 0o755), 2, &["a.json: it belongs to user 0 with mode 0o666", "chmod go-w"]);
    check(run(0o600, 1000, 0o755), 2, &["a.json: it belongs to user 1000 with mode 0o600", "chown root"]);
    check(run(0o644, 0, 0o777), 2, &["it belongs to user 0 with mode 0o777"]);
}
