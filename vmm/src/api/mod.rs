//! The control API of a machine: HTTP/1.1 on a Unix socket, by a thread of its own (`egm-vmm run FILE --api PATH`, and
//! `egm-vmm serve`, where machines come and go).
//!
//! ```text
//!  client ─► listener ─► server.rs ──► connection.rs ──► http.rs        bytes, limits, deadlines: pure
//!                        one thread,      ▲
//!                        epoll            └── answer.rs ◄── routes.rs   one table: dispatch, refusals, documents
//!                                                              │  └─► openapi.rs   on request, with the views' schemas
//!                                                              │
//!  machine ─► events.rs ─► published.rs ◄──────────────────────┤        what is known of the machine, and its controls
//!  main thread ◄─ orders ── cycle.rs ◄── created.rs ◄──────────┘        egm-vmm serve: create, boot, end, again
//!                                         ▲ amend.rs                            changes before the boot
//!                           published.rs ─► event_monitor.rs            by the name cloud-hypervisor: its events, in a file
//! ```
//! Two surfaces: `/api/v1/` is that of cloud-hypervisor, `/egm/v1/` is ours. The thread never waits for a client, and the
//! machine never waits for the thread. Without `--api` there is neither thread nor descriptor. `cloud` translates
//! cloud-hypervisor's documents into our configuration.

mod amend;
mod answer;
mod client;
pub(crate) mod cloud;
mod connection;
mod control;
mod created;
mod cycle;
mod event_monitor;
mod events;
mod http;
mod life;
mod metrics;
mod openapi;
mod published;
mod routes;
mod server;
mod shown;
mod snapshots;
mod upgrade;
mod upgrades;
mod views;

pub(crate) use answer::with_causes;
pub(crate) use client::{Client, ClientError, Events};
pub(crate) use cycle::{Created, Order, RestoreOrder, SavedCycle};
pub(crate) use event_monitor::{CloudEvent, EventMonitor};
pub use events::{Journal, MachineEvent};
pub(crate) use published::Published;
pub(crate) use routes::{Surface, open_api};
pub(crate) use server::Server;
pub(crate) use upgrades::{Upgrade, Upgrades};
