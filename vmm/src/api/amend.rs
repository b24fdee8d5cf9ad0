//! Changes of cloud-hypervisor's document between `vm.create` and `vm.boot`.
//!
//! The document is read, changed and checked as a whole, so that a device which is added follows the same rules as one
//! that was there.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use serde::de::DeserializeOwned;

use super::answer::{Answer, Status, read, texts};
use super::cloud::{DiskConfig, RemovedDevice, Resize, VmConfig, VsockConfig};
use super::cycle::{Created, Language};
use super::http::Request;
use super::life;
use super::published::Published;
use crate::passed::Passed;
use crate::virtio::net::tap;

/// Longest document in bytes. The state that an execution leaves to the next has it as a string, which is twice as long
/// at most.
const MAX_DOCUMENT: usize = 256 << 10;

/// A request that changes the document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    AddDisk,
    AddNet,
    AddVsock,
    AddDevice,
    AddUserDevice,
    RemoveDevice,
    Resize,
}

/// Most descriptors of taps in one machine. An upgrade passes each twice: with the configuration, and with its device.
const MAX_TAPS: usize = 64;
/// A number that no descriptor has in the document.
const NO_TAP: i32 = -1;

/// Carries out `change` as `request` describes it on the machine that is created; `None` where none is, or where it was
/// started.
pub(super) fn amended(change: Change, request: &Request, machine: &Published) -> Option<Answer> {
    let state = machine.state();
    let cycle = state.cycle.as_ref().filter(|cycle| !cycle.is_booted())?;
    Some(amend(change, request, cycle.created()?, machine).unwrap_or_else(|refusal| refusal))
}

/// Carries out `change` before the machine's start, or refuses it with `remedy` afterwards.
pub(super) fn respond(change: Change, remedy: &str, request: &Request, machine: &Published) -> Answer {
    let late = || Answer::failure(Status::NotImplemented, "cannot change a machine that was started", remedy);
    let refusal = || life::unbooted(&machine.state()).unwrap_or_else(late); // none is created, or it runs
    amended(change, request, machine).unwrap_or_else(refusal)
}

fn amend(
    change: Change,
    request: &Request,
    created: &Created,
    machine: &Published,
) -> Result<Answer, Answer> {
    let Created { language: Language::CloudHypervisor, text, default_name, taps, .. } = created else {
        let what = "cannot change the machine: its configuration is egm-vmm's own";
        return Err(Answer::failure(Status::Conflict, what, "delete it, and create it with the change"));
    };
    let mut document: VmConfig = read("document", text.as_bytes())?;
    change.apply(&request.body, &mut document)?;
    if let Some(added) =
        document.net.as_mut().and_then(|nets| nets.last_mut()).filter(|_| change == Change::AddNet)
    {
        added.fds = places_of(taps.len(), &request.passed, added.fds.is_some())?;
    }
    let taps = in_order(&mut document, &taps.iter().chain(request.passed.iter()).cloned().collect());
    if taps.len() > MAX_TAPS {
        let what =
            format!("cannot change the machine: it would have more than {MAX_TAPS} descriptors of taps");
        return Err(Answer::failure(Status::Conflict, &what, "use fewer queue pairs, or name taps"));
    }
    let text = serde_json::to_string(&document).unwrap_or_default(); // it was read from such a text
    if text.len() > MAX_DOCUMENT {
        let what = "cannot change the machine: its document would be too long";
        return Err(Answer::failure(Status::ContentTooLarge, what, "use shorter paths, or fewer devices"));
    }
    let created = Created::with_taps(Language::CloudHypervisor, text, default_name, taps)
        .map_err(|errors| Answer::failures(Status::BadRequest, &texts(&errors)))?;
    match machine.change(|cycle| cycle.amend(created)) {
        Some(Err(error)) => Err(life::refused(error)),
        _ => Ok(Answer::done()),
    }
}

/// The places of `passed` behind `first` others. `has_numbers`: the request names descriptors, of the client's process.
///
/// # Errors
/// The refusal of a descriptor that is no tap.
fn places_of(first: usize, passed: &Passed, has_numbers: bool) -> Result<Option<Vec<i32>>, Answer> {
    if passed.is_empty() {
        // The rule of the document refuses it.
        return Ok(has_numbers.then(|| vec![NO_TAP]));
    }
    check_taps(passed)?;
    let places = first..first.saturating_add(passed.len());
    Ok(Some(places.map(|place| i32::try_from(place).unwrap_or(NO_TAP)).collect()))
}

/// Checks that each descriptor is a tap.
///
/// # Errors
/// The refusal of the first that is none, which counts from 0 on.
pub(super) fn check_taps(passed: &Passed) -> Result<(), Answer> {
    for (number, descriptor) in (0..).zip(passed.iter()) {
        tap::check_adopted(number, descriptor.as_fd())
            .map_err(|error| Answer::failures(Status::BadRequest, &texts(&error)))?;
    }
    Ok(())
}

/// The descriptors of `all` that `document` names, in the order in which it names them from now on.
fn in_order(document: &mut VmConfig, all: &Passed) -> Passed {
    let mut kept: Vec<Arc<OwnedFd>> = Vec::new();
    for place in document.net.iter_mut().flatten().flat_map(|net| net.fds.iter_mut().flatten()) {
        let Some(tap) = usize::try_from(*place).ok().and_then(|place| all.get(place)) else { continue };
        *place = i32::try_from(kept.len()).unwrap_or(NO_TAP);
        kept.push(Arc::clone(tap));
    }
    kept.into_iter().collect()
}

impl Change {
    fn apply(self, body: &[u8], document: &mut VmConfig) -> Result<(), Answer> {
        match self {
            Self::AddDisk => add(body, &mut document.disks)?,
            Self::AddNet => add(body, &mut document.net)?,
            Self::AddDevice => add(body, &mut document.devices)?,
            Self::AddUserDevice => add(body, &mut document.user_devices)?,
            Self::AddVsock => {
                let vsock: VsockConfig = read("device", body)?;
                if document.vsock.replace(vsock).is_some() {
                    let what = "cannot add a vsock device: the machine has one";
                    return Err(Answer::failure(
                        Status::Conflict,
                        what,
                        "remove that first: vm.remove-device",
                    ));
                }
            }
            Self::RemoveDevice => remove(&read::<RemovedDevice>("device", body)?.id, document)?,
            Self::Resize => resize(&read("size", body)?, document)?,
        }
        Ok(())
    }
}

/// Adds the device of `body` to `devices`.
fn add<T: DeserializeOwned>(body: &[u8], devices: &mut Option<Vec<T>>) -> Result<(), Answer> {
    devices.get_or_insert_default().push(read("device", body)?);
    Ok(())
}

/// Removes the device `id`.
fn remove(id: &str, document: &mut VmConfig) -> Result<(), Answer> {
    fn without<T>(devices: &mut Option<Vec<T>>, is_it: impl Fn(&T) -> bool) -> bool {
        let before = devices.as_ref().map_or(0, Vec::len);
        if let Some(devices) = devices {
            devices.retain(|device| !is_it(device));
        }
        devices.as_ref().map_or(0, Vec::len) < before
    }
    let has = |of_device: &Option<String>| of_device.as_deref() == Some(id);
    // A disk without an id has that of its serial number.
    let is_disk = |disk: &DiskConfig| has(&disk.id) || (disk.id.is_none() && has(&disk.serial));
    let vsock = document.vsock.take_if(|vsock| has(&vsock.id)).is_some();
    let removed = vsock
        | without(&mut document.disks, is_disk)
        | without(&mut document.net, |net| has(&net.id))
        | without(&mut document.devices, |device| has(&device.id))
        | without(&mut document.user_devices, |device| has(&device.id));
    if removed {
        return Ok(());
    }
    let what = format!("cannot remove device {id:?}: no device of the document has this id");
    Err(Answer::failure(Status::NotFound, &what, "use the id that the device was added with"))
}

/// Sets the numbers of `size` that are given.
fn resize(size: &Resize, document: &mut VmConfig) -> Result<(), Answer> {
    if size.desired_balloon.is_some() {
        let what = "cannot resize the balloon: the machine has none";
        return Err(Answer::failure(Status::BadRequest, what, "leave desired_balloon out"));
    }
    document.cpus.boot_vcpus = size.desired_vcpus.unwrap_or(document.cpus.boot_vcpus);
    document.memory.size = size.desired_ram.unwrap_or(document.memory.size);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use crate::api::cycle::SavedCycle;

    /// A program that serves, with a machine of the document `text`.
    fn created(text: &str) -> Published {
        let machine = serving();
        let created = Created::new(Language::CloudHypervisor, text.to_owned(), "vm1").unwrap();
        machine.change(|cycle| cycle.create(created)).unwrap().unwrap();
        machine
    }

    fn serving() -> Published {
        Published::serving(Path::new("vm1.sock"), SavedCycle::default()).unwrap()
    }

    const SMALL: &str = r#"{"payload":{"kernel":"k"},"cpus":{"boot_vcpus":1,"max_vcpus":4}}"#;

    #[track_caller]
    fn ask(change: Change, body: &Value, machine: &Published) -> Status {
        let request = Request::put("/api/v1/vm.change", body.to_string().into_bytes());
        amended(change, &request, machine).unwrap().status
    }

    fn document(machine: &Published) -> Value {
        let state = machine.state();
        serde_json::from_str(&state.cycle.unwrap().created().unwrap().text).unwrap()
    }

    #[test]
    fn a_created_machine_takes_devices_and_sizes_and_gives_devices_back() {
        let machine = created(SMALL);
        for (change, body) in [
            (Change::AddDisk, json!({ "path": "/disk", "id": "d" })),
            (Change::AddDisk, json!({ "path": "/other", "id": "e" })),
            (Change::AddNet, json!({ "tap": "tap0", "id": "n" })),
            (Change::AddVsock, json!({ "cid": 3, "socket": "/v", "id": "v" })),
            (Change::AddDevice, json!({ "path": "/sys/bus/pci/devices/0000:41:00.0", "id": "g" })),
            (Change::AddUserDevice, json!({ "socket": "/u", "id": "u" })),
            (Change::Resize, json!({ "desired_vcpus": 2, "desired_ram": 1 << 30 })),
        ] {
            assert_eq!(ask(change, &body, &machine), Status::NoContent, "{change:?}");
        }
        let now = document(&machine);
        assert_eq!((&now["disks"][1]["path"], &now["cpus"]["boot_vcpus"]), (&json!("/other"), &json!(2)));
        let state = machine.state();
        let shown = &state.cycle.as_ref().unwrap().created().unwrap().shown;
        assert_eq!((shown.cpus.boot_vcpus, shown.memory.size), (2, 1 << 30));
        for id in ["d", "n", "v", "g", "u"] {
            assert_eq!(ask(Change::RemoveDevice, &json!({ "id": id }), &machine), Status::NoContent, "{id}");
        }
        let now = document(&machine);
        assert_eq!((&now["disks"].as_array().unwrap().len(), &now["vsock"]), (&1, &Value::Null));
        assert_eq!(ask(Change::RemoveDevice, &json!({ "id": "d" }), &machine), Status::NotFound);
    }

    #[test]
    fn a_refused_change_leaves_the_machine_as_it_was() {
        let machine = created(SMALL);
        let before = document(&machine);
        for (change, body) in [
            (Change::AddDisk, json!({ "readonly": true })),
            (Change::AddDisk, json!({ "path": "/disk", "image_type": "Qcow2" })),
            (Change::AddNet, json!({ "tap": "tap0", "wrong": 1 })),
            (Change::AddVsock, json!([])),
            (Change::Resize, json!({ "desired_vcpus": 5 })),
            (Change::Resize, json!({ "desired_balloon": 0 })),
        ] {
            assert_eq!(ask(change, &body, &machine), Status::BadRequest, "{change:?} {body}");
        }
        assert_eq!(document(&machine), before);
        let vsock = json!({ "cid": 3, "socket": "/v" });
        assert_eq!(ask(Change::AddVsock, &vsock, &machine), Status::NoContent);
        assert_eq!(ask(Change::AddVsock, &vsock, &machine), Status::Conflict);
    }

    #[test]
    fn a_document_grows_to_a_limit_that_the_next_execution_reads() {
        let machine = created(SMALL);
        let path = "\\".repeat(4000);
        let added = |number: usize| {
            let disk = json!({ "path": format!("/{number}{path}"), "id": format!("d{number}") });
            ask(Change::AddDisk, &disk, &machine)
        };
        let statuses: Vec<Status> = (0..64).map(added).collect();
        assert_eq!((statuses[0], statuses[63]), (Status::NoContent, Status::ContentTooLarge));
        machine.change(super::super::cycle::Cycle::boot).unwrap().unwrap();
        machine.ended(&crate::machine::ExitReason::Reset);
        let saved = machine.saved().unwrap();
        let state = crate::reexec::sealed(&saved).unwrap();
        assert_eq!(crate::reexec::unsealed::<SavedCycle>(state).unwrap(), saved);
    }

    #[test]
    fn without_a_machine_or_after_its_start_nothing_is_changed_here_and_our_own_language_is_refused() {
        let body = json!({ "path": "/disk" }).to_string().into_bytes();
        let request = Request::put("/api/v1/vm.add-disk", body);
        assert!(amended(Change::AddDisk, &request, &serving()).is_none());
        let machine = created(SMALL);
        machine.change(super::super::cycle::Cycle::boot).unwrap().unwrap();
        assert!(amended(Change::AddDisk, &request, &machine).is_none());
        let machine = serving();
        let ours = r#"{"memory":{"size":"16MiB"},"boot":{"kernel":"k"}}"#.to_owned();
        let ours = Created::new(Language::Own, ours, "vm1").unwrap();
        machine.change(|cycle| cycle.create(ours)).unwrap().unwrap();
        assert_eq!(ask(Change::AddDisk, &json!({ "path": "/disk" }), &machine), Status::Conflict);
    }
}
