//! The control API of a machine that runs: requests by `egm-vmm ctl`, and checks of their answers.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::engine::command::Tool;
use crate::engine::error::LabError;
use crate::engine::scenario::Scenario;
use crate::engine::step::{Fault, Step};
use crate::runner::machine::{Machine, Runner};

/// The control API of a scenario's machine.
#[derive(Debug)]
pub(crate) struct Control {
    vmm: PathBuf,
    socket: PathBuf,
}

impl Control {
    pub(crate) fn of(runner: &Runner, scenario: &Scenario) -> Self {
        let socket = runner.work.join(scenario.name).join("api.sock");
        Self { vmm: runner.tools.vmm.clone(), socket }
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The command that starts `machine` with this API.
    pub(crate) fn start(&self, runner: &Runner, machine: &Machine) -> Command {
        let mut command = runner.command(machine);
        command.arg("--api").arg(&self.socket);
        command
    }

    /// The command that sends a request, in `words` of `egm-vmm ctl`.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.vmm);
        command.args(self.arguments(words));
        command
    }

    /// Sends a request, in `words` of `egm-vmm ctl`; returns the answer.
    pub(crate) fn ask(&self, words: &[&str]) -> Result<String, LabError> {
        Tool::new(&self.vmm.to_string_lossy(), "egm-vmm").args(self.arguments(words)).text()
    }

    /// Plugs in `device` as `id`: the answer and the machine's devices have one address. Returns the answer.
    pub(crate) fn plug(&self, device: &str, id: &str) -> Result<Value, Fault> {
        plugged(id, &self.ask(&["plug", device, "--id", id])?, &self.devices()?)
    }

    /// Requests `id` back: the guest releases it, and the machine has no such device any more.
    pub(crate) fn unplug(&self, id: &str) -> Step {
        gone(id, &self.ask(&["unplug", id])?, &self.devices()?)
    }

    /// Saves the machine in `folder`, and ends it.
    pub(crate) fn save(&self, folder: &Path) -> Step {
        self.ask(&["pause"])?;
        self.ask(&["snapshot", &folder.to_string_lossy()])?;
        self.ask(&["shutdown", "--timeout", "0"])?;
        Ok(())
    }

    /// Result of `request`, which must leave the machine's devices as they are.
    pub(crate) fn unchanged<T>(&self, request: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
        let before = self.devices()?;
        let result = request()?;
        let after = self.devices()?;
        if after == before {
            return Ok(result);
        }
        Err(Fault::Untrue(format!("the devices were {before}, and are {after}")))
    }

    /// The machine's devices, by id.
    fn devices(&self) -> Result<Value, Fault> {
        devices(&self.ask(&["info"])?)
    }

    fn arguments<'a>(&'a self, words: &'a [&'a str]) -> impl Iterator<Item = &'a OsStr> {
        let options = ["ctl", "--json", "--api"].into_iter().map(OsStr::new);
        options.chain([self.socket.as_os_str()]).chain(words.iter().map(|word| OsStr::new(*word)))
    }
}

/// The devices in `info`, a `VmInfo`, by id.
fn devices(info: &str) -> Result<Value, Fault> {
    let info: Value = serde_json::from_str(info)?;
    match &info["device_tree"] {
        devices @ Value::Object(_) => Ok(devices.clone()),
        _ => Err(Fault::Untrue(format!("no devices in: {info}"))),
    }
}

fn plugged(id: &str, answer: &str, devices: &Value) -> Result<Value, Fault> {
    let answer: Value = serde_json::from_str(answer)?;
    let (printed, shown) = (&answer["address"], &devices[id]["pci_bdf"]);
    if answer["id"] == id && printed.is_string() && printed == shown {
        return Ok(answer);
    }
    Err(Fault::Untrue(format!("plugged in: {answer}, shown at: {shown}")))
}

fn gone(id: &str, printed: &str, devices: &Value) -> Step {
    let shown = &devices[id];
    if printed.contains("the guest released ") && shown.is_null() {
        return Ok(());
    }
    Err(Fault::Untrue(format!("unplugged: {printed}, shown: {shown}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_device_is_in_the_machine_where_both_answers_have_it_and_gone_where_neither_has() {
        let (with, without) = (json!({ "drive": { "pci_bdf": "0000:02:00.0" } }), json!({}));
        let answer = r#"{"id":"drive","address":"0000:02:00.0"}"#;
        assert!(plugged("drive", answer, &with).is_ok() && plugged("drive", answer, &without).is_err());
        assert!(plugged("other", answer, &json!({ "other": with["drive"] })).is_err());
        assert!(plugged("drive", r#"{"id":"drive"}"#, &without).is_err());
        let left = "device \"drive\": the guest released 0000:01:00.0: the host has it back\n";
        assert!(gone("drive", left, &without).is_ok() && gone("drive", left, &with).is_err());
        let taken = "device \"drive\": 0000:01:00.0 was taken from the guest";
        assert!(gone("drive", taken, &without).is_err());
    }

    #[test]
    fn an_answer_without_devices_is_not_one_of_no_device() {
        assert!(devices(r#"{"device_tree":{}}"#).is_ok_and(|devices| devices == json!({})));
        assert!(devices("{}").is_err() && devices(r#"{"device_tree":null}"#).is_err());
    }
}
