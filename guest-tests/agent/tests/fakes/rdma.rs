//! RDMA against a stand-in for libibverbs, whose queue pairs reach each other within one process.

use std::path::{Path, PathBuf};
use std::process::Command;

use egm_report::{Outcome, Verdict};

use super::build::{self, Fakes};

/// What is wrong with the stand-in, who must find it, and what that says.
const FAULTS: [(&str, &str, &str); 18] = [
    ("write-tail", "rdma.memory", "of a write of"),
    ("write-beside", "rdma.memory", "surroundings behind"),
    ("read-flip", "rdma.memory", "of a read of"),
    ("read-none", "rdma.bandwidth", "after a timed read"),
    ("send-short", "rdma.memory", "arrived"),
    ("early", "rdma.memory", "of a write of"),
    ("relaxed-late", "rdma.relaxed", "of a write of"),
    ("atomic-lost", "rdma.atomics", "are missing"),
    ("atomic-answer", "rdma.atomics", "each sum once"),
    ("compare-always", "rdma.atomics", "the word after a comparison"),
    ("odp-lie", "odp.explicit", "ibv_reg_mr"),
    ("odp-stale", "odp.moving", "pages that move"),
    ("odp-stale", "odp.page_starts", "at page"),
    ("odp-place", "odp.explicit", "at the page's first byte"),
    ("odp-place", "odp.moving", "at the page's first byte"),
    ("devices-many", "rdma.device", "RDMA devices"),
    ("gids-many", "rdma.device", "of GIDs"),
    ("completions-many", "rdma.memory", "32 at most"),
];

/// What is wrong where a GPU takes part, likewise.
const GPU_FAULTS: [(&str, &str, &str); 13] = [
    ("dmabuf-byte", "rdma.gpu_dmabuf", "a write, as the GPU sees it"),
    ("dmabuf-other", "rdma.gpu_dmabuf", "a write, as the GPU sees it"),
    ("dmabuf-lie", "rdma.gpu_dmabuf", "but not one of GPU memory"),
    ("dmabuf-refused", "rdma.gpu_dmabuf", "and gives none"),
    ("dmabuf-unclear", "rdma.gpu_dmabuf", "does not say whether"),
    ("read-flip", "rdma.gpu_dmabuf", "of a read of"),
    ("write-beside", "rdma.gpu_dmabuf", "what is behind a write"),
    ("atomic-lost", "rdma.gpu_dmabuf", "the GPU's word after"),
    ("pages-old", "rdma.gpu_peermem", "a write, as the GPU sees it"),
    ("pages-old", "rdma.cuda_host_numa", "a write, as the GPU sees it"),
    ("write-tail", "rdma.cuda_host_numa", "a write, as the GPU sees it"),
    ("direct-refused", "rdma.data_direct", "takes no GPU memory"),
    ("direct-path", "rdma.data_direct", "4095 at most"),
];

/// What a GPU takes part in.
const OF_GPUS: &str = "rdma.gpu_dmabuf,rdma.gpu_peermem,rdma.cuda_host_numa,rdma.data_direct";

/// The folder of the stand-ins, which are C libraries.
fn made(fakes: &Fakes) -> PathBuf {
    let folder = fakes.folder.join(format!("verbs-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for (name, source, with) in
        [("libibverbs.so.1", "ibverbs.c", None), ("libmlx5.so.1", "mlx5.c", Some("-l:libibverbs.so.1"))]
    {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake").join(source);
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o"]).arg(folder.join(name));
        compiler.arg(source).arg("-L").arg(&folder).arg(format!("-Wl,-soname,{name}")).args(with);
        assert!(compiler.status().unwrap().success(), "cc fails");
    }
    folder
}

/// The folders in which the loader looks.
fn folders(fakes: &Fakes, folder: &Path) -> std::ffi::OsString {
    std::env::join_paths([folder, &fakes.folder]).unwrap()
}

/// What `select` finds with `fault`.
fn verdicts(fakes: &Fakes, folder: &Path, select: &str, fault: &str) -> Vec<Verdict> {
    let mut command = Command::new(&fakes.program);
    command.args(["validate", "--json", "--seed", "7", "--size", "1MiB", "--select", select]);
    command.env("LD_LIBRARY_PATH", folders(fakes, folder)).env("EGM_FAKE_FAULT", fault);
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
    let names = FAULTS.iter().chain(&GPU_FAULTS).map(|(_, name, _)| *name);
    for name in names.chain(others) {
        // Not every kernel moves pages of a machine with one node.
        let waived = ["odp.moving", "odp.page_starts"].contains(&name) && is(name, Outcome::Waived);
        assert!(is(name, Outcome::Passed) || waived, "{name}: {found:#?}");
    }
}

#[test]
fn each_fault_of_rdma_is_noticed_by_the_check_that_looks_for_it() {
    let Some(fakes) = build::fakes() else { return };
    let folder = made(&fakes);
    for (fault, name, says) in FAULTS.into_iter().chain(GPU_FAULTS) {
        let found = verdicts(&fakes, &folder, name, fault);
        let [verdict] = found.as_slice() else { panic!("{fault}: {found:?}") };
        let bad = matches!(verdict.outcome, Outcome::Failed | Outcome::Error);
        assert!(bad && verdict.reason.contains(says), "{fault}: {verdict:#?}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_a_gpu_needs_and_is_not_there_is_waived_with_its_reason() {
    let Some(fakes) = build::fakes() else { return };
    let folder = made(&fakes);
    let waived = |fault: &str, name: &str| {
        let found = verdicts(&fakes, &folder, name, fault);
        let [verdict] = found.as_slice() else { panic!("{fault}: {found:?}") };
        assert_eq!(verdict.outcome, Outcome::Waived, "{fault}: {verdict:#?}");
        verdict.reason.clone()
    };
    assert!(waived("dmabuf-none", "rdma.gpu_dmabuf").contains("takes no dma-buf"));
    assert!(waived("direct-none", "rdma.data_direct").contains("15b3:2100"));
    // No GPU, and no library of its driver's.
    let mut command = Command::new(&fakes.program);
    command.args(["validate", "--json", "--select", OF_GPUS]).env("LD_LIBRARY_PATH", &folder);
    let found = build::verdicts(&String::from_utf8(command.output().unwrap().stdout).unwrap());
    assert_eq!(found.len(), 4);
    let driver = Path::new("/proc/driver/nvidia/version").exists();
    let ended = |v: &Verdict| v.outcome == Outcome::Waived && v.reason.contains("libcuda.so.1");
    assert!(driver || found.iter().all(ended), "{found:#?}");
    std::fs::remove_dir_all(folder).unwrap();
}

/// What `egm-guest doctor` asks libibverbs, in the process that it asks in.
fn probed(fakes: &Fakes, folder: &Path, fault: &str) -> String {
    let mut command = Command::new(&fakes.program);
    command.args(["probe", "dmabuf"]).env("LD_LIBRARY_PATH", folder).env("EGM_FAKE_FAULT", fault);
    String::from_utf8(command.output().unwrap().stdout).unwrap()
}

#[test]
fn doctor_asks_each_device_whether_it_takes_dma_bufs_as_nccl_does() {
    let Some(fakes) = build::fakes() else { return };
    let folder = made(&fakes);
    assert_eq!(probed(&fakes, &folder, ""), r#"{"Ok":[["fake0",{"Ok":true}]]}"#);
    assert_eq!(probed(&fakes, &folder, "dmabuf-none"), r#"{"Ok":[["fake0",{"Ok":false}]]}"#);
    let unclear = probed(&fakes, &folder, "dmabuf-unclear");
    assert!(unclear.contains(r#"["fake0",{"Err":"ibv_reg_dmabuf_mr: "#), "{unclear}");
    let many = probed(&fakes, &folder, "devices-many");
    assert!(many.starts_with(r#"{"Err":"the number of RDMA devices"#), "{many}");
    // A library that is none, and one that ends the process: the one is told, the other leaves no answer.
    assert_eq!(probed(&fakes, &folder, "devices-abort"), "");
    std::fs::write(folder.join("libibverbs.so.1"), "no library").unwrap();
    let none = probed(&fakes, &folder, "");
    assert!(none.starts_with(r#"{"Err":"no libibverbs.so.1 on this machine: "#), "{none}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_a_driver_gets_right_that_loses_its_place_within_a_page_passes() {
    let Some(fakes) = build::fakes() else { return };
    let folder = made(&fakes);
    let found = verdicts(&fakes, &folder, "odp.page_starts", "odp-place");
    std::fs::remove_dir_all(folder).unwrap();
    let [verdict] = found.as_slice() else { panic!("{found:?}") };
    // Not every kernel moves pages of a machine with one node.
    let unmoved = verdict.outcome == Outcome::Waived && verdict.reason.contains("no page moved");
    assert!(verdict.outcome == Outcome::Passed || unmoved, "{verdict:#?}");
}
