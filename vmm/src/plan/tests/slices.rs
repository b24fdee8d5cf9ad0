//! Slices that are PCI functions.

use super::*;

/// A machine of two nodes with a slice of 3 GiB of `region` as a function near `near`.
fn machine(region: &str, near: u32) -> Spec {
    let mut spec = spec(vec![node(0, 4 * GIB, "0-1"), node(1, 4 * GIB, "2-3")]);
    let regions = vec![region.to_owned()];
    spec.egm.push(EgmSlice { regions, form: EgmForm::Device, ..slice(near, 3 * GIB) });
    spec.devices.push(device("egm0", true, DeviceKind::Egm { slice: 0, node: near }));
    spec
}

fn endpoint(plan: &Plan) -> &FunctionPlan {
    plan.pci.iter().find(|f| matches!(f.role, FunctionRole::Endpoint { .. })).unwrap()
}

#[test]
fn a_slice_that_is_a_device_has_registers_memory_of_the_next_power_of_two_and_vectors_and_is_no_ram() {
    let (spec, facts) = (machine("egm4", 0), facts());
    let plan = plan(&spec, &facts).unwrap();
    check(&spec, &facts, &plan);
    let function = endpoint(&plan);
    let bars: Vec<_> = function.bars.iter().map(|bar| (bar.index, bar.kind, bar.span.size())).collect();
    let expected = [(0, BarKind::Memory32, 0x4000), (2, BarKind::Memory64Prefetchable, 4 * GIB)];
    assert_eq!((bars.as_slice(), function.msix_vectors), (expected.as_slice(), 3));
    assert!(plan.memory.iter().all(|memory| memory.kind == MemoryKind::Ram));
    let slice = plan.backings.iter().find(|backing| backing.device).unwrap();
    let found = (slice.id.as_str(), slice.region.as_deref(), slice.size);
    assert_eq!(found, ("egm0", Some("egm4"), 3 * GIB));
    assert!(plan.passthrough.is_none() && plan.nodes.len() == 2, "no node of its own");
}

#[test]
fn a_slice_near_another_node_than_bus_0_is_behind_a_host_bridge_of_that_node() {
    let facts = facts();
    let near = |node| {
        let plan = plan(&machine("local", node), &facts).unwrap();
        (endpoint(&plan).address.bus(), plan.expanders.iter().map(|e| (e.node, e.bridge.secondary)).collect())
    };
    let none: Vec<(u32, u8)> = Vec::new();
    assert_eq!(near(0), (1, none));
    let (bus, expanders) = near(1);
    assert_eq!((bus, expanders), (2, vec![(1, 1)]));
}

#[test]
fn a_slice_that_is_a_device_is_not_shared_with_servers_whatever_its_file_is() {
    let (mut spec, facts) = (machine("egm4", 0), facts());
    spec.devices.push(device("user0", true, DeviceKind::VfioUser { socket: "/run/gpu.sock".into() }));
    assert!(plan(&spec, &facts).is_ok());
}
