//! Deliberately broken doubles of vendors' libraries: for each fault that is planted, the validations that should
//! notice it fail, and no other of those that are selected does. Without a fault, all that run pass.
//!
//! The doubles (`tests/fake`) are compiled here by `c++`; the program is egm-guest linked to the machine's libc, as
//! `cargo guest` links it. Where there is no C++ compiler, the tests say so and decide nothing.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bare;
mod build;
mod gpus;
mod programs;
mod rdma;
mod turns;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use build::Fakes;
use egm_guest::findings::{Outcome, Verdict};

/// A fault, the validations that run with it, and those of them that notice it.
struct Planted {
    fault: &'static str,
    select: &'static str,
    notice: &'static [&'static str],
}

const fn planted(fault: &'static str, select: &'static str, notice: &'static [&'static str]) -> Planted {
    Planted { fault, select, notice }
}

/// Runs the chosen validations with a fault.
fn validate(
    fakes: &Fakes,
    gpus: u32,
    select: &str,
    fault: Option<&str>,
    seed: u64,
) -> BTreeMap<String, Verdict> {
    run(fakes, &fakes.folder, (gpus, select, fault, seed), &[])
}

/// The same, with the libraries of `folder` found first, and more words.
fn run(
    fakes: &Fakes,
    folder: &Path,
    (gpus, select, fault, seed): (u32, &str, Option<&str>, u64),
    more: &[&str],
) -> BTreeMap<String, Verdict> {
    let mut command = Command::new(&fakes.program);
    command.args(["validate", "--json", "--size", "64KiB", "--select", select, "--seed", &seed.to_string()]);
    command.args(["--arg", "deadline=300"]).args(more);
    command
        .arg("--arg")
        .arg(format!("nvshmem.library={}", fakes.folder.join("libnvshmem_host.so.3").display()));
    let path = std::env::join_paths([folder, &fakes.folder]).unwrap();
    command.env("LD_LIBRARY_PATH", path).env("EGM_FAKE_GPUS", gpus.to_string());
    command.env_remove("EGM_FAKE_FAULT").envs(fault.map(|fault| ("EGM_FAKE_FAULT", fault)));
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let verdicts: BTreeMap<String, Verdict> =
        build::verdicts(&text).into_iter().map(|verdict| (verdict.name.clone(), verdict)).collect();
    assert!(!verdicts.is_empty(), "{select} {fault:?}: {text}\n{}", String::from_utf8_lossy(&output.stderr));
    verdicts
}

/// Without a fault everything passes or is skipped, and what is named passes.
fn all_pass(fakes: &Fakes, gpus: u32, select: &str, must_run: &[&str]) {
    let verdicts = validate(fakes, gpus, select, None, 7);
    let bad: Vec<_> = verdicts
        .values()
        .filter(|verdict| !matches!(verdict.outcome, Outcome::Passed | Outcome::Skipped))
        .map(|verdict| format!("{} {}: {}", verdict.name, verdict.outcome, verdict.reason))
        .collect();
    assert!(bad.is_empty(), "without a fault: {bad:#?}");
    for name in must_run {
        let verdict = &verdicts[*name];
        assert_eq!(verdict.outcome, Outcome::Passed, "{name}: {}", verdict.reason);
    }
}

/// Each fault is noticed by those that should, as a failure, and by no other.
fn each_is_noticed(fakes: &Fakes, gpus: u32, all: &[Planted]) {
    let mut wrong = Vec::new();
    for Planted { fault, select, notice } in all {
        let verdicts = validate(fakes, gpus, select, Some(fault), 7);
        let failed: BTreeSet<&str> = verdicts
            .values()
            .filter(|verdict| verdict.outcome == Outcome::Failed)
            .map(|verdict| verdict.name.as_str())
            .collect();
        let broken: Vec<_> = verdicts.values().filter(|verdict| verdict.outcome == Outcome::Error).collect();
        let should: BTreeSet<&str> = notice.iter().copied().collect();
        if failed != should || !broken.is_empty() {
            let reasons: Vec<_> = verdicts
                .values()
                .map(|verdict| format!("{} {}: {}", verdict.name, verdict.outcome, verdict.reason))
                .collect();
            wrong.push(format!("{fault}: {failed:?} failed, not {should:?}: {reasons:#?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Kinds of memory of which a fault is planted in the first.
const BYTES: &str = "cuda.host_numa.bytes,cuda.pinned.bytes,cuda.managed.bytes";

/// Validations that compare rates, and another check of the same memory.
const RATIO: &str = "cuda.host_numa.of_pinned,cuda.host_numa.bytes";

#[test]
fn a_gpu_without_a_fault_passes() {
    let Some(fakes) = build::fakes() else { return };
    let run = [
        "cuda.attributes",
        "cuda.device.bytes",
        "cuda.host_numa.bytes",
        "cuda.pool.bytes",
        "cuda.host_numa.atomics",
        "cuda.host_numa.ordering",
        "cuda.host_numa.latency",
        "cuda.host_numa.export",
        "cuda.managed.latency",
    ];
    all_pass(&fakes, 1, "cuda,-cuda.*.bandwidth", &run);
}

#[test]
fn a_required_group_passes_by_its_core_and_a_required_name_by_itself() {
    let Some(fakes) = build::fakes() else { return };
    let select = "cuda.attributes,cuda.*.bytes,cuda.host_numa.capacity";
    let verdicts = |words| run(&fakes, &fakes.folder, (1, select, None, 7), &["--require", words]);
    let by_core = verdicts("cuda");
    // The double has no more memory for processors than the run may use: a good GPU skips this, and the group passes.
    assert_eq!(by_core["cuda.host_numa.capacity"].outcome, Outcome::Skipped);
    assert_eq!(by_core["required"].outcome, Outcome::Passed, "{}", by_core["required"].reason);
    let named = &verdicts("cuda,cuda.host_numa.capacity")["required"];
    assert_eq!(named.outcome, Outcome::Failed, "{}", named.reason);
    assert!(named.reason.contains("cuda.host_numa.capacity skipped"), "{}", named.reason);
}

#[test]
fn what_a_gpu_without_a_fault_moves_is_measured() {
    let Some(fakes) = build::fakes() else { return };
    all_pass(&fakes, 1, "cuda.*.bandwidth", &["cuda.host_numa.bandwidth", "cuda.managed.bandwidth"]);
}

#[test]
fn each_fault_of_what_a_gpu_moves_is_noticed_by_the_check_that_looks_for_it() {
    let Some(fakes) = build::fakes() else { return };
    let atomics = "cuda.host_numa.atomics,cuda.pinned.atomics,cuda.pool.atomics";
    let ordering = "cuda.host_numa.ordering,cuda.pinned.ordering";
    let export = "cuda.host_numa.export,cuda.device.export,cuda.host_numa.bytes";
    each_is_noticed(
        &fakes,
        1,
        &[
            planted("fill-byte", BYTES, &["cuda.host_numa.bytes"]),
            planted("stale", BYTES, &["cuda.host_numa.bytes"]),
            planted("add-lost", atomics, &["cuda.host_numa.atomics"]),
            planted("add-start-lost", atomics, &["cuda.host_numa.atomics"]),
            planted("flag-first", ordering, &["cuda.host_numa.ordering"]),
            planted("consume-not-run", ordering, &["cuda.host_numa.ordering"]),
            planted("managed-read-sum", "cuda.managed.*,cuda.pinned.bytes", &["cuda.managed.bandwidth"]),
            planted("copy-byte", "cuda.device.bytes,cuda.pinned.bytes", &["cuda.device.bytes"]),
            planted("copy-tail", "cuda.device.bytes,cuda.pinned.bytes", &["cuda.device.bytes"]),
            planted("copy-byte", "cuda.host_numa.of_pinned", &["cuda.host_numa.of_pinned"]),
            planted("read-sum", "cuda.host_numa.of_pinned", &["cuda.host_numa.of_pinned"]),
            planted("write-byte", "cuda.host_numa.of_pinned", &["cuda.host_numa.of_pinned"]),
            planted("host-numa-slow:copy", RATIO, &["cuda.host_numa.of_pinned"]),
            planted("host-numa-slow:copy,numa-node-none", RATIO, &["cuda.host_numa.of_pinned"]),
            planted("read-once", RATIO, &["cuda.host_numa.of_pinned"]),
            planted("host-numa-slow:kernel", RATIO, &["cuda.host_numa.of_pinned"]),
            planted("host-numa-slow:little", RATIO, &[]),
            planted("import-other", export, &["cuda.host_numa.export", "cuda.device.export"]),
        ],
    );
}

#[test]
fn what_never_was_at_work_at_once_is_skipped_and_not_passed() {
    let Some(fakes) = build::fakes() else { return };
    let both = [("add-start-late", "atomics"), ("produce-backwards", "ordering")];
    for (fault, check) in both {
        let select = format!("cuda.host_numa.{check},cuda.pinned.{check}");
        let verdicts = validate(&fakes, 1, &select, Some(fault), 7);
        let skipped = &verdicts[&format!("cuda.host_numa.{check}")];
        assert_eq!(skipped.outcome, Outcome::Skipped, "{fault}: {}", skipped.reason);
        assert!(skipped.reason.contains("attempts"), "{fault}: {}", skipped.reason);
        let passed = &verdicts[&format!("cuda.pinned.{check}")];
        assert_eq!(passed.outcome, Outcome::Passed, "{fault}: {}", passed.reason);
    }
}

#[test]
fn each_lie_of_a_gpu_is_noticed_by_the_check_that_looks_for_it() {
    let Some(fakes) = build::fakes() else { return };
    let attributes = "cuda.attributes,cuda.pinned.bytes";
    each_is_noticed(
        &fakes,
        1,
        &[
            planted("host-numa-lie", attributes, &["cuda.attributes"]),
            planted("numa-node-wrong", attributes, &["cuda.attributes"]),
            planted("granularity-odd", attributes, &["cuda.attributes"]),
            planted("granularity-zero", attributes, &["cuda.attributes"]),
            planted("dmabuf-refused", attributes, &["cuda.attributes"]),
        ],
    );
}

/// Of two kinds of memory a fault is planted in the first.
const RATES: &str = "cuda.host_numa.bandwidth,cuda.pinned.bandwidth";
const TIMES: &str = "cuda.host_numa.latency,cuda.pinned.latency,cuda.pinned.bytes";

#[test]
fn each_fault_of_kernels_that_are_measured_is_noticed_by_the_check_that_looks_for_it() {
    let Some(fakes) = build::fakes() else { return };
    each_is_noticed(
        &fakes,
        1,
        &[
            planted("write-byte", RATES, &["cuda.host_numa.bandwidth"]),
            planted("copy-kernel-byte", RATES, &["cuda.host_numa.bandwidth"]),
            planted("read-sum", RATES, &["cuda.host_numa.bandwidth"]),
        ],
    );
}

#[test]
fn each_fault_of_a_gpus_clock_is_noticed_by_what_is_measured() {
    let Some(fakes) = build::fakes() else { return };
    each_is_noticed(
        &fakes,
        1,
        &[
            planted("chase-short", TIMES, &["cuda.host_numa.latency"]),
            planted("time-zero", TIMES, &["cuda.host_numa.latency", "cuda.pinned.latency"]),
            planted("time-negative", RATES, &["cuda.host_numa.bandwidth", "cuda.pinned.bandwidth"]),
            planted("time-nonsense", TIMES, &["cuda.host_numa.latency", "cuda.pinned.latency"]),
        ],
    );
}

#[test]
fn each_fault_between_gpus_is_noticed_by_the_check_that_looks_for_it() {
    let Some(fakes) = build::fakes() else { return };
    let all = ["p2p.access", "p2p.bytes", "p2p.atomics", "p2p.atomic_rate", "p2p.bandwidth", "p2p.latency"];
    all_pass(&fakes, 2, "p2p", &all);
    all_pass(&fakes, 2, "cuda.host_numa.together", &["cuda.host_numa.together"]);
    each_is_noticed(
        &fakes,
        2,
        &[
            planted("p2p-refused", "p2p.access,cuda.pinned.bytes", &["p2p.access"]),
            planted("p2p-add-lost", "p2p.access,p2p.bytes,p2p.atomics", &["p2p.atomics"]),
            planted("p2p-add-lost", "p2p.bytes,p2p.atomic_rate", &["p2p.atomic_rate"]),
            planted("copy-byte", "cuda.host_numa.together", &["cuda.host_numa.together"]),
            planted("read-sum", "cuda.host_numa.together", &["cuda.host_numa.together"]),
            planted("write-byte", "cuda.host_numa.together", &["cuda.host_numa.together"]),
            planted("p2p-copy-byte", "p2p.access,p2p.bytes,p2p.bandwidth", &["p2p.bandwidth"]),
        ],
    );
}

#[test]
fn memory_goes_only_when_every_gpu_that_has_it_is_done_with_it() {
    let Some(fakes) = build::fakes() else { return };
    // The second GPU works only when it is waited for, and a call fails after it got a write to the first one's memory.
    // The double ends a process that unmaps memory which a GPU may still use.
    let verdicts = validate(&fakes, 2, "p2p.bandwidth", Some("peer-event-refused"), 7);
    let verdict = &verdicts["p2p.bandwidth"];
    assert_eq!(verdict.outcome, Outcome::Error, "{}", verdict.reason);
    assert!(verdict.reason.contains("cuEventRecord"), "{}", verdict.reason);
}

#[test]
fn additions_of_gpus_one_after_the_other_are_skipped_and_not_passed() {
    let Some(fakes) = build::fakes() else { return };
    let verdicts = validate(&fakes, 2, "p2p.atomics", Some("gpus-in-turns"), 7);
    let verdict = &verdicts["p2p.atomics"];
    assert_eq!(verdict.outcome, Outcome::Skipped, "{}", verdict.reason);
    assert!(verdict.reason.contains("never were at work at once"), "{}", verdict.reason);
}

#[test]
fn each_fault_of_nvshmem_is_noticed_by_the_check_that_looks_for_it() {
    let Some(fakes) = build::fakes() else { return };
    let all = [
        "nvshmem.start",
        "nvshmem.put",
        "nvshmem.get",
        "nvshmem.signal",
        "nvshmem.atomics",
        "nvshmem.barrier",
        "nvshmem.collectives",
        "nvshmem.bandwidth",
        "nvshmem.buffer",
    ];
    all_pass(&fakes, 2, "nvshmem", &all);
    let transfers = "nvshmem.put,nvshmem.get,nvshmem.collectives";
    let collectives = "nvshmem.collectives,nvshmem.put";
    let sync = "nvshmem.signal,nvshmem.barrier,nvshmem.put";
    each_is_noticed(
        &fakes,
        2,
        &[
            planted("shmem-put-byte", transfers, &["nvshmem.put"]),
            planted("shmem-put-tail", transfers, &["nvshmem.put"]),
            planted("shmem-put-over", transfers, &["nvshmem.put"]),
            planted("shmem-get-byte", transfers, &["nvshmem.get"]),
            planted("shmem-get-tail", transfers, &["nvshmem.get"]),
            planted("shmem-get-over", transfers, &["nvshmem.get"]),
            planted("shmem-get-own", transfers, &["nvshmem.get"]),
            planted("shmem-signal-first", sync, &["nvshmem.signal"]),
            planted("shmem-barrier-early", sync, &["nvshmem.barrier"]),
            planted("shmem-add-lost", "nvshmem.atomics,nvshmem.signal", &["nvshmem.atomics"]),
            planted("shmem-sum-one-less", collectives, &["nvshmem.collectives"]),
            planted("shmem-max-signed", collectives, &["nvshmem.collectives"]),
            planted("shmem-broadcast-byte", collectives, &["nvshmem.collectives"]),
            planted("shmem-collect-order", collectives, &["nvshmem.collectives"]),
            planted("shmem-exchange-own", collectives, &["nvshmem.collectives"]),
            planted("shmem-wrong-pe", "nvshmem.start", &["nvshmem.start"]),
            planted("shmem-peer-none", "nvshmem.start,nvshmem.put", &["nvshmem.start"]),
            planted("shmem-register-other", "nvshmem.buffer,nvshmem.put", &["nvshmem.buffer"]),
            planted("time-zero", "nvshmem.bandwidth,nvshmem.put", &["nvshmem.bandwidth"]),
        ],
    );
}

#[test]
fn a_pe_alone_is_one_pe_and_what_needs_two_is_skipped() {
    let Some(fakes) = build::fakes() else { return };
    let verdicts = validate(&fakes, 1, "nvshmem.put,nvshmem.barrier", None, 7);
    assert_eq!(verdicts["nvshmem.put"].outcome, Outcome::Passed, "{}", verdicts["nvshmem.put"].reason);
    assert!(
        verdicts["nvshmem.put"].reason.starts_with("1 PE on 1 GPU"),
        "{}",
        verdicts["nvshmem.put"].reason
    );
    assert_eq!(verdicts["nvshmem.barrier"].outcome, Outcome::Skipped);
}

#[test]
fn each_fault_of_gpu_memory_by_the_bar_is_noticed_by_the_check_that_looks_for_it() {
    let Some(fakes) = build::fakes() else { return };
    let all = ["gdr.dmabuf", "gdr.gdrapi", "gdr.bandwidth", "gdr.latency"];
    all_pass(&fakes, 1, "gdr", &all);
    let both = "gdr.dmabuf,gdr.gdrapi";
    each_is_noticed(
        &fakes,
        1,
        &[
            planted("dmabuf-other", both, &["gdr.dmabuf", "gdr.gdrapi"]),
            planted("gdr-write-tail", both, &["gdr.gdrapi"]),
            planted("gdr-write-word", both, &["gdr.gdrapi"]),
            planted("gdr-read-byte", both, &["gdr.gdrapi"]),
            planted("gdr-read-once", "gdr.bandwidth,gdr.latency", &["gdr.bandwidth", "gdr.latency"]),
            planted("gdr-info-short", both, &["gdr.gdrapi"]),
            planted(
                "gdr-write-tail",
                "gdr.bandwidth,gdr.latency,gdr.dmabuf",
                &["gdr.bandwidth", "gdr.latency"],
            ),
            planted(
                "gdr-read-byte",
                "gdr.bandwidth,gdr.latency,gdr.dmabuf",
                &["gdr.bandwidth", "gdr.latency"],
            ),
        ],
    );
    let verdicts = validate(&fakes, 1, both, Some("dmabuf-unmappable"), 7);
    let reason = &verdicts["gdr.dmabuf"].reason;
    assert_eq!(verdicts["gdr.dmabuf"].outcome, Outcome::Skipped, "{reason}");
    assert!(reason.contains("13.3") && reason.contains("behind PCI Express"), "{reason}");
    let verdicts = validate(&fakes, 1, both, Some("dmabuf-by-pcie"), 7);
    assert_eq!(verdicts["gdr.dmabuf"].outcome, Outcome::Passed, "{}", verdicts["gdr.dmabuf"].reason);
    for (fault, word) in [("dmabuf-shut", "mmap of a dma-buf: "), ("dmabuf-broken", "CUDA_ERROR_UNKNOWN")] {
        let verdicts = validate(&fakes, 1, "gdr.dmabuf", Some(fault), 7);
        let reason = &verdicts["gdr.dmabuf"].reason;
        assert_eq!(verdicts["gdr.dmabuf"].outcome, Outcome::Error, "{fault}: {reason}");
        assert!(reason.contains(word), "{fault}: {reason}");
    }
    let verdicts = validate(&fakes, 1, both, Some("gdr-no-driver"), 7);
    assert_eq!(verdicts["gdr.gdrapi"].outcome, Outcome::Skipped);
    assert!(verdicts["gdr.gdrapi"].reason.contains("gdrdrv"), "{}", verdicts["gdr.gdrapi"].reason);
}

#[test]
fn a_run_with_the_same_seed_tries_the_same_and_another_seed_something_else() {
    let Some(fakes) = build::fakes() else { return };
    // The messages of a fault say which lengths and places were tried, and which byte was wrong.
    let said = |seed| {
        let verdicts = validate(&fakes, 1, "nvshmem.put", Some("shmem-put-byte"), seed);
        let verdict = &verdicts["nvshmem.put"];
        assert_eq!(verdict.outcome, Outcome::Failed, "{}", verdict.reason);
        (verdict.seed, verdict.reason.clone())
    };
    assert_eq!(said(41), said(41));
    assert_ne!(said(41).1, said(42).1);
}

#[test]
fn a_seed_is_a_pattern_of_its_own_in_every_run() {
    let Some(fakes) = build::fakes() else { return };
    // The fault's message has what was there and what should have been: the pattern itself.
    let said = |seed| {
        let verdicts = validate(&fakes, 1, "cuda.host_numa.bytes", Some("fill-byte"), seed);
        let verdict = &verdicts["cuda.host_numa.bytes"];
        assert_eq!(verdict.outcome, Outcome::Failed, "{}", verdict.reason);
        (verdict.seed, verdict.reason.clone())
    };
    assert_eq!(said(41), said(41));
    assert_ne!(said(41), said(42));
}
