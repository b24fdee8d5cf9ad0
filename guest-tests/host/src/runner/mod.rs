//! Boots the machines of a scenario, controls them, and runs its steps.

pub(crate) mod control;
pub(crate) mod machine;
pub(crate) mod machine_file;
pub(crate) mod refusal;
pub(crate) mod regions;
pub(crate) mod snapshot;
pub(crate) mod steps;
pub(crate) mod upgrade;
