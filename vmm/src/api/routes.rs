//! The table of requests. Dispatch, refusals, OpenAPI documents and the table of `docs/api.md` are made from it.

mod described;
mod listed;
mod table;

use egm_report::program::log::Severity;

pub(crate) use self::described::open_api;
use self::described::open_api_text;
use self::listed::{ListedRequest, requests};
pub(super) use self::table::ROUTES;
pub(crate) use self::table::Surface;
use super::amend::{self, Change};
use super::answer::{Answer, Awaited, JSON, LINES, METRICS, Response, SERVER_SENT, Status, read};
use super::control::{ask, done, running};
use super::cycle::{Cycle, Language, Next};
use super::events::EventFormat;
use super::http::{Method, Request};
use super::published::{KnownState, Published};
use super::{control, life, metrics, snapshots, upgrade, views};
use crate::machine::{ControlError, Live};
use crate::plan::{self, Plan};

/// A request that the API has.
pub(super) struct Route {
    method: Method,
    path: &'static str,
    operation: Operation,
    /// Its line in the document: the effect, or the remedy.
    line: &'static str,
}

/// Effect of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Ping,
    Info,
    Counters,
    PowerButton,
    Pause,
    Resume,
    /// A snapshot of the paused machine.
    Snapshot,
    /// A snapshot with devices that the restored machine plugs in, or a check of it.
    SnapshotWithDevices,
    /// A machine of a snapshot.
    Restore,
    /// Another program takes the machine over.
    Upgrade,
    UpgradeOutcome,
    /// A device, before the start of the machine or while it runs.
    Add(Change),
    /// A device of our own language, while the machine runs.
    Plug,
    /// A slice, as a device of the machine that runs.
    PlugSlice,
    /// Devices that were plugged in while the guest ran.
    PluggedDevices,
    RemoveDevice,
    /// A change of a machine before its start; the remedy afterwards.
    Amend(Change, &'static str),
    /// A machine in this language.
    Create(Language),
    Boot,
    /// What follows the end of the machine.
    End(Next),
    Machine,
    Plan,
    Slices,
    Interrupts,
    Timings,
    Events,
    Metrics,
    LogLevel,
    SetLogLevel,
    Requests,
    /// The OpenAPI document of this surface.
    OpenApi(Surface),
    /// Not built yet; the remedy.
    Missing(&'static str),
}

impl Operation {
    /// Whether it needs a life cycle, which a program with one machine lacks.
    const fn is_of_serve(self) -> bool {
        matches!(
            self,
            Self::Create(_)
                | Self::Boot
                | Self::Restore
                | Self::Upgrade
                | Self::Amend(..)
                | Self::End(Next::Delete)
        )
    }

    /// Whether it may have a body; one that is refused anyway may, so that its own refusal is the answer.
    const fn takes_body(self, serves: bool) -> bool {
        matches!(
            self,
            Self::Create(_)
                | Self::Snapshot
                | Self::SnapshotWithDevices
                | Self::Restore
                | Self::Upgrade
                | Self::Add(_)
                | Self::Plug
                | Self::PlugSlice
                | Self::RemoveDevice
                | Self::Amend(..)
                | Self::SetLogLevel
                | Self::Missing(_)
        ) || (self.is_of_serve() && !serves)
    }
}

/// Carries out `request` on `machine`.
pub(super) fn respond(request: &Request, machine: &Published) -> Response {
    let here = || ROUTES.iter().filter(|route| route.path == request.path);
    let Some(route) = here().find(|route| route.method == request.method) else {
        let methods: Vec<_> = here().map(|route| route.method.name()).collect();
        return Answer::unknown(&methods).into();
    };
    let serves = machine.orders().is_some();
    if !request.body.is_empty() && !route.operation.takes_body(serves) {
        let what = "cannot read the request: it takes no body";
        return Answer::failure(Status::BadRequest, what, "send it without a body").into();
    }
    let takes_descriptors =
        serves && matches!(route.operation, Operation::Add(Change::AddNet) | Operation::Restore);
    if !request.passed.is_empty() && !takes_descriptors {
        let what = "cannot read the request: it takes no descriptors";
        let remedy = "pass them with vm.add-net or vm.restore of egm-vmm serve";
        return Answer::failure(Status::BadRequest, what, remedy).into();
    }
    answer(route.operation, request, machine)
}

fn answer(operation: Operation, request: &Request, machine: &Published) -> Response {
    let state = &machine.state();
    let answer = match operation {
        Operation::Events => return events(request, machine),
        Operation::Boot => return life::boot(machine),
        Operation::End(next) if state.cycle.is_some() || operation.is_of_serve() => {
            return life::end(next, machine);
        }
        Operation::Snapshot => return snapshots::save(request, machine),
        Operation::SnapshotWithDevices => return snapshots::save_with_devices(request, machine),
        Operation::Restore => return snapshots::restore(request, machine),
        Operation::Upgrade => return upgrade::begin(request, machine),
        Operation::UpgradeOutcome => return upgrade::respond(state),
        Operation::Add(change) => return control::add(change, request, machine),
        Operation::Plug => return control::plug_in(request, machine),
        Operation::PlugSlice => return control::plug_slice(request, machine),
        Operation::RemoveDevice => return control::remove_device(request, machine),
        Operation::Amend(change, remedy) => amend::respond(change, remedy, request, machine),
        Operation::Create(language) => life::create(language, &request.body, machine),
        Operation::Missing(remedy) => {
            Answer::failure(Status::NotImplemented, "this request is not implemented", remedy)
        }
        Operation::Ping => Answer::json(&views::ping()),
        Operation::Info => info(state),
        Operation::Counters => match ask(state, |live| live.counters().ok_or(ControlError::Ending)) {
            Ok(counters) => Answer::json(&views::counters(&counters)),
            Err(answer) => answer,
        },
        Operation::PowerButton => done(ask(state, Live::press_power_button)),
        Operation::Pause => match ask(state, Live::pause) {
            Ok(()) => return Response::Later(Awaited::Pause),
            Err(answer) => answer,
        },
        Operation::Resume => done(ask(state, Live::resume)),
        Operation::End(Next::Boot) => done(ask(state, Live::reset)),
        Operation::End(_) => done(running(state).map(Live::stop)),
        Operation::Machine => Answer::json(&views::machine(machine, state)),
        Operation::Plan => of_plan(state, |plan| Answer::text(JSON, plan::json(plan))),
        Operation::PluggedDevices => match running(state) {
            Ok(live) => control::plugged_devices(live),
            Err(answer) => answer,
        },
        Operation::Slices => of_plan(state, |_| Answer::json(&state.slices.records())),
        Operation::Interrupts => {
            of_plan(state, |plan| Answer::json(&views::interrupts(plan, state.live.as_ref())))
        }
        Operation::Requests => Answer::json(&requests(state.cycle.is_some())),
        Operation::Timings => Answer::json(&views::timings(state)),
        Operation::Metrics => Answer::text(METRICS, metrics::text(machine, state)),
        Operation::LogLevel => Answer::json(&views::LogLevel { level: Severity::least() }),
        Operation::SetLogLevel => match read::<views::NewLogLevel>("level", &request.body) {
            Ok(views::NewLogLevel { level }) => {
                level.set_least();
                Answer::done()
            }
            Err(answer) => answer,
        },
        Operation::OpenApi(surface) => Answer::text(JSON, open_api_text(surface)),
    };
    answer.into()
}

/// The machine's `VmInfo`: by its plan, or before there is one by its configuration.
fn info(state: &KnownState) -> Answer {
    let cycle = state.cycle.as_ref().filter(|_| state.plan.is_none());
    match cycle.and_then(Cycle::created) {
        Some(created) => Answer::json(&views::info_of_created(created, cycle.and_then(Cycle::last))),
        None => of_plan(state, |plan| Answer::json(&views::info(plan, state))),
    }
}

/// The answer of `make` to the plan, or a refusal before there is one.
fn of_plan(state: &KnownState, make: impl FnOnce(&Plan) -> Answer) -> Answer {
    match &state.plan {
        Some(plan) => make(plan),
        None => life::unbooted(state).unwrap_or_else(|| {
            let what = "the machine has no plan yet";
            Answer::failure(
                Status::Conflict,
                what,
                "send the request again: the machine's memory is being reserved",
            )
        }),
    }
}

/// Kept events with the query `follow=0`, otherwise these and all later ones.
fn events(request: &Request, machine: &Published) -> Response {
    let (format, media) = match request.accepts_server_sent {
        true => (EventFormat::ServerSent, SERVER_SENT),
        false => (EventFormat::Lines, LINES),
    };
    match request.query.as_str() {
        "" => Response::Events(format, media),
        "follow=0" => {
            let kept = machine.journal().read(&mut 0, usize::MAX);
            Answer::text(media, kept.encode(format)).into()
        }
        _ => {
            let what = "cannot read the request: its query is unknown";
            Answer::failure(Status::BadRequest, what, "use follow=0, or no query").into()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use egm_fixtures::schema::accepts;
    use serde_json::{Value, json};

    use super::Method::{Get, Put};
    use super::Operation::Missing;
    use super::*;
    use crate::api::{MachineEvent, Order, SavedCycle};
    use crate::machine::{DeviceCounters, ExitLatch, ExitReason, LiveParts, MachineStep};
    use crate::reserve::{Leases, SliceRecord};

    fn request(method: Method, path: &str) -> Request {
        Request { method, ..Request::put(path, Vec::new()) }
    }

    fn answer_to(request: &Request, machine: &Published) -> Answer {
        match respond(request, machine) {
            Response::Answer(answer) => answer,
            other => panic!("{request:?} is answered by {other:?}"),
        }
    }

    fn status(method: Method, path: &str, machine: &Published) -> Status {
        answer_to(&request(method, path), machine).status
    }

    fn json(path: &str, machine: &Published) -> Value {
        let bytes = answer_to(&request(Get, path), machine).bytes(true);
        let text = String::from_utf8(bytes).unwrap();
        serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap()
    }

    fn starting() -> Published {
        Published::new("vm.json".into())
    }

    /// A program that serves, without a machine.
    fn serving() -> Published {
        let machine = Published::serving(std::path::Path::new("vm1.sock"), SavedCycle::default()).unwrap();
        machine.journal().open().unwrap();
        machine
    }

    /// The list of texts in a failure.
    fn texts_of(answer: &Answer) -> Vec<String> {
        let text = String::from_utf8(answer.bytes(true)).unwrap();
        serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap()
    }

    const OURS: &str = r#"{"memory":{"size":"16MiB"},"boot":{"kernel":"k"}}"#;

    fn with_body(path: &str, body: &str) -> Request {
        Request { body: body.as_bytes().to_vec(), ..request(Put, path) }
    }

    /// A program that serves, with a created machine.
    fn created() -> Published {
        let machine = serving();
        let answer = answer_to(&with_body("/egm/v1/machine", OURS), &machine);
        assert_eq!(answer.status, Status::NoContent, "{answer:?}");
        machine
    }

    /// A machine that runs, without KVM.
    fn live(button: bool) -> Live {
        let button = button.then(|| Box::new(|| ()) as Box<dyn Fn() + Send>);
        let device =
            || vec![DeviceCounters { id: "disk".to_owned(), counters: vec![("failed requests", 2)] }];
        let parts = LiveParts {
            button,
            reset: None,
            hotplug: None,
            is_confined: false,
            counters: Box::new(device),
            messages: Box::new(Vec::<crate::kvm::Message>::new),
        };
        Live::new(ExitLatch::new().unwrap(), Arc::default(), parts)
    }

    fn plan_of_a_config() -> Plan {
        let configs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
        let spec = crate::config::load(&configs.join("grace-1gpu-egm.json")).unwrap();
        plan::plan(&spec, &crate::facts::load(&configs.join("facts/grace.json")).unwrap()).unwrap()
    }

    /// The rows of a table in `docs/api.md` that the table of requests has.
    fn rows(routes: impl Iterator<Item = &'static Route>) -> Vec<String> {
        routes
            .map(|Route { method, path, operation, line }| match operation {
                Missing(_) => format!("| `{path}` | {line} |"),
                _ => format!("| `{} {path}` | {line} |", method.name()),
            })
            .collect()
    }

    #[test]
    fn the_document_lists_exactly_the_table() {
        let page = include_str!("../../../docs/api.md");
        let listed: Vec<&str> =
            page.lines().filter(|line| line.starts_with("| `") && line.contains("/v1/")).collect();
        assert_eq!(listed, rows(ROUTES.iter()), "write it as the table has it");
    }

    /// Rows of the page for the metrics `text`: name, kind, labels of the first sample, help.
    fn metric_rows(text: &str) -> Vec<String> {
        let row = |help: &str| {
            let (name, help) = help.split_once(' ').unwrap();
            let line = |prefix: &str| text.lines().find_map(|line| line.strip_prefix(prefix)).unwrap();
            let kind = line(&format!("# TYPE {name} "));
            let labels = text.lines().find_map(|line| line.strip_prefix(&format!("{name}{{")));
            // No value of the test's machine has one of these characters.
            let names =
                labels.into_iter().flat_map(|labels| labels.split(',')).map(|label| label.split('=').next());
            let names: Vec<_> = names.map(|name| format!("`{}`", name.unwrap())).collect();
            format!("| `{name}` | {kind} | {} | {help} |", names.join(", "))
        };
        text.lines().filter_map(|line| line.strip_prefix("# HELP ")).map(row).collect()
    }

    /// A machine of `egm-vmm run` that runs, with a slice and an event.
    fn alive() -> Published {
        let machine = starting();
        machine.journal().open().unwrap();
        machine.stage("configuration");
        let region = Some("local".to_owned());
        let slice = SliceRecord {
            id: "egm0".into(),
            device: false,
            region,
            offset: 0,
            size: 1,
            owner: None,
            retired: Vec::new(),
        };
        machine.planned(plan_of_a_config(), vec![slice].into());
        machine.step(MachineStep::Started, &live(true));
        machine
    }

    /// The same after its end.
    fn over() -> Published {
        let machine = alive();
        machine.ended(&ExitReason::Requested);
        machine
    }

    /// Checks the answer of `machine` by the responses that `document` has for `route`.
    fn check_by_document(document: &Value, route: &Route, machine: &Published) {
        let Route { method, path, .. } = *route;
        let answer = match respond(&request(method, path), machine) {
            Response::Answer(answer) => answer,
            Response::Later(_) => Answer::done(),
            Response::Events(..) => answer_to(&request(Get, "/egm/v1/events?follow=0"), machine),
        };
        let text = String::from_utf8(answer.bytes(true)).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let operation = &document["paths"][path][method.name().to_ascii_lowercase()];
        let mut response = &operation["responses"][(answer.status as u16).to_string()];
        if let Some(reference) = response["$ref"].as_str() {
            response = document.pointer(reference.trim_start_matches('#')).unwrap();
        }
        assert!(response.is_object(), "{path}: {head}");
        let Some(media) = head.lines().find_map(|line| line.strip_prefix("Content-Type: ")) else { return };
        let schema = &response["content"][media]["schema"];
        assert!(schema.is_object(), "{path}: {head}");
        let (schema, texts) = match media {
            JSON => (schema, vec![body]),
            LINES => (&schema["contentSchema"], body.lines().collect()),
            _ => return,
        };
        let mut schema = schema.clone();
        schema["$defs"] = document["components"]["schemas"].clone();
        for text in texts {
            assert!(accepts(&schema, &serde_json::from_str(text).unwrap()), "{path}: {text}");
        }
    }

    #[test]
    fn every_answer_is_as_its_openapi_document_has_it() {
        let documents = [Surface::CloudHypervisor, Surface::Own].map(|surface| {
            let text = open_api_text(surface).replace("#/components/schemas/", "#/$defs/");
            serde_json::from_str::<Value>(&text).unwrap()
        });
        let machines: [fn() -> Published; 5] = [starting, serving, created, alive, over];
        for route in ROUTES {
            let of_route = |document: &&Value| document["paths"][route.path].is_object();
            let document = documents.iter().find(of_route).unwrap();
            machines.iter().for_each(|machine| check_by_document(document, route, &machine()));
        }
    }

    #[test]
    fn the_document_lists_exactly_the_metrics() {
        let machine = alive();
        let text = metrics::text(&machine, &machine.state());
        assert!(text.contains(",device=\"disk\",counter=\"failed_requests\"} 2\n"), "{text}");
        let page = include_str!("../../../docs/api.md");
        let listed: Vec<&str> = page.lines().filter(|line| line.starts_with("| `egm_vmm_")).collect();
        assert_eq!(listed, metric_rows(&text), "write it as the program has it");
    }

    #[test]
    fn every_request_of_the_table_has_an_answer_and_another_method_and_a_body_have_theirs() {
        let machine = starting();
        machine.journal().open().unwrap();
        for Route { method, path, operation, .. } in ROUTES {
            let other = if *method == Get { Put } else { Get };
            if !ROUTES.iter().any(|route| route.path == *path && route.method == other) {
                assert_eq!(status(other, path, &machine), Status::MethodNotAllowed, "{path}");
            }
            assert_eq!(status(Method::Other, path, &machine), Status::MethodNotAllowed, "{path}");
            let with_body = Request { body: b"{}".to_vec(), ..request(*method, path) };
            let is_missing = matches!(operation, Missing(_)) || operation.is_of_serve();
            let expected = match operation {
                _ if is_missing => Status::NotImplemented,
                Operation::Add(_) | Operation::Plug | Operation::PlugSlice => Status::Conflict, // it does not run yet
                _ => Status::BadRequest,
            };
            assert_eq!(answer_to(&with_body, &machine).status, expected, "{path}");
            if *operation != Operation::Events {
                let status = status(*method, path, &machine);
                assert_eq!(status == Status::NotImplemented, is_missing, "{path}");
            }
        }
        for path in ["/", "", "/api/v1/vm.infos", "/api/v1/vm.info/", "/egm/v1", "*"] {
            assert_eq!(status(Get, path, &machine), Status::NotFound, "{path:?}");
        }
    }

    #[test]
    fn what_is_not_built_names_a_remedy_in_the_list_that_clients_read() {
        for (path, texts) in [
            ("/api/v1/vm.send-migration", ["this request is not implemented", table::NO_MIGRATION]),
            ("/api/v1/vm.create", ["egm-vmm run has one machine", life::SERVE]),
        ] {
            assert_eq!(texts_of(&answer_to(&request(Put, path), &starting())), texts);
        }
        let listed = json("/egm/v1/requests", &starting());
        assert_eq!(listed.as_array().unwrap().len(), ROUTES.len());
        let row = |path: &str| listed.as_array().unwrap().iter().find(|row| row["path"] == path).unwrap();
        let migration = row("/api/v1/vm.send-migration");
        assert_eq!(
            (&migration["built"], &migration["text"]),
            (&Value::from(false), &Value::from(table::NO_MIGRATION))
        );
        assert_eq!(row("/api/v1/vm.create")["built"], false);
        let served = json("/egm/v1/requests", &serving());
        let create =
            served.as_array().unwrap().iter().find(|row| row["path"] == "/api/v1/vm.create").unwrap();
        assert_eq!(create["built"], true);
    }

    #[test]
    fn a_machine_that_starts_has_no_controls_yet_and_no_values_that_are_not_known() {
        let machine = starting();
        for (method, path) in [
            (Get, "/api/v1/vm.info"),
            (Get, "/api/v1/vm.counters"),
            (Put, "/api/v1/vm.power-button"),
            (Put, "/api/v1/vm.pause"),
            (Put, "/api/v1/vm.resume"),
            (Put, "/api/v1/vm.shutdown"),
            (Get, "/egm/v1/plan"),
            (Get, "/egm/v1/slices"),
            (Get, "/egm/v1/interrupts"),
        ] {
            assert_eq!(status(method, path, &machine), Status::Conflict, "{path}");
        }
        let shown = json("/egm/v1/machine", &machine);
        assert_eq!((&shown["state"], &shown["name"]), (&Value::from("starting"), &Value::Null));
        assert_eq!(json("/egm/v1/timings", &machine)["stages"], json!([]));
    }

    #[test]
    fn a_pause_is_answered_once_the_vcpus_wait_and_by_a_refusal_where_they_will_not() {
        let (machine, live) = (alive(), |machine: &Published| machine.state().live.unwrap());
        let refused = |machine: &Published| {
            let answer = life::outcome(&Awaited::Pause, &machine.state(), false).unwrap();
            assert_eq!(answer.status, Status::Conflict);
        };
        assert_eq!(status(Put, "/api/v1/vm.resume", &machine), Status::Conflict);
        assert_eq!(respond(&request(Put, "/api/v1/vm.pause"), &machine), Response::Later(Awaited::Pause));
        assert_eq!(life::outcome(&Awaited::Pause, &machine.state(), false), None);
        assert_eq!(status(Put, "/api/v1/vm.pause", &machine), Status::Conflict);
        assert_eq!(live(&machine).settle_pause(0), [None, Some(MachineStep::Paused)]);
        assert_eq!(life::outcome(&Awaited::Pause, &machine.state(), false), Some(Answer::done()));
        assert_eq!(json("/egm/v1/machine", &machine)["state"], "paused");
        assert_eq!(json("/api/v1/vm.info", &machine)["state"], "Paused");
        assert_eq!(status(Put, "/api/v1/vm.resume", &machine), Status::NoContent);
        assert_eq!(json("/egm/v1/machine", &machine)["state"], "running");
        refused(&machine); // a client resumed it before another one's pause
        live(&machine).pause().unwrap();
        live(&machine).stop();
        refused(&machine);
    }

    #[test]
    fn a_running_machine_is_shown_pressed_and_stopped_once() {
        let machine = starting();
        machine.stage("configuration");
        machine.planned(plan_of_a_config(), Leases::default());
        let live = live(true);
        machine.step(MachineStep::Started, &live);
        assert_eq!(json("/egm/v1/machine", &machine)["state"], "running");
        assert_eq!(json("/api/v1/vm.counters", &machine)["disk"]["failed_requests"], 2);
        let info = json("/api/v1/vm.info", &machine);
        assert_eq!(
            (&info["state"], info["config"]["payload"]["kernel"].is_string()),
            (&Value::from("Running"), true)
        );
        let (plan, vcpus) = (json("/egm/v1/plan", &machine), &info["config"]["cpus"]["boot_vcpus"]);
        assert_eq!(vcpus.as_u64(), Some(plan["vcpus"].as_array().unwrap().len() as u64));
        assert!(info["device_tree"].as_object().unwrap().values().all(|node| node["pci_bdf"].is_string()));
        let stages = json("/egm/v1/timings", &machine)["stages"].clone();
        assert_eq!(
            (&stages[0]["stage"], &stages[1]["stage"]),
            (&Value::from("configuration"), &Value::from("vcpus"))
        );
        assert_eq!(status(Put, "/api/v1/vm.power-button", &machine), Status::NoContent);
        assert_eq!(status(Put, "/api/v1/vmm.shutdown", &machine), Status::NoContent);
        assert!(live.is_ending());
        assert_eq!(json("/egm/v1/machine", &machine)["state"], "ending");
        assert_eq!(status(Put, "/api/v1/vm.power-button", &machine), Status::Conflict);
        machine.ended(&ExitReason::Requested);
        assert_eq!(status(Put, "/api/v1/vm.shutdown", &machine), Status::Conflict);
        assert_eq!(json("/egm/v1/machine", &machine)["ended"], "requested");
        assert_eq!(json("/api/v1/vm.info", &machine)["state"], "Shutdown");
    }

    #[test]
    fn without_a_machine_a_program_that_serves_has_an_answer_to_each_request() {
        let machine = serving();
        for path in ["vm.info", "vm.counters"] {
            assert_eq!(status(Get, &format!("/api/v1/{path}"), &machine), Status::NotFound, "{path}");
        }
        for path in ["vm.boot", "vm.shutdown", "vm.reboot", "vm.power-button"] {
            assert_eq!(status(Put, &format!("/api/v1/{path}"), &machine), Status::NotFound, "{path}");
        }
        assert_eq!(status(Get, "/egm/v1/plan", &machine), Status::NotFound);
        assert_eq!(json("/egm/v1/machine", &machine)["state"], "empty");
        assert_eq!(
            status(Put, "/api/v1/vm.delete", &machine),
            Status::NoContent,
            "as cloud-hypervisor has it"
        );
        assert_eq!(machine.order(), Order::Wait);
        assert_eq!(status(Put, "/api/v1/vmm.shutdown", &machine), Status::NoContent);
        assert_eq!(machine.order(), Order::End);
    }

    #[test]
    fn a_created_machine_is_shown_and_refuses_what_it_cannot_do_yet() {
        let machine = created();
        let shown = json("/egm/v1/machine", &machine);
        assert_eq!((&shown["state"], &shown["name"]), (&Value::from("created"), &Value::from("vm1")));
        let info = json("/api/v1/vm.info", &machine);
        assert_eq!((&info["state"], &info["config"]["payload"]["kernel"]), (&"Created".into(), &"k".into()));
        assert_eq!(info["memory_actual_size"], 16 << 20);
        for path in ["vm.shutdown", "vm.reboot", "vm.power-button"] {
            assert_eq!(status(Put, &format!("/api/v1/{path}"), &machine), Status::Conflict, "{path}");
        }
        let again = answer_to(&with_body("/egm/v1/machine", OURS), &machine);
        assert_eq!(texts_of(&again), ["a machine is created already", "use vm.delete first"]);
        assert_eq!(status(Put, "/api/v1/vm.delete", &machine), Status::NoContent);
        assert_eq!(json("/egm/v1/machine", &machine)["state"], "empty");
    }

    #[test]
    fn every_refusal_of_a_configuration_has_its_remedy_and_the_last_text_is_one_too() {
        let machine = serving();
        let body = r#"{"cpus":{"boot_vcpus":1,"max_vcpus":1},"payload":{"kernel":"k","firmware":"f"},
            "serial":{"mode":"Tty"},"console":{"mode":"Off"},"tpm":{"socket":"s"}}"#;
        let refused = answer_to(&with_body("/api/v1/vm.create", body), &machine);
        let texts = texts_of(&refused);
        assert_eq!((refused.status, texts.len()), (Status::BadRequest, 3), "{texts:?}");
        assert!(
            texts[0].starts_with("vm1.json:1:") && texts[0].contains("payload.firmware: cannot"),
            "{texts:?}"
        );
        assert!(texts[1].starts_with("vm1.json:2:") && texts[1].contains("tpm"), "{texts:?}");
        assert_eq!(texts[2], "change the configuration, and send it again");
        assert_eq!(status(Put, "/api/v1/vm.create", &machine), Status::BadRequest, "without a body");
        assert_eq!(json("/egm/v1/machine", &machine)["state"], "empty");
    }

    #[test]
    fn a_boot_is_answered_when_the_vcpus_run_or_when_the_failed_start_is_over() {
        let machine = created();
        assert_eq!(respond(&request(Put, "/api/v1/vm.boot"), &machine), Response::Later(Awaited::Start));
        assert!(matches!(machine.order(), Order::Boot(_)));
        assert_eq!(status(Put, "/api/v1/vm.boot", &machine), Status::Conflict);
        assert_eq!(status(Put, "/api/v1/vm.shutdown", &machine), Status::Conflict, "it starts");
        assert_eq!(json("/egm/v1/machine", &machine)["state"], "starting");
        assert_eq!(life::outcome(&Awaited::Start, &machine.state(), false), None);
        machine.failed(&crate::reserve::ReserveError::Moved { attempts: 4 });
        assert_eq!(life::outcome(&Awaited::Start, &machine.state(), false), None);
        let failed = life::outcome(&Awaited::Start, &machine.state(), true).unwrap();
        assert_eq!((failed.status, texts_of(&failed).len()), (Status::InternalServerError, 2));
        let other = created();
        let _ = respond(&request(Put, "/api/v1/vm.boot"), &other);
        other.step(MachineStep::Started, &live(true));
        assert_eq!(life::outcome(&Awaited::Start, &other.state(), false), Some(Answer::done()));
    }

    #[test]
    fn the_end_of_a_machine_is_answered_when_it_is_over_and_decides_what_follows() {
        for (path, keeps) in [("vm.shutdown", true), ("vm.reboot", true), ("vm.delete", false)] {
            let machine = created();
            let _ = respond(&request(Put, "/api/v1/vm.boot"), &machine);
            let live = live(true);
            machine.step(MachineStep::Started, &live);
            let request = request(Put, &format!("/api/v1/{path}"));
            assert_eq!(respond(&request, &machine), Response::Later(Awaited::End), "{path}");
            assert!(live.is_ending());
            machine.ended(&ExitReason::Requested);
            assert_eq!(life::outcome(&Awaited::End, &machine.state(), false), None);
            assert_eq!(life::outcome(&Awaited::End, &machine.state(), true), Some(Answer::done()));
            let next =
                Published::serving(std::path::Path::new("vm1.sock"), machine.saved().unwrap()).unwrap();
            assert_eq!(matches!(next.order(), Order::Boot(_)), path == "vm.reboot");
            assert_eq!(next.state().cycle.unwrap().created().is_some(), keeps, "{path}");
        }
    }

    #[test]
    fn a_guest_without_a_power_button_is_a_conflict() {
        let machine = starting();
        machine.step(MachineStep::Started, &live(false));
        assert_eq!(status(Put, "/api/v1/vm.power-button", &machine), Status::Conflict);
    }

    /// A client that waited in the socket over an execution reads the events at once.
    #[test]
    fn a_program_is_ready_before_it_serves_a_client() {
        let machine = Published::serving(std::path::Path::new("vm1.sock"), SavedCycle::default()).unwrap();
        machine.announce().unwrap();
        assert_eq!(machine.journal().values()[0]["event"], "ready");
    }

    #[test]
    fn kept_events_are_a_body_and_the_others_a_stream() {
        let machine = starting();
        machine.journal().open().unwrap();
        machine.journal().publish(&MachineEvent::Started);
        machine.ended(&ExitReason::Panicked);
        let bytes = answer_to(&request(Get, "/egm/v1/events?follow=0"), &machine).bytes(true);
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.contains(LINES) && text.contains("\"reason\":\"panicked\""), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with('{')).count(), 2, "{text}");
        let mut follow = request(Get, "/egm/v1/events");
        assert_eq!(respond(&follow, &machine), Response::Events(EventFormat::Lines, LINES));
        follow.accepts_server_sent = true;
        assert_eq!(respond(&follow, &machine), Response::Events(EventFormat::ServerSent, SERVER_SENT));
        assert_eq!(status(Get, "/egm/v1/events?since=1", &machine), Status::BadRequest);
    }

    #[test]
    fn the_end_is_one_event_whatever_ended_the_machine() {
        let error = crate::reserve::ReserveError::Moved { attempts: 4 };
        let machine = starting();
        machine.journal().open().unwrap();
        machine.ended(&ExitReason::Reset);
        machine.failed(&error);
        assert_eq!(
            (machine.journal().published(), json("/egm/v1/machine", &machine)["ended"].clone()),
            (1, "reset".into())
        );
        let other = starting();
        other.journal().open().unwrap();
        other.failed(&error);
        assert_eq!(
            (other.journal().published(), json("/egm/v1/machine", &other)["ended"].clone()),
            (1, "failed".into())
        );
    }
}
