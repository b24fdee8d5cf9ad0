//! Our configuration of a machine that is described elsewhere, and a host that has what it names.

use egm_vmm::config::{self, Spec};
use egm_vmm::facts::Facts;
use serde_json::{Value, json};

use crate::args::{Reference, bytes};

/// Nodes with processors: number, processors, bytes, region of EGM.
pub(crate) fn sockets(reference: &Reference) -> Vec<(u32, String, u64, Option<String>)> {
    let nodes = reference.nodes.iter().filter_map(|node| Some((node, node.cpus.clone()?)));
    nodes
        .map(|(node, cpus)| {
            let (size, _) = &reference.backends[node.memory.as_ref().unwrap()];
            (node.id, cpus, *size, reference.region(node.id).map(str::to_owned))
        })
        .collect()
}

pub(crate) fn spec(reference: &Reference) -> Spec {
    let sockets = sockets(reference);
    let far = |own: u32| -> Value {
        let others = sockets.iter().filter(|(id, ..)| *id != own);
        Value::Object(others.map(|(id, ..)| (id.to_string(), json!(40))).collect())
    };
    let node = |(id, cpus, size, region): &(u32, String, u64, Option<String>)| match region {
        None => {
            json!({ "id": id, "cpus": cpus, "size": size, "host_nodes": id.to_string(), "distances": far(*id) })
        }
        Some(_) => json!({ "id": id, "cpus": cpus, "distances": far(*id) }),
    };
    let slice = |(id, _, size, region): &(u32, String, u64, Option<String>)| {
        region.as_ref().map(|region| json!({ "region": region, "size": size, "node": id }))
    };
    let device =
        |(id, (host, _)): (&String, &(String, String))| json!({ "type": "vfio", "id": id, "function": host });
    let count: usize =
        sockets.iter().map(|(_, cpus, ..)| cpus.parse::<egm_address::CpuSet>().unwrap().len()).sum();
    let text = json!({
        "name": "reference", "arch": "aarch64", "boot": { "kernel": "/vmlinuz" }, "console": "null",
        "cpus": { "count": count },
        "memory": { "nodes": sockets.iter().map(node).collect::<Vec<_>>() },
        "egm": sockets.iter().filter_map(slice).collect::<Vec<_>>(),
        "devices": reference.functions.iter().map(device).collect::<Vec<_>>(),
        "pcie": { "window64": bytes(&reference.machine["highmem-mmio-size"]) },
    });
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("reference.json");
    std::fs::write(&file, text.to_string()).unwrap();
    config::load(&file).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// The recorded Grace host with this machine's sockets, functions and regions in place of its own.
pub(crate) fn facts(reference: &Reference) -> Facts {
    let mut facts: Value =
        serde_json::from_str(&std::fs::read_to_string("../configs/facts/grace.json").unwrap()).unwrap();
    let (node, region, gpu) =
        (facts["nodes"][0].clone(), facts["regions"][0].clone(), facts["functions"][0].clone());
    let sockets = sockets(reference);
    let with = |of: &Value, changes: &[(&str, Value)]| {
        let mut one = of.clone();
        for (pointer, value) in changes {
            *one.pointer_mut(pointer).unwrap() = value.clone();
        }
        one
    };
    let socket = |(id, ..): &(u32, String, u64, Option<String>)| {
        let distances: Vec<u32> =
            sockets.iter().map(|(other, ..)| if other == id { 10 } else { 40 }).collect();
        let cpus = format!("{}-{}", id * 72, id * 72 + 71);
        with(&node, &[("/id", json!(id)), ("/cpus", json!(cpus)), ("/distances", json!(distances))])
    };
    facts["nodes"] = sockets.iter().map(socket).collect();
    let own = |region: &str| -> Vec<&String> {
        let near = reference.egm.iter().filter(|(_, node)| reference.region(**node) == Some(region));
        near.map(|(device, _)| &reference.functions[device].0).collect()
    };
    let regions = sockets.iter().filter_map(|(id, _, _, name)| Some((id, name.as_ref()?)));
    let regions = regions.map(|(id, name)| {
        let device = format!("/dev/{name}");
        with(
            &region,
            &[
                ("/region/name", json!(name)),
                ("/region/kind/device", json!(device)),
                ("/region/node", json!(id)),
                ("/region/functions", json!(own(name))),
            ],
        )
    });
    facts["regions"] = regions.collect();
    let functions = reference.functions.iter().zip(1..).map(|((id, (address, port)), group)| {
        let memory = if reference.initiators.contains_key(id) { gpu["memory"].clone() } else { json!([]) };
        with(
            &gpu,
            &[
                ("/address", json!(address)),
                ("/iommu_group", json!(group)),
                ("/numa_node", json!(reference.bridges[&reference.ports[port]])),
                ("/memory", memory),
            ],
        )
    });
    facts["functions"] = functions.collect();
    serde_json::from_value(facts).unwrap()
}
