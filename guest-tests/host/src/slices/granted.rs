//! Scenario: one broker and three machines. Two have a slice each of one region, filled with a pattern of their own,
//! and none of the other's bytes. One is killed. The third waited for free memory; it gets that slice, and its guest
//! reads zeros from end to end. The other machine runs all the while.
//!
//! The ledger reports where a slice lies; the lab reads the guests' bytes there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use egm_address::{InRegion, Span};
use egm_fixtures::payload::Ports;
use egm_guest::findings::{Check, Line};
use serde::Deserialize;

use crate::engine::command::output;
use crate::engine::error::{LabError, chain};
use crate::engine::judge::case;
use crate::engine::process::{Ending, Limit, Reaction, watch};
use crate::engine::scenario::Scenario;
use crate::engine::step::{TIMEOUT, eventually};
use crate::hosts::extent::Extent;
use crate::runner::machine::{Machine, Runner};
use crate::runner::regions;
use crate::runner::steps::{Fault, Step, Steps, timed};
use crate::slices::broker::Broker;
use crate::slices::host_words::{beats, physical, zeros};

/// Pages that each guest fills: 64 MiB.
const PAGES: usize = 16384;
const WORDS_OF_A_PAGE: usize = 512;
/// Before the guest physical address, on the console.
const BEAT: &str = "egm-beat 0x";

/// A guest: its machine's name, the words of its kernel's command line, and the pattern that fills its pages (random,
/// so that no other memory holds it by chance).
struct Guest {
    name: &'static str,
    words: &'static str,
    mark: u64,
}

const FIRST: Guest = Guest {
    name: "first",
    words: "egm.checks=numa,egm_beat egm.arg.beat.seconds=0 egm.arg.beat.pages=16384 egm.arg.beat.mark=11330020823458867751",
    mark: 0x9d3c_51e8_f00b_6a27,
};
const SECOND: Guest = Guest {
    name: "second",
    words: "egm.checks=numa,egm_beat egm.arg.beat.seconds=0 egm.arg.beat.pages=16384 egm.arg.beat.mark=6548529176504468415",
    mark: 0x5ae1_0c97_26d4_83bf,
};
/// No Linux: a payload that reads its slice.
const THIRD: Guest = Guest { name: "third", words: "", mark: 0 };

/// Runs the scenario of slices of `region` that a broker grants.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, region, report, .. } = *steps;
    let machines = Machines { runner, scenario, region, socket: runner.work.join("broker.sock"), report };
    // Planned while the region is free: later only the broker can grant slices of it.
    let [first, second, third] = [FIRST, SECOND, THIRD].map(|guest| machines.tenant(guest));
    let (first, second, third) = (first?, second?, third?);
    let _broker = Broker::start(runner, region, &machines.socket, report, None)?;
    let end = machines.boot(&first, &[], BEAT, |address| {
        let mut first = At::new(&first, address);
        steps.step("granted", || {
            first.place = machines.held(&[FIRST.name])?.pop();
            Ok(())
        });
        steps.cases.extend(machines.beside(&first, &second, &third));
        steps.step("goes on", || machines.shows(&first, &[SECOND.mark]));
        Reaction::Terminate
    })?;
    steps.cases.extend(end.cases(FIRST.name, Ending::Exit(0)));
    steps.step("returned", || machines.held(&[]).map(drop));
    Ok(())
}

struct Machines<'a> {
    runner: &'a Runner,
    scenario: &'a Scenario,
    region: &'a str,
    socket: PathBuf,
    report: &'a Path,
}

/// A guest with its machine, and the folder of its logs.
struct Tenant {
    guest: Guest,
    machine: Machine,
    folder: PathBuf,
}

/// A guest that increments a word, and the word's address.
struct At<'a> {
    tenant: &'a Tenant,
    gpa: Option<u64>,
    /// Its slice, once read from the ledger.
    place: Option<Span<InRegion>>,
}

impl<'a> At<'a> {
    fn new(tenant: &'a Tenant, address: &str) -> Self {
        Self { tenant, gpa: u64::from_str_radix(address, 16).ok(), place: None }
    }
}

/// The result of one machine.
struct End {
    ending: Ending,
    checks: Vec<Check>,
    /// Whether its guest printed the expected word.
    said: bool,
}

impl End {
    /// The checks that machine `name` reported, and whether it printed its word and ended as expected.
    fn cases(self, name: &str, expected: Ending) -> Vec<Check> {
        let said = (!self.said).then(|| "it never said what was waited for".to_owned());
        let ended = (self.ending != expected).then(|| format!("{:?}, expected {expected:?}", self.ending));
        let mut cases = self.checks;
        cases.extend([case("said", said, 0), case("ended", ended, 0)]);
        cases.iter_mut().for_each(|case| case.name = format!("{} of {name}", case.name));
        cases
    }
}

impl Machines<'_> {
    fn tenant(&self, guest: Guest) -> Result<Tenant, LabError> {
        let folder = self.report.join(guest.name);
        fs::create_dir_all(&folder).map_err(LabError::file("make", &folder))?;
        let scenario = Scenario { name: guest.name, words: guest.words, ..*self.scenario };
        let machine = self.runner.machine(&scenario, &folder)?;
        Ok(Tenant { guest, machine, folder })
    }

    /// Runs a machine with a slice from the broker; `then` gets the rest of a console line after `word`.
    fn boot(
        &self,
        tenant: &Tenant,
        arguments: &[&str],
        word: &str,
        mut then: impl FnMut(&str) -> Reaction,
    ) -> Result<End, LabError> {
        let mut command = self.runner.command(&tenant.machine);
        command.arg("--broker").arg(&self.socket).args(arguments);
        let (console, said) = (tenant.folder.join("console.log"), tenant.folder.join("vmm.log"));
        let mut end = End { ending: Ending::Deadline, checks: Vec::new(), said: false };
        end.ending = watch(command, Limit::Total(self.scenario.deadline), &console, &said, |line| {
            if let Some(Line::Check(check)) = Line::parse(line) {
                end.checks.push(check);
            }
            let Some(rest) = line.split(word).nth(1) else { return Reaction::Go };
            end.said = true;
            then(rest.trim())
        })?;
        Ok(end)
    }

    /// While the first machine runs: the second starts, is killed, and the third gets its slice.
    fn beside(&self, first: &At<'_>, second: &Tenant, third: &Tenant) -> Vec<Check> {
        let mut cases = Vec::new();
        thread::scope(|scope| {
            let mut next = None;
            let end = self.boot(second, &[], BEAT, |address| {
                let mut second = At::new(second, address);
                cases.push(timed("owners", || {
                    second.place = self.held(&[FIRST.name, SECOND.name])?.pop();
                    Ok(())
                }));
                cases.push(timed("apart", || {
                    self.shows(first, &[SECOND.mark])?;
                    self.shows(&second, &[FIRST.mark])
                }));
                let place = second.place;
                next = Some(scope.spawn(move || self.after(third, place)));
                cases.push(timed("waits", || self.waits(third)));
                Reaction::Kill
            });
            cases.extend(ended(end, SECOND.name, Ending::Signal(9)));
            let next = next.and_then(|next| next.join().ok());
            cases.extend(next.unwrap_or_else(|| vec![case(THIRD.name, Some("it never started".into()), 0)]));
        });
        cases
    }

    /// The third machine waits, gets the second's `place`, reads zeros there, and returns it scrubbed.
    fn after(&self, third: &Tenant, place: Option<Span<InRegion>>) -> Vec<Check> {
        let kernel = third.folder.join("zeros.elf");
        let plan = third.machine.plan.as_ref();
        let Some(slice) = plan.and_then(|plan| plan.slice_in_guest()) else {
            return vec![case(THIRD.name, Some("the plan has no slice".into()), 0)];
        };
        let payload = egm_fixtures::payload::zeros(Ports::USUAL, slice.start, slice.size);
        if let Err(error) = fs::write(&kernel, payload) {
            return vec![case(THIRD.name, Some(error.to_string()), 0)];
        }
        let mut cases = Vec::new();
        let arguments = ["--wait", "--kernel", &kernel.to_string_lossy()];
        let end = self.boot(third, &arguments, "zeros", |_| {
            cases.push(timed("granted on", || match self.held(&[FIRST.name, THIRD.name])?.pop() {
                had if had == place => Ok(()),
                had => Err(Fault::Untrue(format!("the third has {had:x?}, the second had {place:x?}"))),
            }));
            Reaction::Terminate
        });
        cases.extend(ended(end, THIRD.name, Ending::Exit(0)));
        cases.push(timed("scrubbed", || {
            self.held(&[FIRST.name])?;
            let place = place.ok_or("the second had no place")?;
            zeros(Some(Extent { start: self.base()? + place.start().get(), size: place.size() }))
        }));
        cases
    }

    /// The spans of the slices of the machines `names`, in this order, if no others of the region are granted.
    fn held(&self, names: &[&str]) -> Result<Vec<Span<InRegion>>, Fault> {
        let said = output(Command::new(&self.runner.tools.device).args(["ledger", "show", "--json"]))?;
        let all: Vec<States> = serde_json::from_slice(&said.stdout)?;
        let states = all.iter().find(|states| states.region == self.region).ok_or("the region is gone")?;
        let granted: Vec<_> = states.held.iter().filter(|held| held.usage == "granted").collect();
        let owned =
            |name: &&str| granted.iter().find(|held| held.owner.as_ref().is_some_and(|o| o.name == **name));
        let spans: Vec<_> = names.iter().filter_map(owned).map(|held| held.span).collect();
        let apart =
            |(i, one): (usize, &Span<InRegion>)| spans.iter().skip(i + 1).all(|other| !one.overlaps(*other));
        if granted.len() == names.len() && spans.len() == names.len() && spans.iter().enumerate().all(apart) {
            return Ok(spans);
        }
        Err(Fault::Untrue(format!("granted is {granted:x?}, and not a slice each to {}", names.join(", "))))
    }

    /// The host physical address of the region.
    fn base(&self) -> Result<u64, Fault> {
        regions::base(self.runner, self.region)
    }

    /// In host memory, `guest`'s word increases in its slice, which holds all of its pages and no word of `others`.
    fn shows(&self, guest: &At<'_>, others: &[u64]) -> Step {
        let Guest { name, mark, .. } = guest.tenant.guest;
        let place = guest.place.ok_or("the ledger has no slice of it")?;
        let plan = guest.tenant.machine.plan.as_ref().ok_or("there is no plan")?;
        let inside =
            guest.gpa.and_then(|gpa| plan.offset_in_slice(gpa)).ok_or("the guest's word is elsewhere")?;
        let slice = Extent { start: self.base()? + place.start().get(), size: place.size() };
        let page = Extent { start: slice.start + inside, size: 4096 };
        let words = physical(page)?;
        beats(|| words.word(0), page.start)?;
        let slice = physical(slice)?;
        let (own, all) = (slice.count(mark), PAGES * WORDS_OF_A_PAGE - 1);
        if own < all {
            return Err(Fault::Untrue(format!("{own} words of {name} lie in its slice, and it wrote {all}")));
        }
        match others.iter().map(|other| slice.count(*other)).sum::<usize>() {
            0 => Ok(()),
            count => Err(Fault::Untrue(format!("{count} words of another guest lie in the slice of {name}"))),
        }
    }

    /// The third machine reports that it waits.
    fn waits(&self, third: &Tenant) -> Step {
        eventually(TIMEOUT, || {
            let said = fs::read_to_string(third.folder.join("vmm.log")).unwrap_or_default();
            match said.contains("egm0 waits: ") {
                true => Ok(()),
                false => Err(Fault::Untrue(format!("it does not report that it waits: {said}"))),
            }
        })?;
        self.held(&[FIRST.name, SECOND.name]).map(drop)
    }
}

/// The cases of machine `name`, which should have ended as `expected`.
fn ended(end: Result<End, LabError>, name: &str, expected: Ending) -> Vec<Check> {
    match end {
        Ok(end) => end.cases(name, expected),
        Err(error) => vec![case(name, Some(chain(&error)), 0)],
    }
}

/// A region in the output of `egm-device ledger show --json`.
#[derive(Debug, Deserialize)]
struct States {
    region: String,
    held: Vec<Held>,
}

/// One record of the region.
#[derive(Debug, Deserialize)]
struct Held {
    span: Span<InRegion>,
    owner: Option<Owner>,
    usage: String,
}

#[derive(Debug, Deserialize)]
struct Owner {
    name: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_fill_their_pages_with_the_marks_that_are_looked_for() {
        for Guest { name, words, mark } in [FIRST, SECOND] {
            assert!(
                words.ends_with(&format!(" egm.arg.beat.pages={PAGES} egm.arg.beat.mark={mark}")),
                "{name}"
            );
        }
    }
}
