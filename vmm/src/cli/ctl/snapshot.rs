//! A snapshot of a running machine with plugged devices, which have no state that can be saved: they leave for it.

use std::path::Path;

use serde_json::{Value, json};

use super::error::Undescribed;
use super::{LONG, has_device, unplug};
use crate::api::Client;
use crate::error::Report;

/// A running machine, and what was done to it.
struct Machine<'a> {
    client: Client<'a>,
    /// Socket of its API.
    path: &'a Path,
    is_paused: bool,
    /// Devices that have left, in the order of that.
    left: Vec<Value>,
}

/// Unplugs what was plugged in, pauses the machine, and writes a snapshot into the absolute path `folder`, which has the devices for
/// the restored machine. With `resume`, and after a failure, the machine goes on as before. Returns what was done, in lines.
///
/// # Errors
/// The first step that fails.
pub(super) fn write(
    client: Client<'_>,
    path: &Path,
    folder: &str,
    resume: bool,
) -> Result<String, Box<dyn Report>> {
    let devices = client.ask("GET", "/egm/v1/devices")?;
    let devices: Vec<Value> = serde_json::from_str(&devices).unwrap_or_default();
    if let Some(device) = devices.iter().find(|device| device["type"].is_null()) {
        return Err(Undescribed { id: id(device) }.into());
    }
    let mut machine = Machine { client, path, is_paused: false, left: Vec::new() };
    let written = machine.save(folder, &devices);
    if written.is_ok() && !resume {
        return written;
    }
    let back = machine.go_on();
    let lines = written?;
    back.map(|back| lines + &back)
}

/// Name of `device` in the machine.
fn id(device: &Value) -> String {
    device["id"].as_str().unwrap_or_default().to_owned()
}

impl Machine<'_> {
    fn save(&mut self, folder: &str, devices: &[Value]) -> Result<String, Box<dyn Report>> {
        let mut lines = String::new();
        for device in devices.iter().rev() {
            let id = id(device);
            let unplugged = unplug(self.client, self.path, &id);
            // It can leave and fail all the same: a disk that is not flushed.
            if unplugged.is_ok() || !has_device(self.client, &id)? {
                self.left.push(device.clone());
            }
            lines += &unplugged?;
        }
        self.client.ask("PUT", "/api/v1/vm.pause")?;
        self.is_paused = true;
        let body = json!({ "folder": folder, "plug": devices }).to_string();
        self.client.within(LONG).ask_with("PUT", "/egm/v1/snapshot", body.as_bytes())?;
        Ok(lines)
    }

    /// Resumes the machine, and plugs in what has left.
    fn go_on(&mut self) -> Result<String, Box<dyn Report>> {
        if self.is_paused {
            self.client.ask("PUT", "/api/v1/vm.resume")?;
        }
        let mut lines = String::new();
        while let Some(device) = self.left.pop() {
            let body = device.to_string();
            self.client.within(LONG).ask_with("PUT", "/egm/v1/devices", body.as_bytes())?;
            lines += &format!("{} is plugged in again\n", id(&device));
        }
        Ok(lines)
    }
}
