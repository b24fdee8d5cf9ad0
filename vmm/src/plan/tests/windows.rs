//! Windows around BARs at fixed addresses, and errors of BARs that fit nowhere.

use egm_address::Gpa;
use egm_vfio::topology::Port;

use super::assigned::{bar, made, place, roles, three_gpus, wishes};
use super::*;
use crate::config::{BarPlacement, FixedBar};

const TIB: u64 = 1 << 40;
const HIGH: HostBarKind = HostBarKind::Memory64Prefetchable;

fn at(bars: &[(u8, u64)]) -> BarPlacements {
    let fixed = |&(index, at): &(u8, u64)| FixedBar { index, place: BarPlacement::At(Gpa::new(at)) };
    BarPlacements::Each(bars.iter().map(fixed).collect())
}

/// A machine with 4 GiB of memory and these functions of the host, each behind a root port.
fn machine(functions: Vec<HostFunction>) -> (Spec, Facts) {
    let (mut spec, mut facts) = (spec(vec![node(0, 4 * GIB, "0-3")]), facts());
    functions.into_iter().for_each(|function| assign(&mut spec, &mut facts, function, true));
    (spec, facts)
}

fn window(plan: &Plan) -> Span<Guest> {
    plan.window(WindowKind::PciMemory64).unwrap()
}

#[test]
fn a_fixed_bar_may_begin_where_memory_ends_and_end_where_addresses_end() {
    let (mut spec, facts) = machine(vec![gpu(1, &[(2, HIGH, 256 * MIB)])]);
    let memory_end = made(&spec, &facts).memory_end().get();
    for address in [memory_end, (1 << 46) - 256 * MIB] {
        *wishes(&mut spec, 0).2 = at(&[(2, address)]);
        let plan = made(&spec, &facts);
        check(&spec, &facts, &plan);
        assert_eq!(bar(&plan, "vfio0", 2), address);
    }
    *wishes(&mut spec, 0).2 = at(&[(2, memory_end - 256 * MIB)]);
    let error = plan(&spec, &facts).unwrap_err().to_string();
    assert!(error.starts_with("device \"vfio0\": BAR 2 cannot lie at 0x130000000..0x140000000: "), "{error}");
}

/// Two GPUs with all BARs where the host has them: from 49 TiB to 32 MiB above 52 TiB.
fn two_as_on_the_host() -> (Spec, Facts) {
    let (mut spec, facts) = three_gpus();
    spec.devices.remove(1);
    for device in 0..2 {
        *wishes(&mut spec, device).2 = BarPlacements::Host;
    }
    (spec, facts)
}

#[test]
fn a_window_of_fixed_bars_alone_has_nothing_to_spare() {
    let (spec, facts) = two_as_on_the_host();
    let plan = made(&spec, &facts);
    check(&spec, &facts, &plan);
    let (start, end) = (49 * TIB, 52 * TIB + GIB);
    assert_eq!((window(&plan).start().get(), window(&plan).end().get()), (start, end));
}

#[test]
fn a_window_of_fixed_bars_has_the_others_behind_them() {
    let (mut spec, facts) = three_gpus();
    spec.pcie.topology = PciTopology::Flat;
    *wishes(&mut spec, 0).2 = BarPlacements::Host;
    let plan = made(&spec, &facts);
    check(&spec, &facts, &plan);
    let last = bar(&plan, "vfio0", 4);
    assert_eq!(window(&plan).start().get(), 49 * TIB);
    assert!(["vfio1", "vfio2"].iter().all(|id| bar(&plan, id, 2) > last));
}

#[test]
fn a_configured_window_holds_fixed_bars_to_the_last_byte_or_is_refused() {
    let (mut spec, facts) = two_as_on_the_host();
    let exact = 3 * TIB + 32 * MIB;
    spec.pcie.window64 = Some(ByteSize::new(exact));
    let plan_of_exact = made(&spec, &facts);
    check(&spec, &facts, &plan_of_exact);
    assert_eq!(window(&plan_of_exact).size(), exact);
    spec.pcie.window64 = Some(ByteSize::new(exact - MIB));
    let error = plan(&spec, &facts).unwrap_err();
    let PlanError::Window64 { size, configured: true, .. } = error else { panic!("{error}") };
    assert_eq!(size.get(), exact);
}

#[test]
fn small_bars_share_no_page() {
    let (mut spec, mut facts) = (spec(vec![node(0, GIB, "0")]), facts());
    let low = HostBarKind::Memory32;
    assign(&mut spec, &mut facts, gpu(1, &[(0, low, 16), (1, low, 16), (2, low, 16)]), false);
    let plan = made(&spec, &facts);
    let mut pages: Vec<u64> = (0..3).map(|index| bar(&plan, "vfio0", index)).collect();
    pages.sort_unstable();
    assert!(pages.iter().all(|start| start.is_multiple_of(4096)), "{pages:x?}");
    assert!(pages.windows(2).all(|pair| pair[0] < pair[1]), "{pages:x?}");
}

#[test]
fn a_bar_that_fits_nowhere_is_named_with_its_size() {
    let (mut spec, facts) = machine(vec![big_gpu(1)]);
    *wishes(&mut spec, 0).2 = at(&[(0, 8 * TIB), (4, 8 * TIB)]);
    let error = plan(&spec, &facts).unwrap_err();
    let PlanError::Bar { index, size, why, .. } = error else { panic!("{error}") };
    assert!([(0, 16 * MIB), (4, 32 * MIB)].contains(&(index, size)), "BAR {index} of {size}");
    assert!(why.contains("fixed at the same addresses"), "{why}");
    // Each alone is smaller than the guest's addresses, and both behind one switch are not.
    let (spec, mut facts) = three_gpus();
    for function in &mut facts.functions[..2] {
        function.bars = vec![HostBar { index: 0, kind: HIGH, size: 1 << 63, start: 0 }];
    }
    let error = plan(&spec, &facts).unwrap_err();
    assert!(matches!(error, PlanError::Bar { index: 0, size, .. } if size == 1 << 63), "{error}");
    assert!(error.to_string().contains("together exceed 64 bits"), "{error}");
}

#[test]
fn an_address_that_two_devices_ask_for_is_no_matter_of_data_direct() {
    let (mut spec, facts) = three_gpus();
    for device in [0, 2] {
        *wishes(&mut spec, device).2 = at(&[(2, 8 * TIB)]);
    }
    let help = plan(&spec, &facts).unwrap_err().help().unwrap();
    assert!(help.starts_with("leave it out of the device's \"bars\""), "{help}");
}

#[test]
fn a_function_alone_behind_a_switch_of_the_host_has_a_root_port() {
    let (mut spec, facts) = three_gpus();
    spec.devices.truncate(1);
    assert_eq!(roles(&made(&spec, &facts)), ["00:00.0 host", "00:01.0 root 1-1", "01:00.0 vfio0"]);
}

/// Functions with one BAR behind one switch of the host: 32 of them take 34 buses of the guest.
fn below_a_switch(count: u16) -> (Spec, Facts) {
    let function = |number: u16| {
        let mut function = gpu(1, &[(0, HostBarKind::Memory32, 4096)]);
        let (bus, device) = (u8::try_from(0x21 + number / 32).unwrap(), u8::try_from(number % 32).unwrap());
        function.address = PciAddress::new(0, bus, device, 0).unwrap();
        (function.vendor, function.iommu_group) = (0x8086, Some(number.into()));
        function.place = place(&["0000:10:01.0", "0000:11:00.0", "0000:12:00.0"], Port::Endpoint);
        function
    };
    machine((0..count).map(function).collect())
}

#[test]
fn a_machine_has_256_buses_at_most() {
    let (spec, facts) = below_a_switch(239);
    let made = made(&spec, &facts);
    assert_eq!(made.pci.last().unwrap().address.bus(), 255);
    assert_eq!(made.window(WindowKind::Ecam).unwrap().size(), 256 * MIB);
    let (spec, facts) = below_a_switch(240);
    assert_eq!(plan(&spec, &facts), Err(PlanError::Buses { devices: 240, buses: 257, max: 256 }));
}

#[test]
fn a_host_bridge_of_a_node_has_32_ports_at_most() {
    let near = |count: u8| {
        let functions = (0x21..)
            .take(count.into())
            .map(|bus| HostFunction { numa_node: Some(1), ..gpu(bus, &[(0, HostBarKind::Memory32, 4096)]) });
        let (mut spec, mut facts) = machine(functions.collect());
        spec.memory.nodes.push(node(1, GIB, "4"));
        spec.cpus.count = 5;
        for (node, host) in spec.memory.nodes.iter_mut().zip(["0", "1"]) {
            node.host_nodes = Some(host.parse().unwrap());
        }
        facts.nodes[1].distances = vec![21, 10];
        plan(&spec, &facts)
    };
    assert_eq!(near(32).unwrap().expanders.len(), 1);
    assert_eq!(near(33), Err(PlanError::NodeBus(1, 33)));
}
