//! Devices of requests to a machine that runs, one at a time.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::super::document::{DeviceConfig, DiskConfig, NetConfig, UserDeviceConfig, VsockConfig};
use super::context::Context;
use super::{devices, judge};
use crate::config::{ConfigErrors, NewDevice};

/// The disk of `body`, a `DiskConfig`.
///
/// # Errors
/// Each value that cannot be honoured, by its name.
pub(crate) fn disk(body: &[u8]) -> Result<NewDevice, ConfigErrors> {
    one(body, "disks[0]", |disk: &mut DiskConfig, at, context| devices::disk(disk, at, context))
}

/// The interface of `body`, a `NetConfig`, over the descriptors of the numbers `taps`, if there are any.
///
/// # Errors
/// As [`disk`].
pub(crate) fn net(body: &[u8], taps: Vec<i32>) -> Result<NewDevice, ConfigErrors> {
    one(body, "net[0]", |net: &mut NetConfig, at, context| {
        if !taps.is_empty() {
            // The client's numbers have no meaning here.
            net.fds = Some((0..).zip(&taps).map(|(place, _)| place).collect());
            context.taps = taps;
        }
        devices::net(net, at, context);
        context.take_numbers(net);
    })
}

/// The vsock device of `body`, a `VsockConfig`.
///
/// # Errors
/// As [`disk`].
pub(crate) fn vsock(body: &[u8]) -> Result<NewDevice, ConfigErrors> {
    one(body, "vsock", |vsock: &mut VsockConfig, _, context| devices::vsock(vsock, context))
}

/// The host function of `body`, a `DeviceConfig`.
///
/// # Errors
/// As [`disk`].
pub(crate) fn function(body: &[u8]) -> Result<NewDevice, ConfigErrors> {
    one(body, "devices[0]", |device: &mut DeviceConfig, at, context| {
        devices::function(device, None, at, context)
    })
}

/// The device of a vfio-user server of `body`, a `UserDeviceConfig`.
///
/// # Errors
/// As [`disk`].
pub(crate) fn server(body: &[u8]) -> Result<NewDevice, ConfigErrors> {
    one(body, "user_devices[0]", |device: &mut UserDeviceConfig, at, context| {
        devices::server(device, at, context);
    })
}

/// The device of `body`, which is the part `at` of a document. `add` adds it to the context.
fn one<T: DeserializeOwned + Serialize>(
    body: &[u8],
    at: &'static str,
    add: impl FnOnce(&mut T, &str, &mut Context),
) -> Result<NewDevice, ConfigErrors> {
    let own = move |key: &str| {
        key.strip_prefix(at).map_or_else(|| key.to_owned(), |rest| rest.trim_start_matches('.').to_owned())
    };
    NewDevice::parse_foreign(body.to_vec(), move |mut device: T| {
        let mut context = Context::default();
        add(&mut device, at, &mut context);
        judge(&document(at, &device), &mut context);
        for refusal in &mut context.refusals {
            refusal.key = own(&refusal.key);
        }
        let made = context.devices.pop().and_then(crate::config::Slot::into_entry);
        let Some(made) = made.filter(|_| context.refusals.is_empty()) else {
            return Err(context.refusals);
        };
        context.notes.iter().for_each(|note| tracing::info!("{note}"));
        let origins = context.origins;
        Ok((made, move |key: &str| own(&origins.of(&format!("devices[0].{key}")))))
    })
}

/// A document with `device` at `at`: a list's first entry or a value of its own.
fn document(at: &str, device: &impl Serialize) -> Value {
    match at.strip_suffix("[0]") {
        Some(list) => json!({ list: [device] }),
        None => json!({ at: device }),
    }
}
