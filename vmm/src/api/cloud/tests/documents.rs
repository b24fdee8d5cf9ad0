//! Documents of clients, in `tests/cloud/`, and the files that they become. After a change that is meant:
//! ```text
//! EGM_GOLDEN=write cargo test -p egm-vmm cloud::tests::documents && git diff vmm/tests/cloud
//! ```

use std::fs;
use std::path::Path;

use egm_report::Chain;
use serde_json::json;

use super::super::{Translation, VmConfig, translate};
use super::{document, file, translated};
use crate::config::{self, Architecture, File, Overrides, Spec};

const FOLDER: &str = "tests/cloud";
/// The smallest, kata-containers' with an image and a GPU, and that of a domain of libvirt.
const CLIENTS: [&str; 3] = ["minimal", "kata", "libvirt"];

/// The file of the document `name`.
fn file_of(name: &str) -> File {
    let text = fs::read(Path::new(FOLDER).join(format!("{name}.json"))).unwrap();
    let config: VmConfig = serde_json::from_slice(&text).unwrap();
    translate(&config).unwrap_or_else(|refusals| panic!("{name}: {refusals:#?}")).file
}

/// Each refusal is compared with those before.
#[test]
fn a_document_with_many_mistakes_is_refused_for_some() {
    let affinity = vec![json!({ "vcpu": 7, "host_cpus": [0] }); 1000];
    let refusals = translated(&document(
        &json!({ "cpus": { "boot_vcpus": 1, "max_vcpus": 1, "affinity": affinity } }).to_string(),
    ));
    assert_eq!(refusals.unwrap_err().len(), config::MOST_FAULTS);
}

#[test]
fn documents_of_clients_become_the_files_that_were_reviewed() {
    let write = std::env::var_os("EGM_GOLDEN").is_some_and(|value| value == "write");
    let mut wrong = Vec::new();
    for name in CLIENTS {
        let (file, golden) = (file_of(name).to_json(), format!("{FOLDER}/{name}.file.json"));
        if write {
            fs::write(&golden, &file).unwrap();
        } else if fs::read_to_string(&golden).ok().as_deref() != Some(&file) {
            wrong.push(golden);
        }
    }
    assert!(wrong.is_empty(), "missing or different: {}; see the top of this file", wrong.join(", "));
}

/// The machine of the document `path`, or what is printed about it.
fn load(path: &Path) -> Result<Spec, String> {
    let spec = config::load_foreign(path, &Overrides::default(), |document: VmConfig| {
        let Translation { mut file, origins, .. } = translate(&document)?;
        file.arch = Some(Architecture::X86_64);
        Ok((file, move |key: &str| origins.of(key)))
    });
    spec.map_err(|errors| Chain(&errors).to_string())
}

#[test]
fn the_file_means_the_machine_of_the_document() {
    let folder = tempfile::tempdir().unwrap();
    for name in CLIENTS {
        let mut file = file_of(name);
        file.arch = Some(Architecture::X86_64);
        let path = folder.path().join(format!("{name}.json"));
        fs::write(&path, file.to_json()).unwrap();
        assert_eq!(
            config::load(&path).unwrap(),
            load(&Path::new(FOLDER).join(format!("{name}.json"))).unwrap()
        );
    }
}

/// What is printed about the wrong document `text`.
fn complaint(text: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("create.json");
    fs::write(&path, text).unwrap();
    load(&path).unwrap_err().replace(path.to_str().unwrap(), "create.json")
}

#[test]
fn a_refusal_and_a_broken_rule_have_the_line_of_the_document() {
    let refused = complaint(
        "{\n \"payload\": { \"kernel\": \"k\" },\n \"disks\": [\n  { \"path\": \"d\", \"direct\": true }]}",
    );
    assert!(refused.starts_with("error: create.json:4:18: disks[0].direct: cannot bypass "), "{refused}");
    assert!(refused.contains("\n  help: leave direct out"), "{refused}");
    for (members, wanted) in [
        (r#""cpus":{"boot_vcpus":255,"max_vcpus":255}"#, ":1:35: cpus.boot_vcpus: 255 is outside 1 to 254"),
        (r#""net":[{"tap":"a/b"}]"#, ":1:35: net[0].tap: \"a/b\" cannot name a network interface"),
        (r#""disks":[{"path":"d"},{"path":"d"}]"#, "disks[1].path: disk d "),
        (r#""vsock":{"cid":1,"socket":"s"}"#, "vsock.cid: 1 is outside 3 to"),
        (r#""memory":{"size":4097}"#, "memory.size: 4097 is not a multiple"),
        (
            r#""memory":{"size":0,"zones":[{"id":"a","size":4097}]},"numa":[{"guest_numa_id":0,"cpus":[0],"memory_zones":["a"]}]"#,
            "numa[0].memory_zones: 4097 is not a multiple",
        ),
        (
            r#""devices":[{"path":"/sys/bus/pci/devices/0000:41:00.0","x_nv_gpudirect_clique":16}]"#,
            "devices[0].x_nv_gpudirect_clique: 16 is outside 0 to 15",
        ),
        (r#""disk":[]"#, "unknown key \"disk\""),
    ] {
        let text = format!(r#"{{"payload":{{"kernel":"k"}},{members}}}"#);
        let complaint = complaint(&text);
        assert!(complaint.contains(wanted), "{members}: {complaint}");
    }
    // The first of two is named as the document names it.
    let twice = complaint(r#"{"payload":{"kernel":"k"},"disks":[{"path":"d"},{"path":"d"}]}"#);
    assert!(twice.contains("disks[0].path") && !twice.contains("devices["), "{twice}");
}

#[test]
fn a_zone_of_egm_is_a_slice_and_nodes_of_devices_are_the_plans() {
    let egm = document(
        r#"{"cpus":{"boot_vcpus":4,"max_vcpus":4},
            "memory":{"size":0,"zones":[{"id":"ram0","size":17179869184,"host_numa_node":0},
                {"id":"egm0","size":68719476736,"file":"/dev/egm4","shared":true}]},
            "numa":[{"guest_numa_id":0,"cpus":[0,1,2,3],"memory_zones":["ram0"]},
                {"guest_numa_id":1,"device_id":"gpu0"},
                {"guest_numa_id":9,"memory_zones":["egm0"],"distances":[{"destination":0,"distance":11},
                    {"destination":1,"distance":80}]}],
            "devices":[{"id":"gpu0","path":"/sys/bus/pci/devices/0009:01:00.0"}]}"#,
    );
    let translated = translated(&egm).unwrap();
    let file: serde_json::Value = serde_json::from_str(&translated.file.to_json()).unwrap();
    let nodes = json!([{ "id": 0, "size": 17_179_869_184_u64, "cpus": "0-3", "host_nodes": "0" }]);
    assert_eq!(file["memory"], json!({ "nodes": nodes }));
    let slice = json!({ "region": "egm4", "size": 68_719_476_736_u64, "node": 9, "distances": { "0": 11 } });
    assert_eq!(file["egm"], json!([slice]));
    assert!(
        translated.notes.iter().any(|note| note.starts_with("numa[1].device_id: ")),
        "{:?}",
        translated.notes
    );
}

#[test]
fn a_slice_of_a_node_with_processors_is_all_of_its_memory() {
    let file: serde_json::Value = serde_json::from_str(&file(&document(
        r#"{"memory":{"size":0,"zones":[{"id":"e","size":1073741824,"file":"/dev/egm0"}]},
            "numa":[{"guest_numa_id":0,"cpus":[0],"memory_zones":["e"],"distances":[{"destination":1,"distance":40}]}]}"#,
    )))
    .unwrap();
    assert_eq!(file["memory"]["nodes"], json!([{ "id": 0, "cpus": "0", "distances": { "1": 40 } }]));
    assert_eq!(file["egm"], json!([{ "region": "egm0", "size": 1_073_741_824, "node": 0 }]));
}

#[test]
fn the_console_is_that_of_the_two_which_has_an_output() {
    for (text, console) in [
        ("{}", json!("stdio")),
        (r#"{"serial":{"mode":"Off"},"console":{"mode":"Off"}}"#, json!("null")),
        (r#"{"serial":{"mode":"Pty"}}"#, json!("pty")),
        (r#"{"console":{"mode":"Pty"}}"#, json!("pty")),
        (r#"{"serial":{"mode":"Pty"},"console":{"mode":"Pty"}}"#, json!("pty")),
        (r#"{"serial":{"mode":"Tty"},"console":{"mode":"Null"}}"#, json!("stdio")),
        (r#"{"serial":{"mode":"File","file":"f"}}"#, json!({ "type": "file", "path": "f" })),
        (
            r#"{"serial":{"mode":"Null"},"console":{"mode":"Socket","socket":"s"}}"#,
            json!({ "type": "socket", "path": "s" }),
        ),
    ] {
        let file: serde_json::Value = serde_json::from_str(&file(&document(text))).unwrap();
        assert_eq!(file["console"], console, "{text}");
    }
}

#[test]
fn a_topology_of_more_vcpus_than_start_leaves_the_cores_to_those_that_start() {
    let cpus = r#"{"cpus":{"boot_vcpus":4,"max_vcpus":16,"topology":
        {"threads_per_core":2,"cores_per_die":4,"dies_per_package":1,"packages":2}}}"#;
    let file: serde_json::Value = serde_json::from_str(&file(&document(cpus))).unwrap();
    assert_eq!(file["cpus"], json!({ "count": 4, "topology": { "sockets": 2, "threads": 2 } }));
}

#[test]
fn affinity_is_of_every_vcpu_or_of_none() {
    let some = document(r#"{"cpus":{"boot_vcpus":2,"max_vcpus":2,"affinity":[{"vcpu":0,"host_cpus":[1]}]}}"#);
    let refusals = translated(&some).unwrap_err();
    assert_eq!(refusals.iter().map(|refusal| refusal.key.as_str()).collect::<Vec<_>>(), ["cpus.affinity"]);
    let none = document(r#"{"cpus":{"boot_vcpus":2,"max_vcpus":2,"affinity":[]}}"#);
    assert!(!file(&none).contains("affinity"));
}
