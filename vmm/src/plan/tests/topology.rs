//! Trees of switches and host bridges as the guest and NCCL see them, and address cases that others got wrong.

use std::collections::BTreeMap;
use std::path::Path;

use egm_address::Gpa;
use egm_vfio::topology::{Relation, relation};

use super::*;
use crate::{config, facts};

fn reviewed(name: &str) -> (Plan, Facts) {
    let spec = config::load(Path::new(&format!("../configs/{name}.json"))).unwrap();
    let facts = facts::load(Path::new(&format!("../configs/facts/{name}.json"))).unwrap();
    let plan = plan(&spec, &facts).unwrap();
    check(&spec, &facts, &plan);
    (plan, facts)
}

fn functions(plan: &Plan) -> Vec<(&FunctionPlan, &AssignedPlan)> {
    plan.pci.iter().filter_map(|function| Some((function, assigned_of(&function.role)?))).collect()
}

fn assigned_of(role: &FunctionRole) -> Option<&AssignedPlan> {
    match role {
        FunctionRole::Endpoint { assigned, .. } => assigned.as_ref(),
        _ => None,
    }
}

/// Upstream ports above `function` in the guest, from the root, after the host bridge's bus.
fn above(plan: &Plan, function: &FunctionPlan) -> Vec<String> {
    let mut chain = Vec::new();
    let mut at = function;
    while let Some(bridge) = plan.pci.iter().find(|f| {
        f.role.bridge().is_some_and(|b| b.secondary == at.address.bus() && f.address.bus() < at.address.bus())
    }) {
        if matches!(bridge.role, FunctionRole::SwitchUpstream { .. }) {
            chain.push(bridge.address.to_string());
        }
        at = bridge;
    }
    chain.push(format!("bus {}", at.address.bus()));
    chain.reverse();
    chain
}

/// As NCCL counts: how many switches two share, and how many are between.
fn distance(a: &[String], b: &[String]) -> Relation {
    let common = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    match (common, a.len() - common, b.len() - common) {
        (0, _, _) => Relation::Sys,
        (1, _, _) => Relation::Phb,
        (_, 0, 0) => Relation::Pix,
        _ => Relation::Pxb,
    }
}

/// `busid`s of the switches above each function in NCCL's file, after its `numaid`.
fn parse(xml: &str) -> BTreeMap<String, Vec<String>> {
    let attribute = |line: &str, name: &str| {
        let (_, rest) = line.split_once(&format!("{name}=\""))?;
        Some(rest.split_once('"')?.0.to_owned())
    };
    let (mut open, mut all) = (Vec::new(), BTreeMap::new());
    for line in xml.lines().map(str::trim) {
        match line {
            _ if line.starts_with("<cpu ") => open.push(attribute(line, "numaid").unwrap()),
            _ if line.starts_with("</") => drop(open.pop()),
            _ if line.ends_with("/>") => drop(all.insert(attribute(line, "busid").unwrap(), open.clone())),
            _ if line.starts_with("<pci ") => open.push(attribute(line, "busid").unwrap()),
            _ => open.push(line.to_owned()),
        }
    }
    assert!(open.is_empty(), "{open:?}");
    all
}

#[test]
fn every_two_functions_are_as_near_in_the_guest_and_in_nccl_s_file_as_on_the_host() {
    for name in ["hgx-h200", "cascaded-switches"] {
        let (plan, facts) = reviewed(name);
        let (all, xml) = (functions(&plan), parse(&nccl(&plan, &facts)));
        let host = |assigned: &AssignedPlan| {
            facts.functions.iter().find(|f| f.address == assigned.function).unwrap()
        };
        let mut seen = Vec::new();
        for (a, assigned_a) in &all {
            for (b, assigned_b) in all.iter().filter(|(b, _)| b.address != a.address) {
                // Root ports of one host bridge or of two of a node: the guest has one host bridge a node.
                let wanted = match relation(host(assigned_a), host(assigned_b)) {
                    Relation::Node => Relation::Phb,
                    other => other,
                };
                assert_eq!(
                    distance(&above(&plan, a), &above(&plan, b)),
                    wanted,
                    "{} {}",
                    a.address,
                    b.address
                );
                let [x, y] = [a, b].map(|f| &xml[&f.address.to_string()]);
                // The file begins with "<system>", then the node.
                assert_eq!(distance(&x[1..], &y[1..]), wanted, "{} {} in {xml:?}", a.address, b.address);
                seen.push(wanted);
            }
        }
        assert!(
            [Relation::Pix, Relation::Phb, Relation::Sys].iter().all(|one| seen.contains(one)),
            "{seen:?}"
        );
        assert_eq!(seen.contains(&Relation::Pxb), name == "cascaded-switches");
        for (function, path) in xml {
            let own = all.iter().find(|(f, _)| f.address.to_string() == function).unwrap();
            let switches: Vec<&String> = path[2..].iter().filter(|id| !id.starts_with("ffff")).collect();
            assert_eq!(switches, above(&plan, own.0)[1..].iter().collect::<Vec<_>>(), "{function}");
        }
    }
}

#[test]
fn a_function_near_another_node_is_behind_that_node_s_host_bridge() {
    let (plan, _) = reviewed("cascaded-switches");
    let [expander] = plan.expanders.as_slice() else { panic!("{:?}", plan.expanders) };
    for (function, assigned) in functions(&plan) {
        let inside = function.address.bus() >= expander.bridge.secondary;
        assert_eq!(assigned.node, Some(if inside { expander.node } else { 0 }), "{}", function.address);
        let window = expander.bridge.window64.unwrap();
        assert!(function.bars.iter().all(|bar| window.covers(bar.span) == inside));
    }
}

#[test]
fn ports_keep_apart_what_the_host_s_ports_keep_apart() {
    let (plan, facts) = reviewed("cascaded-switches");
    for (function, assigned) in functions(&plan) {
        let port =
            plan.pci.iter().filter_map(|f| f.role.bridge()).find(|b| b.secondary == function.address.bus());
        let host = facts.functions.iter().find(|f| f.address == assigned.function).unwrap();
        let above = facts.functions.iter().find(|f| Some(&f.address) == host.place.bridges.last()).unwrap();
        assert_eq!(port.unwrap().acs, above.place.express.unwrap().acs, "{}", function.address);
    }
}

#[test]
fn memory_bound_to_no_node_is_near_none_and_otherwise_the_nearest_is_taken() {
    let (mut spec, mut facts) = (spec(vec![node(0, GIB, "0"), node(1, GIB, "1")]), facts());
    spec.cpus.count = 2;
    for (guest, host) in [(0, "0"), (1, "1")] {
        spec.memory.nodes[guest].host_nodes = Some(host.parse().unwrap());
    }
    let mut third = facts.nodes[1].clone();
    (third.id, third.distances) = (2, vec![30, 15, 10]);
    facts.nodes[0].distances.push(30);
    facts.nodes[1].distances.push(15);
    facts.nodes.push(third);
    let mut far = big_gpu(0x21);
    far.numa_node = Some(2);
    assign(&mut spec, &mut facts, far, true);
    let near = |spec: &Spec, facts: &Facts| functions(&plan(spec, facts).unwrap())[0].1.node;
    assert_eq!(near(&spec, &facts), Some(1));
    spec.memory.nodes[0].host_nodes = None;
    assert_eq!(near(&spec, &facts), None);
    facts.functions[0].numa_node = None;
    assert_eq!(near(&spec, &facts), None);
}

/// A machine with `count` GPUs of 128 GiB.
fn gpus(count: u8, size: u64) -> (Spec, Facts) {
    let (mut spec, mut facts) = (spec(vec![node(0, 4 * GIB, "0-3")]), facts());
    for bus in 0..count {
        let kind = HostBarKind::Memory64Prefetchable;
        assign(&mut spec, &mut facts, gpu(0x21 + bus, &[(0, kind, 16 * MIB), (2, kind, size)]), true);
    }
    (spec, facts)
}

/// cloud-hypervisor #8896: four BARs of 128 GiB landed in 0xfd00000000..0x10000000000, which AMD's IOMMU does not
/// translate; the peer-to-peer map failed and the clique still promised it.
#[test]
fn cloud_hypervisor_8896_no_bar_lies_in_what_amd_reserves_below_1_tib() {
    let (spec, mut facts) = gpus(4, 128 * GIB);
    facts.cpu_vendor = "AuthenticAMD".to_owned();
    let reserved = Span::new(Gpa::new(0xfd_0000_0000), 0x3_0000_0000).unwrap();
    let plan = plan(&spec, &facts).unwrap();
    check(&spec, &facts, &plan);
    let bars = plan.pci.iter().flat_map(|f| &f.bars);
    assert_eq!(bars.clone().filter(|bar| bar.span.size() == 128 * GIB).count(), 4);
    assert!(bars.clone().all(|bar| !bar.span.overlaps(reserved)));
    assert!(functions(&plan).iter().all(|(_, assigned)| assigned.p2p));
}

/// cloud-hypervisor #7030: an IOMMU of 39 bits, and BARs above them, so that every peer-to-peer map failed.
#[test]
fn cloud_hypervisor_7030_everything_lies_where_the_iommu_translates() {
    let (spec, mut facts) = gpus(1, 64 * GIB);
    let end = |facts: &Facts| {
        let plan = plan(&spec, facts).unwrap();
        assert_eq!(plan.address_bits, 46, "the guest has the processor's");
        plan.pci.iter().flat_map(|f| &f.bars).map(|bar| bar.span.end().get()).max().unwrap()
    };
    facts.functions[0].iova_bits = Some(39);
    assert!(end(&facts) <= 1 << 39);
    let (spec, mut facts) = gpus(2, 256 * GIB);
    facts.functions[1].iova_bits = Some(39);
    let error = plan(&spec, &facts).unwrap_err().to_string();
    assert!(
        error.ends_with("and 0x8000000000, the end of the 39 bits that the host's IOMMU translates"),
        "{error}"
    );
}

/// kata-containers #13270: more than three B200 with 40 guest address bits failed in the guest, without a reason.
#[test]
fn kata_13270_bars_beyond_the_address_bits_are_refused_before_the_start() {
    let (spec, mut facts) = gpus(4, 256 * GIB);
    facts.address_bits = 40;
    let error = plan(&spec, &facts).unwrap_err();
    assert!(error.to_string().contains("the end of 40 guest physical address bits"), "{error}");
    assert!(error.help().is_some());
    facts.address_bits = 42;
    assert_eq!(plan(&spec, &facts).unwrap().pci.len(), 9, "two bits more are enough");
}

#[test]
fn eight_functions_with_bars_of_256_gib_have_a_plan() {
    let (spec, facts) = gpus(8, 256 * GIB);
    let plan = plan(&spec, &facts).unwrap();
    check(&spec, &facts, &plan);
    let large = plan.pci.iter().flat_map(|f| &f.bars).filter(|bar| bar.span.size() == 256 * GIB);
    assert_eq!(large.count(), 8);
}
