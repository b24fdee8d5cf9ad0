//! The sinks, one by one: what a line holds, and what happens when it cannot be written.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use egm_address::{Offset, Span};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn actor(comm: &str) -> Actor {
    let program = Program { comm: comm.to_owned(), exe: "/usr/bin/vm".to_owned() };
    Actor { owner: "vm1".to_owned(), uid: 1000, pid: 42, program }
}

fn grant(comm: &str) -> Event {
    let place = RegionBytes::of("egm4", Span::new(Offset::new(0x1000), 0x2000).unwrap());
    Event::Grant(Action::new(actor(comm), place, Duration::from_millis(7)))
}

fn encode(event: &Event) -> Vec<u8> {
    line::encode(SystemTime::UNIX_EPOCH, event, 0, 0)
}

#[test]
fn a_line_has_these_keys_in_this_order() {
    let line = String::from_utf8(line::encode(SystemTime::UNIX_EPOCH, &grant("vm"), 3, 2)).unwrap();
    assert_eq!(
        line,
        "{\"time\":\"1970-01-01T00:00:00.000Z\",\"event\":\"grant\",\"owner\":\"vm1\",\"uid\":1000,\"pid\":42,\
         \"program\":{\"comm\":\"vm\",\"exe\":\"/usr/bin/vm\"},\"region\":\"egm4\",\
         \"span\":{\"offset\":4096,\"size\":8192},\"bytes\":8192,\"duration_ms\":7,\"lost\":3,\"suppressed\":2}\n"
    );
}

#[test]
fn a_hostile_name_stays_one_line_of_printable_ascii() {
    let name = "a\n\"\\\x1b[2J\u{9b}\u{202e}\u{1f980}\x7f";
    let line = encode(&grant(name));
    assert!(line[..line.len() - 1].iter().all(|byte| matches!(byte, b' '..=b'~')), "{line:?}");
    let back: Value = serde_json::from_slice(&line).unwrap();
    assert_eq!(back["program"]["comm"], name);
}

proptest! {
    #[test]
    fn any_text_gives_a_bounded_line_that_is_json(text in any::<String>(), times in 1usize..200) {
        let long = text.repeat(times);
        let by = Actor { owner: long.clone(), program: Program { comm: long.clone(), exe: long.clone() }, ..actor("") };
        let refusal = Event::Refusal(Refusal { by, region: Some(long.clone()), bytes: None, reason: long.clone() });
        let line = encode(&refusal);
        prop_assert!(line.len() <= MAX_LINE);
        let back: Value = serde_json::from_slice(&line).unwrap();
        let reason = back["reason"].as_str().unwrap();
        prop_assert!(reason == long || long.starts_with(reason.strip_suffix("...").unwrap()));
    }
}

#[test]
fn a_full_file_is_rotated_and_the_oldest_goes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("audit.jsonl");
    let file = LogFile::with_limit(path.clone(), 30);
    for number in 0..100 {
        file.append(format!("line {number:04}\n").as_bytes()).unwrap();
    }
    let named = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
    assert_eq!(named("audit.jsonl"), "line 0099\n");
    assert_eq!(named("audit.jsonl.1"), "line 0096\nline 0097\nline 0098\n");
    assert_eq!(named("audit.jsonl.7"), "line 0078\nline 0079\nline 0080\n");
    assert!(!folder.path().join("audit.jsonl.8").exists());
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_line_that_a_full_disk_cut_ends_before_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("audit.jsonl");
    fs::write(&path, "{\"time\":\"20").unwrap();
    LogFile::new(path.clone()).append(b"{}\n").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "{\"time\":\"20\n{}\n");
}

#[test]
fn a_link_in_the_place_of_the_file_is_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let (path, target) = (folder.path().join("audit.jsonl"), folder.path().join("target"));
    fs::write(&target, "").unwrap();
    std::os::unix::fs::symlink(&target, &path).unwrap();
    assert!(LogFile::new(path).append(b"{}\n").is_err());
    assert_eq!(fs::read(&target).unwrap(), b"");
}

#[test]
fn while_a_rotation_is_stopped_the_file_has_a_limit_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("audit.jsonl");
    let lock = fs::File::create(folder.path().join("audit.jsonl.lock")).unwrap();
    lock.lock().unwrap();
    let file = LogFile::with_limit(path.clone(), 100);
    let written = (0..100).filter(|_| file.append(b"0123456789\n").is_ok()).count();
    assert_eq!(written, 19);
    lock.unlock().unwrap();
    file.append(b"0123456789\n").unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 11);
}

#[test]
fn a_lost_line_is_counted_in_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let paths = Paths::below(folder.path());
    let log = Log::new(paths.clone());
    fs::create_dir_all(&paths.file).unwrap();
    log.write(&grant("a"));
    log.write(&grant("b"));
    fs::remove_dir(&paths.file).unwrap();
    log.write(&grant("c"));
    log.write(&grant("d"));
    let text = fs::read_to_string(&paths.file).unwrap();
    let lost: Vec<Value> =
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["lost"].clone()).collect();
    assert_eq!(lost, [json!(2), Value::Null]);
}

#[test]
fn findings_stay_when_grants_rotate_the_log() {
    let folder = tempfile::tempdir().unwrap();
    let paths = Paths::below(folder.path());
    let sinks = Sinks {
        file: LogFile::with_limit(paths.file.clone(), 1000),
        findings: LogFile::with_limit(paths.findings.clone(), 1000),
        journal: Journal::new(paths.journal.clone()),
        limits: Limits::default(),
        lost: AtomicU64::new(0),
        unsent: AtomicU64::new(0),
    };
    let place = || RegionBytes::of("egm4", Span::new(Offset::new(0), 4096).unwrap());
    let finding = |reason| Finding::new(actor("vm"), place(), reason);
    sinks.write(&Event::Mismatch(finding("first")), 0);
    sinks.write(&Event::Retire(finding("second")), 0);
    for _ in 0..100 {
        sinks.write(&grant("vm"), 0);
    }
    let files = fs::read_dir(paths.file.parent().unwrap()).unwrap();
    let kept = files.map(|entry| entry.unwrap().path()).filter(|path| *path != paths.findings);
    let kept: String = kept.map(|path| fs::read_to_string(path).unwrap()).collect();
    assert!(kept.contains("grant") && !kept.contains("mismatch"), "{kept}");
    let findings = fs::read_to_string(&paths.findings).unwrap();
    assert!(findings.contains("first") && findings.contains("second") && !findings.contains("grant"));
}

#[test]
fn the_journal_gets_an_entry_and_one_that_is_stopped_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let paths = Paths::below(folder.path());
    let log = Log::new(paths.clone());
    log.write(&grant("no journal"));
    fs::create_dir_all(paths.journal.parent().unwrap()).unwrap();
    let journal = UnixDatagram::bind(&paths.journal).unwrap();
    log.write(&grant("vm"));
    let mut entry = [0; MAX_LINE * 2];
    let length = journal.recv(&mut entry).unwrap();
    let entry = std::str::from_utf8(&entry[..length]).unwrap();
    let line = fs::read_to_string(&paths.file).unwrap();
    let line = line.lines().nth(1).unwrap();
    assert_eq!(entry, format!("PRIORITY=6\nSYSLOG_IDENTIFIER=egm-device\nEGM_EVENT=grant\nMESSAGE={line}\n"));
    // A journal that reads nothing: its queue fills up.
    let place = RegionBytes::of("egm4", Span::new(Offset::new(0x1000), 0x2000).unwrap());
    for _ in 0..2000 {
        log.write(&Event::Retire(Finding::new(actor("vm"), place.clone(), "a memory error")));
    }
    assert_eq!(fs::read_to_string(&paths.file).unwrap().lines().count(), 2002);
    let Log(Some(sinks)) = &log else { panic!() };
    assert!(sinks.unsent.load(Ordering::Relaxed) > 0);
}
