//! Scenario of trust domains: a GPU is refused while another owner has a slice of its region, and a slice while another
//! owner has the GPU. In one domain, which an operator names, both run, and the GPU's guest accesses that slice.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use crate::engine::error::LabError;
use crate::engine::scenario::Scenario;
use crate::hosts::physical::Physical;
use crate::runner::machine::Runner;
use crate::runner::refusal::{HOST_LACKS, refused};
use crate::runner::regions;
use crate::runner::steps::{Fault, Step, Steps};

/// The trust domain of both.
const DOMAIN: &str = "lab";
/// Region of the machine's own slice, which the GPU does not reach.
const ELSEWHERE: &str = "egm5";
/// Name of the slice's owner, and bytes of its slice.
const NEIGHBOUR: &str = "neighbour";
const SIZE: &str = "64MiB";
/// Line of the agent's check `egm_aperture`, the value that it searches for, and the value that it writes after it.
const WAITS: &str = "egm-aperture waits";
const MARK: u64 = 0x7275_6f62_6867_6965;
const ANSWER: u64 = 0x6465_6863_6165_7221;

/// Runs the scenario of the first function of `scenario`, a GPU.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, region, report, .. } = *steps;
    let gpu = scenario.assigned.first().copied().unwrap_or_default();
    // Planned while the region is free. The machine has no slice of it: a GPU is enough.
    let machine = runner.machine(&Scenario { region: Some(ELSEWHERE), ..*scenario }, report)?;
    steps.step("GPU refused", || {
        let _neighbour = Neighbour::start(runner, region, None)?;
        refused(&mut runner.command(&machine), HOST_LACKS, &[gpu, region, NEIGHBOUR, "of no trust domain"])
    });
    let mut command = runner.command(&machine);
    command.args(["--trust-domain", DOMAIN]);
    let mut neighbour = None;
    let boot = runner.boot_by(command, scenario, &machine, report, |line| {
        if neighbour.is_none() && line.contains(WAITS) {
            steps.step("slice refused", || refused_grant(runner, region, scenario.name));
            neighbour = Some(Neighbour::start(runner, region, Some(DOMAIN)));
        }
    })?;
    steps.judge(scenario.expected, &boot, "");
    steps.step("written", || match neighbour {
        Some(neighbour) => neighbour?.answered(),
        None => Err("the guest did not come to look for a neighbour".into()),
    });
    steps.free();
    steps.no_faults("no-dma-faults");
    Ok(())
}

/// An owner without a trust domain gets no slice while machine `name` has the GPU.
fn refused_grant(runner: &Runner, region: &str, name: &str) -> Step {
    let mut command = Command::new(&runner.tools.device);
    command.args(["carve", "grant", "--region", region, "--size", SIZE, "--name", NEIGHBOUR, "--", "true"]);
    refused(&mut command, HOST_LACKS, &["the region is exclusive to", name])
}

/// An owner of a slice, which returns it when this value is dropped.
struct Neighbour {
    process: Child,
    /// First page of the slice.
    page: Physical,
}

impl Neighbour {
    /// Takes a slice of `region` in `domain` and marks it.
    fn start(runner: &Runner, region: &str, domain: Option<&str>) -> Result<Self, Fault> {
        let mut command = Command::new(&runner.tools.device);
        command.args(["carve", "grant", "--region", region, "--size", SIZE, "--name", NEIGHBOUR]);
        command.args(domain.iter().flat_map(|domain| ["--trust-domain", domain]));
        command.args(["--", "/bin/sh", "-c", "echo $EGM_SLICE_OFFSET; read end"]);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().ok_or("no output")?).read_line(&mut line)?;
        let offset: u64 = line.trim().parse().map_err(|_| format!("no offset of a slice: {line}"))?;
        let memory = File::options().read(true).write(true).open("/dev/mem")?;
        let page = Physical::map_writable(&memory, regions::base(runner, region)? + offset, 4096)?;
        page.set_word(0, MARK).ok_or("no such word")?;
        Ok(Self { process, page })
    }

    /// The guest of the GPU wrote to the slice.
    fn answered(&self) -> Step {
        match (self.page.word(0), self.page.word(8)) {
            (Some(MARK), Some(ANSWER)) => Ok(()),
            words => Err(Fault::Untrue(format!("the slice begins with {words:x?}"))),
        }
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        // Its command ends with its input.
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}
