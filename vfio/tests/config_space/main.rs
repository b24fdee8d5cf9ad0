//! Guest view of a function's configuration space: recorded functions, the specification's sentences, and arbitrary
//! bytes.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod golden;
mod hostile;
mod lists;
mod rules;
mod space;
mod state;
mod values;
