//! `egm-device export` has a reader of its own for configurations: it and the machine's agree.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::fs;
use std::path::{Path, absolute};

use egm_device::export::{self, Guest, Machine};
use egm_device::region::{HostFacts, Survey};
use egm_vmm::config::{self, DeviceKind, EgmForm, Spec};
use serde_json::Value;

/// Uses every key of the schema.
const ALL: &str = r#"{
  "$schema": "schema.json", "extends": "base.json", "description": "all keys", "name": "all",
  "cpus": { "count": 4, "topology": { "sockets": 2, "cores": 1, "threads": 2 }, "affinity": "0-3" },
  "memory": {
    "size": "3MiB", "page_size": "4K", "prefault": true,
    "nodes": [
      { "id": 1, "size": "1MiB", "cpus": "2-3", "host_nodes": "0", "distances": { "0": 21, "5": 33 } },
      { "id": 0, "size": "2MiB", "cpus": "0-1", "access": [{ "from": 1, "latency_ns": 9, "bandwidth_mbps": 7 }] }
    ]
  },
  "egm": [
    {
      "region": ["local", "egm"], "size": "2MiB", "node": 5, "as": "memory", "page_size": "2M", "host_nodes": "0",
      "distances": { "0": 44 }, "access": [{ "from": 0, "latency_ns": 5, "bandwidth_mbps": 3 }]
    },
    { "region": "egm4", "size": "4MiB", "node": 0, "as": "device" }
  ],
  "devices": [
    { "type": "virtio-blk", "id": "blk1", "root_port": true, "path": "disk", "read_only": true },
    { "type": "virtio-blk", "path": "../disk" },
    { "type": "virtio-blk", "path": "/disk" },
    { "type": "virtio-net", "tap": "tap0", "mac": "52:54:00:00:00:01", "queue_pairs": 2, "vhost": false },
    { "type": "virtio-net", "tap": "tap1" },
    { "type": "virtio-vsock", "cid": 7, "socket": "vsock" },
    { "type": "virtio-rng" },
    {
      "type": "vfio", "function": "0009:01:00.0", "backend": "iommufd", "clique": 4, "bars": { "2": "host" }, "p2p": false
    },
    { "type": "vfio", "function": "0009:02:00.0", "clique": "off", "bars": "guest" },
    { "type": "vfio-user", "socket": "user" }
  ],
  "console": { "type": "file", "path": "log" },
  "pcie": { "window64": "1GiB", "topology": "flat", "spare": { "ports": 2, "window32": "16MiB" } }
}"#;
const BASE: &str =
    r#"{ "arch": "aarch64", "boot": { "kernel": "k", "initramfs": "i", "cmdline": "c" }, "console": "pty" }"#;

/// Variants of both sides have the same names.
fn same(one: impl Debug, other: impl Debug) {
    assert_eq!(format!("{one:?}"), format!("{other:?}"));
}

fn path(path: &Path) -> String {
    absolute(path).unwrap().to_str().unwrap().to_owned()
}

fn agree(file: &Path) {
    let (spec, machine) = (config::load(file).unwrap(), Machine::load(file).unwrap());
    assert_eq!(machine.name, spec.name);
    same(machine.arch, spec.arch);
    same(&machine.cpus, &spec.cpus);
    same((machine.page_size, machine.prefault), (spec.memory.page_size, spec.memory.prefault));
    for (ours, theirs) in machine.nodes.iter().zip(&spec.memory.nodes) {
        same((ours.id, ours.size, &ours.cpus), (theirs.id, theirs.size, &theirs.cpus));
        same((&ours.host_nodes, &ours.access), (&theirs.host_nodes, &theirs.access));
    }
    for (ours, theirs) in machine.slices.iter().zip(&spec.egm) {
        same((&ours.regions, ours.size, ours.node), (&theirs.regions, theirs.size, theirs.node));
        same(
            (ours.form, ours.page_size, &ours.host_nodes),
            (theirs.form, theirs.page_size, &theirs.host_nodes),
        );
        same(&ours.access, &theirs.access);
    }
    // There they are slices alone; here each is a device too.
    let devices: Vec<_> =
        spec.devices.iter().filter(|device| !matches!(device.kind, DeviceKind::Egm { .. })).collect();
    let lengths = (machine.nodes.len(), machine.slices.len(), machine.devices.len());
    assert_eq!(lengths, (spec.memory.nodes.len(), spec.egm.len(), devices.len()));
    assert_eq!(machine.boot.kernel, path(&spec.boot.kernel));
    assert_eq!(machine.boot.initramfs, spec.boot.initramfs.as_deref().map(path));
    assert_eq!(machine.boot.cmdline, spec.boot.cmdline);
    same(machine.window64, spec.pcie.window64);
    assert_eq!(machine.spare_ports, spec.pcie.spare.map_or(0, |spare| spare.ports));
    for (ours, theirs) in machine.devices.iter().zip(devices) {
        assert_eq!((&ours.id, ours.root_port), (&theirs.id, theirs.root_port));
        device(&ours.kind, &theirs.kind);
    }
    distances(machine, &spec);
}

fn device(ours: &export::DeviceKind, theirs: &DeviceKind) {
    use export::DeviceKind as Ours;
    match (ours, theirs) {
        (Ours::VirtioBlk { path: one, read_only }, DeviceKind::VirtioBlk { path: other, read_only: too }) => {
            assert_eq!((one, read_only), (&path(other), too));
        }
        (Ours::VfioUser { socket }, DeviceKind::VfioUser { socket: other, .. }) => {
            assert_eq!(*socket, path(other));
        }
        (Ours::VirtioVsock { cid, socket }, DeviceKind::VirtioVsock { cid: too, socket: other }) => {
            assert_eq!((cid, socket), (too, &other.as_deref().map(path)));
        }
        (
            Ours::Vfio { function, backend, p2p, .. },
            DeviceKind::Vfio { function: other, backend: too, p2p: and, .. },
        ) => {
            same((function, backend, p2p), (other, too, and));
        }
        (one, other) => same(one, other),
    }
}

/// The whole matrix, of machines whose slices need no host.
fn distances(machine: Machine, spec: &Spec) {
    let any = HostFacts::default();
    let Ok(guest) =
        Guest::new(machine, &Survey { host: any, regions: Vec::new(), refused: Vec::new() }, "/run")
    else {
        return;
    };
    let Some(rows) = &guest.distances else { return };
    let memory = spec.egm.iter().filter(|slice| slice.form == EgmForm::Memory);
    let theirs: BTreeMap<u32, &BTreeMap<u32, u8>> = spec
        .memory
        .nodes
        .iter()
        .map(|node| (node.id, &node.distances))
        .chain(memory.map(|slice| (slice.node, &slice.distances)))
        .collect();
    for (node, row) in guest.nodes.iter().zip(rows) {
        let ours: BTreeMap<u32, u8> = guest.nodes.iter().map(|to| to.id).zip(row.iter().copied()).collect();
        assert_eq!(&ours, theirs[&node.id], "node {}", node.id);
    }
}

#[test]
fn both_readers_agree_on_every_configuration_of_ours() {
    let mut count = 0;
    for entry in fs::read_dir("../configs").unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.ends_with(".json") && name != "schema.json" && !name.starts_with("base-") {
            agree(&path);
            count += 1;
        }
    }
    assert!(count >= 6, "{count} configurations");
}

#[test]
fn both_readers_agree_on_every_key() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("vm")).unwrap();
    let file = folder.path().join("vm/all.json");
    fs::write(&file, ALL).unwrap();
    fs::write(folder.path().join("vm/base.json"), BASE).unwrap();
    let mut keys = BTreeSet::new();
    collect(&serde_json::from_str(&config::schema()).unwrap(), &mut keys);
    assert!(keys.len() > 40, "{keys:?}");
    let written = format!("{ALL}{BASE}");
    let missing: Vec<_> = keys.iter().filter(|key| !written.contains(&format!("\"{key}\":"))).collect();
    assert!(missing.is_empty(), "add to the machine above: {missing:?}");
    agree(&file);
}

/// The names of all properties in a schema.
fn collect(schema: &Value, keys: &mut BTreeSet<String>) {
    if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
        keys.extend(properties.keys().cloned());
    }
    let inner = schema.as_object().into_iter().flat_map(|object| object.values());
    for value in inner.chain(schema.as_array().into_iter().flatten()) {
        collect(value, keys);
    }
}
