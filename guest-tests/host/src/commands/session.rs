//! `egm-lab run` and `egm-lab demo`: decide where, run, show.

use std::ffi::OsStr;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use clap::Args;
use egm_report::show::{Screen, hanging};

use crate::engine::error::{LabError, chain};
use crate::engine::logs;
use crate::engine::peer_program::{PeerName, PeerProgram, find, of_scenario};
use crate::engine::results::{Count, ScenarioResult, junit, table};
use crate::engine::scenario::{FAULT_VARIABLE, Scenario, WITH_FAULT};
use crate::engine::shard::Shard;
use crate::hosts::capability::{Host, Where};
use crate::hosts::grace;
use crate::hosts::l1;
use crate::hosts::parts::GUEST;
use crate::images::cache::Cache;
use crate::images::debian::Architecture;
use crate::images::emulator::{self, Emulator};
use crate::images::kernel;
use crate::images::portable::Portable;
use crate::images::rdma_kit::Kit;
use crate::images::rootfs;
use crate::images::tools::{Sandbox, Tools};
use crate::runner::machine::{Runner, Vmm};
use crate::scenarios::{self, run_scenario};
use crate::skips::{Site, Skips};

/// Default folder for logs and results.
const REPORT: &str = ".lab";

/// Arguments of `egm-lab run`.
#[derive(Debug, Args)]
pub(crate) struct RunArguments {
    /// Scenarios to run [default: all that are not long].
    scenarios: Vec<String>,
    /// List the scenarios and their claims.
    #[arg(long)]
    list: bool,
    /// Run the long ones as well.
    #[arg(long)]
    full: bool,
    /// Run every Nth of the chosen scenarios, starting with the Ith.
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    /// Emulated hosts at a time [default: one for each processor, as far as memory goes].
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// Sandbox of the machines: strict, log or off [default: that of egm-vmm run].
    #[arg(long, value_name = "MODE", hide_possible_values = true)]
    sandbox: Option<Sandbox>,
    /// Plant this fault in the host's programs, which must be built for it: see scripts/test --faults.
    #[arg(long, value_name = "NAME")]
    fault: Option<String>,
    /// Where to run [default: kvm if this machine's KVM runs stock kernels, else lab].
    #[arg(long = "where", value_name = "HOST")]
    place: Option<Where>,
    /// Monitor that runs the guest.
    #[arg(long, default_value = "egm")]
    vmm: Vmm,
    /// Monitor that you provide for the scenario peer-NAME: cloud-hypervisor=PATH.
    #[arg(long = "peer", value_name = "NAME=PATH", value_parser = of_scenario)]
    peers: Vec<PeerProgram>,
    /// Write the results as JUnit XML as well.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Print the results as JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Folder for logs and results.
    #[arg(long, value_name = "DIR", default_value = REPORT)]
    report: PathBuf,
    /// Directory with the programs, the kernel and configs/, instead of those of the checkout.
    #[arg(long, hide = true)]
    tools: Option<PathBuf>,
    /// Folder for files of a running machine.
    #[arg(long, hide = true)]
    work: Option<PathBuf>,
}

impl RunArguments {
    /// Every option at its default, but for the folder of the report.
    fn plain(report: &Path) -> Self {
        Self {
            scenarios: Vec::new(),
            list: false,
            full: false,
            shard: None,
            jobs: None,
            sandbox: None,
            fault: None,
            place: None,
            vmm: Vmm::Egm,
            peers: Vec::new(),
            junit: None,
            json: false,
            report: report.to_owned(),
            tools: None,
            work: None,
        }
    }
}

/// Runs the scenarios `names`, and shows nothing but progress.
pub(crate) fn run_named(names: &[String], report: &Path) -> Result<Vec<ScenarioResult>, LabError> {
    run_each(&RunArguments::plain(report), &scenarios::select(names, false)?)
}

/// Runs scenarios and shows the results; exit code 1 when a check failed.
pub(crate) fn run(arguments: &RunArguments) -> Result<ExitCode, LabError> {
    if arguments.list {
        let screen = Screen::of_stdout();
        for scenario in scenarios::ALL {
            let summary = format!("{}{}", scenario.summary, if scenario.long { " (long)" } else { "" });
            let name = format!("{:<11} ", scenario.name);
            println!("{name}{}", hanging(&summary, name.len(), screen));
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut chosen = scenarios::select(&arguments.scenarios, arguments.full)?;
    if let Some(fault) = &arguments.fault {
        let names: Vec<_> = chosen.iter().map(|s| format!("{}{}{fault}", s.name, WITH_FAULT)).collect();
        chosen = scenarios::select(&names, false)?;
    }
    if let Some(shard) = arguments.shard {
        chosen = shard.of(chosen);
    }
    let results = run_each(arguments, &chosen)?;
    let json = keep(&results, &arguments.report)?;
    if let Some(path) = &arguments.junit {
        fs::write(path, junit(&results)).map_err(LabError::file("write", path))?;
    }
    if arguments.json {
        println!("{json}");
    } else {
        print!("{}", table(&results, Screen::of_stdout()));
    }
    Ok(conclude(&results, &arguments.report, arguments.json))
}

/// Runs the demo and shows the guest's memory nodes.
pub(crate) fn demo() -> Result<ExitCode, LabError> {
    let report = PathBuf::from(REPORT);
    let arguments = RunArguments::plain(&report);
    let results = run_each(&arguments, &scenarios::select(&["demo".into()], false)?)?;
    print!("{}", table(&results, Screen::of_stdout()));
    let nodes = results.iter().flat_map(|result| &result.cases).find(|case| case.name == "numa");
    println!("\nthe guest's memory nodes: {}\n", nodes.map_or("not reported", |case| &case.reason));
    Ok(conclude(&results, &report, false))
}

fn run_each(arguments: &RunArguments, chosen: &[Scenario]) -> Result<Vec<ScenarioResult>, LabError> {
    let RunArguments { report, jobs, .. } = arguments;
    fs::create_dir_all(report).map_err(LabError::file("make", report))?;
    let cache = || Cache::open();
    let place = place(arguments)?;
    let mut tools = match &arguments.tools {
        Some(directory) => Tools::copied(directory),
        None => Tools::of_checkout(&cache()?)?,
    };
    tools.sandbox = arguments.sandbox;
    let provided = find(&arguments.peers, PeerName::CloudHypervisor);
    tools.cloud_hypervisor = provided.as_deref().map(Portable::here).or(tools.cloud_hypervisor);
    let mut skipped = Vec::new();
    let mut chosen: Vec<Scenario> = chosen.to_vec();
    chosen.retain(|scenario| match grace::missing(scenario).or_else(|| without_peer(scenario, &tools)) {
        None => true,
        Some(why) => {
            skipped.push(ScenarioResult::skipped(scenario.name, &why));
            false
        }
    });
    if tools.root.is_none() && chosen.iter().any(|s| s.debian) {
        match rootfs::debian(&cache()?, GUEST) {
            Ok(image) => tools.root = Some(image),
            Err(error @ LabError::Host { .. }) => {
                skipped.extend(left_out(&mut chosen, |s| s.debian, &error.to_string()));
            }
            Err(error) => return Err(error),
        }
    }
    skipped.extend(obtain_kit(&mut tools, &mut chosen)?);
    if tools.generic.is_none() && chosen.iter().any(|s| s.generic) {
        tools.generic = Some(kernel::generic(&cache()?, false)?);
    }
    if chosen.iter().any(|s| s.on_this_machine) {
        match Emulator::of(&cache()?) {
            Ok(emulator) => tools.emulator = Some(emulator),
            Err(error) => skipped.extend(left_out(&mut chosen, |s| s.on_this_machine, &chain(&error))),
        }
    }
    // This machine's KVM runs no guests of another processor.
    let is_here = |s: &Scenario| s.on_this_machine || place == Where::Kvm && s.grace == grace::is_arm();
    let (here, there): (Vec<_>, Vec<_>) = chosen.into_iter().partition(is_here);
    let mut results =
        if there.is_empty() { Vec::new() } else { l1::run(&there, &tools, &cache()?, report, *jobs)? };
    let work = arguments.work.clone().unwrap_or_else(|| report.join("work"));
    let in_lab = arguments.tools.is_some();
    let options = arguments.peers.iter().map(|peer| peer.name().option()).collect();
    let mut runner = Runner {
        tools,
        vmm: arguments.vmm,
        work: absolute(&work)?,
        report: report.clone(),
        in_lab,
        skips: Skips::read()?,
        options,
    };
    let has_faults = here.iter().any(|scenario| scenario.fault.is_some());
    for scenario in &here {
        runner.tools.sandbox = arguments.sandbox.or_else(|| scenario.strict.then_some(Sandbox::Strict));
        results.push(match has_faults {
            false => run_scenario::run(&runner, scenario),
            true => in_own_process(scenario, arguments)?,
        });
        // Keeps the results so far, in case this machine (perhaps an emulated host) dies before the end.
        keep(&results, report)?;
    }
    let site = Site::of_this_host(in_lab, &runner.options);
    skipped.iter_mut().for_each(|result| runner.skips.judge(result, site));
    results.extend(skipped);
    Ok(results)
}

/// Runs a scenario in a process of its own. All children of that have its fault. Where some have one, all run so: a process
/// keeps its listeners, and the next process could not have their addresses.
fn in_own_process(scenario: &Scenario, arguments: &RunArguments) -> Result<ScenarioResult, LabError> {
    let name = scenario.name;
    let report = arguments.report.join(name);
    fs::create_dir_all(&report).map_err(LabError::file("make", &report))?;
    logs::remove(&report.join(l1::RESULTS))?;
    let lab = std::env::current_exe().map_err(LabError::file("find", "egm-lab"))?;
    let mut command = Command::new(&lab);
    command.args(["run", "--where", "kvm", "--report"]).arg(&report);
    if let Some(fault) = scenario.fault {
        command.env(FAULT_VARIABLE, fault.name);
    }
    command.args(arguments.sandbox.into_iter().flat_map(Sandbox::words));
    for (option, path) in [("--tools", &arguments.tools), ("--work", &arguments.work)] {
        command.args(path.iter().flat_map(|path| [OsStr::new(option), path.as_os_str()]));
    }
    let plain = scenario.fault.map_or(name, |fault| fault.of);
    // Its verdicts are in its results.
    command.arg(plain).stdout(Stdio::null()).status().map_err(LabError::file("run", lab))?;
    let done: Option<Vec<ScenarioResult>> =
        fs::read(report.join(l1::RESULTS)).ok().and_then(|json| serde_json::from_slice(&json).ok());
    let result = done.and_then(|results| results.into_iter().find(|result| result.scenario == plain));
    let result = result.unwrap_or_else(|| ScenarioResult::broken(name, "the scenario left no result"));
    Ok(ScenarioResult { scenario: name.into(), ..result })
}

/// Adds the RDMA kit for guests of this processor to `tools`. If that is unavailable, it removes their scenarios from
/// `chosen` and returns them as skipped.
fn obtain_kit(tools: &mut Tools, chosen: &mut Vec<Scenario>) -> Result<Vec<ScenarioResult>, LabError> {
    // Scenarios of the other processor have a kit of their own, in their emulated host.
    let has_kit = |s: &Scenario| s.rdma && s.grace == grace::is_arm();
    if tools.rdma.is_none() && chosen.iter().any(has_kit) {
        match Cache::open().and_then(|cache| Kit::of(Architecture::of_this_machine(), &cache)) {
            Ok(kit) => tools.rdma = Some(kit),
            Err(error @ LabError::Host { .. }) => {
                return Ok(left_out(chosen, has_kit, &error.to_string()));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(Vec::new())
}

/// Removes the scenarios with `property` from `chosen`, and returns them as skipped.
fn left_out(
    chosen: &mut Vec<Scenario>,
    property: impl Fn(&Scenario) -> bool,
    why: &str,
) -> Vec<ScenarioResult> {
    let without = chosen.extract_if(.., |scenario| property(scenario));
    without.map(|scenario| ScenarioResult::skipped(scenario.name, why)).collect()
}

/// Reason why `scenario` cannot run: it needs a monitor that the user did not provide.
fn without_peer(scenario: &Scenario, tools: &Tools) -> Option<String> {
    let is_provided = |name: PeerName| name == PeerName::CloudHypervisor && tools.cloud_hypervisor.is_some();
    scenario.peer.filter(|name| !is_provided(*name)).map(PeerName::absent)
}

/// The host that scenarios run on. One that this machine does not have is refused before anything is fetched for it.
fn place(arguments: &RunArguments) -> Result<Where, LabError> {
    let place = match (arguments.place, arguments.vmm) {
        (Some(place), _) => place,
        // A reference machine needs no KVM.
        (None, Vmm::Qemu) => Where::Kvm,
        (None, Vmm::Egm) => decide(&Cache::open()?)?,
    };
    if place == Where::Lab {
        emulator::supported()?;
    }
    Ok(place)
}

fn decide(cache: &Cache) -> Result<Where, LabError> {
    let host = Host::detect(Some(cache));
    host.place.ok_or_else(|| {
        let missing: Vec<_> = host.missing().map(|f| format!("{}: {}", f.name, f.detail)).collect();
        LabError::Host {
            what: "this host can run guests neither on its own nor in the lab".into(),
            remedy: missing.join("; "),
        }
    })
}

fn absolute(path: &Path) -> Result<PathBuf, LabError> {
    std::path::absolute(path).map_err(LabError::file("find", path))
}

/// Writes the results as JSON to the report directory, and returns that.
fn keep(results: &[ScenarioResult], report: &Path) -> Result<String, LabError> {
    let json = serde_json::to_string_pretty(results)
        .map_err(|error| LabError::Content { what: "results".into(), problem: error.to_string() })?;
    let path = report.join(l1::RESULTS);
    fs::write(&path, &json).map_err(LabError::file("write", path))?;
    Ok(json)
}

/// Prints the closing line, after the ends of the logs of failed scenarios; with `json` on standard error.
fn conclude(results: &[ScenarioResult], report: &Path, json: bool) -> ExitCode {
    let count = Count::of(results);
    let failed = results.iter().filter(|r| Count::of(std::slice::from_ref(*r)).failed > 0);
    let logs = failed.map(|result| (&result.scenario, report.join(&result.scenario)));
    let text: String = logs
        .map(|(scenario, logs)| format!("{}logs of {scenario}: {}\n", logs::ends(&logs), logs.display()))
        .collect();
    if json {
        eprintln!("{text}{count}");
    } else {
        println!("{text}{count}");
    }
    ExitCode::from(u8::from(count.failed > 0))
}
