//! The table of requests as clients get it.

use schemars::JsonSchema;
use serde::Serialize;

use super::{Operation, ROUTES, Route};

/// A row of the table as clients get it.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Request")]
pub(super) struct ListedRequest {
    method: &'static str,
    path: &'static str,
    /// Whether this program carries it out.
    built: bool,
    /// Its effect, or the remedy where it is not built.
    text: &'static str,
}

/// The table for a program that `serves` machines or has one.
pub(super) fn requests(serves: bool) -> Vec<ListedRequest> {
    let shown = |route: &Route| {
        let is_of_program = serves || !route.operation.is_of_serve();
        let built = !matches!(route.operation, Operation::Missing(_)) && is_of_program;
        ListedRequest { method: route.method.name(), path: route.path, built, text: route.line }
    };
    ROUTES.iter().map(shown).collect()
}
