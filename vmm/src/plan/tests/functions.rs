//! Interfaces, peers and nodes of host functions.

use super::assigned::{made, of, three_gpus, wishes};
use super::*;
use crate::facts::Iommu;

#[test]
fn a_function_alone_needs_no_kernel_in_which_functions_reach_each_other() {
    let (mut spec, mut facts) = three_gpus();
    facts.iommu = Probe::Present(Iommu { groups: 9, iommufd: true });
    spec.devices.truncate(1);
    spec.memory.nodes[0].host_nodes = Some("0".parse().unwrap());
    let plan = made(&spec, &facts);
    assert_eq!((plan.passthrough.unwrap().interface, plan.notes), (Interface::Iommufd, Vec::new()));
    *wishes(&mut spec, 0).0 = VfioBackend::Iommufd;
    assert_eq!(made(&spec, &facts).notes, Vec::<String>::new());
}

#[test]
fn others_reach_a_functions_bars_only_where_its_configuration_allows_that() {
    let (mut spec, facts) = three_gpus();
    *wishes(&mut spec, 1).3 = false;
    let plan = made(&spec, &facts);
    assert_eq!(["vfio0", "vfio1", "vfio2"].map(|id| of(&plan, id).1.p2p), [true, false, true]);
}

#[test]
fn gpus_that_no_iommu_lets_reach_each_other_are_no_clique() {
    let (spec, mut facts) = three_gpus();
    facts.functions[1].iommu_group = None;
    let plan = made(&spec, &facts);
    assert_eq!(["vfio0", "vfio1", "vfio2"].map(|id| of(&plan, id).1.clique), [None; 3]);
}

#[test]
fn a_gpu_and_what_shares_its_switch_are_near_the_slice_of_its_region() {
    let (mut spec, mut facts) = three_gpus();
    spec.memory.nodes.push(node(1, GIB, "4"));
    spec.cpus.count = 5;
    spec.egm = vec![EgmSlice { regions: vec!["egm4".to_owned()], ..slice(7, GIB) }];
    let near = |facts: &Facts| {
        let plan = made(&spec, facts);
        ["vfio0", "vfio1", "vfio2"].map(|id| of(&plan, id).1.node)
    };
    assert_eq!(near(&facts), [None; 3]);
    facts.regions[1].region.functions = vec![facts.functions[0].address];
    assert_eq!(near(&facts), [Some(7), Some(7), None]);
    facts.regions[1].region.functions = vec![facts.functions[2].address];
    assert_eq!(near(&facts), [None, None, Some(7)]);
}
