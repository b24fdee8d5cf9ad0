//! Scenarios of a slice as a PCI function. The function is the monitor's own for one guest and from `egm-device serve`
//! for another; both guests report the same. The slice may be of any kind of memory.

use std::process::{Command, Stdio};

use egm_guest::findings::{Check, Line};

use crate::engine::boot::Boot;
use crate::engine::error::LabError;
use crate::engine::scenario::Scenario;
use crate::hosts::parts::Plan;
use crate::hosts::served::{Server, serve};
use crate::runner::machine::Runner;
use crate::runner::regions;
use crate::runner::steps::{Fault, Step, Steps};
use crate::slices::grant;

/// Socket of the server.
const SOCKET: &str = "/run/egm-slice.sock";
/// Memory that `mem=` and `memmap=` hide (`/dev/mem`), device-DAX as one file and split, huge pages, and KVM's own.
const KINDS: [&str; 6] = ["mem", "memmap", "dax0.0", "dax2", "hugetlb", "guest-memfd"];
/// The region of which a server has a slice by the ledger.
const LEASED: &str = "mem";

/// Boots a guest for each of the two.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let own = runner.boot(scenario, &runner.machine(scenario, report)?, report)?;
    steps.judge(scenario.expected, &own, "");
    let _server = serve_slice(runner, "memfd", scenario)?;
    let folder = steps.folder("served")?;
    let next = Scenario { region: None, servers: &[SOCKET], ..*scenario };
    let served = runner.boot(&next, &runner.machine(&next, &folder)?, &folder)?;
    steps.judge(scenario.expected, &served, " of a server");
    steps.step("same", || same(&own, &served));
    Ok(())
}

/// A slice of each kind of memory as the monitor's own function, then one that a server got by the host's ledger.
pub(crate) fn kinds(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, .. } = *steps;
    for region in KINDS {
        // A pool without pages is no region.
        let _pool = (region == "hugetlb").then(regions::pool).transpose()?;
        if regions::missing(runner, region)?.is_some() {
            steps.step(region, || Err(Fault::Undecided("this host has no such region")));
            continue;
        }
        let next = Scenario { region: Some(region), ..*scenario };
        let folder = steps.folder(region)?;
        let machine = runner.machine(&next, &folder)?;
        let boot = runner.boot(&next, &machine, &folder)?;
        steps.judge(scenario.expected, &boot, &format!(", {region}"));
        if machine.plan.as_ref().and_then(Plan::slice).is_some() {
            steps.step(&format!("zero for the next, {region}"), || {
                grant::next_finds_zeros(runner, region, scenario.slice_test.slice())
            });
        }
    }
    leased(steps)
}

/// A server of a slice in the ledger: other owners are refused it meanwhile, and its next owner finds zeros.
fn leased(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, .. } = *steps;
    if regions::missing(runner, LEASED)?.is_some() {
        steps.step("leased", || Err(Fault::Undecided("this host has no such region")));
        return Ok(());
    }
    let mut server = serve_slice(runner, LEASED, scenario)?;
    let folder = steps.folder("leased")?;
    let next = Scenario { servers: &[SOCKET], ..*scenario };
    let boot = runner.boot(&next, &runner.machine(&next, &folder)?, &folder)?;
    steps.judge(scenario.expected, &boot, ", leased");
    steps.step("no other owner has it", || {
        let output = grant::run_zeros(runner, LEASED, "1GiB")?;
        let said = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() && said.contains("held by ") {
            return Ok(());
        }
        Err(Fault::Untrue(format!("all of the region is asked for: {}, {said}", output.status)))
    });
    steps.step("the server ends well", || {
        server.request_slice()?;
        match server.wait()? {
            Some(0) => Ok(()),
            code => Err(Fault::Untrue(format!("its exit code is {code:?}"))),
        }
    });
    steps.step("zero for the next, leased", || {
        grant::next_finds_zeros(runner, LEASED, scenario.slice_test.slice())
    });
    Ok(())
}

/// `egm-device serve` of a slice of `region` at [`SOCKET`].
fn serve_slice(runner: &Runner, region: &str, scenario: &Scenario) -> Result<Server, LabError> {
    let mut command = Command::new(&runner.tools.device);
    command.args(["serve", "--region", region, "--pxm", "0", "--socket", SOCKET, "--size"]);
    command.arg(scenario.slice_test.slice());
    serve(command, Stdio::null())
}

/// Both guests reported the same, except for durations.
fn same(one: &Boot, other: &Boot) -> Step {
    let [one, other] = [one, other].map(checks_of);
    match one.iter().zip(&other).find(|(one, other)| one != other) {
        _ if one.is_empty() || one.len() != other.len() => {
            Err(Fault::Untrue(format!("{} and {} checks", one.len(), other.len())))
        }
        Some((one, other)) => Err(Fault::Untrue(format!("{one:?} became {other:?}"))),
        None => Ok(()),
    }
}

fn checks_of(boot: &Boot) -> Vec<Check> {
    let checks = boot.collected.lines.iter().filter_map(|line| match line {
        Line::Check(check) => Some(Check { millis: 0, ..check.clone() }),
        _ => None,
    });
    checks.collect()
}
