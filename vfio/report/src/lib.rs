//! What every program of ours prints: errors with the party that must act and a remedy, tables, sizes, notes and pages.
//!
//! ```text
//!  error: Report ──► Chain ──► standard error: what failed, why, the place in a file, help ──► exit code by Blame
//!  rows ──► Table ──► Screen ─┬─► a terminal: colours, lines that break between words
//!                             ├─► a file or pipe: plain
//!                             └─► a page (show::page)
//! ```
//! ```
//! use egm_report::{Blame, Chain, Remedy, Report};
//!
//! #[derive(Debug)]
//! struct NoPool;
//! impl std::error::Error for NoPool {}
//! impl std::fmt::Display for NoPool {
//!     fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
//!         f.write_str("cannot reserve 2 pages of 2 MiB: the pool is empty")
//!     }
//! }
//! impl Report for NoPool {
//!     fn remedy(&self) -> Remedy {
//!         Blame::Host.help("sysctl vm.nr_hugepages=2")
//!     }
//! }
//!
//! let shown = Chain(&NoPool).to_string();
//! assert_eq!(shown, "error: cannot reserve 2 pages of 2 MiB: the pool is empty\n  help: sysctl vm.nr_hugepages=2");
//! ```

mod excerpt;
#[cfg(feature = "json")]
pub mod json;
#[cfg(feature = "program")]
pub mod program;
#[cfg(feature = "program")]
pub mod progress;
pub mod rate;
mod report;
pub mod show;

pub use excerpt::excerpt;
pub use report::{Blame, Chain, Remedy, Report};
