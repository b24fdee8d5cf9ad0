//! Plugs of devices and slices.

use egm_address::PciAddress;
use egm_report::program::Outcome;
use serde_json::{Map, Value};

use super::tables::plugged;
use super::{Args, LONG, show};
use crate::api::Client;

/// The device of a command line, as a configuration has it.
pub(super) fn device(text: &str) -> Result<Map<String, Value>, String> {
    if let Ok(function) = text.parse::<PciAddress>() {
        return Ok([("type", "vfio".to_owned()), ("function", function.to_string())]
            .map(|(key, value)| (key.to_owned(), value.into()))
            .into_iter()
            .collect());
    }
    let object = serde_json::from_str(text);
    object.map_err(|error| format!("expected a PCI address such as 0000:41:00.0, or a JSON object: {error}"))
}

/// Plugs in `what` by `request`, or plans that; prints what the guest finds.
pub(super) fn plug(
    args: &Args,
    client: Client<'_>,
    request: &str,
    is_dry_run: bool,
    what: &Value,
) -> Outcome {
    let query = if is_dry_run { "?dry-run=1" } else { "" };
    let (request, body) = (format!("{request}{query}"), what.to_string());
    Ok(show(args, &client.within(LONG).ask_with("PUT", &request, body.as_bytes())?, plugged))
}
