//! The story of a slice as a PCI function: a guest of a monitor that has it itself, and one of a monitor that has it from
//! `egm-device serve`, report the same.

use std::path::Path;
use std::process::Command;

use egm_report::{Check, Line};

use crate::error::LabError;
use crate::frame::{Fault, Frame, Step};
use crate::run::Boot;
use crate::scenarios::Scenario;
use crate::served::serve;

/// Where the server is.
const SOCKET: &str = "/run/egm-slice.sock";

/// Boots a guest for each of the two.
pub(crate) fn run(frame: &mut Frame<'_>) -> Result<(), LabError> {
    let Frame { runner, scenario, report, .. } = *frame;
    let own = runner.boot(scenario, &runner.machine(scenario, report)?, report)?;
    frame.judge(scenario.expected, &own, "");
    let program = &runner.tools.device;
    let mut command = Command::new(program);
    command.args(["serve", "--region", "memfd", "--pxm", "0", "--socket", SOCKET, "--size"]);
    command.arg(scenario.tale.slice());
    let _server = serve(command, program, Path::new(SOCKET))?;
    let folder = frame.folder("served")?;
    let next = Scenario { region: None, servers: &[SOCKET], ..*scenario };
    let served = runner.boot(&next, &runner.machine(&next, &folder)?, &folder)?;
    frame.judge(scenario.expected, &served, " of a server");
    frame.step("same", || same(&own, &served));
    Ok(())
}

/// Both guests said the same, but for the time that it took.
fn same(one: &Boot, other: &Boot) -> Step {
    let [one, other] = [one, other].map(said);
    match one.iter().zip(&other).find(|(one, other)| one != other) {
        _ if one.is_empty() || one.len() != other.len() => {
            Err(Fault::Untrue(format!("{} and {} checks", one.len(), other.len())))
        }
        Some((one, other)) => Err(Fault::Untrue(format!("{one:?} became {other:?}"))),
        None => Ok(()),
    }
}

fn said(boot: &Boot) -> Vec<Check> {
    let checks = boot.collected.lines.iter().filter_map(|line| match line {
        Line::Check(check) => Some(Check { millis: 0, ..check.clone() }),
        _ => None,
    });
    checks.collect()
}
