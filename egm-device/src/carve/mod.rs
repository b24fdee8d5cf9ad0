//! Splitting a host's memory once, and taking slices from its regions all day.

pub mod advise;
pub mod plan;
pub mod verify;
