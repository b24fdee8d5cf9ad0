//! Requests to the machine that runs.

use std::sync::Arc;

use serde_json::json;

use super::amend::{Change, amended, check_taps};
use super::answer::{Answer, Awaited, Deferred, Response, Status, read, texts};
use super::cloud::{RemovedDevice, added};
use super::cycle::CycleError;
use super::http::Request;
use super::life;
use super::published::{KnownState, Published};
use super::views::{self, NewPciDevice, PciDeviceInfo};
use crate::config::{ConfigErrors, Device, NewDevice, NewSlice};
use crate::error::{Blame, Report};
use crate::hotplug::{HotplugError, Plug, PluggedDevice, Reply};
use crate::machine::{ControlError, Live};
use crate::passed::Passed;
use crate::resources::ThreadError;

/// The machine, if it runs.
pub(super) fn running(state: &KnownState) -> Result<&Live, Answer> {
    match (&state.live, state.ended) {
        (_, Some(_)) => Err(unable(ControlError::Ending, state)),
        (Some(live), None) => Ok(live),
        (None, None) => Err(life::unbooted(state).unwrap_or_else(life::starting)),
    }
}

/// Result of `request` to the running machine, or the refusal.
pub(super) fn ask<T>(
    state: &KnownState,
    request: impl FnOnce(&Live) -> Result<T, ControlError>,
) -> Result<T, Answer> {
    request(running(state)?).map_err(|error| unable(error, state))
}

pub(super) fn done(result: Result<(), Answer>) -> Answer {
    result.map_or_else(|refusal| refusal, |()| Answer::done())
}

/// Adds the device of the body, in the form that `change` has: to the document before the machine's start, and afterwards by
/// plugging it in.
pub(super) fn add(change: Change, request: &Request, machine: &Published) -> Response {
    if let Some(answer) = amended(change, request, machine) {
        return answer.into();
    }
    let Request { body, passed, .. } = request;
    let parse = || match change {
        Change::AddDisk => added::disk(body),
        Change::AddNet => added::net(body, passed.numbers()),
        Change::AddVsock => added::vsock(body),
        Change::AddUserDevice => added::server(body),
        _ => added::function(body),
    };
    plug(parse, false, passed, machine, |device| Answer::json(&PciDeviceInfo::from(device)))
}

/// Plugs in the device of the body, which is written as in a configuration, or only plans that.
pub(super) fn plug_in(request: &Request, machine: &Published) -> Response {
    let is_dry_run = match is_dry_run(request) {
        Ok(is_dry_run) => is_dry_run,
        Err(answer) => return answer.into(),
    };
    let parse = || NewDevice::parse(request.body.clone());
    let answer = |device| Answer::json(&NewPciDevice::from(device));
    plug(parse, is_dry_run, &Passed::default(), machine, answer)
}

/// Grants the slice of the body, which is written as in a configuration, and plugs it in; or only plans that.
pub(super) fn plug_slice(request: &Request, machine: &Published) -> Response {
    let is_dry_run = match is_dry_run(request) {
        Ok(is_dry_run) => is_dry_run,
        Err(answer) => return answer.into(),
    };
    if let Err(refusal) = ask(&machine.state(), Live::check_plug) {
        return refusal.into();
    }
    let answer = |plugged| Answer::json(&views::NewPciSlice::from(plugged));
    match NewSlice::parse(request.body.clone()) {
        Ok(slice) => later(machine, |live, reply| live.plug_slice(slice, is_dry_run, reply), answer),
        Err(errors) => Answer::failures(Status::BadRequest, &texts(&errors)).into(),
    }
}

/// Whether the query of `request` is "dry-run=1"; another one is refused.
pub(super) fn is_dry_run(request: &Request) -> Result<bool, Answer> {
    match request.query.as_str() {
        "" => Ok(false),
        "dry-run=1" => Ok(true),
        _ => {
            let what = "cannot read the request: its query is unknown";
            Err(Answer::failure(Status::BadRequest, what, "use dry-run=1, or no query"))
        }
    }
}

/// Plugs in the device of `parse`, which names the descriptors `passed` by their numbers.
fn plug(
    parse: impl FnOnce() -> Result<NewDevice, ConfigErrors>,
    is_dry_run: bool,
    passed: &Passed,
    machine: &Published,
    answer: fn(PluggedDevice) -> Answer,
) -> Response {
    // First: no thread of a sandbox may look at a descriptor.
    let checked = ask(&machine.state(), Live::check_plug).and_then(|()| check_taps(passed));
    if let Err(refusal) = checked {
        return refusal.into();
    }
    let passed = passed.clone();
    match parse() {
        Ok(device) => later(
            machine,
            |live, reply| live.plug(Plug { device, is_dry_run, passed, slice: None }, reply),
            answer,
        ),
        Err(errors) => Answer::failures(Status::BadRequest, &texts(&errors)).into(),
    }
}

/// The devices that were plugged in, as a machine can plug them in again. One that no text describes has its `id` alone.
pub(super) fn plugged_devices(live: &Live) -> Answer {
    let text = |device: Device| device.to_json().ok().flatten().unwrap_or_else(|| json!({ "id": device.id }));
    let devices = live.plugged().into_iter().map(text);
    Answer::json(&devices.collect::<Vec<_>>())
}

/// Requests the guest to release the device of the body, a `RemovedDevice`; before the start it is removed at once.
pub(super) fn remove_device(request: &Request, machine: &Published) -> Response {
    if let Some(answer) = amended(Change::RemoveDevice, request, machine) {
        return answer.into();
    }
    match read::<RemovedDevice>("device", &request.body) {
        Ok(RemovedDevice { id }) => later(machine, |live, reply| live.unplug(id, reply), |()| Answer::done()),
        Err(answer) => answer.into(),
    }
}

/// The response to a request that the hot-plug controller carries out later; `answer` converts its result.
fn later<T: 'static>(
    machine: &Published,
    request: impl FnOnce(&Live, Reply<T>) -> Result<(), ControlError>,
    answer: fn(T) -> Answer,
) -> Response {
    answered_later(machine, |live, give| {
        request(live, Box::new(move |result| give(result.map_or_else(|error| failure(&error), answer))))
    })
}

/// The response to a request that another thread carries out, which then calls its second argument with the answer.
pub(super) fn answered_later(
    machine: &Published,
    request: impl FnOnce(&Live, Box<dyn FnOnce(Answer) + Send>) -> Result<(), ControlError>,
) -> Response {
    let deferred = Deferred::default();
    let (given, journal) = (deferred.clone(), Arc::clone(machine.journal()));
    let give = Box::new(move |answer| {
        given.set(answer);
        journal.wake();
    });
    match ask(&machine.state(), |live| request(live, give)) {
        Ok(()) => Response::Later(Awaited::Reply(deferred)),
        Err(answer) => answer.into(),
    }
}

fn failure(error: &HotplugError) -> Answer {
    match error {
        HotplugError::Unknown { .. } => Answer::failures(Status::NotFound, &texts(error)),
        _ => not_carried_out(error),
    }
}

/// The answer to a request that failed while it was carried out.
pub(super) fn not_carried_out(error: &dyn Report) -> Answer {
    let is_client_s = error.blame() == Blame::Configuration;
    let status = if is_client_s { Status::Conflict } else { Status::InternalServerError };
    Answer::failures(status, &texts(error))
}

fn unable(error: ControlError, state: &KnownState) -> Answer {
    let (what, remedy) = match error {
        ControlError::Ending if state.cycle.is_some() => return life::refused(CycleError::Ending),
        ControlError::Ending => ("the machine ends, or has ended", "start it again: egm-vmm run FILE"),
        ControlError::Paused => ("the machine is paused already", "use vm.resume"),
        ControlError::NotPaused => ("the machine is not paused", "use vm.pause first"),
        ControlError::NoPorts => return failure(&HotplugError::NoPorts),
        ControlError::GuestPaused => {
            ("the machine is paused: its guest cannot release a device", "use vm.resume first")
        }
        ControlError::Confined => (
            "cannot plug in a device: the machine's sandbox opens none",
            "start the machine with --sandbox off",
        ),
        ControlError::EndsAtReset => (
            "cannot reset the guest: a reset ends its machine",
            "start it with \"on_reset\": \"reboot\" in its configuration",
        ),
        ControlError::ConfinedSnapshot => (
            "cannot write a snapshot: the machine's sandbox opens no file",
            "start the machine with --sandbox off",
        ),
        ControlError::Granting => (
            "cannot plug in a slice: another request for a slice is being carried out",
            "wait for its answer, and try again",
        ),
        ControlError::NoGranter => (
            "cannot plug in a slice: a machine of --user has no access to the host's ledger",
            "start the machine without --user: as root, or with --broker SOCKET",
        ),
        ControlError::NoThread => ("cannot plug in a slice: the host has no thread left", ThreadError::HELP),
        ControlError::Saving => {
            ("cannot write a snapshot: another request for one waits", "wait for its answer, and try again")
        }
        ControlError::NoButton => {
            ("cannot press the power button: the guest has a device tree, which has none", "use vm.shutdown")
        }
    };
    Answer::failure(Status::Conflict, what, remedy)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use vmm_sys_util::eventfd::EventFd;

    use super::*;
    use crate::config::{Clique, Device, DeviceKind, Tap};
    use crate::hotplug::{Candidate, Controller, Devices, Maker, New, PlugMemory, Running};
    use crate::machine::{DeviceCounters, ExitLatch, LiveParts, MachineStep};
    use crate::pci::{Bus, RootComplex};
    use crate::plan::BridgePlan;

    const GPU: &str = "/sys/bus/pci/devices/0000:41:00.0";

    fn put(body: &Value) -> Request {
        Request::put("/api/v1/vm.change", body.to_string().into_bytes())
    }

    /// Refuses each device that it is to plan.
    struct NoMaker;

    impl Maker for NoMaker {
        fn plan(
            &self,
            _: &Device,
            _: Option<&PlugMemory>,
            _: &[BridgePlan],
        ) -> Result<Candidate, HotplugError> {
            Err(HotplugError::Unprepared)
        }
        fn make(&self, _: Candidate) -> Result<New, HotplugError> {
            Err(HotplugError::Unprepared)
        }
    }

    /// A machine that runs, with a controller of no ports, or without a controller.
    struct Machine {
        published: Published,
        running: Option<Running>,
        wake: Arc<EventFd>,
    }

    impl Machine {
        fn new(has_controller: bool, is_confined: bool) -> Self {
            let controller = || {
                let (root, devices) = (Arc::new(RootComplex::new(Bus::default())), Devices::default());
                let report = Box::new(|_: &_| ());
                Controller::new(root, Vec::new(), Vec::new(), devices, Box::new(NoMaker), report)
                    .unwrap()
                    .start()
                    .unwrap()
            };
            let running = has_controller.then(controller);
            let parts = LiveParts {
                button: None,
                reset: None,
                hotplug: running.as_ref().map(|running| running.handle.clone()),
                is_confined,
                counters: Box::new(Vec::<DeviceCounters>::new),
                messages: Box::new(Vec::new),
            };
            let published = Published::new("vm.json".into());
            let wake = published.journal().open().unwrap();
            let live = Live::new(ExitLatch::new().unwrap(), Arc::default(), parts);
            published.step(MachineStep::Started, &live);
            wake.read().unwrap();
            Self { published, running, wake }
        }

        /// Status and texts of the answer to `response`, which may come later.
        fn answer(&self, response: Response) -> (Status, Vec<String>) {
            let answer = match response {
                Response::Answer(answer) => answer,
                Response::Later(awaited) => {
                    while self.wake.read().is_err() {
                        std::thread::yield_now();
                    }
                    life::outcome(&awaited, &self.published.state(), false).unwrap()
                }
                Response::Events(..) => panic!("events"),
            };
            let text = String::from_utf8(answer.bytes(true)).unwrap();
            let body = text.split_once("\r\n\r\n").unwrap().1;
            (answer.status, serde_json::from_str(body).unwrap())
        }

        fn add(&self, body: &Value) -> (Status, Vec<String>) {
            self.answer(add(Change::AddDevice, &put(body), &self.published))
        }

        fn remove(&self, body: &Value) -> (Status, Vec<String>) {
            self.answer(remove_device(&put(body), &self.published))
        }
    }

    #[test]
    fn what_the_controller_refuses_is_the_answer_of_its_request() {
        let machine = Machine::new(true, false);
        let (status, texts) = machine.add(&json!({ "path": GPU, "id": "gpu0" }));
        assert_eq!(status, Status::Conflict);
        assert!(texts[0].contains("no hot-plug port") && texts[1].contains("spare"), "{texts:?}");
        let (status, texts) = machine.remove(&json!({ "id": "gpu0" }));
        assert_eq!(status, Status::NotFound);
        assert!(texts[0].contains("has no device \"gpu0\""), "{texts:?}");
    }

    #[test]
    fn a_request_of_a_machine_that_ends_is_answered_at_its_end() {
        let mut machine = Machine::new(true, false);
        drop(machine.running.take());
        let later = remove_device(&put(&json!({ "id": "gpu0" })), &machine.published);
        match later {
            Response::Answer(answer) => assert_eq!(answer.status, Status::Conflict),
            Response::Later(awaited) => {
                let answer = life::outcome(&awaited, &machine.published.state(), true).unwrap();
                assert_eq!(answer.status, Status::Conflict);
            }
            Response::Events(..) => panic!("events"),
        }
    }

    #[test]
    fn a_machine_without_ports_or_in_a_sandbox_plugs_nothing_in() {
        let device = json!({ "path": GPU });
        let (status, texts) = Machine::new(false, false).add(&device);
        assert_eq!(status, Status::Conflict);
        assert!(texts[0].contains("no hot-plug port"), "{texts:?}");
        let confined = Machine::new(true, true);
        let (status, texts) = confined.add(&device);
        assert_eq!((status, texts[1].as_str()), (Status::Conflict, "start the machine with --sandbox off"));
        assert_eq!(confined.remove(&json!({ "id": "x" })).0, Status::NotFound, "nothing is opened for that");
    }

    #[test]
    fn every_value_that_cannot_be_honoured_is_refused_by_its_name() {
        let machine = Machine::new(true, false);
        for (body, words) in [
            (json!({}), "path: cannot find a PCI function"),
            (json!({ "path": "/dev/vfio/12" }), "path: cannot find a PCI function"),
            (json!({ "fd": 3 }), "fd: cannot use this descriptor"),
            (json!({ "path": GPU, "iommu": true }), "iommu: cannot put the device behind an IOMMU"),
            (json!({ "path": GPU, "pci_device_id": 3 }), "pci_device_id: cannot choose the device's address"),
            (
                json!({ "path": GPU, "x_exclude_mmap_bars": [0] }),
                "x_exclude_mmap_bars: cannot leave BARs unmapped",
            ),
            (
                json!({ "path": GPU, "x_nv_gpudirect_clique": 16 }),
                "x_nv_gpudirect_clique: 16 is outside 0 to 15",
            ),
            (json!({ "path": GPU, "id": "a b" }), "id: \"a b\" is not a name"),
            (json!({ "path": GPU, "other": 1 }), "unknown key \"other\""),
            (json!([GPU]), "found an array"),
        ] {
            let (status, texts) = machine.add(&body);
            assert_eq!(status, Status::BadRequest, "{body}: {texts:?}");
            assert!(texts[0].starts_with("device:1:") && texts[0].contains(words), "{body}: {texts:?}");
        }
        let all = json!({ "iommu": true, "pci_device_id": 3 });
        assert_eq!(machine.add(&all).1.len(), 4, "each, and what to do");
        assert_eq!(machine.remove(&json!({ "id": 1 })).0, Status::BadRequest);
    }

    #[test]
    fn a_device_of_either_language_is_the_one_that_is_plugged_in() {
        let body = json!({ "path": GPU, "id": "gpu0", "x_nv_gpudirect_clique": 3 });
        let device = added::function(body.to_string().as_bytes()).unwrap();
        let DeviceKind::Vfio { function, clique, .. } = device.named("gpu0", "vm").kind else { panic!() };
        assert_eq!((device.id(), function.to_string().as_str()), (Some("gpu0"), "0000:41:00.0"));
        assert_eq!(clique, Clique::Number(3));
        for (made, ours) in [
            (
                added::disk(br#"{"path":"/d","readonly":true}"#),
                r#"{"type":"virtio-blk","path":"/d","read_only":true}"#,
            ),
            (added::net(br#"{"tap":"t"}"#, Vec::new()), r#"{"type":"virtio-net","tap":"t","queue_pairs":1}"#),
            (added::server(br#"{"socket":"/s"}"#), r#"{"type":"vfio-user","socket":"/s"}"#),
            (added::vsock(br#"{"cid":3,"socket":"/s"}"#), r#"{"type":"virtio-vsock","cid":3,"socket":"/s"}"#),
        ] {
            assert_eq!(made.unwrap(), NewDevice::parse(ours.as_bytes().to_vec()).unwrap(), "{ours}");
        }
        let passed = added::net(br#"{"fds":[9]}"#, vec![5]).unwrap().named("net0", "vm").kind;
        let DeviceKind::VirtioNet { tap: Tap::Descriptors(numbers), queue_pairs: 1, .. } = passed else {
            panic!("{passed:?}")
        };
        assert_eq!(numbers, [5], "not the client's number");
    }

    #[test]
    fn a_device_of_ours_is_refused_by_its_keys_and_a_query_by_its_name() {
        let machine = Machine::new(true, false);
        let plug = |query: &str, body: &str| {
            let request = Request::put(&format!("/egm/v1/devices?{query}"), body.as_bytes().to_vec());
            machine.answer(plug_in(&request, &machine.published))
        };
        let (status, texts) = plug("dry-run=1", r#"{"type":"virtio-blk","path":""}"#);
        assert_eq!(status, Status::BadRequest);
        assert!(texts[0].contains("path: the path is empty"), "{texts:?}");
        assert_eq!(plug("dry-run=2", r#"{"type":"virtio-rng"}"#).0, Status::BadRequest);
        let (status, texts) = plug("", r#"{"type":"virtio-rng"}"#);
        assert!(status == Status::Conflict && texts[0].contains("no hot-plug port"), "{texts:?}");
    }
}
