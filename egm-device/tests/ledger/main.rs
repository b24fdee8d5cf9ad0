//! The ledger: never two owners of a byte, never an unscrubbed byte handed out.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod aperture;
mod common;
mod faults;
#[expect(dead_code, reason = "other tests receive")]
#[path = "../in_flight/mod.rs"]
mod in_flight;
mod in_use;
mod pinned;
mod retired;
mod ring;
mod slice_files;
mod states;
mod trust;
