//! A plan for a person: as text for a terminal, or as a page for a browser. Both have the same content.

mod html;
mod model;
mod names;
mod nodes;
mod sockets;
mod text;

pub use egm_report::show::Screen;
pub use html::html;
pub use text::text;

use crate::facts::Facts;
use crate::plan::Plan;

/// How a plan is shown to a person.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The host of the plan, for vendors and ids of its functions.
    pub facts: &'a Facts,
    /// Colours and columns of text; a page has its own.
    pub screen: Screen,
    /// Whether each node has a row of its own, equal ones too.
    pub wide: bool,
}

impl<'a> View<'a> {
    /// Short, for a file.
    pub const fn of(facts: &'a Facts) -> Self {
        Self { facts, screen: Screen::FILE, wide: false }
    }
}

/// The plan for a program: JSON that ends in a newline.
pub fn json(plan: &Plan) -> String {
    // Every map in a plan has string keys, so nothing of it can fail to be JSON.
    serde_json::to_string_pretty(plan).map_or_else(|_| String::new(), |text| text + "\n")
}
