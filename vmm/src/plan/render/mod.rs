//! A plan for a person: as text for a terminal, or as a page for a browser. Both say the same.

mod html;
mod model;
mod text;

pub use egm_report::show::Screen;
pub use html::html;
pub use text::text;

use crate::plan::Plan;

/// The plan for a program: JSON that ends in a newline.
pub fn json(plan: &Plan) -> String {
    // Every map in a plan has string keys, so nothing of it can fail to be JSON.
    serde_json::to_string_pretty(plan).map_or_else(|_| String::new(), |text| text + "\n")
}
