//! The EGM device: served to our client and to the `vfio_user` crate's, to peers that do strange things, for long.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod blocking_files;
mod cli;
mod clients;
mod fuse;
mod hostile;
mod messages;
mod peers;
mod raw;
mod silent;
#[path = "../small_host/mod.rs"]
mod small_host;
mod talk;
mod urgent;
mod users;
mod world;
