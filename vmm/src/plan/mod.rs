//! From a specification and host facts to every address of the virtual machine.

mod types;

pub use types::*;
