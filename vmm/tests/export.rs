//! Machines as arguments of other monitors, and those monitors' check of them where this host has them.
//!
//! The output for two published topologies of EGM is in `tests/golden-export/`, and was reviewed. After an intended
//! change, write it anew and read the difference:
//! ```text
//! EGM_GOLDEN=write cargo test -p egm-vmm --test export && git diff vmm/tests/golden-export
//! ```

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "export/grammar.rs"]
mod grammar;
#[path = "export/hostile.rs"]
mod hostile;
#[path = "../../egm-device/tests/hostile_text/mod.rs"]
mod hostile_text;
#[path = "export/monitors.rs"]
mod monitors;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_egm-vmm");
const GOLDEN: &str = "tests/golden-export";
/// Machines that have a host of their own.
const TOPOLOGIES: [&str; 2] = ["gb200-4gpu", "gh200-4socket"];
/// Monitor, options, and the end of the golden file's name.
const FORMS: [(&str, &[&str], &str); 5] = [
    ("qemu", &[], "qemu.txt"),
    ("qemu", &["--nvidia"], "qemu-nvidia.txt"),
    ("cloud-hypervisor", &[], "cloud-hypervisor.txt"),
    ("libvirt", &[], "libvirt.txt"),
    ("libvirt", &["--nvidia"], "libvirt-nvidia.txt"),
];

fn file(name: &str) -> PathBuf {
    Path::new("tests/export").join(name)
}

fn export(monitor: &str, config: &Path, host: &Path, options: &[&str]) -> Output {
    let mut command = Command::new(PROGRAM);
    command.args(["export", monitor, "--config"]).arg(config).arg("--facts").arg(host).args(options);
    command.output().unwrap()
}

/// Output of `--json` for a machine of ours on its host.
fn json(monitor: &str, name: &str, options: &[&str]) -> Value {
    let options = [options, &["--json"]].concat();
    let host = file(&format!("{name}.host.json"));
    let output = export(monitor, &file(&format!("{name}.json")), &host, &options);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The words of a command line.
fn words(json: &Value) -> Vec<String> {
    json["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
}

/// The awkward machine in a folder of its own, which its paths are relative to.
fn awkward(folder: &Path) -> PathBuf {
    let config = folder.join("awkward.json");
    fs::copy(file("awkward.json"), &config).unwrap();
    config
}

#[test]
fn the_published_topologies_are_written_as_they_were_read() {
    let write = std::env::var_os("EGM_GOLDEN").is_some_and(|value| value == "write");
    let mut wrong = Vec::new();
    for name in TOPOLOGIES {
        for (monitor, options, end) in FORMS {
            let host = file(&format!("{name}.host.json"));
            let output = export(monitor, &file(&format!("{name}.json")), &host, options);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let said = [output.stdout, b"\n".to_vec(), output.stderr].concat();
            let golden = Path::new(GOLDEN).join(format!("{name}.{end}"));
            if write {
                fs::write(&golden, said).unwrap();
            } else if fs::read(&golden).ok().as_deref() != Some(&said) {
                wrong.push(golden.display().to_string());
            }
        }
    }
    assert!(wrong.is_empty(), "missing or different: {}; see the top of this file", wrong.join(", "));
}

#[test]
fn a_slice_that_is_the_memory_of_processors_is_that_of_their_node() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.json");
    let memory = r#"{"nodes": [{"id": 0, "cpus": "0"}]}"#;
    fs::write(&path, machine(memory, r#", "egm": [{"region": "egm4", "size": "4GiB", "node": 0}]"#)).unwrap();
    for (monitor, node) in [
        ("qemu", "node,nodeid=0,cpus=0,memdev=egm0"),
        ("cloud-hypervisor", "guest_numa_id=0,cpus=[0],memory_zones=[egm0]"),
    ] {
        let output = export(monitor, &path, &file("gb200-4gpu.host.json"), &["--json"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let words = words(&serde_json::from_slice(&output.stdout).unwrap());
        assert_eq!(words.iter().filter(|word| word.starts_with(node)).count(), 1, "{words:?}");
    }
}

#[test]
fn what_a_shell_reads_is_what_programs_get() {
    let folder = tempfile::tempdir().unwrap();
    let config = awkward(folder.path());
    let host = file("x86.host.json");
    let text = String::from_utf8(export("qemu", &config, &host, &[]).stdout).unwrap();
    // The shell runs a function in the place of QEMU, which prints its arguments.
    let script = text.replacen("qemu-system-x86_64", "printf '%s\\0' qemu-system-x86_64", 1);
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let arguments =
        words(&serde_json::from_slice(&export("qemu", &config, &host, &["--json"]).stdout).unwrap());
    assert_eq!(said.split_terminator('\0').collect::<Vec<_>>(), arguments);
    assert!(arguments.iter().any(|word| word.contains("`id` \\ *")), "{arguments:?}");
}

#[test]
fn a_domain_has_no_bridge_for_a_device_that_libvirt_does_not_place() {
    let folder = tempfile::tempdir().unwrap();
    let domain = export("libvirt", &awkward(folder.path()), &file("x86.host.json"), &[]);
    let xml = String::from_utf8(domain.stdout).unwrap();
    assert!(xml.contains("vfio-user-pci"), "{xml}");
    assert!(!xml.contains("pcie-expander-bus"), "libvirt takes its port for empty:\n{xml}");
}

/// Notes beside an export of the awkward machine, with `options`.
fn awkward_notes(monitor: &str, options: &[&str]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let options = [options, &["--json"]].concat();
    let output = export(monitor, &awkward(folder.path()), &file("x86.host.json"), &options);
    notes(&serde_json::from_slice(&output.stdout).unwrap())
}

fn notes(json: &Value) -> Vec<String> {
    json["notes"].as_array().unwrap().iter().map(|note| note.as_str().unwrap().to_owned()).collect()
}

#[test]
fn functions_are_bound_and_slices_served_before_a_monitor_starts() {
    let here = std::env::current_dir().unwrap();
    let socket = format!(" --socket '{}/a b/awkward-egm1.sock'", here.display());
    let gpus =
        "egm-vmm bind 0008:01:00.0 0009:01:00.0 0018:01:00.0 0019:01:00.0 --driver nvgrace_gpu_vfio_pci";
    let said = |notes: &[String], end: &str| {
        assert!(notes.iter().any(|note| note.ends_with(end)), "no {end:?} in {notes:#?}");
    };
    // No option of cloud-hypervisor can hold the awkward machine's paths.
    for monitor in ["qemu", "libvirt"] {
        let awkward = awkward_notes(monitor, &["--sockets", "a b"]);
        said(&awkward, ": egm-vmm bind 0000:18:00.0 0000:19:00.0");
        said(&awkward, &socket);
    }
    for monitor in ["qemu", "cloud-hypervisor", "libvirt"] {
        said(&notes(&json(monitor, "gb200-4gpu", &[])), gpus);
    }
}

#[test]
fn a_folder_of_sockets_that_no_argument_can_hold_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let options = ["--sockets", "a\nb"];
    let output = export("qemu", &awkward(folder.path()), &file("x86.host.json"), &options);
    let said = String::from_utf8(output.stderr).unwrap();
    let named = said.contains("--sockets") && said.contains("control character");
    assert!(output.status.code() == Some(2) && named, "{said}");
}

#[test]
fn numbers_of_cliques_that_only_egm_vmm_finds_are_asked_for() {
    let asked = |notes: Vec<String>| -> Vec<String> {
        notes.into_iter().filter(|note| note.contains("\"clique\"")).collect()
    };
    // Of the awkward machine's two functions one has its number.
    assert_eq!(asked(awkward_notes("qemu", &[])), Vec::<String>::new());
    for monitor in ["qemu", "cloud-hypervisor", "libvirt"] {
        let topology = asked(notes(&json(monitor, "gb200-4gpu", &[])));
        assert!(topology.len() == 1 && topology[0].starts_with("gpu0, gpu1, gpu2, gpu3: "), "{topology:?}");
    }
}

#[track_caller]
fn refused(monitor: &str, config: &str, parts: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.json");
    fs::write(&path, config).unwrap();
    let output = export(monitor, &path, &file("gb200-4gpu.host.json"), &[]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(matches!(output.status.code(), Some(2 | 3)) && output.stdout.is_empty(), "{said}");
    for part in parts {
        assert!(said.contains(part), "no {part:?} in\n{said}");
    }
}

/// A machine with `memory` and other keys.
fn machine(memory: &str, rest: &str) -> String {
    format!(r#"{{"boot": {{"kernel": "/k"}}, "memory": {memory}{rest}}}"#)
}

#[test]
fn what_a_monitor_has_no_words_for_is_refused() {
    let size = r#"{"size": "1GiB"}"#;
    let twice = r#", "egm": [{"region": "egm4", "size": "1GiB", "node": 1}, {"region": "egm4", "size": "1GiB", "node": 2}]"#;
    refused("cloud-hypervisor", &machine(size, twice), &["egm1 begins at 0x40000000 of /dev/egm4"]);
    let gap = r#", "egm": [{"region": "local", "size": "1GiB", "node": 4}]"#;
    for monitor in ["qemu", "libvirt"] {
        let remedy = "make node 4 node 1 in \"memory\".\"nodes\" and \"egm\"";
        refused(monitor, &machine(size, gap), &["there is a node 4 and no node 1", remedy]);
    }
    let nodes = r#"{"nodes": [{"id": 0, "size": "1GiB", "cpus": "0"}, {"id": 2, "size": "1GiB"}]}"#;
    let between = r#", "egm": [{"region": "egm4", "size": "1GiB", "node": 1}]"#;
    refused("libvirt", &machine(nodes, between), &["node 2 cannot be a cell"]);
    let quote = r#", "devices": [{"type": "virtio-blk", "path": "/a\"b"}]"#;
    refused("cloud-hypervisor", &machine(size, quote), &["double quote"]);
}

#[test]
fn a_file_that_is_no_machine_or_a_host_without_its_region_is_refused() {
    let size = r#"{"size": "1GiB"}"#;
    refused("qemu", "{", &["vm.json:1:1: not JSON"]);
    refused(
        "qemu",
        &machine(size, r#", "devcies": []"#),
        &["vm.json:1:56: unknown key \"devcies\"", "did you mean \"devices\"?"],
    );
    refused("qemu", &machine(size, r#", "name": "a b""#), &["name: \"a b\" is not a name"]);
    refused("qemu", &machine(r#"{"size": "1"}"#, ""), &["memory.size: 1 is not a multiple"]);
    refused("qemu", &machine(size, r#", "cpus": {"count": 999}"#), &["cpus.count: 999 is outside 1 to 254"]);
    let far = r#"{"nodes": [{"id": 0, "size": "1GiB", "cpus": "0", "distances": {"7": 20}}]}"#;
    refused("qemu", &machine(far, ""), &["memory.nodes[0].distances.7: there is no node \"7\""]);
    let region = r#", "egm": [{"region": "egm9", "size": "1GiB", "node": 1}]"#;
    refused("qemu", &machine(size, region), &["egm[0]: this host has none of egm9", "--facts"]);
    let large = r#", "egm": [{"region": "egm4", "size": "1TiB", "node": 1}]"#;
    refused("qemu", &machine(size, large), &["egm[0]: no place", "in region egm4: "]);
    refused("qemu", r#"{"extends": "vm.json"}"#, &["extend each other in a circle"]);
}
