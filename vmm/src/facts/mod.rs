//! A host's resources, as a value: the plan is made from it, so it can be made on another machine.
//!
//! ```text
//!  /proc, /sys, /dev/kvm ──of_host──┐
//!                                   ├─► Facts ─► plan
//!  facts.json ─────────────load─────┘
//! ```

mod error;
mod huge;
mod kvm;
mod nodes;
mod read;
mod regions;
mod types;

/// The JSON Schema of recorded [`Facts`].
pub const SCHEMA: &str = include_str!("../../../configs/schemas/facts.schema.json");

pub use error::FactsError;
pub(crate) use read::architecture_of_host;
pub use read::{Scope, load, of_host, read};
pub(crate) use regions::egm as egm_regions;
pub use types::*;
