//! Data Direct pairs of the host that `configs/gb300-data-direct.json` is for.

use std::path::Path;

use egm_address::Gpa;

use super::*;
use crate::{config, facts};

const NETWORK: usize = 1;
const DIRECT: usize = 2;

fn machine() -> (Spec, Facts) {
    let spec = config::load(Path::new("../configs/gb300-data-direct.json")).unwrap();
    (spec, facts::load(Path::new("../configs/facts/gb300-data-direct.json")).unwrap())
}

fn host<'a>(facts: &'a mut Facts, address: &str) -> &'a mut HostFunction {
    facts.functions.iter_mut().find(|f| f.address.to_string() == address).unwrap()
}

/// What is wrong, and what to do.
fn refused(spec: &Spec, facts: &Facts) -> (String, String) {
    let error = plan(spec, facts).unwrap_err();
    assert_eq!(error.blame(), crate::error::Blame::Configuration);
    (error.to_string(), error.help().unwrap())
}

fn bar(plan: &Plan, index: u8) -> u64 {
    let is_gpu =
        |f: &&FunctionPlan| matches!(&f.role, FunctionRole::Endpoint { device, .. } if device.id == "gpu0");
    let gpu = plan.pci.iter().find(is_gpu).unwrap();
    gpu.bars.iter().find(|bar| bar.index == index).unwrap().span.start().get()
}

#[test]
fn a_gpu_has_its_second_bar_where_the_host_has_it_and_both_functions_are_a_pair() {
    let (spec, facts) = machine();
    let plan = plan(&spec, &facts).unwrap();
    assert_eq!(bar(&plan, 2), 0x6800_0000_0000);
    let partners = plan.pci.iter().filter_map(|f| match &f.role {
        FunctionRole::Endpoint { device, assigned: Some(assigned) } => {
            Some((device.id.as_str(), assigned.partner?))
        }
        _ => None,
    });
    let partners: Vec<(&str, String)> = partners.map(|(id, at)| (id, at.to_string())).collect();
    assert_eq!(partners.len(), 2);
    assert!(partners.contains(&("nic0", "0008:03:00.0".to_owned())), "{partners:?}");
    assert!(partners.contains(&("direct0", "0000:03:00.0".to_owned())), "{partners:?}");
}

#[test]
fn a_gpu_elsewhere_keeps_its_freedom() {
    let (spec, mut facts) = machine();
    let gpu = host(&mut facts, "0008:06:00.0");
    gpu.place.bridges = vec!["0000:00:01.0".parse().unwrap()];
    gpu.iommu_group = Some(99);
    assert_ne!(bar(&plan(&spec, &facts).unwrap(), 2), 0x6800_0000_0000);
}

#[test]
fn one_of_a_pair_is_refused_with_the_other_s_name() {
    for (removed, named) in [(NETWORK, "0000:03:00.0"), (DIRECT, "0008:03:00.0")] {
        let (mut spec, facts) = machine();
        spec.devices.remove(removed);
        let (error, help) = refused(&spec, &facts);
        assert!(
            error.starts_with("device \"") && help.contains(&format!("\"function\": \"{named}\"")),
            "{error}: {help}"
        );
    }
    let (mut spec, facts) = machine();
    spec.devices.truncate(2);
    spec.devices.remove(0);
    let plan = plan(&spec, &facts).unwrap();
    assert_eq!(plan.notes.len(), 1, "without GPUs nobody misses it: {:?}", plan.notes);
}

#[test]
fn a_card_with_vital_product_data_that_lack_a_keyword_is_refused() {
    let (spec, mut facts) = machine();
    host(&mut facts, "0008:03:00.0").card.as_mut().unwrap().unique = None;
    assert!(refused(&spec, &facts).0.contains("have no keyword VU"));
    host(&mut facts, "0008:03:00.0").card = None;
    assert!(refused(&spec, &facts).0.contains("cannot be read (no vpd file)"));
}

#[test]
fn an_address_of_the_host_that_is_not_free_is_refused_with_what_is_there() {
    let at = |start: u64| {
        let (spec, mut facts) = machine();
        host(&mut facts, "0008:06:00.0").bars[1].start = start;
        refused(&spec, &facts)
    };
    let (error, help) = at(0);
    assert!(
        error.ends_with("Data Direct uses the host's address of BAR 2, and the host gave it none"),
        "{error}"
    );
    assert!(help.contains("15b3:2100"));
    let (error, help) = at(256 * GIB / 256 * 4);
    assert!(error.contains("not a multiple of its size"), "{error} {help}");
    let (error, help) = at(1 << 49);
    assert!(error.contains("guest addresses end at") && help.contains("address bits"), "{error}: {help}");
    let (mut spec, facts) = machine();
    let DeviceKind::Vfio { bars, .. } = &mut spec.devices[0].kind else { panic!() };
    let place = config::BarPlacement::At(Gpa::new(0x7000_0000_0000));
    *bars = BarPlacements::Each(vec![config::FixedBar { index: 2, place }]);
    assert!(refused(&spec, &facts).0.ends_with("\"bars\" gives it another"));
}

#[test]
fn guest_memory_over_the_host_s_address_is_refused_with_less_memory_as_remedy() {
    let (mut spec, mut facts) = machine();
    host(&mut facts, "0008:06:00.0").bars[1].start = 256 * GIB;
    let size = ByteSize::new(300 * GIB);
    spec.memory.nodes[0].size = size;
    spec.memory.size = size;
    facts.memory.total = ByteSize::new(1 << 40);
    facts.memory.available = facts.memory.total;
    for node in &mut facts.nodes {
        node.memory = facts.memory;
    }
    let (error, help) = refused(&spec, &facts);
    assert!(
        error.contains("guest memory ends at") && help.starts_with("give the guest less memory"),
        "{error}: {help}"
    );
}

#[test]
fn a_gpu_that_shares_switches_or_a_group_with_the_function_is_reached_by_it() {
    let has_its_place = |change: &dyn Fn(&mut HostFunction)| {
        let (spec, mut facts) = machine();
        change(host(&mut facts, "0008:06:00.0"));
        bar(&plan(&spec, &facts).unwrap(), 2) == 0x6800_0000_0000
    };
    assert!(has_its_place(&|gpu| gpu.iommu_group = Some(99)), "one switch");
    assert!(
        has_its_place(&|gpu| {
            gpu.iommu_group = Some(99);
            gpu.place
                .bridges
                .extend(["0008:04:00.0", "0008:05:00.0"].map(|port| port.parse::<PciAddress>().unwrap()));
        }),
        "a switch below that switch"
    );
    assert!(has_its_place(&|gpu| gpu.place.bridges = vec!["0000:00:01.0".parse().unwrap()]), "one group");
}

#[test]
fn another_device_at_the_gpu_s_address_is_to_be_moved() {
    // Before the GPU's BAR and in it: either device may be the first of the two.
    for address in [0x67ff_ff00_0000, 0x6800_0100_0000] {
        let (mut spec, mut facts) = machine();
        assign(&mut spec, &mut facts, big_gpu(0x40), true);
        let fixed = config::FixedBar { index: 0, place: config::BarPlacement::At(Gpa::new(address)) };
        let DeviceKind::Vfio { bars, .. } = &mut spec.devices[3].kind else { panic!() };
        *bars = BarPlacements::Each(vec![fixed]);
        let (error, help) = refused(&spec, &facts);
        assert!(error.ends_with("has BARs there"), "{error}");
        assert!(
            help.starts_with("move the other device's BAR, or leave the Data Direct functions"),
            "{help}"
        );
    }
}
