//! Recorded hosts with terminal control sequences.

use std::fs;
use std::process::Output;

use crate::hostile_text::{append, places, shows};
use crate::{export, file};

/// The monitors, each with the machine of `name` on its host with [`ESCAPE`](crate::hostile_text::ESCAPE) at the places that
/// `chosen` takes: each place on a host of its own, or all on one.
fn outputs(name: &str, chosen: &[String], together: bool) -> Vec<(String, Output)> {
    let folder = tempfile::tempdir().unwrap();
    let host = folder.path().join("hostile.json");
    let record: serde_json::Value =
        serde_json::from_slice(&fs::read(file(&format!("{name}.host.json"))).unwrap()).unwrap();
    let hosts =
        if together { vec![chosen.to_vec()] } else { chosen.iter().map(|p| vec![p.clone()]).collect() };
    let mut outputs = Vec::new();
    for places in hosts {
        let mut hostile = record.clone();
        places.iter().for_each(|place| append(&mut hostile, "", place));
        fs::write(&host, hostile.to_string()).unwrap();
        for monitor in ["qemu", "cloud-hypervisor", "libvirt"] {
            let output = export(monitor, &file(&format!("{name}.json")), &host, &[]);
            outputs.push((format!("{monitor} with {places:?}"), output));
        }
    }
    outputs
}

fn all_places(name: &str) -> Vec<String> {
    let record = fs::read(file(&format!("{name}.host.json"))).unwrap();
    let mut all = Vec::new();
    places(&serde_json::from_slice(&record).unwrap(), "", &mut all);
    assert!(all.len() >= 8, "{all:?}");
    all
}

#[test]
fn no_text_of_a_recorded_host_reaches_the_terminal_as_a_command() {
    let outputs = outputs("gb200-4gpu", &all_places("gb200-4gpu"), false);
    let shown = outputs.iter().filter(|(what, output)| shows(output, what)).count();
    assert!(shown > 3, "{shown} showed the text");
}

#[test]
fn an_export_refuses_what_a_shell_and_xml_would_pass_on() {
    let mut devices = all_places("gb200-4gpu");
    devices.retain(|place| place.ends_with(".device"));
    assert!(!devices.is_empty());
    for (monitor, output) in outputs("gb200-4gpu", &devices, true) {
        assert!(shows(&output, &monitor), "{output:?}");
        assert_eq!(output.status.code(), Some(2), "{monitor}: {output:?}");
    }
}
