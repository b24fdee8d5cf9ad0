//! A Linux virtual machine monitor whose guests use Extended GPU Memory.

pub mod config;
pub mod plan;
