//! Subcommands that run scenarios, or a machine or shell of the user, in an emulated host.

pub(crate) mod grace;
pub(crate) mod run_config;
pub(crate) mod session;
