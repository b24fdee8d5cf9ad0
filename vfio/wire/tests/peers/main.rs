//! Both sides at the two ends of a socket.
#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod hostile;
mod talk;
mod their_crate;
mod toy;
