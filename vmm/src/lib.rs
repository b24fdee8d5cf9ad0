//! A Linux virtual machine monitor whose guests use Extended GPU Memory.
//!
//! ```text
//! File ─► Spec ─► Plan ─► Resources ─► Machine ─► ExitReason
//! ```
//! Nothing before [`Resources`](plan) has side effects; nothing after it makes decisions.

pub mod arch;
pub mod cli;
pub mod config;
pub mod error;
pub mod facts;
pub mod firmware;
pub mod pci;
pub mod plan;
pub mod virtio;
