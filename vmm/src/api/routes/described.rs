//! The table of requests as OpenAPI documents: one for each surface, with the schemas of the types that are read and
//! written.

use std::sync::OnceLock;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::Value;

use super::table::{ROUTES, Surface};
use super::{ListedRequest, Operation, Route};
use crate::api::amend::Change;
use crate::api::answer::{JSON, LINES, METRICS, SERVER_SENT, Status};
use crate::api::cloud::{
    DeviceConfig, DiskConfig, NetConfig, RemovedDevice, Resize, UserDeviceConfig, VmConfig, VsockConfig,
};
use crate::api::cycle::{Language, Next};
use crate::api::events::line_schema;
use crate::api::openapi::{Content, Described, Outcome, Query, SchemaOf, document};
use crate::api::snapshots::{NewSnapshot, RestoreConfig, VmSnapshotConfig};
use crate::api::upgrade::NewUpgrade;
use crate::api::upgrades::Upgrade;
use crate::api::views;
use crate::config;
use crate::reserve::SliceRecord;

/// The OpenAPI document of `surface`.
pub(crate) fn open_api(surface: Surface) -> Value {
    let routes = ROUTES.iter().filter(|route| route.path.starts_with(surface.prefix()));
    document(surface.title(), &routes.map(described).collect::<Vec<_>>())
}

/// The same as text, made at the first request.
pub(super) fn open_api_text(surface: Surface) -> &'static str {
    static CLOUD_HYPERVISOR: OnceLock<String> = OnceLock::new();
    static OWN: OnceLock<String> = OnceLock::new();
    let text = match surface {
        Surface::CloudHypervisor => &CLOUD_HYPERVISOR,
        Surface::Own => &OWN,
    };
    text.get_or_init(|| open_api(surface).to_string())
}

fn described(route: &Route) -> Described {
    let Route { method, path, operation, line } = *route;
    let summary = if matches!(operation, Operation::Missing(_)) { "not implemented" } else { line };
    Described {
        method: method.name(),
        path,
        summary,
        query: query(operation),
        body: body(operation),
        outcome: outcome(operation),
        failures: failures(operation),
    }
}

fn query(operation: Operation) -> Option<Query> {
    match operation {
        Operation::Events => {
            Some(Query { name: "follow", value: "0", meaning: "End after the latest events." })
        }
        Operation::SnapshotWithDevices | Operation::Upgrade => Some(Query {
            name: "dry-run",
            value: "1",
            meaning: "Check what can be checked, and change nothing.",
        }),
        Operation::Plug | Operation::PlugSlice => {
            Some(Query { name: "dry-run", value: "1", meaning: "Plan the device, and change nothing." })
        }
        _ => None,
    }
}

/// Schema of the body that `operation` takes.
fn body(operation: Operation) -> Option<SchemaOf> {
    match operation {
        Operation::Create(Language::Own) => Some(SchemaGenerator::subschema_for::<config::File>),
        Operation::Create(Language::CloudHypervisor) => Some(SchemaGenerator::subschema_for::<VmConfig>),
        Operation::Plug => Some(SchemaGenerator::subschema_for::<config::DeviceFile>),
        Operation::PlugSlice => Some(SchemaGenerator::subschema_for::<config::EgmFile>),
        Operation::Snapshot => Some(SchemaGenerator::subschema_for::<VmSnapshotConfig>),
        Operation::SnapshotWithDevices => Some(SchemaGenerator::subschema_for::<NewSnapshot>),
        Operation::Restore => Some(SchemaGenerator::subschema_for::<RestoreConfig>),
        Operation::Upgrade => Some(SchemaGenerator::subschema_for::<NewUpgrade>),
        Operation::RemoveDevice => Some(SchemaGenerator::subschema_for::<RemovedDevice>),
        Operation::Add(change) | Operation::Amend(change, _) => Some(match change {
            Change::AddDisk => SchemaGenerator::subschema_for::<DiskConfig>,
            Change::AddNet => SchemaGenerator::subschema_for::<NetConfig>,
            Change::AddVsock => SchemaGenerator::subschema_for::<VsockConfig>,
            Change::AddDevice => SchemaGenerator::subschema_for::<DeviceConfig>,
            Change::AddUserDevice => SchemaGenerator::subschema_for::<UserDeviceConfig>,
            Change::RemoveDevice => SchemaGenerator::subschema_for::<RemovedDevice>,
            Change::Resize => SchemaGenerator::subschema_for::<Resize>,
        }),
        Operation::SetLogLevel => Some(SchemaGenerator::subschema_for::<views::NewLogLevel>),
        _ => None,
    }
}

fn outcome(operation: Operation) -> Outcome {
    match operation {
        Operation::PowerButton
        | Operation::Pause
        | Operation::Resume
        | Operation::Snapshot
        | Operation::SnapshotWithDevices
        | Operation::Restore
        | Operation::Upgrade
        | Operation::RemoveDevice
        | Operation::SetLogLevel
        | Operation::Amend(..)
        | Operation::Create(_)
        | Operation::Boot
        | Operation::End(_) => Outcome::Done,
        Operation::UpgradeOutcome => json::<Upgrade>(),
        Operation::Plug => json::<views::NewPciDevice>(),
        Operation::PlugSlice => json::<views::NewPciSlice>(),
        Operation::PluggedDevices => Outcome::Contents(vec![content(JSON, plugged_devices)]),
        Operation::Add(_) => {
            Outcome::ContentOrDone(content(JSON, SchemaGenerator::subschema_for::<views::PciDeviceInfo>))
        }
        Operation::Ping => json::<views::Ping>(),
        Operation::Info => json::<views::VmInfo>(),
        Operation::Counters => json::<views::Counters>(),
        Operation::Machine => json::<views::Machine>(),
        Operation::Plan => Outcome::Contents(vec![content(JSON, plan)]),
        Operation::Slices => json::<[SliceRecord]>(),
        Operation::Interrupts => json::<views::Interrupts>(),
        Operation::Timings => json::<views::Timings>(),
        Operation::Events => Outcome::Contents(vec![content(LINES, lines), content(SERVER_SENT, blocks)]),
        Operation::Metrics => {
            Outcome::Contents(vec![content(METRICS, SchemaGenerator::subschema_for::<String>)])
        }
        Operation::LogLevel => json::<views::LogLevel>(),
        Operation::Requests => json::<[ListedRequest]>(),
        Operation::OpenApi(_) => Outcome::Contents(vec![content(JSON, any_object)]),
        Operation::Missing(remedy) => Outcome::Missing(remedy),
    }
}

/// Statuses of failures that are the request's own, in `egm-vmm run` or in `egm-vmm serve`.
const fn failures(operation: Operation) -> &'static [Status] {
    match operation {
        Operation::Info
        | Operation::Counters
        | Operation::PowerButton
        | Operation::Pause
        | Operation::Resume
        | Operation::Plan
        | Operation::Slices
        | Operation::PluggedDevices
        | Operation::Interrupts
        | Operation::End(Next::Stay) => &[Status::NotFound, Status::Conflict],
        Operation::Add(_) | Operation::Plug | Operation::PlugSlice | Operation::RemoveDevice => &[
            Status::BadRequest,
            Status::NotFound,
            Status::Conflict,
            Status::ContentTooLarge,
            Status::InternalServerError,
        ],
        Operation::Snapshot | Operation::SnapshotWithDevices => {
            &[Status::BadRequest, Status::NotFound, Status::Conflict, Status::InternalServerError]
        }
        Operation::Restore => {
            &[Status::BadRequest, Status::Conflict, Status::InternalServerError, Status::NotImplemented]
        }
        Operation::Create(_) => &[Status::BadRequest, Status::Conflict, Status::NotImplemented],
        Operation::Boot => {
            &[Status::NotFound, Status::Conflict, Status::InternalServerError, Status::NotImplemented]
        }
        Operation::Upgrade => &[
            Status::BadRequest,
            Status::NotFound,
            Status::Conflict,
            Status::InternalServerError,
            Status::NotImplemented,
        ],
        Operation::UpgradeOutcome => &[Status::NotFound, Status::ServiceUnavailable],
        Operation::End(Next::Boot) => &[Status::NotFound, Status::Conflict, Status::NotImplemented],
        Operation::End(Next::Delete) => &[Status::Conflict, Status::NotImplemented],
        Operation::End(Next::End) => &[Status::Conflict],
        Operation::Events => &[Status::BadRequest, Status::ServiceUnavailable],
        Operation::SetLogLevel => &[Status::BadRequest],
        Operation::Amend(..) => &[
            Status::BadRequest,
            Status::NotFound,
            Status::Conflict,
            Status::ContentTooLarge,
            Status::NotImplemented,
        ],
        Operation::Ping
        | Operation::Machine
        | Operation::Timings
        | Operation::Metrics
        | Operation::LogLevel
        | Operation::Requests
        | Operation::OpenApi(_)
        | Operation::Missing(_) => &[],
    }
}

fn json<T: JsonSchema + ?Sized>() -> Outcome {
    Outcome::Contents(vec![content(JSON, SchemaGenerator::subschema_for::<T>)])
}

const fn content(media: &'static str, schema: SchemaOf) -> Content {
    Content { media, schema }
}

/// The plan has a version of its own, and more types than both documents together.
fn plan(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "description": "As egm-vmm plan --json prints it. The version counts changes of its form.",
        "properties": { "version": { "type": "integer" }, "name": { "type": "string" } },
        "required": ["version", "name"],
    })
}

/// Without the schema of a device: that belongs to bodies, which have another generator.
fn plugged_devices(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "description": "As entries of devices in a configuration; only the id of one with descriptors, which no text names.",
        "items": { "type": "object" },
    })
}

/// JSON lines are no JSON document.
fn lines(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "description": "A JSON object on each line, until the program or the machine ends.",
        "contentMediaType": JSON,
        "contentSchema": line_schema(generator),
    })
}

fn blocks(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "description": "Server-sent events: the data of each is a JSON object, its id the number of the event.",
        "contentMediaType": JSON,
        "contentSchema": line_schema(generator),
    })
}

fn any_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "description": "This document." })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const SURFACES: [Surface; 2] = [Surface::CloudHypervisor, Surface::Own];
    /// Stack of the API's thread in `egm-vmm run`.
    const STACK: usize = 256 << 10;

    /// Each reference in `value`.
    fn references(value: &Value) -> Vec<String> {
        match value {
            Value::Array(values) => values.iter().flat_map(references).collect(),
            Value::Object(members) => {
                let own = members.get("$ref").and_then(Value::as_str).map(str::to_owned);
                own.into_iter().chain(members.values().flat_map(references)).collect()
            }
            _ => Vec::new(),
        }
    }

    #[test]
    fn every_request_is_in_exactly_one_document() {
        let mut described = Vec::new();
        for surface in SURFACES {
            let document = open_api(surface);
            let mut ids = BTreeSet::new();
            for (path, operations) in document["paths"].as_object().unwrap() {
                for (method, operation) in operations.as_object().unwrap() {
                    assert!(ids.insert(operation["operationId"].as_str().unwrap().to_owned()), "{path}");
                    let responses = operation["responses"].as_object().unwrap();
                    let succeeds = responses.keys().any(|status| status.starts_with('2'));
                    described.push((path.clone(), method.to_ascii_uppercase(), succeeds));
                }
            }
        }
        let listed = ROUTES.iter().map(|Route { method, path, operation, .. }| {
            let is_built = !matches!(operation, Operation::Missing(_));
            ((*path).to_owned(), method.name().to_owned(), is_built)
        });
        let mut listed: Vec<_> = listed.collect();
        described.sort();
        listed.sort();
        assert_eq!(described, listed);
    }

    #[test]
    fn every_reference_leads_to_a_part_of_its_document_and_every_schema_is_used() {
        for surface in SURFACES {
            let document = open_api(surface);
            let references: BTreeSet<String> = references(&document).into_iter().collect();
            for reference in &references {
                let part = reference.strip_prefix('#').and_then(|pointer| document.pointer(pointer));
                assert!(part.is_some_and(Value::is_object), "{surface:?}: {reference}");
            }
            for kind in ["schemas", "responses"] {
                for name in document["components"][kind].as_object().unwrap().keys() {
                    assert!(
                        references.contains(&format!("#/components/{kind}/{name}")),
                        "{surface:?}: {name}"
                    );
                }
            }
        }
    }

    /// The generators of bodies and of answers choose names independently of each other.
    #[test]
    fn a_schema_of_a_body_has_another_name_than_those_of_answers() {
        for surface in SURFACES {
            let (mut bodies, mut answers) = (SchemaGenerator::default(), SchemaGenerator::default());
            for route in ROUTES.iter().filter(|route| route.path.starts_with(surface.prefix())) {
                let Described { body, outcome, .. } = described(route);
                if let Some(schema) = body {
                    let _ = schema(&mut bodies);
                }
                if let Outcome::Contents(contents) = outcome {
                    contents.iter().for_each(|content| drop((content.schema)(&mut answers)));
                }
            }
            let names = |of: &SchemaGenerator| of.definitions().keys().cloned().collect::<BTreeSet<_>>();
            let (bodies, answers) = (names(&bodies), names(&answers));
            assert!(bodies.len() > 5 && !answers.is_empty(), "{surface:?}");
            assert!(bodies.is_disjoint(&answers), "{bodies:?} {answers:?}");
        }
    }

    #[test]
    fn a_document_is_small_equal_each_time_and_made_within_the_stack_of_the_thread() {
        for surface in SURFACES {
            let thread = std::thread::Builder::new().stack_size(STACK);
            let text = thread.spawn(move || open_api(surface).to_string()).unwrap().join().unwrap();
            assert_eq!(text, open_api_text(surface));
            assert!(text.len() < 128 << 10, "{surface:?}: {} bytes", text.len());
        }
    }
}
