//! The program that can load libraries, on a machine that has none: nothing fails, and each skip names its reason.

use std::process::Command;

use egm_guest::findings::{Outcome, Run};

use super::build::fakes;

#[test]
fn without_any_library_everything_passes_or_is_skipped_with_a_reason() {
    let Some(fakes) = fakes() else { return };
    let nothing = tempfile::tempdir().unwrap();
    // Links and error counters of this machine's own functions are its own affair.
    let words = ["validate", "--json", "--size", "64KiB", "--select", "-pci", "--arg", "memory.rounds=1"];
    let output =
        Command::new(&fakes.program).args(words).env("LD_LIBRARY_PATH", nothing.path()).output().unwrap();
    let run = Run::parse(&output.stdout).unwrap();
    assert!(run.program.ends_with("linked dynamically"), "{}", run.program);
    let groups = ["memory.", "numa.", "cuda.", "p2p.", "rdma.", "gdr.", "nvshmem.", "odp."];
    for group in groups {
        assert!(run.verdicts.iter().any(|verdict| verdict.name.starts_with(group)), "{group}");
    }
    for verdict in &run.verdicts {
        let good =
            matches!(verdict.outcome, Outcome::Passed | Outcome::Skipped) && !verdict.reason.is_empty();
        assert!(good, "{verdict:?}");
        assert!(!verdict.reason.contains("linked statically"), "{verdict:?}");
    }
    assert_eq!(output.status.code(), Some(0));
}
