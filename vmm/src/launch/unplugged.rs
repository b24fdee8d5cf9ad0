//! Devices that were unplugged for a snapshot, in the machine that is restored from it.

use std::sync::Arc;

use serde_json::Value;

use crate::api::{Journal, MachineEvent};
use crate::config::NewDevice;
use crate::error::Chain;
use crate::hotplug::{HotplugError, Plug};
use crate::machine::{ControlError, Live};
use crate::passed::Passed;

/// Plugs in `device`, an entry of `"devices"`. The guest runs without it if that fails: an event and a message have the reason.
pub(super) fn plug(device: &Value, live: &Live, journal: &Arc<Journal>) {
    let id = device["id"].as_str().unwrap_or_default().to_owned();
    let journal = Arc::clone(journal);
    let failed = Arc::new(move |why: &str| {
        let text = format!("cannot plug in device \"{id}\" again: {why}");
        tracing::error!("{text}");
        journal.publish(&MachineEvent::Device { device: id.clone(), change: "not-plugged", text });
    });
    let device = match NewDevice::from_value(device) {
        Ok(device) => device,
        Err(error) => return failed(&error.to_string()),
    };
    let later = Arc::clone(&failed);
    let reply = move |plugged: Result<_, HotplugError>| {
        if let Err(error) = plugged {
            later(&Chain(&error).one_line());
        }
    };
    let plug = Plug { device, is_dry_run: false, passed: Passed::default(), slice: None };
    if let Err(error) = live.plug(plug, Box::new(reply)) {
        failed(match error {
            ControlError::NoPorts => "the machine has no hot-plug port",
            ControlError::Confined => "the machine's sandbox opens no device: restore it with --sandbox off",
            _ => "the machine ends",
        });
    }
}
