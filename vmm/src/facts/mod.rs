//! What a host offers, as a value: the plan is made from it, so it can be made on another machine.

mod types;

pub use types::*;
