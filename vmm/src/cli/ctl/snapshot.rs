//! A snapshot of a running machine with plugged devices, which have no state that can be saved: they are unplugged for it.

use std::path::Path;

use serde_json::{Value, json};

use super::error::CtlError;
use super::{LONG, has_device, unplug};
use crate::api::{Client, ClientError};
use crate::cli::print_message;
use crate::error::{Chain, Report};

pub(super) type Outcome<T> = Result<T, Box<dyn Report>>;

/// Unplugs what was plugged in, pauses the machine, and writes a snapshot into the absolute path `folder`, which has the devices for
/// the restored machine. With `resume`, and after a failure, the machine gets them back and runs. Returns what was done, in lines.
///
/// # Errors
/// The last step that failed; others are printed.
pub(super) fn write(client: Client<'_>, path: &Path, folder: &str, resume: bool) -> Outcome<String> {
    let devices = listed(client)?;
    let body = json!({ "folder": folder, "unplugged": devices }).to_string();
    // What is refused for certain is refused before a device leaves.
    client.ask_with("PUT", "/egm/v1/snapshot?dry-run=1", body.as_bytes())?;
    let mut unplugged = Vec::new();
    let written = unplug_all(client, path, &devices, &mut unplugged)
        .and_then(|lines| save(client, &body, resume).map(|()| lines));
    if written.is_ok() && !resume {
        return written;
    }
    let (mut lines, mut errors) = match written {
        Ok(lines) => (lines, Vec::new()),
        Err(error) => (String::new(), vec![error]),
    };
    let (again, failed) = plug_again(client, &unplugged);
    lines += &again;
    errors.extend(failed.into_iter().map(Box::from));
    let Some(last) = errors.pop() else { return Ok(lines) };
    errors.iter().for_each(|error| print_message(Chain(error.as_ref())));
    Err(last)
}

/// The devices that were plugged in.
///
/// # Errors
/// One of them cannot be plugged in again.
pub(super) fn listed(client: Client<'_>) -> Outcome<Vec<Value>> {
    let devices = client.ask("GET", "/egm/v1/devices")?;
    let devices: Vec<Value> = serde_json::from_str(&devices).unwrap_or_default();
    match devices.iter().find(|device| device["type"].is_null()) {
        Some(device) => Err(CtlError::Undescribed { id: id(device) }.into()),
        None => Ok(devices),
    }
}

/// Plugs in `unplugged` devices again, the last one first. Returns which, in lines, and what failed.
pub(super) fn plug_again(client: Client<'_>, unplugged: &[Value]) -> (String, Vec<ClientError>) {
    let (mut lines, mut errors) = (String::new(), Vec::new());
    for device in unplugged.iter().rev() {
        match client.within(LONG).ask_with("PUT", "/egm/v1/devices", device.to_string().as_bytes()) {
            Ok(_) => lines += &format!("{} is plugged in again\n", id(device)),
            Err(error) => errors.push(error),
        }
    }
    (lines, errors)
}

/// Unplugs `devices`, the last one first, and adds each that has left to `unplugged`.
pub(super) fn unplug_all(
    client: Client<'_>,
    path: &Path,
    devices: &[Value],
    unplugged: &mut Vec<Value>,
) -> Outcome<String> {
    let mut lines = String::new();
    for device in devices.iter().rev() {
        let id = id(device);
        // Where this program ends early, its user needs the command.
        let api = path.display();
        print_message(format_args!("to plug in \"{id}\" again: egm-vmm ctl --api {api} plug '{device}'"));
        let outcome = unplug(client, path, &id);
        // It can leave and fail all the same: a disk that is not flushed.
        if outcome.is_ok() || !has_device(client, &id)? {
            unplugged.push(device.clone());
        }
        lines += &outcome?;
    }
    Ok(lines)
}

/// Pauses the machine, and writes the snapshot of `body`. With `resume`, and after a failure, the machine runs again.
fn save(client: Client<'_>, body: &str, resume: bool) -> Outcome<()> {
    // A vCPU can wait for storage for longer than other requests take.
    client.within(LONG).ask("PUT", "/api/v1/vm.pause")?;
    let saved = client.within(LONG).ask_with("PUT", "/egm/v1/snapshot", body.as_bytes());
    if resume || saved.is_err() {
        match client.ask("PUT", "/api/v1/vm.resume") {
            // Another client was faster.
            Ok(_) | Err(ClientError::Refused { status: 409, .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(saved.map(drop)?)
}

/// Name of `device` in the machine.
fn id(device: &Value) -> String {
    device["id"].as_str().unwrap_or_default().to_owned()
}
