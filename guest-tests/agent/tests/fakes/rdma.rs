//! RDMA against a stand-in for libibverbs, whose queue pairs reach each other within one process.

use std::path::{Path, PathBuf};
use std::process::Command;

use egm_report::{Outcome, Verdict};

use super::build::{self, Fakes};

/// What is wrong with the stand-in, who must find it, and what that says.
const FAULTS: [(&str, &str, &str); 14] = [
    ("write-tail", "rdma.memory", "of a write of"),
    ("write-beside", "rdma.memory", "surroundings behind"),
    ("read-flip", "rdma.memory", "of a read of"),
    ("send-short", "rdma.memory", "arrived"),
    ("early", "rdma.memory", "of a write of"),
    ("relaxed-late", "rdma.relaxed", "of a write of"),
    ("atomic-lost", "rdma.atomics", "are missing"),
    ("atomic-answer", "rdma.atomics", "each sum once"),
    ("compare-always", "rdma.atomics", "the word after a comparison"),
    ("odp-lie", "odp.explicit", "ibv_reg_mr"),
    ("odp-stale", "odp.moving", "pages that move"),
    ("devices-many", "rdma.device", "RDMA devices"),
    ("gids-many", "rdma.device", "of GIDs"),
    ("completions-many", "rdma.memory", "32 at most"),
];

/// The program, and the folder of the stand-in, which is a C library.
fn made(fakes: &Fakes) -> PathBuf {
    let folder = fakes.folder.join(format!("verbs-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake/ibverbs.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o"]).arg(folder.join("libibverbs.so.1"));
    assert!(compiler.arg(source).status().unwrap().success(), "cc fails");
    folder
}

/// What `select` finds with `fault`.
fn verdicts(fakes: &Fakes, folder: &Path, select: &str, fault: &str) -> Vec<Verdict> {
    let mut command = Command::new(&fakes.program);
    command.args(["validate", "--json", "--seed", "7", "--size", "1MiB", "--select", select]);
    command.env("LD_LIBRARY_PATH", folder).env("EGM_FAKE_FAULT", fault);
    let output = command.output().unwrap();
    build::verdicts(&String::from_utf8(output.stdout).unwrap())
}

#[test]
fn a_libibverbs_that_does_as_it_should_passes() {
    let Some(fakes) = build::fakes() else { return };
    let folder = made(&fakes);
    let found = verdicts(&fakes, &folder, "rdma,odp", "");
    std::fs::remove_dir_all(folder).unwrap();
    let bad: Vec<_> =
        found.iter().filter(|v| !matches!(v.outcome, Outcome::Passed | Outcome::Waived)).collect();
    assert!(bad.is_empty(), "{bad:#?}");
    let is = |name: &str, outcome| found.iter().any(|v| v.name == name && v.outcome == outcome);
    let others = ["rdma.nodes", "rdma.bandwidth", "rdma.latency", "odp.implicit"];
    for name in FAULTS.iter().map(|(_, name, _)| *name).chain(others) {
        // Not every kernel moves pages of a machine with one node.
        let waived = name == "odp.moving" && is(name, Outcome::Waived);
        assert!(is(name, Outcome::Passed) || waived, "{name}: {found:#?}");
    }
}

#[test]
fn each_fault_of_rdma_is_noticed_by_the_check_that_looks_for_it() {
    let Some(fakes) = build::fakes() else { return };
    let folder = made(&fakes);
    for (fault, name, says) in FAULTS {
        let found = verdicts(&fakes, &folder, name, fault);
        let [verdict] = found.as_slice() else { panic!("{fault}: {found:?}") };
        let bad = matches!(verdict.outcome, Outcome::Failed | Outcome::Error);
        assert!(bad && verdict.reason.contains(says), "{fault}: {verdict:#?}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}
