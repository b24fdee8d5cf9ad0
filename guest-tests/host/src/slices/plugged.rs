//! Scenario of slices that are plugged into a running guest as PCI functions, and unplugged, by the control API.
//!
//! ```text
//!  each round   the slice is granted, the guest finds zeros and leaves a pattern; once it is unplugged the next owner finds zeros
//!  round 1      a dry run, which changes nothing, first
//! ```

use serde_json::Value;

use crate::engine::error::LabError;
use crate::engine::scenario::Scenario;
use crate::runner::control::Control;
use crate::runner::machine::Runner;
use crate::runner::regions;
use crate::runner::steps::{Fault, Step, Steps, timed};
use crate::slices::grant;

/// Begins each line in which the guest prints what it waits for.
const EVENT: &str = "egm-hotplug ";

/// The machine, and the slice that it has now.
struct Rounds<'a> {
    runner: &'a Runner,
    control: Control,
    region: &'a str,
    size: &'static str,
    id: String,
}

/// Runs the scenario; its guest waits for a slice in each round.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, region, report, .. } = *steps;
    if let Some(why) = regions::missing(runner, region)? {
        return Err(LabError::Usage(why));
    }
    let control = Control::of(runner, scenario);
    let without = Scenario { region: None, ..*scenario };
    let machine = runner.machine(&without, report)?;
    let command = control.start(runner, &machine);
    let mut rounds = Rounds { runner, control, region, size: scenario.slice_test.slice(), id: String::new() };
    let mut done = Vec::new();
    let boot = runner.boot_by(command, scenario, &machine, report, |line| {
        let Some((_, event)) = line.split_once(EVENT) else { return };
        if event == "plug 1" {
            done.push(timed("planned", || rounds.plan()));
        }
        if let Some(round) = event.strip_prefix("plug ") {
            done.push(timed(&format!("plugged {round}"), || rounds.plug()));
        }
        if let Some(round) = event.strip_prefix("unplug ") {
            done.push(timed(&format!("returned {round}"), || rounds.unplug()));
        }
    })?;
    steps.judge(scenario.expected, &boot, "");
    steps.cases.append(&mut done);
    Ok(())
}

impl Rounds<'_> {
    /// A dry run names the region and a place in it, and the machine stays as it is.
    fn plan(&self) -> Step {
        let words = ["plug-slice", self.region, "--size", self.size, "--dry-run"];
        let answer = self.control.unchanged(|| Ok(self.control.ask(&words)?))?;
        let answer: Value = serde_json::from_str(&answer)?;
        if answer["region"] != self.region || !answer["offset"].is_u64() || !self.slices()?.is_empty() {
            return Err(Fault::Untrue(format!("planned: {answer}")));
        }
        Ok(())
    }

    fn plug(&mut self) -> Step {
        let answer = self.control.ask(&["plug-slice", self.region, "--size", self.size])?;
        let answer: Value = serde_json::from_str(&answer)?;
        self.id = answer["id"].as_str().ok_or("the answer has no id")?.to_owned();
        let slices = self.slices()?;
        match &slices[..] {
            [one] if one["id"] == self.id.as_str() && one["region"] == self.region => Ok(()),
            _ => Err(Fault::Untrue(format!("plugged in: {answer}, slices: {slices:?}"))),
        }
    }

    /// The guest releases the slice, which is returned: the next owner of these bytes finds zeros.
    fn unplug(&self) -> Step {
        let printed = self.control.ask(&["unplug", &self.id])?;
        if printed.trim() != format!("slice \"{}\" is returned", self.id) || !self.slices()?.is_empty() {
            return Err(Fault::Untrue(format!("unplugged: {printed}")));
        }
        grant::next_finds_zeros(self.runner, self.region, self.size)
    }

    /// The slices that the machine has now.
    fn slices(&self) -> Result<Vec<Value>, Fault> {
        Ok(serde_json::from_str(&self.control.ask(&["slices"])?)?)
    }
}
