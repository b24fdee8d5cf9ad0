//! OpenAPI documents from descriptions of requests. Pure.
//!
//! Version 3.1: schemas are those of JSON Schema 2020-12, as `egm-vmm schema` prints them.

use std::collections::BTreeMap;

use schemars::generate::SchemaSettings;
use schemars::{Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::answer::{JSON, Status};
use super::views::VERSION;

/// Version of OpenAPI in which documents are written.
const FORM: &str = "3.1.0";
/// JSON pointer to the schemas of a document.
const SCHEMAS: &str = "/components/schemas";
/// Name of the schema of a failure.
const FAILURE: &str = "Failure";
/// Name of the response for refusals that all requests share.
const REFUSED: &str = "Refused";

/// Adds a schema to those of a document, and refers to it.
pub(super) type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

/// Description of a request.
pub(super) struct Described {
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    pub(super) summary: &'static str,
    pub(super) query: Option<Query>,
    /// Schema of the body that it takes.
    pub(super) body: Option<SchemaOf>,
    pub(super) outcome: Outcome,
    /// Statuses of failures that are the request's own.
    pub(super) failures: &'static [Status],
}

/// An optional query with its only value.
pub(super) struct Query {
    pub(super) name: &'static str,
    pub(super) value: &'static str,
    pub(super) meaning: &'static str,
}

/// Answer to a request that is carried out.
pub(super) enum Outcome {
    /// No body, status 204.
    Done,
    /// One of these bodies, by the client's `Accept`.
    Contents(Vec<Content>),
    /// This body; before the start of the machine none, status 204.
    ContentOrDone(Content),
    /// It is not built; the remedy.
    Missing(&'static str),
}

/// A media type of an answer, and its schema.
pub(super) struct Content {
    pub(super) media: &'static str,
    pub(super) schema: SchemaOf,
}

/// The document with this title for `requests`.
pub(super) fn document(title: &str, requests: &[Described]) -> Value {
    let mut schemas = Schemas::new();
    let mut paths: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
    for request in requests {
        let operation = schemas.operation(request);
        paths.entry(request.path).or_default().insert(request.method.to_ascii_lowercase(), operation);
    }
    json!({
        "openapi": FORM,
        "info": {
            "title": title,
            "version": VERSION,
            "description": "HTTP/1.1 on the Unix socket of egm-vmm run --api PATH, or of egm-vmm serve --api PATH.",
        },
        "servers": [{ "url": "http://localhost", "description": "Any host: the socket has none." }],
        "paths": paths,
        "components": { "schemas": schemas.all(), "responses": responses(requests) },
    })
}

/// Schemas of bodies, as they are read, and of answers, as they are written. Their names differ.
struct Schemas {
    bodies: SchemaGenerator,
    answers: SchemaGenerator,
}

impl Schemas {
    fn new() -> Self {
        let settings = SchemaSettings::draft2020_12().with(|settings| {
            settings.definitions_path = SCHEMAS.into();
            settings.meta_schema = None;
        });
        Self {
            bodies: settings.clone().for_deserialize().into_generator(),
            answers: settings.for_serialize().into_generator(),
        }
    }

    fn operation(&mut self, request: &Described) -> Value {
        let mut operation = Map::new();
        operation.insert("operationId".to_owned(), operation_id(request).into());
        operation.insert("summary".to_owned(), request.summary.into());
        if let Some(Query { name, value, meaning }) = &request.query {
            let schema = json!({ "type": "string", "enum": [value] });
            let query = json!([{ "name": name, "in": "query", "description": meaning, "schema": schema }]);
            operation.insert("parameters".to_owned(), query);
        }
        if let Some(schema) = request.body {
            let schema = schema(&mut self.bodies);
            let body = json!({ "required": true, "content": { JSON: { "schema": schema } } });
            operation.insert("requestBody".to_owned(), body);
        }
        operation.insert("responses".to_owned(), Value::Object(self.responses(request)));
        Value::Object(operation)
    }

    /// The responses to `request` by status.
    fn responses(&mut self, request: &Described) -> Map<String, Value> {
        let mut responses = Map::new();
        let mut add = |key: String, response: Value| _ = responses.insert(key, response);
        match &request.outcome {
            Outcome::Done => add(number(Status::NoContent), json!({ "description": "Done." })),
            Outcome::Contents(contents) => add(number(Status::Ok), self.contents(request.summary, contents)),
            Outcome::ContentOrDone(content) => {
                add(number(Status::Ok), self.contents(request.summary, std::slice::from_ref(content)));
                add(number(Status::NoContent), json!({ "description": "Done before the machine's start." }));
            }
            Outcome::Missing(remedy) => {
                let what = format!("This request is not implemented. Remedy: {remedy}.");
                add(number(Status::NotImplemented), failure(&what));
            }
        }
        for status in request.failures {
            add(number(*status), reference(&component(*status)));
        }
        add("default".to_owned(), reference(REFUSED));
        responses
    }

    /// The response with one of `contents`.
    fn contents(&mut self, summary: &str, contents: &[Content]) -> Value {
        let content = |Content { media, schema }: &Content| {
            ((*media).to_owned(), json!({ "schema": schema(&mut self.answers) }))
        };
        let content: Map<String, Value> = contents.iter().map(content).collect();
        json!({ "description": summary, "content": content })
    }

    /// All schemas by name.
    fn all(mut self) -> Map<String, Value> {
        let mut all = self.bodies.take_definitions(false);
        all.append(&mut self.answers.take_definitions(false));
        let failure = json!({
            "type": "array",
            "items": { "type": "string" },
            "minItems": 2,
            "description": "Texts of a failure. The first names it, the last is the remedy.",
        });
        all.insert(FAILURE.to_owned(), failure);
        all
    }
}

/// The responses that operations refer to.
fn responses(requests: &[Described]) -> Map<String, Value> {
    let failures = requests.iter().flat_map(|request| request.failures);
    let named = failures.map(|status| (component(*status), failure(meaning(*status))));
    let refused = "Refused before it was carried out: not HTTP/1.1 (400, 505), a body where none is taken (400), \
        another user (403), another method (405), a coding other than chunked, or too long (411, 413, 431), too many clients (503).";
    named.chain([(REFUSED.to_owned(), failure(refused))]).collect()
}

const fn meaning(status: Status) -> &'static str {
    match status {
        Status::BadRequest => "The configuration is refused, or the query is unknown.",
        Status::NotFound => "No machine is created.",
        Status::Conflict => "The state of the machine does not allow it now.",
        Status::InternalServerError => "The machine cannot start.",
        Status::NotImplemented => "egm-vmm run has one machine. Remedy: egm-vmm serve --api PATH.",
        Status::ServiceUnavailable => "Too many clients read events.",
        _ => "The request is refused.",
    }
}

/// A response with the texts of a failure.
fn failure(description: &str) -> Value {
    let schema = json!({ "$ref": format!("#{SCHEMAS}/{FAILURE}") });
    json!({ "description": description, "content": { JSON: { "schema": schema } } })
}

/// A reference to the response `name`.
fn reference(name: &str) -> Value {
    json!({ "$ref": format!("#/components/responses/{name}") })
}

/// Name of the response with `status`.
fn component(status: Status) -> String {
    status.reason().replace(' ', "")
}

fn number(status: Status) -> String {
    (status as u16).to_string()
}

/// A name of `request` for generators of clients: `put_vm_create`.
fn operation_id(request: &Described) -> String {
    let last = request.path.rsplit('/').next().unwrap_or_default();
    let name = format!("{}_{last}", request.method.to_ascii_lowercase());
    name.replace(|c: char| !c.is_ascii_alphanumeric(), "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A document with one request.
    fn of(outcome: Outcome, query: Option<Query>, body: Option<SchemaOf>) -> Value {
        let (method, path, summary, failures) =
            ("PUT", "/x/v1/vm.do-it", "does it", &[Status::Conflict] as &[_]);
        document("Title", &[Described { method, path, summary, query, body, outcome, failures }])
    }

    #[test]
    fn a_request_has_its_query_body_and_responses() {
        let query = Query { name: "follow", value: "0", meaning: "end at once" };
        let schema: SchemaOf = SchemaGenerator::subschema_for::<String>;
        let document = of(Outcome::Done, Some(query), Some(schema));
        assert_eq!((&document["openapi"], &document["info"]["title"]), (&json!("3.1.0"), &json!("Title")));
        let operation = &document["paths"]["/x/v1/vm.do-it"]["put"];
        assert_eq!(operation["operationId"], "put_vm_do_it");
        assert_eq!(operation["parameters"][0]["schema"]["enum"], json!(["0"]));
        assert_eq!(operation["requestBody"]["content"][JSON]["schema"], json!({ "type": "string" }));
        assert_eq!(operation["responses"]["204"], json!({ "description": "Done." }));
        assert_eq!(operation["responses"]["409"], reference("Conflict"));
        assert_eq!(operation["responses"]["default"], reference(REFUSED));
        let responses = document["components"]["responses"].as_object().unwrap();
        assert_eq!(responses.keys().collect::<Vec<_>>(), ["Conflict", REFUSED]);
    }

    #[test]
    fn what_is_not_built_has_its_remedy_and_no_success() {
        let document = of(Outcome::Missing("use a disk"), None, None);
        let responses = document["paths"]["/x/v1/vm.do-it"]["put"]["responses"].as_object().unwrap();
        assert_eq!(responses.keys().collect::<Vec<_>>(), ["409", "501", "default"]);
        assert!(responses["501"]["description"].as_str().unwrap().ends_with("Remedy: use a disk."));
    }
}
