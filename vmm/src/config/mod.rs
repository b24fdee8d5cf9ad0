//! From a JSON file to a checked specification.

mod spec;

pub use spec::*;
