//! RDMA against a double of libibverbs, with queue pairs that reach each other within one process.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use egm_guest::findings::{Outcome, Verdict};

use super::build::{self, Fakes};

/// A fault; the slow validations that run with [`QUICK`]; those of all these that notice it, and no other does; and
/// parts of the messages of some.
struct Planted {
    fault: &'static str,
    slow: &'static str,
    notice: &'static [&'static [&'static str]],
    says: &'static [(&'static str, &'static str)],
}

const fn planted(
    fault: &'static str,
    slow: &'static str,
    notice: &'static [&'static [&'static str]],
    says: &'static [(&'static str, &'static str)],
) -> Planted {
    Planted { fault, slow, notice, says }
}

/// Validations that take no time, and so run with every fault.
const QUICK: &str = "rdma.device,rdma.memory,rdma.nodes,rdma.relaxed,rdma.atomics,odp.explicit,odp.implicit,\
    rdma.gpu_dmabuf,rdma.gpu_peermem,rdma.cuda_host_numa,rdma.data_direct";
/// Those of them that move data in ordinary memory.
const MOVES: &[&str] = &["rdma.memory", "rdma.nodes", "rdma.relaxed", "odp.explicit", "odp.implicit"];
/// Those into memory of CUDA, which also add.
const GPU: &[&str] = &["rdma.gpu_dmabuf", "rdma.gpu_peermem", "rdma.cuda_host_numa", "rdma.data_direct"];
/// Those of GPU memory as a dma-buf.
const DMABUF: &[&str] = &["rdma.gpu_dmabuf", "rdma.data_direct"];
/// Those of memory without pinned pages.
const PAGES: &[&str] = &["odp.explicit", "odp.page_starts", "odp.moving"];

/// Faults of the double of libibverbs.
const FAULTS: [Planted; 12] = [
    planted(
        "write-tail",
        "",
        &[MOVES, GPU],
        &[("rdma.memory", "of a write of"), ("rdma.cuda_host_numa", "a write, as the GPU sees it")],
    ),
    planted(
        "write-beside",
        "",
        &[MOVES, GPU],
        &[("rdma.memory", "surroundings behind"), ("rdma.gpu_dmabuf", "what is behind a write")],
    ),
    planted(
        "read-flip",
        "",
        &[MOVES, GPU],
        &[("rdma.memory", "of a read of"), ("rdma.gpu_dmabuf", "of a read of")],
    ),
    planted(
        "read-none",
        "rdma.bandwidth,rdma.latency",
        &[MOVES, GPU, &["rdma.bandwidth", "rdma.latency"]],
        &[("rdma.bandwidth", "after a timed read"), ("rdma.latency", "after timed reads")],
    ),
    planted("send-short", "", &[MOVES, GPU], &[("rdma.memory", "arrived")]),
    // Into memory of CUDA a read goes behind every write, as it should on real devices: none is early there.
    planted("early", "", &[MOVES], &[("rdma.memory", "of a write of")]),
    planted("relaxed-late", "", &[&["rdma.relaxed"]], &[("rdma.relaxed", "of a write of")]),
    planted(
        "atomic-lost",
        "rdma.latency",
        &[&["rdma.atomics", "rdma.latency"], GPU],
        &[
            ("rdma.atomics", "are missing"),
            ("rdma.gpu_dmabuf", "the GPU's word after"),
            ("rdma.latency", "after timed fetch-and-adds"),
        ],
    ),
    planted("atomic-answer", "", &[&["rdma.atomics"], GPU], &[("rdma.atomics", "each sum once")]),
    planted(
        "compare-always",
        "",
        &[&["rdma.atomics"]],
        &[("rdma.atomics", "the word after a compare-and-swap")],
    ),
    planted(
        "pages-old",
        "",
        &[MOVES, GPU, &["rdma.atomics"]],
        &[
            ("rdma.gpu_peermem", "a write, as the GPU sees it"),
            ("rdma.cuda_host_numa", "a write, as the GPU sees it"),
        ],
    ),
    planted(
        "odp-lie",
        "odp.page_starts,odp.moving",
        &[PAGES, &["odp.implicit"]],
        &[("odp.explicit", "ibv_reg_mr"), ("odp.moving", "reports on-demand paging, but: ibv_reg_mr")],
    ),
];

/// Faults of it, or of that for libmlx5, where pages move or memory is a dma-buf.
const MORE_FAULTS: [Planted; 9] = [
    planted(
        "odp-stale",
        "odp.page_starts,odp.moving",
        &[PAGES],
        &[("odp.moving", "pages that move"), ("odp.page_starts", "at page")],
    ),
    planted(
        "odp-place",
        "odp.moving",
        &[&["odp.explicit", "odp.moving"]],
        &[("odp.explicit", "at the page's first byte"), ("odp.moving", "at the page's first byte")],
    ),
    planted("dmabuf-byte", "", &[DMABUF], &[("rdma.gpu_dmabuf", "a write, as the GPU sees it")]),
    planted("dmabuf-other", "", &[DMABUF], &[("rdma.gpu_dmabuf", "a write, as the GPU sees it")]),
    planted("dmabuf-lie", "", &[DMABUF], &[("rdma.gpu_dmabuf", "but not one of GPU memory")]),
    planted("dmabuf-refused", "", &[DMABUF], &[("rdma.gpu_dmabuf", "but exports none")]),
    planted("dmabuf-unclear", "", &[DMABUF], &[("rdma.gpu_dmabuf", "does not say whether")]),
    planted("direct-refused", "", &[&["rdma.data_direct"]], &[("rdma.data_direct", "takes no GPU memory")]),
    planted("direct-path", "", &[&["rdma.data_direct"]], &[("rdma.data_direct", "4095 at most")]),
];

/// Impossible numbers of the library's: everything that is tried with them reports them.
const NONSENSE: [(&str, &str, &str); 3] = [
    ("devices-many", "rdma.device", "RDMA devices"),
    ("gids-many", "rdma.device", "of GIDs"),
    ("completions-many", "rdma.memory", "32 at most"),
];

/// Validations in which a GPU takes part.
const OF_GPUS: &str = "rdma.gpu_dmabuf,rdma.gpu_peermem,rdma.cuda_host_numa,rdma.data_direct";

/// The folder of the doubles, which are C libraries.
pub(super) fn made(fakes: &Fakes) -> PathBuf {
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

/// Verdicts of `select` with `fault`.
fn verdicts(fakes: &Fakes, folder: &Path, select: &str, fault: &str) -> Vec<Verdict> {
    let mut command = Command::new(&fakes.program);
    command.args(["validate", "--json", "--seed", "7", "--size", "128KiB", "--select", select]);
    command.env("LD_LIBRARY_PATH", folders(fakes, folder)).env("EGM_FAKE_FAULT", fault);
    command.env("EGM_FAKE_PAGEABLE", "1");
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
        found.iter().filter(|v| !matches!(v.outcome, Outcome::Passed | Outcome::Skipped)).collect();
    assert!(bad.is_empty(), "{bad:#?}");
    let is = |name: &str, outcome| found.iter().any(|v| v.name == name && v.outcome == outcome);
    let others = ["rdma.bandwidth", "rdma.latency", "odp.page_starts", "odp.moving"];
    let names = QUICK.split(',');
    for name in names.chain(others) {
        // Not every kernel moves pages of a machine with one node.
        let skipped = ["odp.moving", "odp.page_starts"].contains(&name) && is(name, Outcome::Skipped);
        assert!(is(name, Outcome::Passed) || skipped, "{name}: {found:#?}");
    }
}

/// Each is noticed by those that should, as a failure, and by no other of those that are tried.
fn each_is_noticed(fakes: &Fakes, faults: &[Planted]) {
    let folder = made(fakes);
    let mut wrong = Vec::new();
    for Planted { fault, slow, notice, says } in faults {
        let found = verdicts(fakes, &folder, [QUICK, slow].join(",").trim_end_matches(','), fault);
        assert!(found.len() >= QUICK.split(',').count(), "{fault}: {found:#?}");
        let should: BTreeSet<&str> = notice.iter().flat_map(|names| names.iter().copied()).collect();
        let is = |outcome| -> BTreeSet<&str> {
            found.iter().filter(|v| v.outcome == outcome).map(|v| v.name.as_str()).collect()
        };
        let said =
            |(who, words): &(&str, &str)| found.iter().any(|v| v.name == *who && v.reason.contains(words));
        if is(Outcome::Failed) != should || !is(Outcome::Error).is_empty() || !says.iter().all(said) {
            wrong.push(format!("{fault}: not {should:?}, or not {says:?}: {found:#?}"));
        }
    }
    std::fs::remove_dir_all(folder).unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_fault_of_rdma_is_noticed_by_the_checks_that_look_for_it_and_by_no_other() {
    let Some(fakes) = build::fakes() else { return };
    each_is_noticed(&fakes, &FAULTS);
}

#[test]
fn each_fault_of_moving_pages_and_dma_bufs_is_noticed_by_the_checks_that_look_for_it_and_by_no_other() {
    let Some(fakes) = build::fakes() else { return };
    each_is_noticed(&fakes, &MORE_FAULTS);
}

#[test]
fn numbers_of_a_library_that_cannot_be_are_named() {
    let Some(fakes) = build::fakes() else { return };
    let folder = made(&fakes);
    for (fault, name, says) in NONSENSE {
        let found = verdicts(&fakes, &folder, name, fault);
        let [verdict] = found.as_slice() else { panic!("{fault}: {found:?}") };
        let bad = matches!(verdict.outcome, Outcome::Failed | Outcome::Error);
        assert!(bad && verdict.reason.contains(says), "{fault}: {verdict:#?}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn rdma_does_not_trust_a_gpu_that_would_not_report_a_difference() {
    let Some(fakes) = build::fakes() else { return };
    let folder = made(&fakes);
    for fault in ["check-not-run", "reports-lost"] {
        for verdict in verdicts(&fakes, &folder, QUICK, fault) {
            // The fault is planted in HOST_NUMA memory alone.
            let planted = verdict.name == "rdma.cuda_host_numa";
            let outcome = if planted { Outcome::Error } else { Outcome::Passed };
            assert_eq!(verdict.outcome, outcome, "{fault}: {verdict:#?}");
            assert_eq!(verdict.reason.contains("cannot be trusted"), planted, "{fault}: {verdict:#?}");
        }
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_a_gpu_needs_and_is_not_there_is_skipped_with_its_reason() {
    let Some(fakes) = build::fakes() else { return };
    let folder = made(&fakes);
    let skipped = |fault: &str, name: &str| {
        let found = verdicts(&fakes, &folder, name, fault);
        let [verdict] = found.as_slice() else { panic!("{fault}: {found:?}") };
        assert_eq!(verdict.outcome, Outcome::Skipped, "{fault}: {verdict:#?}");
        verdict.reason.clone()
    };
    assert!(skipped("dmabuf-none", "rdma.gpu_dmabuf").contains("takes no dma-buf"));
    assert!(skipped("direct-none", "rdma.data_direct").contains("15b3:2100"));
    // No GPU, and no library of its driver's.
    let mut command = Command::new(&fakes.program);
    command.args(["validate", "--json", "--select", OF_GPUS]).env("LD_LIBRARY_PATH", &folder);
    let found = build::verdicts(&String::from_utf8(command.output().unwrap().stdout).unwrap());
    assert_eq!(found.len(), 4);
    let driver = Path::new("/proc/driver/nvidia/version").exists();
    let ended = |v: &Verdict| v.outcome == Outcome::Skipped && v.reason.contains("libcuda.so.1");
    assert!(driver || found.iter().all(ended), "{found:#?}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn memory_that_a_gpu_may_move_is_tried_and_skipped_where_no_page_of_it_moved() {
    let Some(fakes) = build::fakes() else { return };
    let folder = made(&fakes);
    // The double's GPU reaches all memory where it is, so nothing moves: what is wrong is wrong all the same.
    for (fault, outcome, says) in [
        ("", Outcome::Skipped, "bytes written, read and sent, 32 unaligned pieces; a kernel compared"),
        ("write-tail", Outcome::Failed, "a write, as the GPU sees it"),
        ("read-flip", Outcome::Failed, "of a read of"),
        ("odp-stale", Outcome::Failed, "a write, as the GPU sees it"),
        ("odp-lie", Outcome::Failed, "reports on-demand paging, but: ibv_reg_mr"),
    ] {
        let found = verdicts(&fakes, &folder, "odp.gpu_moving", fault);
        let [verdict] = found.as_slice() else { panic!("{fault}: {found:?}") };
        assert_eq!(verdict.outcome, outcome, "{fault}: {verdict:#?}");
        assert!(verdict.reason.contains(says), "{fault}: {verdict:#?}");
    }
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
    // A library that is none is reported; one that ends the process leaves no answer.
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
    let unmoved = verdict.outcome == Outcome::Skipped && verdict.reason.contains("no page moved");
    assert!(verdict.outcome == Outcome::Passed || unmoved, "{verdict:#?}");
}
