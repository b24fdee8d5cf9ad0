//! The return of a plugged device, which the guest releases.

use std::path::Path;

use serde_json::{Value, json};

use super::error::CtlError;
use super::tables::cell;
use super::{LONG, is_end, name, unreadable};
use crate::api::{Client, ClientError};
use crate::error::Report;

/// Requests the device `id` back, and waits for its removal, which the machine forces when its guest does not answer, and for
/// the return of a slice. Returns the last event in words.
pub(super) fn unplug(client: Client<'_>, path: &Path, id: &str) -> Result<String, Box<dyn Report>> {
    let kept = client.ask("GET", "/egm/v1/events?follow=0")?;
    let before = kept.lines().last().and_then(sequence); // a device of this name may have left earlier
    let is_slice = is_slice(client, id)?;
    let last: &[&str] = if is_slice { &["returned", "return-pending"] } else { &["removed"] };
    let mut events = client.follow()?; // before the request: no event is missed
    let body = json!({ "id": id }).to_string();
    client.within(LONG).ask_with("PUT", "/api/v1/vm.remove-device", body.as_bytes())?;
    let mut loss = None;
    while let Some(event) = events.next(None).map_err(|source| unreadable(path, source))? {
        let is_new = sequence(&event) > before;
        loss = change_of(&event, id, "unflushed").filter(|_| is_new).or(loss);
        if let Some(text) = change_of(&event, id, "not-returned").filter(|_| is_new) {
            return Err(Box::new(CtlError::NotReturned { text }));
        }
        if let Some(text) = last.iter().find_map(|last| change_of(&event, id, last)).filter(|_| is_new) {
            return match loss {
                None => Ok(format!("{text}\n")),
                Some(text) => Err(Box::new(CtlError::Unflushed { text })),
            };
        }
        // The end of a machine waits for the returns of its slices.
        if is_end(&event) && !is_slice {
            break;
        }
        if name(&event).as_deref() == Some("lost") && !has_device(client, id)? {
            let text = format!("device \"{id}\" left, and events on whether it was flushed are lost");
            return Err(Box::new(CtlError::Unflushed { text }));
        }
    }
    Err(Box::new(CtlError::Unreturned { id: id.to_owned() }))
}

/// Whether the machine has the device `id` now: "removed" may be among events that are lost.
pub(super) fn has_device(client: Client<'_>, id: &str) -> Result<bool, ClientError> {
    let info: Value = serde_json::from_str(&client.ask("GET", "/api/v1/vm.info")?).unwrap_or_default();
    Ok(info["device_tree"].get(id).is_some())
}

/// Whether the device `id` is a slice.
fn is_slice(client: Client<'_>, id: &str) -> Result<bool, ClientError> {
    let slices: Value = serde_json::from_str(&client.ask("GET", "/egm/v1/slices")?).unwrap_or_default();
    Ok(slices.as_array().into_iter().flatten().any(|slice| slice["id"] == id && slice["device"] == true))
}

/// Position of `event` in the journal.
fn sequence(event: &str) -> Option<u64> {
    serde_json::from_str::<Value>(event).ok()?["sequence"].as_u64()
}

/// The text of `event`, if it is `change` of the device `id`.
fn change_of(event: &str, id: &str, change: &str) -> Option<String> {
    let event: Value = serde_json::from_str(event).ok()?;
    let is_it = event["event"] == "device" && event["device"] == id && event["change"] == change;
    is_it.then(|| cell(&event["text"]))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    #[test]
    fn only_the_removal_of_this_device_is_its_end() {
        let event = |change: &str, device: &str| {
            json!({ "sequence": 4, "event": "device", "device": device, "change": change, "text": "gone" })
                .to_string()
        };
        assert_eq!(change_of(&event("removed", "gpu0"), "gpu0", "removed").as_deref(), Some("gone"));
        assert_eq!(change_of(&event("removed", "gpu1"), "gpu0", "removed"), None);
        assert_eq!(change_of(&event("requested", "gpu0"), "gpu0", "removed"), None);
        assert_eq!((sequence(&event("removed", "gpu0")), sequence("{}")), (Some(4), None));
    }

    /// The outcome of an unplug of "gpu0" with `last` as the new events, by a machine with the devices of `tree`.
    fn unplugged_of(last: &'static [u8], tree: Option<&str>) -> Result<String, String> {
        const EARLIER: &[u8] =
            b"{\"sequence\":3,\"event\":\"device\",\"device\":\"gpu0\",\"change\":\"removed\",\"text\":\"earlier\"}\n";
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let head = b"HTTP/1.1 200 OK\r\n\r\n";
        let info = tree.map(|tree| format!("HTTP/1.1 200 OK\r\n\r\n{{\"device_tree\":{tree}}}").into_bytes());
        let bodies = [
            [head, EARLIER].concat(),
            [head, b"[]".as_slice()].concat(),
            [head, EARLIER, last].concat(),
            b"HTTP/1.1 204 No Content\r\n\r\n".to_vec(),
        ];
        let bodies = bodies.into_iter().chain(info);
        let server = thread::spawn(move || {
            for body in bodies {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 1024]).unwrap();
                stream.write_all(&body).unwrap();
            }
        });
        let outcome = unplug(Client::new(&path), &path, "gpu0").map_err(|error| error.to_string());
        server.join().unwrap();
        outcome
    }

    fn unplugged(last: &'static [u8]) -> Result<String, String> {
        unplugged_of(last, None)
    }

    #[test]
    fn an_unplug_ends_when_the_device_left_and_the_event_of_that_is_lost() {
        const LOST: &[u8] = b"{\"event\":\"lost\",\"events\":300}\n";
        let left = unplugged_of(LOST, Some("{\"disk0\":{}}")).unwrap_err();
        assert_eq!(left, "device \"gpu0\" left, and events on whether it was flushed are lost");
        const LATER: &[u8] = b"{\"event\":\"lost\",\"events\":300}\n\
            {\"sequence\":400,\"event\":\"device\",\"device\":\"gpu0\",\"change\":\"removed\",\"text\":\"now\"}\n";
        assert_eq!(unplugged_of(LATER, Some("{\"gpu0\":{}}")).unwrap(), "now\n");
    }

    #[test]
    fn an_earlier_removal_is_not_the_end_of_an_unplug() {
        const NOW: &[u8] =
            b"{\"sequence\":4,\"event\":\"device\",\"device\":\"gpu0\",\"change\":\"removed\",\"text\":\"now\"}\n";
        assert_eq!(unplugged(NOW).unwrap(), "now\n");
        const LOST: &[u8] = b"{\"sequence\":4,\"event\":\"device\",\"device\":\"gpu0\",\"change\":\"unflushed\",\"text\":\"lost\"}\n\
            {\"sequence\":5,\"event\":\"device\",\"device\":\"gpu0\",\"change\":\"removed\",\"text\":\"now\"}\n";
        assert_eq!(unplugged(LOST).unwrap_err(), "lost", "a disk that was not flushed is no success");
        let ended = unplugged(b"{\"sequence\":4,\"event\":\"stopped\"}\n").unwrap_err();
        assert_eq!(ended, "cannot wait for device \"gpu0\": the machine ends");
        assert!(unplugged(b"").is_err(), "the stream ends");
    }
}
