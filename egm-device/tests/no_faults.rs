//! The programs that users get have no planted faults.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]

#[test]
fn the_program_does_not_read_the_variable_of_planted_faults() {
    let program = std::fs::read(env!("CARGO_BIN_EXE_egm-device")).unwrap();
    let words = b"EGM_FAULT";
    assert!(!program.windows(words.len()).any(|bytes| bytes == words));
}
