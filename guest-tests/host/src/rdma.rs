//! The story of RDMA: a guest with a passed network card moves data between two queue pairs of its own, in ordinary memory and
//! in its EGM node; then two guests, each with a card and a slice, move data into each other's EGM node.

use std::thread;

use crate::error::LabError;
use crate::frame::Frame;
use crate::judge::Expected;
use crate::run::{Boot, Machine};
use crate::scenarios::Scenario;

/// What both guests of the pair are told: nothing but the connection, in memory of the EGM node, with time for the other to boot.
macro_rules! pair {
    ($words:literal) => {
        concat!(
            "egm.checks=numa egm.validate=rdma.device,rdma.pair egm.arg.rdma.node=1 egm.arg.rdma.patience=600 ",
            "egm.arg.deadline=1200 egm.arg.size=1048576 lapic=notscdeadline quiet ",
            $words
        )
    };
}

/// The one that waits.
const LISTENS: &str = pair!("egm.arg.rdma.rxe=192.168.101.12/24 egm.arg.rdma.listen=192.168.101.12:7471");
/// The one that connects.
const CONNECTS: &str = pair!("egm.arg.rdma.rxe=192.168.101.13/24 egm.arg.rdma.peer=192.168.101.12:7471");

/// Tells the story of the two cards of `scenario`.
pub(crate) fn run(frame: &mut Frame<'_>) -> Result<(), LabError> {
    let [first, second] = scenario_cards(frame)?;
    let alone = Scenario { name: "alone", passed: first, ..*frame.scenario };
    let (machine, boot) = one(frame, &alone)?;
    drop(machine);
    frame.judge(alone.expected, &boot, "");
    let expected = Expected { exit: 0, summary: true, checks: &["numa", "rdma.device", "rdma.pair"] };
    let guests = [("listens", first, LISTENS), ("connects", second, CONNECTS)]
        .map(|(name, passed, words)| Scenario { name, passed, words, expected, ..*frame.scenario });
    let [listens, connects] = &guests;
    // Planned one after the other: each takes what is free.
    let folders = [frame.folder(listens.name)?, frame.folder(connects.name)?];
    let runner = frame.runner;
    let machines = [runner.machine(listens, &folders[0])?, runner.machine(connects, &folders[1])?];
    let boots = thread::scope(|scope| {
        let other = scope.spawn(|| runner.boot(connects, &machines[1], &folders[1]));
        let one = runner.boot(listens, &machines[0], &folders[0]);
        [one, other.join().unwrap_or_else(|_| Err(LabError::Usage("a guest's thread panicked".into())))]
    });
    for (scenario, boot) in guests.iter().zip(boots) {
        frame.judge(scenario.expected, &boot?, &format!(" ({})", scenario.name));
    }
    frame.free();
    frame.no_faults("no-dma-faults");
    Ok(())
}

/// The cards of the scenario, each alone.
fn scenario_cards(frame: &Frame<'_>) -> Result<[&'static [&'static str]; 2], LabError> {
    match frame.scenario.passed.split_at_checked(1) {
        Some((first, second)) if second.len() == 1 => Ok([first, second]),
        _ => Err(LabError::Usage("this story is of two cards".into())),
    }
}

fn one(frame: &Frame<'_>, scenario: &Scenario) -> Result<(Machine, Boot), LabError> {
    let folder = frame.folder(scenario.name)?;
    let machine = frame.runner.machine(scenario, &folder)?;
    let boot = frame.runner.boot(scenario, &machine, &folder)?;
    Ok((machine, boot))
}
