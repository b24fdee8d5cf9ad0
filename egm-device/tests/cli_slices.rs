//! Slices from the command line: `carve plan`, `grant`, `return`, `scrub` and `ledger`, on a host that is a folder.
//!
//! Its region `hidden` is a plain file in the place of `/dev/mem`, which the program must not open: the folder is
//! another host, and that host's memory is not here. Slices are granted from `local`.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod record;

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use egm_device::carve::plan::Request;
use egm_device::ledger::{Identity, Ledger, Paths, Watch};
use egm_device::owner::Owner;
use egm_device::region::Survey;
use egm_device::{Backing, Lease};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

/// A host folder. Tests take turns: a program that another test starts would have this one's locks until its exec.
struct Host(tempfile::TempDir, #[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Result of a command: its exit code, standard output and standard error.
type Did = (i32, String, String);

impl Host {
    fn new() -> Self {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let host = Self(tempfile::tempdir().unwrap(), turn);
        let iomem = "00100000-3fffffff : System RAM\n40000000-4fffffff : Reserved\n";
        for (path, text) in [
            ("proc/cmdline", "memmap=256M$1G\n"),
            ("proc/iomem", iomem),
            ("proc/sys/kernel/random/boot_id", "a boot\n"),
            ("etc/machine-id", "a host\n"),
            ("sys/devices/system/node/online", "0\n"),
            ("sys/devices/system/node/node0/cpulist", "0\n"),
            ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 65536 kB\n"),
            ("memory", "precious"),
        ] {
            let path = host.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let span = json!({
            "name": "hidden", "base": "0x40000000", "size": "256MiB", "trusted": true, "device": host.path("memory")
        });
        fs::create_dir(host.path("host")).unwrap();
        fs::write(host.path("host/a.json"), json!({ "regions": [span] }).to_string()).unwrap();
        host
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    /// Arguments, then `--root` and `--host-files`, then the text after ` -- `, as one argument for a shell.
    fn run(&self, words: &str) -> Did {
        let (words, script) = words.split_once(" -- ").map_or((words, None), |(w, s)| (w, Some(s)));
        let mut command = Command::new(env!("CARGO_BIN_EXE_egm-device"));
        command.args(words.split(' ')).arg("--root").arg(self.0.path());
        command.arg("--host-files").arg(self.path("host"));
        if let Some(script) = script {
            command.args(["--", "/bin/sh", "-c", script]);
            let show = format!("ledger show --root {}", self.0.path().display());
            command.env("SHOW", format!("{} {show}", env!("CARGO_BIN_EXE_egm-device")));
        }
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
    }

    /// Standard output of a command that must succeed.
    #[track_caller]
    fn output(&self, words: &str) -> String {
        let (code, out, error) = self.run(words);
        assert_eq!(code, 0, "{error}");
        out
    }

    #[track_caller]
    fn json(&self, words: &str) -> Value {
        serde_json::from_str(&self.output(&format!("{words} --json"))).unwrap()
    }

    /// Standard error of a command that must end with `code` and print nothing else.
    #[track_caller]
    fn refuses(&self, code: i32, words: &str) -> String {
        let (found, out, error) = self.run(words);
        assert_eq!((found, out.as_str()), (code, ""), "{error}");
        error
    }

    /// A slice at the start of `local`, in this process.
    fn lease(&self, owner: &str, size: u64) -> Lease {
        let local = Survey::of(self.0.path(), &[]).regions.into_iter().find(|r| r.name == "local").unwrap();
        let ledger = Ledger::open(Paths::below(self.0.path()), Identity::read(self.0.path()).unwrap());
        ledger.unwrap().grant(&local, &Request::new(size, Owner::this(owner)), &Watch::unobserved()).unwrap()
    }
}

/// The words of the line that begins with `first`.
#[track_caller]
fn row(text: &str, first: &str) -> String {
    let mut lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    lines.find(|words| words.first() == Some(&first)).unwrap_or_else(|| panic!("{text}")).join(" ")
}

#[test]
fn a_plan_shows_places_and_takes_none() {
    let host = Host::new();
    let plan = "carve plan hidden --size 96MiB --count 2";
    assert_eq!(
        host.output(plan),
        "  region     offset    size     address  retired\n  \
           hidden        0x0  96 MiB  0x40000000      0 B\n  \
           hidden  0x6000000  96 MiB  0x46000000      0 B\n"
    );
    let slice = |offset: u64, base: &str| json!({ "region": "hidden", "offset": offset, "size": 96 * MIB, "base": base, "holes": [] });
    assert_eq!(host.json(plan), json!([slice(0, "0x40000000"), slice(96 * MIB, "0x46000000")]));
    assert_eq!(host.json("carve plan hidden --size 2MiB --at 4MiB")[0]["offset"], 4 * MIB);
    assert_eq!(host.output(plan), host.output(plan));
}

#[test]
fn a_region_is_named_as_for_a_grant_or_as_a_word_of_its_own() {
    let host = Host::new();
    for command in ["carve plan {} --size 2MiB", "carve scrub {}", "carve return {} --at 0 --size 2MiB"] {
        let output = |region| host.output(&command.replace("{}", region));
        assert_eq!(output("local"), output("--region local"), "{command}");
        host.refuses(2, &command.replace(" {}", ""));
        host.refuses(2, &command.replace("{}", "local --region local"));
    }
}

#[test]
fn a_request_for_the_firmware_of_another_machine_names_every_other_way() {
    let error = Host::new().refuses(3, "carve advise --hypervisor 1GiB --how firmware");
    assert!(["mem", "hugetlb", "memmap", "dax"].iter().all(|way| error.contains(way)), "{error}");
}

#[test]
fn a_plan_goes_around_what_others_have_unless_it_is_to_be_empty() {
    let host = Host::new();
    let lease = host.lease("vm1", 8 * MIB);
    assert_eq!(host.json("carve plan local --size 2MiB")[0]["offset"], 8 * MIB);
    assert_eq!(host.json("carve plan local --size 2MiB --empty")[0]["offset"], 0);
    drop(lease);
    assert_eq!(host.json("carve plan local --size 2MiB")[0]["offset"], 0);
}

#[test]
fn an_impossible_plan_names_the_shortage_and_the_user_that_must_act() {
    let host = Host::new();
    let error = host.refuses(3, "carve plan hidden --size 96MiB --count 3");
    assert!(error.contains("cannot place 96MiB aligned to 2MiB in region hidden"), "{error}");
    assert!(error.contains("192 MiB are granted, 64 MiB free, 32 MiB too few"), "{error}");
    let error = host.refuses(3, "carve plan hidden --size 1GiB");
    assert!(error.contains("it has 256 MiB in all, 768 MiB too few: ask for less"), "{error}");
    let error = host.refuses(3, "carve plan hidden --size 2MiB --at 256MiB");
    assert!(error.contains("from offset 0x10000000 on it has 2 MiB too few: ask for less"), "{error}");
    let error = host.refuses(2, "carve plan hidden --size 3KiB");
    assert!(error.contains("its pages have 2 MiB: ask for 2MiB"), "{error}");
    host.refuses(2, "carve plan hidden");
    let error = host.refuses(3, "carve plan other --size 2MiB");
    assert!(error.contains("cannot find region \"other\": this host has hidden, local"), "{error}");
}

#[test]
fn a_command_has_its_slice_as_long_as_it_runs_and_ends_as_it_ended() {
    let host = Host::new();
    let grant = "carve grant --region local --size 4MiB --name vm1";
    let script =
        "stat -Lc %s /proc/self/fd/$EGM_SLICE_FD; echo $EGM_SLICE_OFFSET $EGM_SLICE_SIZE; $SHOW; exit 7";
    let (code, out, error) = host.run(&format!("{grant} -- {script}"));
    assert_eq!(code, 7, "{error}");
    assert!(out.starts_with("4194304\n0 4194304\n"), "{out}");
    assert_eq!(row(&out, "local"), "local 64 MiB 4 MiB 0 B 0 B 60 MiB 0 B 0 B");
    assert!(out.contains("vm1") && out.contains("granted"), "{out}");
    let after = host.output("ledger show");
    assert_eq!(row(&after, "local"), "local 64 MiB 0 B 0 B 0 B 64 MiB 0 B 0 B");
    assert!(!after.contains("vm1"), "{after}");
}

#[test]
fn a_command_keeps_its_slice_when_the_one_that_took_it_is_killed() {
    let host = Host::new();
    let grant = "carve grant --region local --size 4MiB --name vm1 -- kill -9 $PPID";
    let (code, out, _) = host.run(&format!("{grant}; $SHOW"));
    assert!(code == -1 && row(&out, "local").starts_with("local 64 MiB 4 MiB"), "{out}");
    let free = || host.json("ledger show")[1]["held"] == json!([]);
    // This process cannot wait for the shell's end: its descriptors are gone a moment after its output.
    assert!((0..1000).any(|_| free()));
    let output = host.output("ledger repair");
    assert!(output.starts_with("The record is sound.\nForgotten: vm1 (process "), "{output}");
    assert!(output.ends_with(") had 4 MiB of local; it is clean.\n"), "{output}");
    assert_eq!(host.output("ledger repair"), "The record is sound.\n");
}

/// The command may run as a tenant, which could release every lock on a description that it shares.
#[test]
fn a_command_gets_the_memory_and_no_lock() {
    let host = Host::new();
    let script = "for fd in /proc/self/fd/*; do readlink $fd; done";
    let (code, found, error) = host.run(&format!("carve grant --region local --size 4MiB -- {script}"));
    assert_eq!(code, 0, "{error}");
    assert!(found.contains("memfd:") && !found.contains(".lock"), "{found}");
}

#[test]
fn what_cannot_be_granted_is_refused_with_the_reason() {
    let host = Host::new();
    let lease = host.lease("vm1", 62 * MIB);
    let grant = "carve grant --region local --size 4MiB -- true";
    let error = host.refuses(3, grant);
    assert!(error.contains("held by vm1 (process") && error.contains(" at 0x0 (62MiB)"), "{error}");
    drop(lease);
    host.output(grant);
    host.refuses(3, "carve grant --region other --size 4MiB -- true");
    let error = host.refuses(3, "carve grant --region local --size 1GiB -- true");
    assert!(error.contains("it has 64 MiB in all, 960 MiB too few"), "{error}");
}

#[test]
fn a_slice_with_an_owner_is_not_returned_by_another() {
    let host = Host::new();
    let lease = host.lease("vm1", 4 * MIB);
    let error = host.refuses(3, "carve return local --at 2MiB --size 2MiB");
    assert!(error.contains("vm1 (process") && error.contains("has 4MiB at 0x0"), "{error}");
    assert!(error.contains("help: a slice returns when its owner ends"), "{error}");
    assert_eq!(lease.size(), 4 * MIB);
    drop(lease);
    assert_eq!(host.output("carve return local --at 2MiB --size 2MiB"), "0 B scrubbed.\n");
    assert_eq!(host.json("carve scrub local"), json!({ "scrubbed": 0 }));
    host.refuses(2, "carve return local --at 1KiB --size 2MiB");
    host.refuses(3, "carve return local --at 0 --size 1GiB");
}

#[test]
fn a_copy_of_a_host_opens_no_device() {
    let host = Host::new();
    for command in [
        "carve scrub hidden",
        "carve return hidden --at 0 --size 2MiB",
        "carve grant --region hidden --size 4MiB -- true",
        "serve --region hidden --size 4MiB --socket never.sock",
    ] {
        let error = host.refuses(2, command);
        assert!(error.contains("--root names a copy of another host"), "{error}");
    }
    assert_eq!(fs::read(host.path("memory")).unwrap(), b"precious");
    assert_eq!(row(&host.output("ledger show"), "hidden"), "hidden 256 MiB 0 B 0 B 0 B 0 B 256 MiB 0 B");
}

#[test]
fn the_ledger_is_shown_to_programs() {
    let host = Host::new();
    let _lease = host.lease("vm1", 4 * MIB);
    let shown = host.json("ledger show");
    assert_eq!((&shown[0]["region"], &shown[0]["held"]), (&json!("hidden"), &json!([])));
    assert_eq!(shown[0]["dirty"], json!([{ "start": "0x0", "size": 256 * MIB }]));
    let held = &shown[1]["held"][0];
    assert_eq!((&held["owner"]["name"], &held["owner"]["pid"]), (&json!("vm1"), &json!(std::process::id())));
    assert_eq!((&held["usage"], &held["span"]["size"]), (&json!("granted"), &json!(4 * MIB)));
    assert_eq!((&shown[1]["retired"], &shown[1]["doubt"]), (&json!([]), &Value::Null));
}

#[test]
fn a_record_that_is_not_trusted_is_reported_and_put_aside() {
    let host = Host::new();
    drop(host.lease("vm1", 4 * MIB));
    let record = host.path("var/lib/egm-device/ledger.json");
    fs::write(&record, "{").unwrap();
    let shown = host.output("ledger show");
    assert!(shown.contains("The record is not used: it is broken."), "{shown}");
    assert_eq!(host.json("ledger repair"), json!({ "doubt": "broken", "forgotten": [], "freed": [] }));
    assert_eq!(fs::read(record.with_extension("json.aside")).unwrap(), b"{");
    assert_eq!(host.output("ledger repair"), "The record is sound.\n");
    fs::remove_file(&record).unwrap();
    let output = host.output("ledger repair");
    assert_eq!(output, "The record is not used: it is gone. A new one is begun.\n");
}

#[test]
fn a_host_of_which_only_the_facts_are_known_is_planned_for_and_not_touched() {
    let host = Host::new();
    fs::write(host.path("facts.json"), record::of(&host.json("regions")).to_string()).unwrap();
    let facts = host.path("facts.json").display().to_string();
    let run = |words: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_egm-device"));
        let output = command.args(words.split(' ')).args(["--facts", &facts]).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(run("carve plan hidden --size 2MiB").0, 0);
    for words in
        ["carve scrub hidden", "carve return hidden --at 0 --size 2MiB", "ledger show", "ledger repair"]
    {
        let (code, error) = run(words);
        assert!(code == 2 && error.contains("unexpected argument '--facts'"), "{words}: {error}");
    }
}

#[test]
fn a_host_without_a_boot_id_has_no_ledger() {
    let host = Host::new();
    fs::remove_file(host.path("proc/sys/kernel/random/boot_id")).unwrap();
    let error = host.refuses(3, "ledger show");
    assert!(error.contains("cannot read the id of this boot for the ledger's record"), "{error}");
}
