//! Our plans beside what others give QEMU for the same Grace machines, field by field.
//!
//! The same: nodes of processors, their memory, and where that is EGM; eight nodes for each GPU and their numbers, the order
//! of all, distances, a root port of its own for each function, the node of its host bridge, regions of EGM with their sizes
//! and GPUs, the size of the window for large BARs. Different, as [`ROWS`] counts:
//!
//! - **Host bridges are for nodes here**, one each, of which bus 0 has the first; there they are for SMMUs, which this
//!   machine does not have.
//! - **No SMMU**: see "Firmware tables: Arm" in vmm/DESIGN.md.
//! - Bus numbers, chassis numbers and I/O windows are each VMM's own. So is what concerns the host alone: `accel`,
//!   `iommufd`, `policy`, hugetlbfs behind memory.
//!
//! EGM may be a node of its own here too (`configs/gb200-nvl4-egm.json`), which none of these files has; vmm/DESIGN.md
//! gives the reasons for it.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod args;
mod machine;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use args::{Reference, bytes};
use egm_vmm::plan::{AssignedPlan, FunctionPlan, FunctionRole, Plan, WindowKind, plan};

/// A file, and what is not the same.
struct Row {
    file: &'static str,
    nodes: usize,
    /// Host bridges beside that of bus 0: theirs and ours.
    bridges: (usize, usize),
    smmus: usize,
}

const fn row(file: &'static str, nodes: usize, bridges: (usize, usize), smmus: usize) -> Row {
    Row { file, nodes, bridges, smmus }
}

const ROWS: [Row; 9] = [
    row("grace_1_single_gpu", 9, (1, 0), 1),
    row("grace_2_four_gpus_1_per_smmu", 33, (4, 0), 4),
    row("grace_3_four_gpus_2_per_smmu", 33, (2, 0), 2),
    row("grace_4_gpu_and_nic", 9, (2, 0), 2),
    row("grace_5_vcmdq", 9, (1, 0), 1),
    row("grace_6_vegm_1_per_socket", 36, (4, 3), 4),
    row("grace_7_vegm_2_per_socket", 34, (2, 1), 2),
    row("gb200_4gpu_2socket", 34, (4, 1), 4),
    row("gb300_nvl_2gpu", 17, (1, 0), 1),
];

/// The folder of this package, then the one that a person has more in.
fn file_of(name: &str) -> Option<PathBuf> {
    let own = Path::new("tests/data/topologies").to_owned();
    let more = std::env::var_os("EGM_TOPOLOGIES").map(PathBuf::from);
    let files = [Some(own), more].into_iter().flatten().map(|folder| folder.join(format!("{name}.args")));
    files.into_iter().find(|file| file.exists())
}

/// Host functions of the plan, by the device's id.
fn functions(plan: &Plan) -> BTreeMap<&str, (&FunctionPlan, &AssignedPlan)> {
    let assigned = plan.pci.iter().filter_map(|function| match &function.role {
        FunctionRole::Endpoint { device, assigned: Some(assigned) } => {
            Some((device.id.as_str(), (function, assigned)))
        }
        _ => None,
    });
    assigned.collect()
}

#[test]
fn plans_agree_with_published_machines() {
    let mut compared = 0;
    for row in ROWS {
        let Some(file) = file_of(row.file) else {
            println!("skipped: {} is not here; set EGM_TOPOLOGIES to its folder", row.file);
            continue;
        };
        let reference = Reference::of(&std::fs::read_to_string(file).unwrap());
        let plan = plan(&machine::spec(&reference), &machine::facts(&reference))
            .unwrap_or_else(|error| panic!("{}: {error}", row.file));
        println!("{}", row.file);
        nodes(&row, &reference, &plan);
        distances(&reference, &plan);
        tree(&row, &reference, &plan);
        egm(&reference, &plan);
        let window = plan.window(WindowKind::PciMemory64).unwrap();
        assert_eq!(window.size(), bytes(&reference.machine["highmem-mmio-size"]));
        compared += 1;
    }
    assert!(compared >= 4, "the files of tests/data/topologies are missing");
}

fn nodes(row: &Row, reference: &Reference, plan: &Plan) {
    assert_eq!((reference.nodes.len(), plan.nodes.len()), (row.nodes, row.nodes));
    // The order of appearance, which is the number that Linux gives, is the number itself, there and here.
    assert!(reference.nodes.iter().map(|node| node.id).eq(0..u32::try_from(row.nodes).unwrap()));
    assert!(plan.nodes.iter().map(|node| node.id).eq(0..u32::try_from(plan.nodes.len()).unwrap()));
    for (theirs, ours) in reference.nodes.iter().zip(&plan.nodes) {
        assert_eq!(theirs.cpus.clone().unwrap_or_default(), ours.cpus.to_string(), "node {}", theirs.id);
        let memory = plan.memory.iter().find(|memory| memory.node == ours.id);
        let backing = memory.map(|memory| &plan.backings[memory.backing]);
        let size = theirs.memory.as_ref().map(|memory| reference.backends[memory].0);
        assert_eq!(size, backing.map(|backing| backing.size), "node {}", theirs.id);
        let region = backing.and_then(|backing| backing.region.as_deref());
        assert_eq!((reference.region(theirs.id), region.is_some()), (region, ours.egm), "node {}", theirs.id);
    }
    for (device, (function, _)) in functions(plan) {
        let of = plan.nodes.iter().filter(|node| node.initiator == Some(function.address));
        let ours: Vec<u32> = of.map(|node| node.id).collect();
        assert_eq!(ours, reference.initiators.get(device).cloned().unwrap_or_default(), "{device}");
        assert_eq!(function.address.devfn(), 0, "the driver knows no other place");
    }
}

/// Their files leave distances to QEMU's user; KubeVirt's enhancement 199 has them for this kind of machine.
fn distances(reference: &Reference, plan: &Plan) {
    let of = functions(plan);
    let gpu_of = |node: u32| reference.initiators.iter().find(|(_, nodes)| nodes.contains(&node));
    let socket_of = |device: &str| {
        let (_, port) = &reference.functions[device];
        reference.bridges[&reference.ports[port]]
    };
    for (from, row) in (0..).zip(&plan.distances).take(reference.nodes.len()) {
        for (to, distance) in (0..).zip(row).take(reference.nodes.len()) {
            let expected = match (gpu_of(from), gpu_of(to)) {
                _ if from == to => 10,
                (None, None) => 40,
                (Some((a, _)), Some((b, _))) => {
                    if a == b {
                        11
                    } else {
                        40
                    }
                }
                (Some((gpu, _)), None) => {
                    if socket_of(gpu) == to {
                        80
                    } else {
                        120
                    }
                }
                (None, Some((gpu, _))) => {
                    if socket_of(gpu) == from {
                        80
                    } else {
                        120
                    }
                }
            };
            assert_eq!(*distance, expected, "from {from} to {to}, of {:?}", of.keys());
        }
    }
}

fn tree(row: &Row, reference: &Reference, plan: &Plan) {
    assert_eq!((reference.bridges.len(), plan.expanders.len()), row.bridges);
    assert_eq!(reference.smmus, row.smmus);
    let mut ports = BTreeSet::new();
    for (device, (function, assigned)) in functions(plan) {
        let (address, theirs) = &reference.functions[device];
        assert_eq!(assigned.function.to_string(), *address);
        let port = plan
            .pci
            .iter()
            .find(|port| port.role.bridge().is_some_and(|bridge| bridge.secondary == function.address.bus()));
        let port = port.unwrap();
        assert!(matches!(port.role, FunctionRole::RootPort { .. }) && ports.insert(port.address), "{device}");
        let bridge = plan.expanders.iter().find(|e| e.bridge.secondary == port.address.bus());
        let ours = bridge.map_or(plan.nodes[0].id, |expander| expander.node);
        assert_eq!(ours, reference.bridges[&reference.ports[theirs]], "{device}");
    }
    assert_eq!(ports.len(), reference.ports.len());
}

fn egm(reference: &Reference, plan: &Plan) {
    let slices = plan.backings.iter().filter(|backing| backing.region.is_some());
    let ours: Vec<(&str, u64)> = slices.map(|b| (b.region.as_deref().unwrap(), b.size)).collect();
    let nodes =
        reference.nodes.iter().filter_map(|node| Some((reference.region(node.id)?, node.memory.as_ref()?)));
    let theirs: Vec<(&str, u64)> =
        nodes.map(|(region, memory)| (region, reference.backends[memory].0)).collect();
    assert_eq!(ours, theirs);
    for (device, node) in &reference.egm {
        let (_, assigned) = functions(plan)[device.as_str()];
        let own = plan.memory.iter().find(|memory| Some(memory.node) == assigned.node).unwrap();
        assert_eq!(plan.backings[own.backing].region.as_deref(), reference.region(*node), "{device}");
    }
}
