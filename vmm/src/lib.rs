//! A Linux virtual machine monitor for guests that use Extended GPU Memory.
//!
//! ```text
//! File ─► Spec ─► Reserved ─► Opened ─► Built ─► Ended
//!         rules   Plan,       Resources Machine  ExitReason
//!                 slices
//! ```
//! Side effects start in `Reserved`, and drop undoes them; nothing after its [plan] makes decisions. [launch] has the
//! phases.
//!
//! The plan of a machine on a recorded host, as `egm-vmm plan` prints it:
//!
//! ```
//! use egm_vmm::{config, facts, plan};
//! # let configs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
//!
//! let spec = config::load(&configs.join("hgx-h200.json"))?;
//! let host = facts::load(&configs.join("facts/hgx-h200.json"))?;
//! let plan = plan::plan(&spec, &host)?;
//! println!("{} NUMA nodes", plan.nodes.len());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![deny(clippy::print_stderr)] // notes and warnings are events of `tracing`

pub mod api;
pub mod arch;
mod cli;
pub mod console;
mod custody;
pub mod error;
mod eventfd;
pub mod export;
pub mod facts;
pub mod firmware;
mod hotplug;
mod inherited;
mod kept;
mod kvm;
pub mod launch;
mod listener;
mod lock;
pub mod machine;
mod memory;
mod passed;
mod passthrough;
pub mod pci;
pub mod plan;
mod program;
mod reexec;
pub mod reserve;
pub mod resources;
mod sandbox;
pub mod snapshot;
mod user;
pub mod virtio;

pub use cli::main;
pub use egm_config as config;
