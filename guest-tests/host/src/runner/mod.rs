//! Boots the machines of a scenario, and runs its steps.

pub(crate) mod machine;
pub(crate) mod machine_file;
pub(crate) mod refusal;
pub(crate) mod regions;
pub(crate) mod steps;
