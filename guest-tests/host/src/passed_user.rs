//! The story of a function behind a vfio-user server: its engine and the host's reach what the guest has where it has it; and
//! a guest whose server dies reads ones and goes on.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::LabError;
use crate::judge::{Expected, judge};
use crate::passed::{self, dmar_faults, free, missing, no_faults_since};
use crate::results::ScenarioResult;
use crate::run::Runner;
use crate::scenarios::Scenario;
use crate::served::{Card, GPU, Server, start};
use crate::slices::{Fault, Step, timed};

/// A GPU in a host that is small itself.
const SMALL: Card = Card { bar: 1 << 10, memory: 16, ..GPU };
/// The second guest sees its function go.
const LOST: &str = "egm.checks=function_lost quiet";
/// What it says when the server may die.
const MARK: &[u8] = b"egm-lost waits";
/// What the VMM says of it.
const WORDS: &str = "is gone: it is taken from the guest";

/// Tells the story of the servers of `scenario`.
pub(crate) fn run(runner: &Runner, scenario: &Scenario, report: &Path) -> Result<ScenarioResult, LabError> {
    if let Some(why) = missing(scenario) {
        return Ok(ScenarioResult::skipped(scenario.name, &why));
    }
    let begun = Instant::now();
    let faults = dmar_faults()?;
    let servers = serve(runner, scenario)?;
    let machine = runner.machine(scenario, report)?;
    let boot = runner.boot(scenario, &machine, report)?;
    let mut cases = judge(scenario.expected, &boot.collected);
    let expected = Expected { checks: &["function_lost"], ..scenario.expected };
    let next = Scenario { words: LOST, expected, ..*scenario };
    let folder = report.join("lost");
    fs::create_dir_all(&folder).map_err(LabError::file("make", &folder))?;
    let machine = runner.machine(&next, &folder)?;
    let second = end_when(&folder.join("console.log"), servers, || runner.boot(&next, &machine, &folder))?;
    cases.extend(judge(expected, &second.collected));
    cases.push(timed("told", || told(&folder)));
    cases.push(timed("free", || scenario.passed.iter().try_for_each(|function| free(function))));
    cases.push(timed("no-dma-faults", || no_faults_since(faults)));
    let millis = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    Ok(ScenarioResult { scenario: scenario.name.into(), cases, init_millis: boot.init, millis })
}

/// Tells the story of the emulated host's cards, which are functions like any other here.
pub(crate) fn plugged(
    runner: &Runner,
    scenario: &Scenario,
    report: &Path,
) -> Result<ScenarioResult, LabError> {
    passed::run(runner, scenario, report)
}

/// A GPU at each socket.
fn serve(runner: &Runner, scenario: &Scenario) -> Result<Vec<Server>, LabError> {
    scenario.servers.iter().map(|socket| start(&runner.tools.function, SMALL, Path::new(socket))).collect()
}

/// Does `work`, and ends `servers` as soon as the guest's mark is in `console`.
fn end_when<T>(console: &Path, servers: Vec<Server>, work: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) && !holds(console, MARK) {
                thread::sleep(Duration::from_millis(50));
            }
            drop(servers);
        });
        let done = work();
        over.store(true, Ordering::Relaxed);
        done
    })
}

fn holds(file: &Path, mark: &[u8]) -> bool {
    fs::read(file).is_ok_and(|bytes| bytes.windows(mark.len()).any(|part| part == mark))
}

/// The operator was told, once.
fn told(report: &Path) -> Step {
    let said = fs::read_to_string(report.join("vmm.log"))?;
    match said.matches(WORDS).count() {
        1 => Ok(()),
        count => Err(Fault::Untrue(format!("the VMM says {count} times that {WORDS}: {said}"))),
    }
}
