//! An upgrade of a running machine; its plugged devices are unplugged for it where that is requested.

use std::path::Path;

use serde_json::Value;

use super::LONG;
use super::error::CtlError;
use super::snapshot::{Outcome, plug_again, unplug_all};
use crate::api::{Client, ClientError};
use crate::cli::print_message;
use crate::error::Chain;

/// Requests for the outcome, of which the first may reach the program before.
const REQUESTS: u32 = 3;

/// The outcome of an upgrade. A program that is executed ends its connections.
fn outcome(client: Client<'_>) -> Result<String, ClientError> {
    let ask = || client.within(LONG).ask("GET", "/egm/v1/upgrade");
    let mut answer = ask();
    for _ in 1..REQUESTS {
        match answer {
            Err(ClientError::Unreadable { .. } | ClientError::Refused { status: 503, .. }) => answer = ask(),
            _ => break,
        }
    }
    answer
}

/// Requests the upgrade of `body`; its `devices` leave before it and come back. Returns what was done, in lines.
///
/// # Errors
/// The machine goes on in its program; the last step that failed.
pub(super) fn upgrade(client: Client<'_>, path: &Path, body: &str, devices: &[Value]) -> Outcome<String> {
    let mut unplugged = Vec::new();
    let begun = unplug_all(client, path, devices, &mut unplugged).and_then(|lines| {
        client.within(LONG).ask_with("PUT", "/egm/v1/upgrade", body.as_bytes())?;
        Ok(lines)
    });
    let mut lines = match begun {
        Ok(lines) => lines,
        Err(error) => {
            let errors = plug_again(client, &unplugged).1;
            errors.iter().for_each(|error| print_message(Chain(error)));
            return Err(error);
        }
    };
    // From here on the machine plugs them in again.
    let outcome = outcome(client)?;
    let outcome: Value = serde_json::from_str(&outcome).unwrap_or_default();
    let text = |key: &str| outcome[key].as_str().unwrap_or_default().to_owned();
    if outcome["state"] != "done" {
        return Err(CtlError::NotUpgraded { reason: text("reason") }.into());
    }
    let program = text("program");
    lines += &match outcome["pause_us"].as_u64() {
        Some(pause) => {
            format!("{program} has the machine; its guest was paused for {} ms\n", pause.div_ceil(1000))
        }
        None => format!("{program} has the machine, which stays paused\n"),
    };
    Ok(lines)
}
