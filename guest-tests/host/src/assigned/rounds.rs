//! Scenario: many machines with one function, in turn, which end in every possible way: the host keeps nothing of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use egm_fixtures::payload::{Entry, Payload, Ports};

use crate::assigned::payload::{devices, payload};
use crate::engine::error::LabError;
use crate::engine::judge::case;
use crate::engine::process::{Ending, Limit, Reaction, watch};
use crate::engine::progress::Stage;
use crate::engine::scenario::Scenario;
use crate::hosts::functions::free;
use crate::runner::machine::Runner;
use crate::runner::steps::{Fault, Step, Steps};

/// Rounds before the host's first measurement: they fill its caches.
const FIRST: u32 = 10;
/// Rounds between the two measurements of the host.
const ROUNDS: u32 = 100;
/// Bytes of free memory that the host may lose: far less than a machine's memory, and than the mapping of its function.
const SLACK: u64 = 24 << 20;
/// Longest time in which the kernel frees memory of processes that have ended, and the time between two looks at it.
const FREED_WITHIN: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(500);
/// The guest prints this when it runs.
const READY: &str = "ready";

/// End of a round.
#[derive(Debug, Clone, Copy)]
enum End {
    PowerOff,
    Terminated,
    Killed,
}

/// Runs the scenario for its one function.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let machines = Machines::new(runner, scenario, report)?;
    let mut wrong = machines.rounds(FIRST)?;
    let before = Host::now()?;
    wrong.extend(machines.rounds(ROUNDS)?);
    let after = Host::after(&before)?;
    steps.cases.push(case("rounds", wrong.into_iter().next(), 0));
    steps.step("memory", || before.memory_is_back(&after));
    steps.step("files", || before.files_are_back(&after));
    steps.free();
    steps.no_faults("no-dma-faults");
    Ok(())
}

struct Machines<'a> {
    runner: &'a Runner,
    scenario: &'a Scenario,
    report: &'a Path,
    /// Configurations of machines with a guest that powers off, and one that halts.
    ends: PathBuf,
    sleeps: PathBuf,
}

impl<'a> Machines<'a> {
    fn new(runner: &'a Runner, scenario: &'a Scenario, report: &'a Path) -> Result<Self, LabError> {
        let mut ends = Payload::new(Ports::USUAL);
        ends.print(&format!("{READY}\n"));
        ends.power_off();
        let machine = |name, elf: &[u8]| payload(runner, scenario, name, elf, devices(scenario.assigned));
        let ends = machine("ends", &ends.finish(Entry::Pvh))?;
        let sleeps = machine("sleeps", &egm_fixtures::payload::halt(Ports::USUAL))?;
        Ok(Self { runner, scenario, report, ends, sleeps })
    }

    /// Faults of `count` machines, one after the other.
    fn rounds(&self, count: u32) -> Result<Vec<String>, LabError> {
        let mut wrong = Vec::new();
        let ways = [End::PowerOff, End::Terminated, End::Killed].into_iter().cycle();
        for (round, way) in (1..=count).zip(ways) {
            if round % 20 == 0 {
                Stage::note(&format!("round {round} of {count}"));
            }
            wrong.extend(self.round(way)?.map(|why| format!("round {round}, {way:?}: {why}")));
        }
        Ok(wrong)
    }

    fn round(&self, way: End) -> Result<Option<String>, LabError> {
        let (config, reaction, expected) = match way {
            End::PowerOff => (&self.ends, Reaction::Go, Ending::Exit(0)),
            End::Terminated => (&self.sleeps, Reaction::Terminate, Ending::Exit(0)),
            End::Killed => (&self.sleeps, Reaction::Kill, Ending::Signal(9)),
        };
        let command = self.runner.tools.run(config);
        let (console, said) = (self.report.join("console.log"), self.report.join("vmm.log"));
        let mut ran = false;
        let ending = watch(command, Limit::Total(self.scenario.deadline), &console, &said, |line| {
            ran |= line.contains(READY);
            if line.contains(READY) { reaction } else { Reaction::Go }
        })?;
        let held = self.scenario.assigned.iter().find_map(|function| match free(function) {
            Err(Fault::Untrue(why)) => Some(format!("{function} is held: {why}")),
            _ => None,
        });
        if ran && ending == expected {
            return Ok(held);
        }
        let said = fs::read_to_string(said).unwrap_or_default();
        Ok(Some(format!("{ending:?}, expected {expected:?}; the guest ran: {ran}; {}", said.trim())))
    }
}

/// Host resources that could leak.
#[derive(Debug)]
struct Host {
    /// `MemAvailable` of `/proc/meminfo`, in bytes.
    memory: u64,
    /// Allocated file handles of the whole host, from `/proc/sys/fs/file-nr`.
    files: u64,
}

impl Host {
    fn now() -> Result<Self, LabError> {
        // Drops caches, so that only lost memory counts.
        let caches = "/proc/sys/vm/drop_caches";
        fs::write(caches, "3").map_err(LabError::file("write", caches))?;
        let read = |path: &str| fs::read_to_string(path).map_err(LabError::file("read", path));
        let (meminfo, files) = (read("/proc/meminfo")?, read("/proc/sys/fs/file-nr")?);
        Self::read(&meminfo, &files)
            .ok_or_else(|| LabError::Content { what: "/proc".into(), problem: "no MemAvailable".into() })
    }

    /// The host once its memory is as `before` again, or [`FREED_WITHIN`] is over: lost memory never comes back.
    fn after(before: &Self) -> Result<Self, LabError> {
        let begun = Instant::now();
        loop {
            let now = Self::now()?;
            if before.memory_is_back(&now).is_ok() || begun.elapsed() >= FREED_WITHIN {
                return Ok(now);
            }
            thread::sleep(POLL);
        }
    }

    fn read(meminfo: &str, files: &str) -> Option<Self> {
        let kib = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        let kib: u64 = kib.split_whitespace().next()?.parse().ok()?;
        Some(Self { memory: kib << 10, files: files.split_whitespace().next()?.parse().ok()? })
    }

    fn memory_is_back(&self, after: &Self) -> Step {
        match self.memory.saturating_sub(after.memory) {
            lost if lost <= SLACK => Ok(()),
            lost => Err(Fault::Untrue(format!("the host has {lost:#x} bytes less after {ROUNDS} machines"))),
        }
    }

    /// A leak of one file for each machine would be as many files as machines.
    fn files_are_back(&self, after: &Self) -> Step {
        match after.files.saturating_sub(self.files) {
            more if more < u64::from(ROUNDS) => Ok(()),
            more => Err(Fault::Untrue(format!("{more} more files are open after {ROUNDS} machines"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_lost_a_machines_memory_or_a_file_for_each_is_found() {
        let host = |kib: u64, files: u64| {
            Host::read(&format!("MemFree: 1 kB\nMemAvailable:  {kib} kB\n"), &format!("{files}\t0\t9"))
        };
        let before = host(1 << 20, 500).unwrap();
        assert!(before.memory_is_back(&host((1 << 20) - 1024, 0).unwrap()).is_ok());
        assert!(before.memory_is_back(&host((1 << 20) - (64 << 10), 0).unwrap()).is_err());
        assert!(before.files_are_back(&host(0, 510).unwrap()).is_ok());
        assert!(before.files_are_back(&host(0, 600).unwrap()).is_err());
    }
}
