//! Machines with several GPUs, with none, with a driver that is too old or broken, and with an EGM device.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use egm_guest::findings::{Outcome, Verdict};

use super::build::{self, Fakes};
use super::{run, validate};

/// One validation of each group that asks for GPUs.
const GROUPS: &str = "cuda.attributes,cuda.pinned.bytes,p2p.access,gdr.dmabuf,gdr.bandwidth,nvshmem.put";
/// Bytes of the EGM device that are retired, and all of its bytes.
const RETIRED: u64 = 1 << 20;
const SIZE: u64 = 24 << 20;

/// All have this outcome, and their reasons this word.
fn all_are(verdicts: &BTreeMap<String, Verdict>, outcome: Outcome, word: &str) {
    assert_eq!(verdicts.len(), GROUPS.split(',').count());
    for verdict in verdicts.values() {
        assert_eq!(verdict.outcome, outcome, "{}: {}", verdict.name, verdict.reason);
        assert!(verdict.reason.contains(word), "{}: {}", verdict.name, verdict.reason);
    }
}

#[test]
fn every_group_skips_a_machine_without_gpus_and_calls_a_broken_driver_an_error() {
    let Some(fakes) = build::fakes() else { return };
    all_are(&validate(&fakes, 0, GROUPS, None, 7), Outcome::Skipped, "CUDA_ERROR_NO_DEVICE");
    all_are(&validate(&fakes, 1, GROUPS, Some("init-broken"), 7), Outcome::Error, "CUDA_ERROR_UNKNOWN");
}

/// A folder with the double of libcuda, but for a function that it has by another name.
fn without(fakes: &Fakes, function: &str) -> PathBuf {
    let folder = fakes.folder.join(format!("without-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let mut library = fs::read(fakes.folder.join("libcuda.so.1")).unwrap();
    let name = format!("\0{function}\0");
    let places: Vec<usize> = library
        .windows(name.len())
        .enumerate()
        .filter_map(|(at, bytes)| (bytes == name.as_bytes()).then_some(at))
        .collect();
    assert!(!places.is_empty(), "no {function} in the double");
    for at in places {
        library[at + 1..at + 3].copy_from_slice(b"no");
    }
    fs::write(folder.join("libcuda.so.1"), library).unwrap();
    folder
}

#[test]
fn every_group_skips_a_driver_that_lacks_a_function_and_names_it() {
    let Some(fakes) = build::fakes() else { return };
    let folder = without(&fakes, "cuMemPoolSetAccess");
    let verdicts = run(&fakes, &folder, (1, GROUPS, None, 7), &[]);
    fs::remove_dir_all(folder).unwrap();
    all_are(&verdicts, Outcome::Skipped, "cuMemPoolSetAccess");
}

#[test]
fn every_gpu_is_validated_and_a_fault_of_the_second_one_is_noticed() {
    let Some(fakes) = build::fakes() else { return };
    let select = "cuda.device.bytes,cuda.pinned.latency,gdr.latency";
    let verdicts = validate(&fakes, 2, select, None, 7);
    for verdict in verdicts.values() {
        assert_eq!(verdict.outcome, Outcome::Passed, "{}: {}", verdict.name, verdict.reason);
    }
    for name in ["cuda.pinned.latency", "gdr.latency"] {
        for gpu in ["GPU 0, ", "GPU 1, "] {
            let figures = &verdicts[name].figures;
            assert!(figures.iter().any(|figure| figure.series.starts_with(gpu)), "{name}: {figures:?}");
        }
    }
    let verdicts = validate(&fakes, 2, select, Some("second-gpu-copy"), 7);
    let verdict = &verdicts["cuda.device.bytes"];
    assert_eq!(verdict.outcome, Outcome::Failed, "{}", verdict.reason);
    assert!(verdict.reason.starts_with("GPU 1: "), "{}", verdict.reason);
    let alone = validate(&fakes, 1, "cuda.device.bytes", Some("second-gpu-copy"), 7);
    assert_eq!(alone["cuda.device.bytes"].outcome, Outcome::Passed);
}

#[test]
fn a_gpu_that_would_not_report_a_difference_is_not_trusted() {
    let Some(fakes) = build::fakes() else { return };
    let select = "cuda.host_numa.bytes,cuda.host_numa.of_pinned,cuda.pinned.bytes";
    for fault in ["check-not-run", "reports-lost"] {
        let verdicts = validate(&fakes, 1, select, Some(fault), 7);
        for name in ["cuda.host_numa.bytes", "cuda.host_numa.of_pinned"] {
            let verdict = &verdicts[name];
            assert_eq!(verdict.outcome, Outcome::Error, "{fault}: {name}: {}", verdict.reason);
            assert!(verdict.reason.contains("cannot be trusted"), "{fault}: {name}: {}", verdict.reason);
        }
        let pinned = &verdicts["cuda.pinned.bytes"];
        assert_eq!(pinned.outcome, Outcome::Passed, "{fault}: {}", pinned.reason);
    }
}

#[test]
fn a_gpu_that_would_not_report_a_difference_is_not_trusted_by_a_pe_either() {
    let Some(fakes) = build::fakes() else { return };
    // Those with data that a kernel compares, then one that a processor compares.
    let select = "nvshmem.put,nvshmem.get,nvshmem.bandwidth,nvshmem.buffer,nvshmem.collectives";
    let heap = ["nvshmem.put", "nvshmem.get", "nvshmem.bandwidth", "nvshmem.buffer"];
    for (fault, unbelieved) in [
        ("check-not-run-elsewhere", &heap[..]),
        ("reports-lost-elsewhere", &heap[..]),
        ("check-not-run", &["nvshmem.buffer"]),
        ("reports-lost", &["nvshmem.buffer"]),
    ] {
        for (name, verdict) in validate(&fakes, 2, select, Some(fault), 7) {
            let reason = &verdict.reason;
            if unbelieved.contains(&name.as_str()) {
                assert_eq!(verdict.outcome, Outcome::Error, "{fault}: {name}: {reason}");
                assert!(reason.contains("cannot be trusted"), "{fault}: {name}: {reason}");
            } else {
                assert_eq!(verdict.outcome, Outcome::Passed, "{fault}: {name}: {reason}");
            }
        }
    }
}

/// Adds an EGM device with retired first bytes to a folder like `/sys/bus/pci/devices`; returns its memory's file.
fn egm_device(folder: &Path, address: &str) -> PathBuf {
    let device = folder.join(address);
    fs::create_dir_all(&device).unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(device.join(name), bytes).unwrap();
    let mut config = vec![0; 256];
    config[0x34] = 0xa0;
    let capability = [&[0x09, 0, 32, 1][..], b"EGMD", &[2, 0, 16, 0], &[1, 0, 0, 0]].concat();
    config[0xa0..0xb0].copy_from_slice(&capability);
    config[0xb0..0xb8].copy_from_slice(&SIZE.to_le_bytes());
    config[0xb8..0xc0].copy_from_slice(&0_u64.to_le_bytes());
    write("config", &config);
    let mut registers = vec![0; 0x4000];
    registers[..8].copy_from_slice(b"EGMD\x01\0\0\0");
    for (at, value) in [(0x08, SIZE), (0x18, 1 << 16), (0x1000, 0), (0x1008, RETIRED)] {
        registers[at..at + 8].copy_from_slice(&u64::to_le_bytes(value));
    }
    registers[0x20] = 1;
    registers[0x28] = 1; // one span
    write("resource0", &registers);
    let line = |start: u64, bytes: u64| format!("{start:#x} {:#x} 0x14220c\n", start + bytes - 1);
    let resource = line(0xf000_0000, 0x4000) + "0x0 0x0 0x0\n" + &line(0x80_0000_0000, 32 << 20);
    write("resource", resource.as_bytes());
    write("class", b"0x050000\n");
    write("numa_node", b"1\n");
    write("enable", b"1\n");
    fs::File::create(device.join("resource2_wc")).unwrap().set_len(32 << 20).unwrap();
    device.join("resource2_wc")
}

#[test]
fn the_bar_of_an_egm_device_is_registered_and_validated_around_what_is_retired() {
    let Some(fakes) = build::fakes() else { return };
    let folder = tempfile::tempdir().unwrap();
    let memory = fs::File::open(egm_device(folder.path(), "0000:01:00.0")).unwrap();
    let argument = format!("egm.functions={}", folder.path().display());
    let more = ["--arg", argument.as_str()];
    let select = "cuda.egm_device.*,cuda.registered.bytes";
    let verdicts = run(&fakes, &fakes.folder, (1, select, None, 7), &more);
    assert_eq!(verdicts.len(), 6, "{verdicts:?}");
    for verdict in verdicts.values() {
        assert_eq!(verdict.outcome, Outcome::Passed, "{}: {}", verdict.name, verdict.reason);
    }
    let figures = &verdicts["cuda.egm_device.bandwidth"].figures;
    assert!(figures.iter().any(|figure| figure.series.contains("EGM device 0000:01:00.0")), "{figures:?}");
    // What is behind the retired bytes was used, they were not.
    let mut bytes = vec![0; 2 << 20];
    memory.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "retired bytes were written");
    memory.read_exact_at(&mut bytes, 2 << 20).unwrap();
    assert!(bytes.iter().any(|byte| *byte != 0), "nothing was written");
    let faulty = run(&fakes, &fakes.folder, (1, select, Some("egm-device-byte"), 7), &more);
    assert_eq!(faulty["cuda.egm_device.bytes"].outcome, Outcome::Failed);
    assert_eq!(faulty["cuda.registered.bytes"].outcome, Outcome::Passed);
    // Without the folder the machine has none.
    let none = validate(&fakes, 1, "cuda.egm_device.bytes", None, 7);
    assert_eq!(none["cuda.egm_device.bytes"].outcome, Outcome::Skipped);
}

#[test]
fn an_egm_device_that_cannot_be_used_is_an_error_beside_a_good_one() {
    let Some(fakes) = build::fakes() else { return };
    let folder = tempfile::tempdir().unwrap();
    let good = egm_device(folder.path(), "0000:01:00.0");
    let bad = egm_device(folder.path(), "0000:02:00.0");
    fs::write(bad.with_file_name("resource"), "nonsense").unwrap();
    let argument = format!("egm.functions={}", folder.path().display());
    let verdict = |fault| {
        let more = ["--arg", argument.as_str()];
        run(&fakes, &fakes.folder, (1, "cuda.egm_device.bytes", fault, 7), &more)
            .remove("cuda.egm_device.bytes")
            .unwrap()
    };
    let beside = verdict(None);
    assert_eq!(beside.outcome, Outcome::Error, "{}", beside.reason);
    assert!(beside.reason.contains("EGM device 0000:02:00.0: "), "{}", beside.reason);
    assert!(
        beside.reason.contains("bytes of memory of the EGM device 0000:01:00.0, both ways"),
        "{}",
        beside.reason
    );
    // The good one was validated, and what is wrong with it counts more.
    assert!(fs::read(good).unwrap().iter().any(|byte| *byte != 0), "nothing was written");
    let faulty = verdict(Some("egm-device-byte"));
    assert_eq!(faulty.outcome, Outcome::Failed, "{}", faulty.reason);
    assert!(faulty.reason.contains("EGM device 0000:02:00.0: "), "{}", faulty.reason);
}
