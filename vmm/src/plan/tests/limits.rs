//! What the host and the guest's tables have room for, to the last byte, page and processor.

use super::*;

fn bound(mut node: Node, host: &str) -> Node {
    node.host_nodes = Some(host.parse().unwrap());
    node
}

/// Bytes that the host has, what they are, and the help, where memory is short.
fn shortage(spec: &Spec, facts: &Facts) -> (u64, &'static str, String) {
    let error = plan(spec, facts).unwrap_err();
    let PlanError::HostMemory { has, state, .. } = error else { panic!("{error}") };
    (has, state, error.help().unwrap())
}

#[test]
fn a_guest_may_have_all_memory_of_its_host_node_outside_the_pools_and_no_page_more() {
    let exact = spec(vec![bound(node(0, 252 * GIB, "0"), "0")]);
    check(&exact, &facts(), &plan(&exact, &facts()).unwrap());
    let more = spec(vec![bound(node(0, 252 * GIB + 2 * MIB, "0"), "0")]);
    let (has, state, help) = shortage(&more, &facts());
    assert_eq!((has, state), (252 * GIB, "in all outside hugetlb pools"));
    assert!(help.contains("host_nodes"), "{help}");
    let mut alone = facts();
    alone.nodes.truncate(1);
    assert_eq!(shortage(&more, &alone).2, "lower \"memory.size\"", "there is no other node to bind it to");
}

#[test]
fn memory_that_is_touched_at_start_must_be_available() {
    let mut touched = spec(vec![bound(node(0, 253 * GIB, "0"), "0")]);
    touched.memory.prefault = true;
    for (available, has, state) in [
        (250, 250, "available"),
        (252, 252, "in all outside hugetlb pools"),
        (255, 252, "in all outside hugetlb pools"),
    ] {
        let mut facts = facts();
        facts.nodes[0].memory.available = ByteSize::new(available * GIB);
        let (found, text, _) = shortage(&touched, &facts);
        assert_eq!((found, text), (has * GIB, state));
    }
    touched.memory.prefault = false;
    touched.memory.nodes[0].size = ByteSize::new(251 * GIB);
    plan(&touched, &facts()).unwrap();
}

#[test]
fn guest_nodes_of_one_host_node_share_its_memory() {
    let nodes = |host: [&str; 2]| {
        spec(vec![bound(node(0, 200 * GIB, "0"), host[0]), bound(node(1, 200 * GIB, "1"), host[1])])
    };
    plan(&nodes(["0", "1"]), &facts()).unwrap();
    assert_eq!(shortage(&nodes(["0", "0"]), &facts()).0, 252 * GIB);
}

#[test]
fn a_huge_page_goes_to_one_backing_and_the_remedy_counts_the_pages_of_that_node() {
    let mut huge = spec(vec![bound(node(0, 2 * GIB, "0"), "0"), bound(node(1, 2 * GIB, "1"), "0")]);
    huge.memory.page_size = PageSize::Size1G;
    let mut facts = facts();
    facts.nodes[1].pools[0].total = 90;
    let error = plan(&huge, &facts).unwrap_err();
    let PlanError::HugePages { backing, needed, free, write, .. } = &error else { panic!("{error}") };
    assert_eq!((backing.as_str(), *needed, *free, *write), ("node1", 2, 1, 5));
    facts.nodes[0].pools[0].free = 4;
    plan(&huge, &facts).unwrap();
}

#[test]
fn a_guest_may_have_as_many_processors_as_kvm_runs_and_their_ids_reach_the_last_one() {
    let machine = |cpus: &str| spec(vec![node(0, GIB, cpus)]);
    let mut two = facts();
    two.kvm = Probe::Present(Kvm { max_vcpus: 2, x2apic: true });
    plan(&machine("0-1"), &two).unwrap();
    let last = plan(&machine("0-254"), &facts()).unwrap().vcpus.last().map(|vcpu| vcpu.hardware_id);
    assert_eq!(last, Some(254));
    let beyond = PlanError::HardwareId { vcpu: 255, id: 255, max: 254 };
    assert_eq!(plan(&machine("0-255"), &facts()), Err(beyond));
}

#[test]
fn threads_of_a_core_are_neighbours_then_cores_of_a_socket() {
    let mut spec = spec(vec![node(0, GIB, "0-11")]);
    spec.cpus = Cpus { count: 12, sockets: 2, cores: 3, threads: 2, affinity: Vec::new() };
    let vcpus = plan(&spec, &facts()).unwrap().vcpus;
    let found: Vec<_> = vcpus.iter().map(|vcpu| (vcpu.socket, vcpu.core, vcpu.thread)).collect();
    let socket = |number| (0..3).flat_map(move |core| (0..2).map(move |thread| (number, core, thread)));
    assert_eq!(found, socket(0).chain(socket(1)).collect::<Vec<_>>());
}

#[test]
fn the_first_node_needs_no_more_than_the_guests_tables() {
    let least = spec(vec![node(0, 2 * MIB, "0")]);
    check(&least, &facts(), &plan(&least, &facts()).unwrap());
    let size = 2 * MIB - 4096;
    let less = plan(&spec(vec![node(0, size, "0")]), &facts());
    assert_eq!(less, Err(PlanError::FirstNode { node: 0, size, least: 2 * MIB }));
}

#[test]
fn memory_that_fills_the_addresses_leaves_no_window_where_no_device_needs_one() {
    let mut facts = facts();
    facts.address_bits = 36;
    let mut full = spec(vec![node(0, 63 * GIB, "0")]);
    let planned = plan(&full, &facts).unwrap();
    assert_eq!((planned.memory_end().get(), planned.window(WindowKind::PciMemory64)), (1 << 36, None));
    full.devices.push(device("rng0", true, DeviceKind::VirtioRng));
    assert!(matches!(plan(&full, &facts), Err(PlanError::Window64 { configured: false, .. })));
}

#[test]
fn a_guest_has_32_to_52_address_bits() {
    let spec = spec(vec![node(0, GIB, "0")]);
    let planned = |address_bits: u8| plan(&spec, &Facts { address_bits, ..facts() });
    assert_eq!([32, 52].map(|bits| planned(bits).unwrap().address_bits), [32, 52]);
    assert_eq!(
        [31, 53].map(|bits| planned(bits).unwrap_err()),
        [31, 53].map(|bits| PlanError::AddressBits { bits })
    );
}

#[test]
fn a_range_that_the_iommu_keeps_is_named_after_its_use() {
    for (kind, label) in
        [(ReservedKind::Msi, "host IOMMU: interrupts"), (ReservedKind::Direct, "host IOMMU: not mappable")]
    {
        let (mut spec, mut facts) = (spec(vec![node(0, GIB, "0")]), facts());
        let mut function = big_gpu(1);
        function.reserved =
            vec![ReservedRegion { span: Span::new(Iova::new(0x800_0000), MIB).unwrap(), kind }];
        assign(&mut spec, &mut facts, function, true);
        let plan = plan(&spec, &facts).unwrap();
        check(&spec, &facts, &plan);
        let kept = plan.windows.iter().find(|w| w.label == label).unwrap();
        assert_eq!(kept.span.start().get(), 0x800_0000);
    }
}

#[test]
fn a_devices_line_and_registers_are_found_by_its_name() {
    let (mut spec, mut facts) = (spec(vec![node(0, GIB, "0")]), facts());
    assign(&mut spec, &mut facts, big_gpu(1), true);
    (spec.arch, facts.arch) = (Architecture::Aarch64, Architecture::Aarch64);
    let plan = plan(&spec, &facts).unwrap();
    let line = plan.line("vfio0 INTA").unwrap();
    assert!(line > 1 && plan.line("vfio0 INTA") == Some(line) && plan.line("vfio1 INTA").is_none());
    let (of_devices, others): (Vec<_>, Vec<_>) =
        plan.windows.iter().partition(|w| w.kind == WindowKind::Device);
    assert!(of_devices.len() > 1 && of_devices.iter().all(|w| plan.device(&w.label) == Some(w.span)));
    assert!(!others.is_empty() && others.iter().all(|w| plan.device(&w.label).is_none()));
}
