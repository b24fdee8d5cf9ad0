//! The audit log as the real programs write it, and as `egm-device log` shows it; and false claims of clients.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod dax_host;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use dax_host::{DaxHost, MIB};
use egm_address::{InRegion, Offset, Span, SpanSet};
use egm_device::audit::{Action, Actor, Event, Log, Paths, RegionBytes};
use egm_device::owner::Owner;
use serde_json::{Value, json};

static NEVER: AtomicBool = AtomicBool::new(false);
const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-device");

/// The last page of a slice.
const LAST: u64 = 4 * MIB - 4096;

fn span(start: u64, size: u64) -> Span<InRegion> {
    Span::new(Offset::new(start), size).unwrap()
}

/// The content of a line without the fields that differ between runs; all of those must be present.
fn essence(line: &Value) -> Value {
    let mut line = line.as_object().unwrap().clone();
    let time = line.remove("time").unwrap();
    assert_eq!(time.as_str().unwrap().len(), "2026-11-23T08:47:35.120Z".len());
    assert!(line.remove("pid").unwrap().as_u64().unwrap() > 1);
    let program = line.remove("program").unwrap();
    assert!(program["exe"].as_str().unwrap().starts_with('/'), "{program}");
    let is_action = ["grant", "return", "scrub"].contains(&line["event"].as_str().unwrap());
    assert_eq!(line.remove("duration_ms").is_some_and(|duration| duration.is_u64()), is_action);
    line.into()
}

fn action(event: &str, owner: &str, size: u64) -> Value {
    json!({ "event": event, "owner": owner, "uid": 0, "region": "dax0.0", "span": { "offset": 0, "size": size }, "bytes": size })
}

/// A line about one page of `dax0.0` at `offset`.
fn finding(event: &str, owner: &str, offset: u64, reason: &str) -> Value {
    json!({
        "event": event, "owner": owner, "uid": 0, "region": "dax0.0",
        "span": { "offset": offset, "size": 4096 }, "bytes": 4096, "reason": reason
    })
}

fn page(at: u64) -> Span<InRegion> {
    span(at, 4096)
}

#[test]
fn the_programs_log_what_happens_to_slices_and_nothing_else() {
    let host = match DaxHost::new(64 * MIB) {
        Ok(host) => host,
        Err(why) => return println!("skipped: {why}"),
    };
    // Directly, as root.
    let granted = host.run("carve grant --region dax0.0 --size 4MiB --name vm1 -- /bin/true");
    assert_eq!(granted.0, 0, "{}", granted.2);
    let refused = host.run("carve grant --region dax0.0 --size 1GiB --name vm1 -- /bin/true");
    assert_eq!(refused.0, 3, "{}", refused.2);
    // By the broker: a page that can be read, one that cannot (a mapping of `/dev/zero` at an offset has no bytes
    // beyond its size), and one outside the slice.
    let broker = host.broker();
    let lease = host.lease(4 * MIB);
    lease.retire(&[page(0), page(LAST), page(8 * MIB)].into_iter().collect()).unwrap();
    lease.return_slice(&NEVER).unwrap();
    let grant = "carve grant --broker /run/broker.sock --region nope --size 2MiB --name vm2 -- /bin/true";
    assert_eq!(host.run(grant).0, 3);
    drop(broker);
    // Bad memory, and its return to use.
    let retire = |at| {
        let bad = SpanSet::from_iter([page(at)]);
        host.ledger().retire(&host.region(), &bad, &Owner::this("test"), "a memory error").unwrap();
    };
    retire(0);
    let unretire = |words: &str| host.run(&format!("ledger unretire dax0.0 {words}"));
    let (code, out, error) = unretire("0 4KiB");
    assert_eq!((code, out.ends_with("add --yes to put them back into use.\n")), (0, true), "{out}{error}");
    assert_eq!(unretire("0 4KiB --yes").1, "4 KiB of dax0.0 are back in use, dirty.\n");
    let (code, _, error) = unretire("0 4KiB --yes");
    assert!(code == 2 && error.contains("the ledger has none of them as retired"), "{code} {error}");
    let (code, _, error) = unretire(&format!("{LAST:#x} 4KiB --yes"));
    assert!(code == 3 && error.contains("reading them gives a memory error"), "{code} {error}");
    let states = host.ledger().states(&host.region()).unwrap();
    assert_eq!(states.retired.spans(), &SpanSet::from_iter([page(LAST)]));
    assert!(states.dirty.overlapping(page(0)).is_some());

    let lines = host.log();
    let mut found: Vec<Value> = lines.iter().map(essence).collect();
    // Other tests check the texts of refusals.
    for refusal in found.iter_mut().filter(|line| line["event"] == "refusal") {
        let reason = refusal.as_object_mut().unwrap().remove("reason").unwrap();
        assert!(reason.as_str().is_some_and(|reason| reason.len() > 10 && !reason.contains('\n')));
    }
    let refusal = |owner, region, size| json!({ "event": "refusal", "owner": owner, "uid": 0, "region": region, "bytes": size });
    let sound = "its owner reported it as bad, and it can be read";
    let bad = "its owner reported it as bad, and it cannot be read";
    let back = "an operator asked for it, and it can be read";
    assert_eq!(
        found,
        [
            action("scrub", "vm1", 4 * MIB),
            action("grant", "vm1", 4 * MIB),
            action("scrub", "vm1", 4 * MIB),
            action("return", "vm1", 4 * MIB),
            refusal("vm1", "dax0.0", 1024 * MIB),
            action("grant", "vm", 4 * MIB),
            finding("claim-refused", "vm", 0, sound),
            finding("retire", "vm", LAST, bad),
            action("scrub", "vm", LAST),
            action("return", "vm", 4 * MIB),
            refusal("vm2", "nope", 2 * MIB),
            finding("retire", "test", 0, "a memory error"),
            finding("unretire", "unretire", 0, back),
        ]
    );
    let file = host.path("var/log/egm-device/audit.jsonl");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::metadata(file.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
}

#[test]
fn a_program_may_have_any_name() {
    let host = match DaxHost::new(4 * MIB) {
        Ok(host) => host,
        Err(why) => return println!("skipped: {why}"),
    };
    let name = "a\n\"\u{9b}\x1b[2J\\";
    symlink(PROGRAM, host.path(name)).unwrap();
    let mut command = host.command(host.path(name).to_str().unwrap());
    let words = "carve grant --region dax0.0 --size 2MiB -- /bin/true";
    let output = command.args(words.split(' ')).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = fs::read(host.path("var/log/egm-device/audit.jsonl")).unwrap();
    assert!(text.iter().all(|byte| matches!(byte, b' '..=b'~' | b'\n')));
    let lines = host.log();
    assert_eq!(lines.len(), 4);
    assert!(lines.iter().all(|line| line["program"]["comm"] == name), "{lines:?}");
    let (_, shown, _) = host.run("log");
    assert!(shown.is_ascii() && !shown.contains('\x1b'), "{shown}");
}

#[test]
fn a_full_disk_costs_lines_of_the_log_and_no_slice() {
    let host = match DaxHost::new(4 * MIB) {
        Ok(host) => host,
        Err(why) => return println!("skipped: {why}"),
    };
    let script = "mount -t tmpfs -o size=4k tmpfs /var/log
        mkdir /var/log/egm-device
        head -c 4096 /dev/zero > /var/log/full
        \"$PROGRAM\" carve grant --region dax0.0 --size 2MiB -- /bin/true
        wc -c < /var/log/egm-device/audit.jsonl
        rm /var/log/full
        \"$PROGRAM\" carve grant --region dax0.0 --size 2MiB -- /bin/true
        wc -l < /var/log/egm-device/audit.jsonl";
    let output = host.command("/bin/sh").args(["-ec", script]).env("PROGRAM", PROGRAM).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    assert_eq!(
        error.matches("cannot write the audit log /var/log/egm-device/audit.jsonl").count(),
        1,
        "{error}"
    );
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0\n3\n");
}

#[test]
fn two_processes_write_ten_thousand_lines_each_and_none_is_torn_or_lost() {
    const FOLDER: &str = "EGM_AUDIT_FOLDER";
    let write = |paths: Paths| {
        let (log, by) = (Log::new(paths), Actor::of(&Owner::this("writer")));
        for number in 0..10_000 {
            let place = RegionBytes::of("r", span(number, 1));
            log.write(&Event::Grant(Action::new(by.clone(), place, Duration::ZERO)));
        }
    };
    if let Some(folder) = std::env::var_os(FOLDER) {
        return write(Paths::below(folder.as_ref()));
    }
    let folder = tempfile::tempdir().unwrap();
    let test = "two_processes_write_ten_thousand_lines_each_and_none_is_torn_or_lost";
    let spawn = |_| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test]).env(FOLDER, folder.path()).spawn().unwrap()
    };
    for mut child in [0, 1].map(spawn) {
        assert!(child.wait().unwrap().success());
    }
    let text = fs::read_to_string(Paths::below(folder.path()).file).unwrap();
    // A process that begins while another writes may leave an empty line.
    let texts = || text.lines().filter(|line| !line.is_empty());
    let lines = texts().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let found: BTreeSet<_> =
        lines.map(|line| (line["pid"].as_u64().unwrap(), line["span"]["offset"].as_u64().unwrap())).collect();
    assert_eq!((found.len(), texts().count()), (20_000, 20_000));
}

#[test]
fn the_log_is_a_table_of_80_columns_or_the_lines_as_they_are() {
    let root = tempfile::tempdir().unwrap();
    let paths = Paths::below(root.path());
    fs::create_dir_all(paths.file.parent().unwrap()).unwrap();
    let old = r#"{"time":"2026-11-22T23:59:59.999Z","event":"grant","owner":"vm1","uid":1000,"pid":7,"program":{"comm":"vm","exe":"/vm"},"region":"egm4","span":{"offset":0,"size":4294967296},"bytes":4294967296,"duration_ms":812}"#;
    let retire = r#"{"time":"2026-11-23T08:00:00.000Z","event":"claim-refused","owner":"a-long-name-of-a-machine","uid":4294967294,"pid":8,"program":{"comm":"vm","exe":"/vm"},"region":"hugetlb-1g-node0","span":{"offset":1099511627776,"size":8192},"bytes":8192,"reason":"its owner reported it as bad, and it can be read, which is a reason of more than one line\u001b[2J","lost":1,"suppressed":2}"#;
    let refusal = r#"{"time":"2026-11-23T08:47:35.120Z","event":"refusal","owner":"","uid":0,"pid":9,"program":{"comm":"","exe":""},"region":"hugetlb-2m-node0","reason":"no"}"#;
    fs::write(format!("{}.1", paths.file.display()), format!("{old}\n")).unwrap();
    fs::write(&paths.file, format!("{{\"time\":\"20\n\n{retire}\n{refusal}\n")).unwrap();
    let run = |words: &str| {
        let mut command = Command::new(PROGRAM);
        let output = command.args(words.split(' ')).arg("--root").arg(root.path()).output().unwrap();
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (table, error) = run("log");
    assert_eq!(
        table,
        "\
time (UTC)     event         owner         user region           offset     size
11-22 23:59:59 grant         vm1           1000 egm4                0x0    4 GiB
11-23 08:00:00 claim-refused a-long-name~ 4294~ hugetlb-1~ 0x100000000~    8 KiB
               owner a-long-name-of-a-machine, user 4294967294, region
               hugetlb-1g-node0, offset 0x10000000000
               its owner reported it as bad, and it can be read, which is a
               reason of more than one line\\u{1b}[2J
               1 line lost before it
               2 lines suppressed before it
11-23 08:47:35 refusal                        0 hugetlb-2m-node0      -        -
               no
"
    );
    assert!(table.lines().all(|line| line.len() <= 80));
    assert_eq!(error, "note: 1 line of the log is cut or damaged\n");
    assert_eq!(run("log --json --since 2026-11-23").0, format!("{retire}\n{refusal}\n"));
    assert_eq!(run("log --json --event grant --event refusal").0, format!("{old}\n{refusal}\n"));
    assert_eq!(run("log --json --region egm4").0, format!("{old}\n"));
    assert!(run("log --event typo").1.contains("possible values: grant, return"));
    assert_eq!(run("log --log-level warn").1, "");
    let note: Value = serde_json::from_str(&run("log --log-format json").1).unwrap();
    assert_eq!(
        (&note["level"], &note["message"]),
        (&"INFO".into(), &"1 line of the log is cut or damaged".into())
    );
}

#[test]
fn a_follower_of_the_log_sees_lines_as_they_come_and_across_a_rotation() {
    use std::io::{BufRead, BufReader};
    let root = tempfile::tempdir().unwrap();
    let paths = Paths::below(root.path());
    let (log, by) = (Log::new(paths.clone()), Actor::of(&Owner::this("writer")));
    let write = |number| {
        log.write(&Event::Grant(Action::new(
            by.clone(),
            RegionBytes::of("r", span(number, 1)),
            Duration::ZERO,
        )));
    };
    write(0);
    let mut command = Command::new(PROGRAM);
    command
        .args(["log", "--follow", "--json", "--root"])
        .arg(root.path())
        .stdout(std::process::Stdio::piped());
    let mut follower = command.spawn().unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines();
    let mut next = || {
        let line: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        line["span"]["offset"].as_u64().unwrap()
    };
    assert_eq!(next(), 0);
    write(1);
    assert_eq!(next(), 1);
    write(2);
    fs::rename(&paths.file, format!("{}.1", paths.file.display())).unwrap();
    write(3);
    assert_eq!((next(), next()), (2, 3));
    follower.kill().unwrap();
    follower.wait().unwrap();
}
