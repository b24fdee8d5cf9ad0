//! Rounds that wait for a turn.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

use egm_guest::findings::Outcome;

use super::{build, run};

/// Two validations with rounds that wait; one also measures what cannot be measured in turn: pages that arrive.
const SELECT: &str = "cuda.managed.bandwidth,cuda.pinned.latency";
const ARRIVE: &str = "of pages that processors wrote";

/// Number of events, by series and size.
type Times = BTreeMap<String, u32>;

/// How often turns were asked for, and seconds reported, until the line `end`.
fn serve_turns(listener: &UnixListener) -> (Times, Times) {
    let (mut asked, mut reported, mut now) = (Times::new(), Times::new(), String::new());
    loop {
        let mut stream = BufReader::new(listener.accept().unwrap().0);
        let mut line = String::new();
        while stream.read_line(&mut line).unwrap() > 0 {
            if line == "end\n" {
                return (asked, reported);
            }
            if let Some(seconds) = line.strip_prefix("took\t") {
                assert!(seconds.trim_end().parse::<f64>().is_ok_and(|seconds| seconds > 0.0), "{line}");
                *reported.entry(now.clone()).or_default() += 1;
            } else {
                line.trim_end().clone_into(&mut now);
                *asked.entry(now.clone()).or_default() += 1;
                stream.get_mut().write_all(b"\n").unwrap();
            }
            line.clear();
        }
    }
}

#[test]
fn every_round_waits_for_its_turn_and_is_named_as_its_figure_is() {
    let Some(fakes) = build::fakes() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("turns");
    let listener = UnixListener::bind(&path).unwrap();
    let server = thread::spawn(move || serve_turns(&listener));
    let turns = format!("turns={}", path.display());
    let verdicts = run(&fakes, &fakes.folder, (1, SELECT, None, 7), &["--arg", &turns]);
    UnixStream::connect(&path).unwrap().write_all(b"end\n").unwrap();
    let (asked, reported) = server.join().unwrap();

    let mut should = BTreeMap::new();
    for verdict in verdicts.values() {
        assert_eq!(verdict.outcome, Outcome::Passed, "{}: {}", verdict.name, verdict.reason);
        for figure in verdict.figures.iter().filter(|figure| !figure.series.ends_with(ARRIVE)) {
            // One more round than count.
            should.insert(format!("{}\t{}", figure.series, figure.bytes.unwrap()), figure.rounds + 1);
        }
    }
    assert!(should.len() >= 9, "{should:?}");
    assert_eq!((&asked, &reported), (&should, &should));
}

#[test]
fn a_giver_of_turns_that_is_not_there_is_an_error_that_names_it() {
    let Some(fakes) = build::fakes() else { return };
    let verdicts = run(&fakes, &fakes.folder, (1, SELECT, None, 7), &["--arg", "turns=/nowhere/at/all"]);
    for verdict in verdicts.values() {
        assert_eq!(verdict.outcome, Outcome::Error, "{}: {}", verdict.name, verdict.reason);
        assert!(verdict.reason.contains("/nowhere/at/all"), "{}", verdict.reason);
    }
}
