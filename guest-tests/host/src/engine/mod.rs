//! Child processes, their consoles, and the data and verdicts of scenarios. Nothing here depends on a host.

pub(crate) mod boot;
pub(crate) mod command;
pub(crate) mod console;
pub(crate) mod disk;
pub(crate) mod error;
pub(crate) mod judge;
pub(crate) mod logs;
pub(crate) mod peer_program;
pub(crate) mod process;
pub(crate) mod progress;
pub(crate) mod qmp;
pub(crate) mod results;
pub(crate) mod scenario;
pub(crate) mod shard;
pub(crate) mod step;
