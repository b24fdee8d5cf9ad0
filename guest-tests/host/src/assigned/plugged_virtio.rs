//! Scenario of virtio devices that are plugged into a machine with spare ports, and unplugged, by the control API.
//!
//! ```text
//!  round 1   a dry run, which changes nothing; then the disk: the guest reads the host's text, and leaves its own
//!  round 2   the same disk in the same place; meanwhile a second plug of its file is refused
//!  round 3   a card at a tap, through which datagrams and streams come back
//! ```

use std::fs;
use std::path::PathBuf;

use egm_guest::findings::Check;
use serde_json::{Value, json};

use crate::engine::disk::{self, Proof};
use crate::engine::error::LabError;
use crate::engine::scenario::Scenario;
use crate::hosts::parts::{HostParts, Part};
use crate::runner::control::Control;
use crate::runner::refusal::refused;
use crate::runner::steps::{Fault, Step, Steps, timed};

/// Begins each line in which the guest prints what it waits for, and the address of a device that came.
const EVENT: &str = "egm-hotplug ";
/// Name of each device in the machine, which is free once the device before is gone.
const ID: &str = "hot0";
const TAP: &str = "egmtap0";
/// Exit code of a request that the machine cannot carry out now.
const REFUSED: i32 = 3;
/// Fields of an answer that a dry run has as well.
const PLACE: [&str; 4] = ["id", "slot", "address", "bars"];

/// The devices, and the results of the rounds so far.
struct Rounds {
    control: Control,
    image: PathBuf,
    /// Text that the guest must find in the last block of the image.
    text: &'static str,
    /// The disk of that image, as in a configuration.
    disk: String,
    /// The card at the tap, as in a configuration.
    card: String,
    /// Answer of the dry run.
    planned: Value,
    /// Addresses of the answers to the plugs.
    printed: Vec<String>,
    /// Addresses at which the guest found devices.
    found: Vec<String>,
}

/// Runs the scenario; its guest waits for a disk, a disk and a card.
pub(crate) fn run(steps: &mut Steps<'_>) -> Result<(), LabError> {
    let Steps { runner, scenario, report, .. } = *steps;
    let machine = runner.machine(scenario, report)?;
    let image = runner.work.join(scenario.name).join("hot.img");
    let (text, mac) = (argument(scenario, "hotplug.text")?, argument(scenario, "hotplug.mac")?);
    let parts = [Part::VirtioBlk { path: image.clone() }, Part::VirtioNet { tap: TAP.to_owned() }];
    let _parts = HostParts::make(parts.iter(), None)?;
    let mut rounds = Rounds {
        control: Control::of(runner, scenario),
        disk: json!({ "type": "virtio-blk", "path": image }).to_string(),
        card: json!({ "type": "virtio-net", "tap": TAP, "mac": mac }).to_string(),
        image,
        text,
        planned: Value::Null,
        printed: Vec::new(),
        found: Vec::new(),
    };
    let mut done = Vec::new();
    let command = rounds.control.start(runner, &machine);
    let boot = runner.boot_by(command, scenario, &machine, report, |line| done.extend(rounds.react(line)))?;
    steps.judge(scenario.expected, &boot, "");
    steps.cases.append(&mut done);
    steps.step("addresses", || rounds.addresses());
    Ok(())
}

impl Rounds {
    /// Does what the guest waits for when it prints `line`.
    fn react(&mut self, line: &str) -> Vec<Check> {
        let Some((_, event)) = line.split_once(EVENT) else { return Vec::new() };
        match event {
            "plug 1" => vec![timed("planned", || self.plan()), timed("plugged 1", || self.plug_disk())],
            "plug 2" => vec![timed("plugged 2", || self.plug_disk()), timed("refused", || self.refuse())],
            "plug 3" => vec![timed("plugged 3", || self.plug_card())],
            "unplug 1" => vec![timed("given back 1", || self.unplug_disk())],
            "unplug 2" => vec![timed("given back 2", || self.unplug_disk())],
            "unplug 3" => vec![timed("given back 3", || self.unplug_card())],
            _ => {
                self.found.extend(event.strip_prefix("found ").map(str::to_owned));
                Vec::new()
            }
        }
    }

    /// A dry run has an answer, and the machine stays as it is.
    fn plan(&mut self) -> Step {
        let words = ["plug", self.disk.as_str(), "--id", ID, "--dry-run"];
        let answer = self.control.unchanged(|| Ok(self.control.ask(&words)?))?;
        self.planned = serde_json::from_str(&answer)?;
        Ok(())
    }

    /// The disk comes to the place that the dry run printed, each time.
    fn plug_disk(&mut self) -> Step {
        disk::sign(&self.image, self.text)?;
        let answer = self.control.plug(&self.disk, ID)?;
        self.printed.extend(answer["address"].as_str().map(str::to_owned));
        same_place(&self.planned, &answer)
    }

    /// Another plug of the file that the guest has changes nothing; the refusal names the file and the disk.
    fn refuse(&self) -> Step {
        let mut again = self.control.command(&["plug", &self.disk]);
        let (file, owner) = (self.image.to_string_lossy(), format!("already, as \"{ID}\""));
        self.control.unchanged(|| refused(&mut again, REFUSED, &[&file, &owner]))
    }

    /// The disk goes, and the image has the bytes that the guest flushed.
    fn unplug_disk(&self) -> Step {
        self.control.unplug(ID)?;
        disk::fault(Proof::Signature, &self.image, None).map_or(Ok(()), |fault| Err(Fault::Untrue(fault)))
    }

    fn plug_card(&mut self) -> Step {
        let answer = self.control.plug(&self.card, ID)?;
        self.printed.extend(answer["address"].as_str().map(str::to_owned));
        Ok(())
    }

    /// The card goes, and the machine has closed the tap, which has a carrier while a program has it open.
    fn unplug_card(&self) -> Step {
        self.control.unplug(ID)?;
        match fs::read_to_string(format!("/sys/class/net/{TAP}/carrier"))?.trim() {
            "0" => Ok(()),
            carrier => Err(Fault::Untrue(format!("{TAP} is still open: its carrier is {carrier}"))),
        }
    }

    /// The guest found each of three devices at the address that was printed for it.
    fn addresses(&self) -> Step {
        let Self { printed, found, .. } = self;
        if printed.len() == 3 && printed == found {
            return Ok(());
        }
        Err(Fault::Untrue(format!("printed: {}; found: {}", printed.join(", "), found.join(", "))))
    }
}

/// Both answers have each field of a place, with the same value.
fn same_place(planned: &Value, answer: &Value) -> Step {
    match PLACE.into_iter().find(|field| answer[field].is_null() || answer[field] != planned[field]) {
        None => Ok(()),
        Some(field) => Err(Fault::Untrue(format!("another \"{field}\": {answer}, planned: {planned}"))),
    }
}

/// Value of the guest's argument `key` in the words of `scenario`.
fn argument(scenario: &Scenario, key: &str) -> Result<&'static str, LabError> {
    let value = |word: &'static str| word.strip_prefix("egm.arg.")?.strip_prefix(key)?.strip_prefix('=');
    let found = scenario.words.split_whitespace().find_map(value);
    found.ok_or_else(|| LabError::Usage(format!("{} gives its guest no {key}", scenario.name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::scenario::PLAIN;

    #[test]
    fn a_place_is_the_same_where_every_field_is_there_and_equal() {
        let place = json!({ "id": "hot0", "slot": 1, "address": "0000:01:00.0", "bars": [] });
        assert!(same_place(&place, &place).is_ok());
        for field in PLACE {
            let (mut other, mut without) = (place.clone(), place.clone());
            other[field] = json!("another");
            without[field] = Value::Null;
            assert!(same_place(&place, &other).is_err() && same_place(&other, &place).is_err(), "{field}");
            assert!(same_place(&without, &without).is_err(), "{field}");
        }
    }

    #[test]
    fn an_argument_of_the_guest_is_found_by_its_whole_key() {
        let words = "quiet egm.arg.hotplug.mac.old=1 egm.arg.hotplug.mac=52:54";
        let scenario = Scenario { words, ..PLAIN };
        assert_eq!(argument(&scenario, "hotplug.mac").unwrap(), "52:54");
        assert!(argument(&scenario, "hotplug.text").is_err());
    }
}
