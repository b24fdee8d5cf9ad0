//! Steps of scenarios about other monitors.

pub(crate) mod cloud_api;
pub(crate) mod guest;
pub(crate) mod monitor;
pub(crate) mod parts;
pub(crate) mod steps;
