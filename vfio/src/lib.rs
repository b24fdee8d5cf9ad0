//! Host PCI functions as guest devices.

pub mod host;
