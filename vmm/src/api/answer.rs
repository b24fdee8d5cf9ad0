//! Answers of the API as bytes of HTTP/1.1. Pure.

use std::error::Error;
use std::sync::{Arc, OnceLock};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::events::EventFormat;
use crate::error::{Blame, Report};

/// Status of an answer; the discriminant is its number (RFC 9110, clause 15).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Status {
    Ok = 200,
    NoContent = 204,
    BadRequest = 400,
    Forbidden = 403,
    NotFound = 404,
    MethodNotAllowed = 405,
    Conflict = 409,
    LengthRequired = 411,
    ContentTooLarge = 413,
    HeadTooLarge = 431,
    InternalServerError = 500,
    NotImplemented = 501,
    ServiceUnavailable = 503,
    VersionNotSupported = 505,
}

impl Status {
    pub(super) const fn reason(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::NoContent => "No Content",
            Self::BadRequest => "Bad Request",
            Self::Forbidden => "Forbidden",
            Self::NotFound => "Not Found",
            Self::MethodNotAllowed => "Method Not Allowed",
            Self::Conflict => "Conflict",
            Self::LengthRequired => "Length Required",
            Self::ContentTooLarge => "Content Too Large",
            Self::HeadTooLarge => "Request Header Fields Too Large",
            Self::InternalServerError => "Internal Server Error",
            Self::NotImplemented => "Not Implemented",
            Self::ServiceUnavailable => "Service Unavailable",
            Self::VersionNotSupported => "HTTP Version Not Supported",
        }
    }
}

/// Media type of a body.
pub(super) const JSON: &str = "application/json";
pub(super) const LINES: &str = "application/x-ndjson";
pub(super) const SERVER_SENT: &str = "text/event-stream";
/// Of Prometheus' text format.
pub(super) const METRICS: &str = "text/plain; version=0.0.4";

/// An answer to one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) status: Status,
    media: &'static str,
    /// Methods of the path, where another was used.
    allow: Option<String>,
    body: Vec<u8>,
}

impl Answer {
    pub(super) fn text(media: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self { status: Status::Ok, media, allow: None, body: body.into() }
    }

    /// Success with `value` as JSON.
    pub(super) fn json(value: &impl Serialize) -> Self {
        // Every map has string keys, so the value always has a JSON form.
        Self::text(JSON, serde_json::to_vec(value).unwrap_or_default())
    }

    /// Success without a body.
    pub(super) fn done() -> Self {
        Self { status: Status::NoContent, media: JSON, allow: None, body: Vec::new() }
    }

    /// A failure in cloud-hypervisor's format: a list of texts. The first is what failed, the last the remedy.
    pub(super) fn failure(status: Status, what: &str, remedy: &str) -> Self {
        Self { status, ..Self::json(&[what, remedy]) }
    }

    /// The same for a failure with several texts, of which the last is the remedy.
    pub(super) fn failures(status: Status, texts: &[String]) -> Self {
        Self { status, ..Self::json(&texts) }
    }

    /// The refusal of a method that is none of the path's `methods`, which are empty for an unknown path.
    pub(super) fn unknown(methods: &[&str]) -> Self {
        if methods.is_empty() {
            let what = "cannot find this path in the API";
            return Self::failure(Status::NotFound, what, "use a path that GET /egm/v1/requests lists");
        }
        let methods = methods.join(", ");
        let remedy = format!("use {methods}");
        Self::failure(Status::MethodNotAllowed, "this path has no such method", &remedy).allowing(methods)
    }

    /// Names the methods that the path has.
    pub(super) fn allowing(self, methods: String) -> Self {
        Self { allow: Some(methods), ..self }
    }

    /// The whole answer. `keeps_alive`: the connection takes another request.
    pub(super) fn bytes(&self, keeps_alive: bool) -> Vec<u8> {
        let mut head = start(self.status);
        if let Some(methods) = &self.allow {
            head.push_str(&format!("Allow: {methods}\r\n"));
        }
        if self.status != Status::NoContent {
            head.push_str(&format!(
                "Content-Type: {}\r\nContent-Length: {}\r\n",
                self.media,
                self.body.len()
            ));
        }
        head.push_str(if keeps_alive {
            "Connection: keep-alive\r\n\r\n"
        } else {
            "Connection: close\r\n\r\n"
        });
        let mut bytes = head.into_bytes();
        bytes.extend(&self.body);
        bytes
    }
}

/// `error` as texts of an answer: each failure with its causes (of several, each with its remedy), then the remedy.
pub(super) fn texts(error: &dyn Report) -> Vec<String> {
    let general = || match error.blame() {
        Blame::Configuration => "change the configuration, and send it again",
        _ => "look at the messages of egm-vmm",
    };
    let others = error.others();
    if others.is_empty() {
        return vec![with_causes(error), error.help().unwrap_or_else(|| general().to_owned())];
    }
    let line = |error: &dyn Report| match error.help() {
        Some(help) => format!("{}; {help}", with_causes(error)),
        None => with_causes(error),
    };
    let lines = [error].into_iter().chain(others).map(line);
    lines.chain([general().to_owned()]).collect()
}

/// `error` and its causes on one line, without its remedy.
pub(crate) fn with_causes(error: &dyn Report) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        text.push_str(": ");
        text.push_str(&source.to_string());
        cause = Error::source(source);
    }
    text
}

/// The answer to a request that another thread carries out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Deferred(Arc<OnceLock<Answer>>);

impl Deferred {
    /// Keeps the first answer; later ones are dropped.
    pub(super) fn set(&self, answer: Answer) {
        let _ = self.0.set(answer);
    }

    pub(super) fn get(&self) -> Option<Answer> {
        self.0.get().cloned()
    }
}

/// The event that a later answer waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Awaited {
    /// The vCPUs run, or the start has failed.
    Start,
    /// The machine has ended, and its slices are returned.
    End,
    /// No vCPU is in the guest.
    Pause,
    /// The machine of a snapshot is paused or runs, or its start has failed.
    Restore,
    /// An upgrade is over.
    Upgrade,
    /// Another thread has carried out the request.
    Reply(Deferred),
}

/// The response to a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Response {
    Answer(Answer),
    /// An answer after this event.
    Later(Awaited),
    /// Events until the client leaves, in this form and of this media type.
    Events(EventFormat, &'static str),
}

impl From<Answer> for Response {
    fn from(answer: Answer) -> Self {
        Self::Answer(answer)
    }
}

/// Status line and the fields of every answer.
fn start(status: Status) -> String {
    format!(
        "HTTP/1.1 {} {}\r\nServer: egm-vmm\r\nCache-Control: no-store\r\n",
        status as u16,
        status.reason()
    )
}

/// The head of an answer with a body that ends with the connection.
pub(super) fn stream_head(media: &str) -> Vec<u8> {
    format!("{}Content-Type: {media}\r\nConnection: close\r\n\r\n", start(Status::Ok)).into_bytes()
}

/// The interim answer to a client that waits before it sends a body (RFC 9110, clause 10.1.1).
pub(super) const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// The `what` of `body`, or the refusal.
pub(super) fn read<T: DeserializeOwned>(what: &str, body: &[u8]) -> Result<T, Answer> {
    let remedy = "send the fields that the request's openapi.json describes: egm-vmm schema";
    serde_json::from_slice(body).map_err(|error| {
        Answer::failure(Status::BadRequest, &format!("cannot read the {what}: {error}"), remedy)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(answer: &Answer, keeps_alive: bool) -> String {
        String::from_utf8(answer.bytes(keeps_alive)).unwrap()
    }

    #[test]
    fn an_answer_has_the_length_of_its_body_and_one_without_a_body_has_none() {
        let answer = text(&Answer::json(&["a"]), true);
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(
            answer.contains("\r\nContent-Length: 5\r\nConnection: keep-alive\r\n\r\n[\"a\"]"),
            "{answer}"
        );
        let done = text(&Answer::done(), false);
        assert!(done.starts_with("HTTP/1.1 204 No Content\r\n") && done.ends_with("close\r\n\r\n"), "{done}");
        assert!(!done.contains("Content-"), "{done}");
    }

    #[test]
    fn a_failure_is_a_list_of_texts_and_names_the_methods_of_its_path() {
        let failure = Answer::failure(Status::MethodNotAllowed, "cannot \"x\"", "use GET");
        let shown = text(&failure.allowing("GET".to_owned()), false);
        assert!(shown.starts_with("HTTP/1.1 405 Method Not Allowed\r\n"), "{shown}");
        assert!(shown.contains("\r\nAllow: GET\r\n"), "{shown}");
        assert!(shown.ends_with("\r\n\r\n[\"cannot \\\"x\\\"\",\"use GET\"]"), "{shown}");
    }
}
