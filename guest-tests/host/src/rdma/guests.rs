//! Scenario: RDMA. A guest with an assigned network card moves data between two queue pairs of its own, in ordinary
//! memory and in its EGM node; then two guests, each with a card and a slice, move data into each other's EGM node.

use std::path::Path;
use std::{fs, thread};

use egm_guest::findings::{Check, Line, Outcome, Run};

use crate::engine::error::LabError;
use crate::engine::judge::Expected;
use crate::engine::scenario::Scenario;
use crate::runner::machine::Machine;
use crate::runner::steps::{Fault, Step, Steps};

/// Kernel words of both guests of a pair: only the connection, in memory of the EGM node, with time for both to boot.
macro_rules! pair {
    ($words:literal) => {
        concat!(
            "egm.checks=numa egm.validate=rdma.device,rdma.pair egm.arg.rdma.node=1 egm.arg.rdma.timeout=600 ",
            "egm.arg.deadline=1200 egm.arg.size=65536 quiet ",
            $words
        )
    };
}
pub(crate) use pair;

/// Words of one that waits and of one that connects, by their cards.
pub(crate) type Words = [&'static str; 2];

/// Words for assigned cards, which are at one hub.
const AT_HUB: Words = [
    pair!("egm.arg.rdma.rxe=192.168.101.12/24 egm.arg.rdma.listen=192.168.101.12:7471 lapic=notscdeadline"),
    pair!("egm.arg.rdma.rxe=192.168.101.13/24 egm.arg.rdma.peer=192.168.101.12:7471 lapic=notscdeadline"),
];
/// Words for cards at taps, between which the host forwards packets.
const AT_TAPS: Words = [
    pair!("egm.arg.rdma.rxe=192.168.100.2/24 egm.arg.rdma.listen=192.168.100.2:7471 lapic=notscdeadline"),
    pair!("egm.arg.rdma.rxe=192.168.100.3/24 egm.arg.rdma.peer=192.168.100.2:7471 lapic=notscdeadline"),
];

/// Runs the scenario with its two cards.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let ([first, second], [listens, connects]) = with_a_card_each(steps.scenario)?;
    alone(steps, first)?;
    let expected = Expected::power_off(&["numa", "rdma.device", "rdma.pair"]);
    let guests = [("listens", first, listens), ("connects", second, connects)]
        .map(|(name, guest, words)| Scenario { name, words, expected, ..guest });
    let runner = steps.runner;
    let boots = together(steps, &guests, |guest, machine, folder| runner.boot(guest, machine, folder))?;
    for (scenario, boot) in guests.iter().zip(boots) {
        steps.judge(scenario.expected, &boot, &format!(" ({})", scenario.name));
    }
    if !steps.scenario.assigned.is_empty() {
        steps.free();
        steps.no_faults("no-dma-faults");
    }
    Ok(())
}

/// One guest by itself: its scenario's checks, the output of doctor, and the document of its run.
pub(crate) fn alone(steps: &mut Steps<'_>, guest: Scenario) -> Result<(), LabError> {
    let guest = Scenario { name: "alone", ..guest };
    let folder = steps.folder(guest.name)?;
    let machine = steps.runner.machine(&guest, &folder)?;
    let boot = steps.runner.boot(&guest, &machine, &folder)?;
    steps.judge(guest.expected, &boot, "");
    steps.step("doctor", || doctor(&boot.collected.lines));
    steps.step("document", || document(&fs::read_to_string(folder.join("console.log"))?));
    Ok(())
}

/// Runs `boot` for both `guests` at once. They are planned one after the other, because each plan takes free memory.
pub(crate) fn together<T: Send>(
    steps: &Steps<'_>,
    guests: &[Scenario; 2],
    boot: impl Fn(&Scenario, &Machine, &Path) -> Result<T, LabError> + Sync,
) -> Result<[T; 2], LabError> {
    let [one, other] = guests;
    let folders = [steps.folder(one.name)?, steps.folder(other.name)?];
    let machines = [steps.runner.machine(one, &folders[0])?, steps.runner.machine(other, &folders[1])?];
    thread::scope(|scope| {
        let second = scope.spawn(|| boot(other, &machines[1], &folders[1]));
        let first = boot(one, &machines[0], &folders[0]);
        let second =
            second.join().unwrap_or_else(|_| Err(LabError::Usage("a guest's thread panicked".into())));
        Ok([first?, second?])
    })
}

/// A line of `egm-guest doctor` that a guest must report.
struct Fact {
    name: &'static str,
    outcome: Outcome,
    /// Part of its reason.
    reason: &'static str,
}

impl Fact {
    const fn available(name: &'static str, reason: &'static str) -> Self {
        Self { name, outcome: Outcome::Passed, reason }
    }

    const fn unavailable(name: &'static str, reason: &'static str) -> Self {
        Self { name, outcome: Outcome::Skipped, reason }
    }

    fn is_in(&self, check: &Check) -> bool {
        check.name == self.name && check.outcome == self.outcome && check.reason.contains(self.reason)
    }
}

/// Output of `egm-guest doctor` in a guest with software RDMA and without a GPU: the true state of each item, and no
/// line about a library that died.
fn doctor(lines: &[Line]) -> Step {
    const REQUIRED: [Fact; 8] = [
        Fact::available("doctor.rdma_devices", "rxe0 (no PCI function, software)"),
        Fact::available("doctor.uverbs", "uverbs0"),
        Fact::available("doctor.rdma_port", "ACTIVE"),
        Fact::available("doctor.gid_table", "(RoCE v2)"),
        Fact::unavailable("doctor.mtu", "1500"),
        Fact::unavailable("doctor.rdma_dma-buf", "rxe0 does not"),
        Fact::unavailable("doctor.nvidia_driver", "not applicable"),
        Fact::unavailable("doctor.gpu_bar1", "not applicable"),
    ];
    let reported: Vec<&Check> = lines
        .iter()
        .filter_map(|line| match line {
            Line::Check(check) if check.name.starts_with("doctor.") => Some(check),
            _ => None,
        })
        .collect();
    let missing = REQUIRED.iter().filter(|fact| !reported.iter().any(|check| fact.is_in(check)));
    let missing: Vec<&str> = missing.map(|fact| fact.name).collect();
    let died: Vec<&str> = reported
        .iter()
        .filter(|check| check.reason.contains("ended without an answer") || check.outcome == Outcome::Error)
        .map(|check| check.name.as_str())
        .collect();
    match (missing.is_empty(), died.is_empty()) {
        (true, true) => Ok(()),
        (false, _) => Err(Fault::Untrue(format!("not as expected: {}", missing.join(", ")))),
        (_, false) => {
            Err(Fault::Untrue(format!("a library ended while it was queried: {}", died.join(", "))))
        }
    }
}

/// The document of the guest's run, as it wrote it on its console: it is one, and has our figure and that of `ib_write_bw` for
/// each size.
fn document(console: &str) -> Step {
    let line = console.lines().find(|line| line.starts_with("{\"egm-run\":"));
    let run = Run::parse(line.ok_or("the guest wrote no document")?.as_bytes())?;
    let perftest = run.verdicts.iter().find(|verdict| verdict.name == "rdma.perftest");
    let figures = perftest.map(|verdict| verdict.figures.as_slice()).unwrap_or_default();
    let of = |series: &str| -> Vec<Option<u64>> {
        figures.iter().filter(|f| f.series == series && f.value > 0.0).map(|figure| figure.bytes).collect()
    };
    let (theirs, ours) = (of("ib_write_bw"), of("rdma write, beside it"));
    if theirs.is_empty() || theirs != ours {
        return Err(Fault::Untrue(format!("ib_write_bw has figures for {theirs:?}, ours are for {ours:?}")));
    }
    Ok(())
}

/// The scenario with one card and with the other, and the words for their connection.
pub(crate) fn with_a_card_each(scenario: &Scenario) -> Result<([Scenario; 2], Words), LabError> {
    let (assigned, taps) = (scenario.assigned, scenario.taps);
    match (assigned.split_at_checked(1), taps.split_at_checked(1)) {
        (Some((first, second)), None) if second.len() == 1 => {
            Ok(([first, second].map(|assigned| Scenario { assigned, ..*scenario }), AT_HUB))
        }
        (None, Some((first, second))) if second.len() == 1 => {
            Ok(([first, second].map(|taps| Scenario { taps, ..*scenario }), AT_TAPS))
        }
        _ => Err(LabError::Usage("this scenario needs two cards".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, outcome: Outcome, reason: &str) -> Line {
        let reason = reason.to_owned();
        Line::Check(Check { name: name.into(), outcome, value: None, unit: None, reason, millis: 1 })
    }

    fn healthy() -> Vec<Line> {
        vec![
            line("doctor.rdma_devices", Outcome::Passed, "rxe0 (no PCI function, software)"),
            line("doctor.uverbs", Outcome::Passed, "/dev/infiniband: uverbs0"),
            line("doctor.rdma_port", Outcome::Passed, "rxe0 port 1: 4: ACTIVE"),
            line("doctor.gid_table", Outcome::Passed, "::ffff (RoCE v2) at index 1"),
            line("doctor.mtu", Outcome::Skipped, "lacks: rxe0 on eth0: 1500 => raise it"),
            line("doctor.rdma_dma-buf", Outcome::Skipped, "lacks: rxe0 does not => mlx5"),
            line("doctor.nvidia_driver", Outcome::Skipped, "not applicable: no GPU"),
            line("doctor.gpu_bar1", Outcome::Skipped, "not applicable: no GPU"),
        ]
    }

    #[test]
    fn each_line_of_doctor_is_required_and_none_of_a_library_that_died() {
        assert!(doctor(&healthy()).is_ok());
        for without in 0..healthy().len() {
            let mut lines = healthy();
            lines.remove(without);
            assert!(doctor(&lines).is_err(), "{without}");
        }
        let mut lines = healthy();
        lines.push(line(
            "doctor.attributes",
            Outcome::Skipped,
            "unknown: ended without an answer, signal: 11",
        ));
        assert!(doctor(&lines).is_err());
    }

    #[test]
    fn a_document_has_both_figures_of_each_size() {
        let figure = |series: &str, value: f64| {
            egm_guest::findings::Figure::of(series, Some(4096), "GB/s", &mut [value])
        };
        let text = |figures| {
            let verdict = egm_guest::findings::Verdict {
                name: "rdma.perftest".into(),
                claim: String::new(),
                outcome: Outcome::Passed,
                reason: String::new(),
                value: None,
                unit: None,
                figures,
                seed: 1,
                millis: 1,
            };
            let run = Run {
                version: egm_guest::findings::RUN_VERSION,
                date: String::new(),
                program: String::new(),
                seed: 1,
                most: 1,
                args: Vec::new(),
                machine: egm_guest::findings::Machine::default(),
                verdicts: vec![verdict],
            };
            format!("noise\r\n{}\r\n", run.to_line())
        };
        let both = vec![figure("ib_write_bw", 0.1), figure("rdma write, beside it", 0.1)];
        assert!(document(&text(both.clone())).is_ok());
        assert!(document(&text(both[..1].to_vec())).is_err());
        assert!(document(&text(Vec::new())).is_err());
        assert!(document("nothing").is_err());
    }
}
