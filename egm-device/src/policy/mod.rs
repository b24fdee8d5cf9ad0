//! Who may take how much of which region, and in which order those who wait are served.
//!
//! ```text
//!  policy.json ──file.rs──► Policy ──rules.rs──► Decision        accounts.rs   who holds what now
//!                                                   │ Wait        queue.rs      who is next
//!                                                   ▼
//!                                                Queue ──► Pick
//! ```
//! Everything but [`load`] is pure: no clock, no file, no descriptor, and the same arrivals give the same grants.
//! What this module refuses to do: believe a name that a request carries. A peer is the user and the groups
//! that the kernel says it has.

mod accounts;
mod file;
mod queue;
mod rules;

pub use accounts::{Accounts, Tenant};
pub(crate) use file::is_word;
pub use file::{Names, PolicyError, load, parse};
pub use queue::{Patience, Pick, Queue, Ticket, Waiter};
pub use rules::{Ask, Decision, Free, Peer, Policy, Refusal, Rule, RuleId, Supply, Who, Why};

#[cfg(test)]
mod tests;
