//! Limits on the memory that each user takes of each region, and the order in which waiting requests are served.
//!
//! ```text
//!  policy.json ──file.rs──► Policy ──decide.rs─► Decision        accounts.rs   holdings of each tenant
//!                                                   │ Wait        queue.rs      the request to serve next
//!                                                   ▼
//!                                                Queue ──► Pick
//! ```
//! Everything but [`load`] is pure: no clock, no file, no descriptor, and the same arrivals give the same grants. This
//! module never trusts a name in a request. A peer is the user and the groups that the kernel reports.

mod accounts;
mod decide;
mod file;
mod queue;
mod rules;

pub use accounts::Accounts;
pub use decide::{Decision, FreeMemory, Refusal, RefusalReason, RegionRequest};
pub use file::{Names, PolicyError, load, parse, schema};
pub(crate) use file::{is_kind, is_word};
pub use queue::{Candidate, OvertakeLimits, PickedRequest, Queue, Ticket, Waiter};
pub use rules::{Charge, OrphanedSlice, Peer, Policy, Rule, RuleId, RuleSubject, Supply, Tenant};

#[cfg(test)]
mod boundaries;
#[cfg(test)]
mod tests;
