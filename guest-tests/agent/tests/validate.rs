//! `egm-guest validate`, `compare` and `doctor` as a person or a script runs them: exit codes, documents, files.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use egm_guest::findings::{Outcome, Run};
use quick_xml::Reader;
use quick_xml::events::Event;
use rustix::process::{Pid, Signal};
use serde_json::Value;
use tempfile::TempDir;

/// Validations that this or any other machine decides quickly.
const QUICK: [&str; 4] = ["--select", "memory.pattern,numa,pci", "--size", "256KiB"];

fn egm_guest(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_egm-guest")).args(words).output().unwrap()
}

fn validate(words: &[&str]) -> Output {
    egm_guest(&[&["validate"], words].concat())
}

#[track_caller]
fn ends(output: &Output, code: i32) -> String {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "stdout: {out}\nstderr: {err}");
    assert!(
        !out.contains('\u{1b}') && !err.contains('\u{1b}'),
        "escape sequences without a terminal: {out}{err}"
    );
    out + &err
}

fn run_of(words: &[&str], file: &Path) -> Run {
    ends(&validate(&[words, &["--json", "--out", file.to_str().unwrap()]].concat()), 0);
    Run::parse(&fs::read(file).unwrap()).unwrap()
}

#[test]
fn the_list_has_every_group_that_has_validations() {
    let text = ends(&validate(&["--list"]), 0);
    for group in ["memory.", "numa.", "pci.", "cuda.", "p2p.", "rdma.", "gdr.", "nvshmem.", "odp."] {
        assert!(text.lines().any(|line| line.starts_with(group)), "{group} in {text}");
    }
    let one = ends(&validate(&["--list", "--select", "*.pattern"]), 0);
    assert_eq!(one.lines().count(), 1, "{one}");
}

#[test]
fn a_command_line_that_is_not_understood_ends_with_2_before_anything_runs() {
    let folder = tempfile::tempdir().unwrap();
    let no_run = folder.path().join("no-run.json");
    fs::write(&no_run, "{\"egm-run\": 9}").unwrap();
    let no_run = no_run.to_str().unwrap();
    for words in [
        &["--select", "memroy"][..],
        &["--size", "many"],
        &["--seed", "-1"],
        &["--min-ratio", "0.9"],
        &["--json", "--junit"],
        &["--arg", "novalue"],
        &["--arg", "memory.round=1"],
        &["--arg", "deadline=soon"],
        &["--select", ""],
        &["--select", "memory,-memory"],
        &["--require", "cudda"],
        &["--require", "cuda"], // --select leaves it out
        &["--size", "0"],
        &["--out", "same", "--html", "same"],
        &["--baseline", "/nowhere/run.json"],
        &["--baseline", no_run],
        &["--out", "/nowhere/out"],
        &["--html", "/nowhere/out.html"],
        &["--baseline", no_run, "--min-ratio", "NaN"],
    ] {
        // Clap takes an option once; the last of these words is what is wrong.
        let quick = QUICK.chunks(2).filter(|quick| !words.contains(&quick[0])).flatten().copied();
        let text = ends(&validate(&quick.chain(words.iter().copied()).collect::<Vec<_>>()), 2);
        assert!(text.starts_with("error: ") && !text.contains("passed"), "{words:?}: {text}");
    }
}

#[test]
fn what_is_required_and_does_not_pass_fails_with_its_reason() {
    let quick = ["--select", "memory.pattern,cuda.attributes,cuda.pool*", "--size", "256KiB"];
    let lenient = ends(&validate(&quick), 0);
    if !lenient.contains("cuda.attributes              skipped") {
        return println!("skipped: this machine has a GPU");
    }
    let why = "cannot load libcuda.so.1";
    for option in [&["--require", "cuda.attributes"][..], &["--strict"]] {
        let text = ends(&validate(&[&quick[..], option].concat()), 1);
        let row = text.lines().find(|line| line.starts_with("required ")).unwrap();
        assert!(row.contains("failed") && row.contains("cuda.attributes"), "{row}");
        assert!(row.contains(why) || row.contains("skipped: "), "{row}");
        assert!(!cfg!(target_feature = "crt-static") || row.contains(why), "{row}");
    }
    ends(&validate(&[&quick[..], &["--require", "memory"]].concat()), 2); // some of its core is not selected
    let text = ends(&validate(&[&quick[..], &["--require", "memory.pattern"]].concat()), 0);
    assert!(text.contains("required ") && text.contains("0 failed"), "{text}");
    let excluded = ["--select", "memory.pattern,cuda.attributes,-cuda", "--size", "256KiB", "--strict"];
    ends(&validate(&excluded), 0);
    let junit = ends(&validate(&[&quick[..], &["--strict", "--junit"]].concat()), 1);
    assert!(junit.contains("name=\"required\"") && junit.contains("<failure"), "{junit}");
}

#[test]
fn a_required_group_passes_whatever_a_machine_skips_beside_its_core() {
    let words = ["--select", "memory,numa", "--size", "256KiB", "--arg", "memory.rounds=1"];
    let text = ends(&validate(&[&words[..], &["--require", "memory,numa"]].concat()), 0);
    let row = text.lines().find(|line| line.starts_with("required ")).unwrap();
    assert!(row.contains("passed") && row.contains("5 validations"), "{row}");
    let listed = ends(&validate(&["--list", "--select", "memory,numa"]), 0);
    let marked = listed.lines().filter(|line| line.split_whitespace().nth(1) == Some("*"));
    assert_eq!(marked.count(), 5, "{listed}");
}

#[test]
fn a_run_is_a_document_with_machine_and_seeds_and_the_seed_repeats_it() {
    let folder = tempfile::tempdir().unwrap();
    let words = [&QUICK[..], &["--seed", "5"]].concat();
    let one = run_of(&words, &folder.path().join("one.json"));
    let two = run_of(&words, &folder.path().join("two.json"));
    assert_eq!((one.seed, one.most, one.version), (5, 256 << 10, egm_guest::findings::RUN_VERSION));
    assert!(one.machine.cpus > 0 && one.machine.memory > 0 && one.date.ends_with('Z'), "{:?}", one.machine);
    let seeds = |run: &Run| run.verdicts.iter().map(|v| (v.name.clone(), v.seed)).collect::<Vec<_>>();
    assert_eq!(seeds(&one), seeds(&two));
    let alone =
        run_of(&["--select", "numa.distances", "--size", "256KiB", "--seed", "5"], &folder.path().join("3"));
    assert!(seeds(&one).contains(&seeds(&alone)[0]), "a seed is the same whatever else runs");
    for verdict in &one.verdicts {
        assert!(!verdict.reason.is_empty(), "{verdict:?}");
    }
}

#[test]
fn what_does_not_end_in_time_is_an_error_and_states_how_to_repeat_it() {
    let text = ends(
        &validate(&[&QUICK[..2], &["--arg", "deadline=0", "--seed", "3", "--size", "1MiB"]].concat()),
        1,
    );
    assert!(text.contains("did not end within 0 s and was killed"), "{text}");
    assert!(
        text.contains("again: egm-guest validate --select memory.pattern --seed 3 --size 1048576"),
        "{text}"
    );
    assert!(text.contains("0 passed, 0 failed, 0 skipped"), "{text}");
}

#[test]
fn an_argument_that_its_validation_cannot_read_is_an_error() {
    let text =
        ends(&validate(&["--select", "memory.bandwidth", "--arg", "memory.rounds=x", "--size", "64KiB"]), 1);
    assert!(text.contains("memory.rounds=x") && text.contains("1 errors"), "{text}");
}

#[test]
fn a_baseline_gives_ratios_and_fails_a_run_only_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("before.json");
    let quick = ["--select", "memory.bandwidth", "--size", "64KiB", "--arg", "memory.rounds=1"];
    let mut before = run_of(&quick, &file);
    assert_eq!(before.verdicts[0].outcome, Outcome::Passed);
    before.verdicts[0].figures.iter_mut().for_each(|figure| figure.value *= 1e6);
    fs::write(&file, before.to_json()).unwrap();
    let baseline = ["--baseline", file.to_str().unwrap()];
    let shown = ends(&validate(&[&quick[..], &baseline].concat()), 0);
    assert!(shown.contains(" of before") && shown.contains("worst against before"), "{shown}");
    let judged = ends(&validate(&[&quick[..], &baseline, &["--min-ratio", "0.5"]].concat()), 1);
    assert!(judged.contains("baseline.least") && judged.contains("are below 0.5"), "{judged}");
    // The option's earlier name.
    ends(&validate(&[&quick[..], &baseline, &["--least", "1e-12"]].concat()), 0);
    // A fast figure that is gone fails, however good the rest is.
    before.verdicts[0].figures[0].series = "read, node 99".into();
    fs::write(&file, before.to_json()).unwrap();
    let gone = ends(&validate(&[&quick[..], &baseline, &["--min-ratio", "1e-12"]].concat()), 1);
    assert!(gone.contains("1 series of the baseline are gone: memory.bandwidth: read, node 99"), "{gone}");
    let hostile = before.to_json().replacen("\"seed\"", "\"\\u001b[2J\": 1, \"seed\"", 1);
    fs::write(&file, hostile).unwrap();
    let refused = ends(&validate(&[&quick[..], &baseline].concat()), 2);
    assert!(refused.contains("unknown key"), "{refused}");
}

#[test]
fn junit_is_well_formed_and_has_a_case_for_each() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let output = validate(&[&QUICK[..], &["--junit", "--html", page.to_str().unwrap()]].concat());
    assert_eq!(output.status.code(), Some(0));
    let xml = String::from_utf8(output.stdout).unwrap();
    let (mut reader, mut cases) = (Reader::from_str(&xml), 0);
    loop {
        match reader.read_event().unwrap() {
            Event::Start(start) if start.name().as_ref() == b"testcase" => cases += 1,
            Event::Eof => break,
            _ => {}
        }
    }
    let listed = ends(&validate(&["--list", QUICK[0], QUICK[1]]), 0).lines().count();
    assert_eq!(cases, listed);
    let page = fs::read_to_string(page).unwrap();
    assert!(
        page.starts_with("<!doctype html>")
            && page.ends_with("</html>\n")
            && !page.contains("http:")
            && !page.contains("https:")
    );
}

#[test]
fn two_runs_stand_side_by_side() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.json");
    let path = file.to_str().unwrap();
    run_of(&["--select", "memory.latency", "--size", "64KiB", "--arg", "memory.rounds=1"], &file);
    let text = ends(&egm_guest(&["compare", path, path]), 0);
    assert!(text.contains("memory.latency: step") && text.contains("1.000"), "{text}");
    assert!(text.contains(" figures in both, ") && text.contains("no verdict changed"), "{text}");
    let json = ends(&egm_guest(&["compare", path, path, "--json"]), 0);
    let json: Value = serde_json::from_str(&json).unwrap();
    let ratios = json["ratios"].as_array().unwrap();
    assert!(!ratios.is_empty() && json["summary"]["figures"] == ratios.len(), "{json}");
    ends(&egm_guest(&["compare", path, path, "--rename", "step=step"]), 0);
    ends(&egm_guest(&["compare", path, path, "--rename", "nothing"]), 2);
    ends(&egm_guest(&["compare", path, "/nowhere"]), 2);
    ends(&egm_guest(&["compare", path]), 2);
    let page = folder.path().join("page.html");
    ends(&egm_guest(&["compare", path, path, "--html", page.to_str().unwrap()]), 0);
    assert!(fs::read_to_string(&page).unwrap().contains("the earlier run"));
    ends(&egm_guest(&["compare", path, path, "--html", "/nowhere/page.html"]), 2);
}

#[test]
fn a_file_that_is_no_run_is_refused_with_the_place_and_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("other.json");
    fs::write(&file, "{\n  \"egm-run\": 2,\n}\n").unwrap();
    let path = file.to_str().unwrap();
    let expected = format!(
        "error: {path}:2:15: cannot read a run: not JSON: a comma after the last entry\n  \
         2 |   \"egm-run\": 2,\n    |               ^\n  help: write one: egm-guest validate --json --out FILE\n"
    );
    for words in [&["report", path][..], &["compare", path, path]] {
        assert_eq!(ends(&egm_guest(words), 2), expected);
    }
    let none = ends(&egm_guest(&["report", "/nowhere"]), 2);
    assert!(
        none.starts_with("error: cannot open /nowhere: ") && none.contains("\n  help: write one"),
        "{none}"
    );
}

#[test]
fn a_run_is_reported_again_in_any_form() {
    let folder = tempfile::tempdir().unwrap();
    let (file, page) = (folder.path().join("run.json"), folder.path().join("page.html"));
    let (path, page_path) = (file.to_str().unwrap(), page.to_str().unwrap());
    let quick = ["--select", "memory.latency", "--size", "64KiB", "--arg", "memory.rounds=1"];
    let mut run = run_of(&quick, &file);
    assert_eq!(run.args, ["memory.rounds=1"]);
    let table = ends(&egm_guest(&["report", path, "--html", page_path]), 0);
    assert!(table.contains("1 passed, 0 failed") && table.contains(&format!("seed {}", run.seed)), "{table}");
    assert!(fs::read_to_string(&page).unwrap().contains("memory.latency"));
    assert_eq!(ends(&egm_guest(&["report", path, "--json"]), 0), run.to_json());
    assert!(ends(&egm_guest(&["report", path, "--junit"]), 0).contains("<testsuites"));
    assert!(
        ends(&egm_guest(&["report", path, "--baseline", path, "--min-ratio", "1"]), 0)
            .contains("1.000 of before")
    );
    run.verdicts[0].outcome = Outcome::Failed;
    fs::write(&file, run.to_json()).unwrap();
    let failed = ends(&egm_guest(&["report", path]), 1);
    assert!(failed.contains("--arg memory.rounds=1"), "{failed}");
    ends(&egm_guest(&["report", "/nowhere"]), 2);
    ends(&egm_guest(&["report", page_path]), 2);
}

/// The output of a program with `out` as its standard output.
fn into(words: &[&str], out: impl Into<Stdio>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_egm-guest"));
    command
        .args(words)
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
        .wait_with_output()
        .unwrap()
}

#[test]
fn a_reader_that_goes_is_no_error_and_a_full_disk_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.json");
    let path = file.to_str().unwrap();
    run_of(&["--select", "numa", "--size", "64KiB"], &file);
    for words in [
        &["validate", "--list"][..],
        &["validate", "--select", "numa"],
        &["doctor"],
        &["doctor", "--json"],
        &["checks"],
        &["compare", path, path],
        &["report", path],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        assert_eq!(ends(&into(words, writer), 0), "", "{words:?}");
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let said = ends(&into(words, full), 1);
        assert!(said.starts_with("error: cannot write standard output: No space left"), "{words:?}: {said}");
    }
    for option in ["--out", "--html"] {
        let said = ends(&validate(&["--select", "numa", option, "/dev/full"]), 1);
        assert!(said.contains("error: cannot write /dev/full: No space left"), "{said}");
    }
}

/// A folder with a `gdrcopy_sanity` that never ends; it writes its process id to the pipe `alive`, which it keeps open.
fn program_that_stays() -> (TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("gdrcopy_sanity");
    let alive = folder.path().join("alive");
    let hold = folder.path().join("hold");
    for pipe in [&alive, &hold] {
        assert!(Command::new("mkfifo").arg(pipe).status().unwrap().success());
    }
    let (alive_path, hold) = (alive.display(), hold.display());
    fs::write(&program, format!("#!/bin/sh\nexec 3>'{alive_path}'\necho $$ >&3\nread never <'{hold}'\n"))
        .unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    (folder, alive)
}

#[test]
fn what_a_validation_started_ends_with_the_run_however_that_ends() {
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let (folder, alive) = program_that_stays();
        let out = folder.path().join("run.json");
        fs::write(&out, "yesterday's").unwrap();
        let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap_or_default());
        let mut run = Command::new(env!("CARGO_BIN_EXE_egm-guest"))
            .args(["validate", "--select", "gdr.sanity", "--json", "--out", out.to_str().unwrap()])
            .env("PATH", path)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mut pipe = BufReader::new(fs::File::open(&alive).unwrap());
        let mut number = String::new();
        pipe.read_line(&mut number).unwrap();
        let program = Pid::from_raw(number.trim().parse().unwrap()).unwrap();
        rustix::process::kill_process(Pid::from_child(&run), signal).unwrap();
        assert!(!run.wait().unwrap().success());
        // The pipe ends when no process has it open any more; the program has nothing else that would end it.
        let (ended, end) = mpsc::channel();
        thread::spawn(move || ended.send(pipe.read_to_end(&mut Vec::new())));
        let end = end.recv_timeout(Duration::from_secs(60));
        if end.is_err() {
            let _ = rustix::process::kill_process(program, Signal::KILL);
        }
        assert!(end.is_ok_and(|end| end.is_ok()), "the program outlived {signal:?}");
        assert_eq!(fs::read_to_string(&out).unwrap(), "yesterday's");
    }
}

#[test]
fn the_doctor_has_lines_for_any_machine_and_a_recorded_one() {
    let text = ends(&egm_guest(&["doctor"]), 0);
    for topic in
        ["System\n", "hypervisor seen", "NUMA nodes", "EGM", "kernel", "GPU errors in dmesg", "RDMA\n"]
    {
        assert!(text.contains(topic), "{topic} in {text}");
    }
    let lines: Value = serde_json::from_slice(&egm_guest(&["doctor", "--json"]).stdout).unwrap();
    assert!(lines.as_array().is_some_and(|lines| lines.len() > 15), "{lines}");
    let folder = tempfile::tempdir().unwrap();
    let recorded = ends(&egm_guest(&["doctor", "--root", folder.path().to_str().unwrap()]), 0);
    for folded in ["GPU topics             no NVIDIA GPU", "RDMA topics            no RDMA device"] {
        assert_eq!(recorded.matches(folded).count(), 1, "{recorded}");
    }
    assert!(recorded.contains("not asked of a recorded machine"), "{recorded}");
    ends(&egm_guest(&["doctor", "--root", "/nowhere/at/all"]), 2);
}

#[test]
fn a_process_that_is_asked_for_nothing_known_reports_it() {
    ends(&egm_guest(&["part", "no.such"]), 2);
    ends(&egm_guest(&["validation", "no.such", "--seed", "1", "--most", "1"]), 0);
    ends(&egm_guest(&["probe", "strange"]), 2);
}
