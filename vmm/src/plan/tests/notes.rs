//! Notes about the guest's kernel and about memory of the host.

use super::assigned::three_gpus;
use super::*;
use crate::plan::map::nodes::too_many;

/// A machine of one node with `gib` GiB of this host node, or of any.
fn machine(gib: u64, host: Option<&str>) -> Spec {
    let mut spec = spec(vec![node(0, gib * GIB, "0")]);
    spec.memory.nodes[0].host_nodes = host.map(|nodes| nodes.parse().unwrap());
    spec
}

/// A host with `gib` GiB available on node 0.
fn busy(gib: u64) -> Facts {
    let mut facts = facts();
    facts.nodes[0].memory.available = ByteSize::new(gib * GIB);
    facts
}

fn notes(spec: &Spec, facts: &Facts) -> Vec<String> {
    plan(spec, facts).unwrap().notes
}

fn help(spec: &Spec, facts: &Facts) -> String {
    plan(spec, facts).unwrap_err().help().unwrap()
}

#[test]
fn more_nodes_than_debians_arm64_kernel_keeps_are_noted() {
    let machine = |count: u32| {
        spec((0..count).map(|id| node(id, GIB, if id == 0 { "0" } else { "" })).collect::<Vec<_>>())
    };
    let on_arm = |mut spec: Spec| {
        let mut facts = facts();
        (spec.arch, facts.arch) = (Architecture::Aarch64, Architecture::Aarch64);
        notes(&spec, &facts)
    };
    assert_eq!(on_arm(machine(16)), [""; 0]);
    let noted = on_arm(machine(17));
    assert_eq!(
        noted,
        [
            "17 NUMA nodes, and Debian's arm64 kernel keeps 16 (CONFIG_NODES_SHIFT=4): it ignores all of them, since one \
          with memory is beyond the first 16; boot a kernel with CONFIG_NODES_SHIFT=6, or configure fewer nodes"
        ]
    );
    assert!(on_arm(machine(65))[0].contains("boot a kernel with CONFIG_NODES_SHIFT=7"));
    assert_eq!(notes(&machine(17), &facts()), [""; 0], "Debian's kernel for amd64 keeps 1024");
}

#[test]
fn nodes_of_gpus_beyond_the_last_that_a_kernel_keeps_are_lost_alone() {
    let of_gpu = |id: u32| NodePlan {
        id,
        cpus: CpuSet::default(),
        memory: 0,
        egm: false,
        access: Vec::new(),
        initiator: Some("0000:01:00.0".parse().unwrap()),
    };
    let first = NodePlan { cpus: "0".parse().unwrap(), memory: GIB, initiator: None, ..of_gpu(0) };
    let mut nodes: Vec<NodePlan> = std::iter::once(first).chain((1..17).map(of_gpu)).collect();
    let note = too_many(Architecture::Aarch64, &nodes).unwrap();
    assert!(note.contains("(CONFIG_NODES_SHIFT=4): the others are lost;"), "{note}");
    assert!(
        note.ends_with("or assign fewer GPUs with coherent memory, each of which takes 8 nodes"),
        "{note}"
    );
    nodes.push(NodePlan { initiator: None, ..of_gpu(17) });
    let note = too_many(Architecture::Aarch64, &nodes).unwrap();
    assert!(note.contains("it ignores all of them"), "{note}");
}

#[test]
fn memory_that_is_not_free_now_is_noted() {
    assert_eq!(notes(&machine(20, Some("0")), &busy(20)), [""; 0]);
    let noted = notes(&machine(20, Some("0")), &busy(19));
    assert_eq!(
        noted,
        [
            "20 GiB for node0 is more than the 19 GiB that host node 0 has available now: free memory there, or lower \
          \"memory.size\", or bind it to other host nodes with \"host_nodes\""
        ]
    );
    assert_eq!(notes(&machine(20, Some("1")), &busy(19)), [""; 0], "memory of the other node");
    assert_eq!(notes(&machine(20, None), &busy(19)), [""; 0], "memory of any node");
    let mut facts = busy(19);
    facts.memory.available = ByteSize::new(19 * GIB);
    let noted = notes(&machine(20, None), &facts);
    assert!(noted[0].contains("is more than the 19 GiB that the host has available now"), "{noted:?}");
    assert_eq!(notes(&machine(20, Some("0")), &facts).len(), 1, "one note for one lack");
}

#[test]
fn huge_pages_that_fit_where_ordinary_ones_do_not_are_named() {
    let named = "or set \"page_size\": \"1G\", of which the host has enough free pages";
    let with_pool = |available: u64, total: u64, free: u64| {
        let mut facts = busy(available);
        facts.nodes[0].pools[0] = Pool { page_size: ByteSize::new(GIB), total, free };
        facts
    };
    let machine = machine(20, Some("0"));
    assert!(notes(&machine, &with_pool(19, 30, 20))[0].ends_with(named));
    assert!(!notes(&machine, &with_pool(19, 30, 19))[0].contains("page_size"));
    // The pool has 246 of the node's 256 GiB.
    assert!(help(&machine, &with_pool(10, 246, 20)).ends_with(named));
    assert!(!help(&machine, &with_pool(10, 246, 19)).contains("page_size"));
}

#[test]
fn ordinary_pages_are_a_remedy_only_where_they_fit() {
    let mut huge = machine(8, Some("0"));
    huge.memory.page_size = PageSize::Size1G;
    let echo = "echo 9 > /sys/devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages (as root)";
    assert_eq!(help(&huge, &busy(8)), format!("{echo}, or set \"page_size\": \"auto\""));
    assert_eq!(help(&huge, &busy(7)), echo);
}

#[test]
fn memory_of_any_host_node_is_noted_where_functions_are_of_known_ones() {
    let (mut spec, mut facts) = three_gpus();
    assert_eq!(
        notes(&spec, &facts),
        [
            "memory of node0 may come from any host node, and vfio0, vfio1, vfio2 are at host node 0: set \"host_nodes\": \
          \"0\" in \"memory.nodes\""
        ]
    );
    facts.functions[2].numa_node = Some(1);
    let noted = notes(&spec, &facts);
    assert!(
        noted[0].ends_with(
            "vfio0, vfio1 are at host node 0 and vfio2 is at host node 1: set \"host_nodes\" in \"memory.nodes\", with a \
             guest node for each host node"
        ),
        "{noted:?}"
    );
    facts.functions.iter_mut().for_each(|function| function.numa_node = None);
    assert_eq!(notes(&spec, &facts), [""; 0], "functions of no known node");
    facts.functions[0].numa_node = Some(0);
    assert_eq!(notes(&spec, &facts).len(), 1);
    spec.memory.nodes[0].host_nodes = Some("0".parse().unwrap());
    assert_eq!(notes(&spec, &facts), [""; 0], "memory of a stated node");
    spec.memory.nodes[0].host_nodes = None;
    facts.nodes.truncate(1);
    facts.nodes[0].distances.truncate(1);
    assert_eq!(notes(&spec, &facts), [""; 0], "a host of one node");
}
