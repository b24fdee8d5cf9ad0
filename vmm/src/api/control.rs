//! Requests to the machine that runs.

use std::sync::Arc;

use super::amend::{Change, amended};
use super::answer::{Answer, Awaited, Deferred, Response, Status, read, texts};
use super::cloud::{self, DeviceConfig, RemovedDevice};
use super::cycle::CycleError;
use super::life;
use super::published::{KnownState, Published};
use super::views::PciDeviceInfo;
use crate::config::Refusal;
use crate::error::{Blame, Report};
use crate::hotplug::{HotplugError, Reply};
use crate::machine::{ControlError, Live};

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

/// Plugs in the function of `body`, a `DeviceConfig`; before the start of the machine it is one of its devices.
pub(super) fn add_device(body: &[u8], machine: &Published) -> Response {
    if let Some(answer) = amended(Change::AddDevice, body, machine) {
        return answer.into();
    }
    let new = match read::<DeviceConfig>("device", body).map(cloud::added) {
        Ok(Ok(new)) => new,
        Ok(Err(refusals)) => return refused(&refusals).into(),
        Err(answer) => return answer.into(),
    };
    later(machine, |live, reply| live.plug(new, reply), |device| Answer::json(&PciDeviceInfo::from(device)))
}

/// Requests the guest to release the device of `body`, a `RemovedDevice`; before the start it is removed at once.
pub(super) fn remove_device(body: &[u8], machine: &Published) -> Response {
    if let Some(answer) = amended(Change::RemoveDevice, body, machine) {
        return answer.into();
    }
    match read::<RemovedDevice>("device", body) {
        Ok(RemovedDevice { id }) => later(machine, |live, reply| live.unplug(id, reply), |()| Answer::done()),
        Err(answer) => answer.into(),
    }
}

fn refused(refusals: &[Refusal]) -> Answer {
    let line = |Refusal { key, reason, help }: &Refusal| format!("{key}: {reason}; {help}");
    let last = "change the request, and send it again".to_owned();
    let texts: Vec<String> = refusals.iter().map(line).chain([last]).collect();
    Answer::failures(Status::BadRequest, &texts)
}

/// The response to a request that the hot-plug controller carries out later; `answer` converts its result.
fn later<T: 'static>(
    machine: &Published,
    request: impl FnOnce(&Live, Reply<T>) -> Result<(), ControlError>,
    answer: fn(T) -> Answer,
) -> Response {
    let deferred = Deferred::default();
    let (given, journal) = (deferred.clone(), Arc::clone(machine.journal()));
    let reply: Reply<T> = Box::new(move |result| {
        given.set(result.map_or_else(|error| failure(&error), answer));
        journal.wake();
    });
    match ask(&machine.state(), |live| request(live, reply)) {
        Ok(()) => Response::Later(Awaited::Reply(deferred)),
        Err(answer) => answer.into(),
    }
}

fn failure(error: &HotplugError) -> Answer {
    let status = match error {
        HotplugError::Unknown { .. } => Status::NotFound,
        _ if error.blame() == Blame::Configuration => Status::Conflict,
        _ => Status::InternalServerError,
    };
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
        ControlError::NoButton => {
            ("cannot press the power button: the guest has a device tree, which has none", "use vm.shutdown")
        }
    };
    Answer::failure(Status::Conflict, what, remedy)
}

#[cfg(test)]
mod tests {
    use egm_vfio::variant::clique::Clique;
    use serde_json::{Value, json};
    use vmm_sys_util::eventfd::EventFd;

    use super::*;
    use crate::hotplug::{Controller, DeviceAddresses, Running};
    use crate::machine::{DeviceCounters, ExitLatch, LiveParts, MachineStep};
    use crate::pci::{Bus, RootComplex};

    const GPU: &str = "/sys/bus/pci/devices/0000:41:00.0";

    /// A machine that runs, with a controller of no ports, or without a controller.
    struct Machine {
        published: Published,
        running: Option<Running>,
        wake: Arc<EventFd>,
    }

    impl Machine {
        fn new(has_controller: bool, is_confined: bool) -> Self {
            let controller = || {
                let (root, devices) = (Arc::new(RootComplex::new(Bus::default())), DeviceAddresses::new());
                let maker = Box::new(|_: &str, _: &_, _: &[_]| Err(HotplugError::Unprepared));
                let report = Box::new(|_: &_| ());
                Controller::new(root, Vec::new(), Vec::new(), devices, maker, report)
                    .unwrap()
                    .start()
                    .unwrap()
            };
            let running = has_controller.then(controller);
            let parts = LiveParts {
                button: None,
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
            self.answer(add_device(body.to_string().as_bytes(), &self.published))
        }

        fn remove(&self, body: &Value) -> (Status, Vec<String>) {
            self.answer(remove_device(body.to_string().as_bytes(), &self.published))
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
        assert!(texts[0].contains("has no function \"gpu0\""), "{texts:?}");
    }

    #[test]
    fn a_request_of_a_machine_that_ends_is_answered_at_its_end() {
        let mut machine = Machine::new(true, false);
        drop(machine.running.take());
        let later = remove_device(br#"{"id":"gpu0"}"#, &machine.published);
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
                "x_nv_gpudirect_clique: cannot use this clique",
            ),
            (json!({ "path": GPU, "pci_segment": 1 }), "pci_segment: cannot choose a segment"),
            (json!({ "path": GPU, "id": "a b" }), "id: cannot name a device so"),
            (json!({ "path": GPU, "other": 1 }), "cannot read the device: unknown field"),
            (json!([GPU]), "cannot read the device"),
        ] {
            let (status, texts) = machine.add(&body);
            assert_eq!(status, Status::BadRequest, "{body}: {texts:?}");
            assert!(texts[0].starts_with(words), "{body}: {texts:?}");
        }
        let all = json!({ "iommu": true, "id": "", "x_nv_gpudirect_clique": 16 });
        assert_eq!(machine.add(&all).1.len(), 5, "each, and what to do");
        assert_eq!(machine.remove(&json!({ "id": 1 })).0, Status::BadRequest);
        let body = json!({ "path": GPU, "id": "gpu0", "x_nv_gpudirect_clique": 3 });
        let device: DeviceConfig = serde_json::from_value(body).unwrap();
        let new = cloud::added(device).unwrap();
        assert_eq!((new.id.as_deref(), new.function.to_string().as_str()), (Some("gpu0"), "0000:41:00.0"));
        assert!(new.clique.and_then(Clique::new).is_some());
    }
}
