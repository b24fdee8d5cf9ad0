//! Host functions: places of BARs, switches, interfaces of the kernel, cliques, NCCL's file.

use egm_address::Gpa;
use egm_vfio::topology::{Express, Link, Port};

use super::*;
use crate::config::{BarPlacement, FixedBar, SparePorts};
use crate::error::Blame;
use crate::facts::Iommu;

const TIB: u64 = 1 << 40;

/// A bridge of the host above function `bus:00.0`s.
fn bridge(address: &str, above: &[&str], port: Port) -> HostFunction {
    let mut bridge = gpu(0, &[]);
    bridge.address = address.parse().unwrap();
    bridge.class = 0x06_0400;
    bridge.driver = Some("pcieport".to_owned());
    bridge.place = place(above, port);
    bridge
}

pub(super) fn place(above: &[&str], port: Port) -> FunctionPlacement {
    FunctionPlacement {
        bridges: above.iter().map(|address| address.parse().unwrap()).collect(),
        link: Some(Link { speed: 2500, width: 8, max_speed: 32_000, max_width: 16 }),
        express: Some(Express { port, acs: None, ats: None }),
        cdev: Some("vfio0".to_owned()),
        ..FunctionPlacement::default()
    }
}

/// A machine with three GPUs: the first two behind one switch of the host, the third behind a root port.
pub(super) fn three_gpus() -> (Spec, Facts) {
    let (mut spec, mut facts) = (spec(vec![node(0, 4 * GIB, "0-3")]), facts());
    let chains: [&[&str]; 3] = [
        &["0000:10:01.0", "0000:11:00.0", "0000:12:00.0"],
        &["0000:10:01.0", "0000:11:00.0", "0000:12:01.0"],
        &["0000:10:02.0"],
    ];
    for (bus, chain) in (0x21u8..).zip(chains) {
        let mut gpu = big_gpu(bus);
        for bar in &mut gpu.bars {
            bar.start = 16 * TIB + u64::from(bus) * TIB + u64::from(bar.index) * 256 * GIB;
        }
        gpu.place = place(chain, Port::Endpoint);
        assign(&mut spec, &mut facts, gpu, true);
    }
    facts.functions.push(bridge("0000:10:01.0", &[], Port::Root));
    facts.functions.push(bridge("0000:11:00.0", &["0000:10:01.0"], Port::Upstream));
    (spec, facts)
}

/// Backend, clique, places and peer-to-peer of a device.
pub(super) fn wishes(
    spec: &mut Spec,
    device: usize,
) -> (&mut VfioBackend, &mut Clique, &mut BarPlacements, &mut bool) {
    let DeviceKind::Vfio { backend, clique, bars, p2p, .. } = &mut spec.devices[device].kind else {
        panic!()
    };
    (backend, clique, bars, p2p)
}

pub(super) fn made(spec: &Spec, facts: &Facts) -> Plan {
    plan(spec, facts).unwrap()
}

pub(super) fn roles(plan: &Plan) -> Vec<String> {
    let name = |role: &FunctionRole| match role {
        FunctionRole::HostBridge => "host".to_owned(),
        FunctionRole::RootPort { bridge, .. } => format!("root {}-{}", bridge.secondary, bridge.subordinate),
        FunctionRole::SwitchUpstream { bridge } => format!("up {}-{}", bridge.secondary, bridge.subordinate),
        FunctionRole::SwitchDownstream { bridge, .. } => format!("down {}", bridge.secondary),
        FunctionRole::Endpoint { device, .. } => device.id.clone(),
    };
    plan.pci.iter().map(|f| format!("{} {}", &f.address.to_string()[5..], name(&f.role))).collect()
}

pub(super) fn of<'a>(plan: &'a Plan, device: &str) -> (&'a FunctionPlan, &'a AssignedPlan) {
    let found = plan.pci.iter().find_map(|f| match &f.role {
        FunctionRole::Endpoint { device: d, assigned: Some(assigned) } if d.id == device => {
            Some((f, assigned))
        }
        _ => None,
    });
    found.unwrap()
}

pub(super) fn bar(plan: &Plan, device: &str, index: u8) -> u64 {
    of(plan, device).0.bars.iter().find(|bar| bar.index == index).unwrap().span.start().get()
}

#[test]
fn functions_of_one_switch_get_a_switch_and_others_a_root_port() {
    let (mut spec, facts) = three_gpus();
    let plan = made(&spec, &facts);
    check(&spec, &facts, &plan);
    assert_eq!(
        roles(&plan),
        [
            "00:00.0 host",
            "00:01.0 root 1-4",
            "00:02.0 root 5-5",
            "01:00.0 up 2-4",
            "02:00.0 down 3",
            "02:01.0 down 4",
            "03:00.0 vfio0",
            "04:00.0 vfio1",
            "05:00.0 vfio2",
        ]
    );
    for outer in plan.pci.iter().filter_map(|f| f.role.bridge()) {
        let inside =
            |inner: &&BridgePlan| outer.secondary < inner.secondary && inner.secondary <= outer.subordinate;
        for inner in plan.pci.iter().filter_map(|f| f.role.bridge()).filter(inside) {
            assert!(outer.window64.unwrap().covers(inner.window64.unwrap()), "{inner:?} in {outer:?}");
        }
    }
    spec.pcie.topology = PciTopology::Flat;
    let plan = made(&spec, &facts);
    check(&spec, &facts, &plan);
    assert_eq!(plan.pci.len(), 7);
}

#[test]
fn assigned_functions_have_their_host_addresses() {
    let (spec, facts) = three_gpus();
    let assigned: Vec<String> = made(&spec, &facts).assigned_functions().map(|f| f.to_string()).collect();
    assert_eq!(assigned, ["0000:21:00.0", "0000:22:00.0", "0000:23:00.0"]);
}

#[test]
fn bars_lie_at_their_host_addresses_where_the_configuration_states_so() {
    let (mut spec, facts) = three_gpus();
    *wishes(&mut spec, 0).2 = BarPlacements::Host;
    let at = BarPlacement::At(Gpa::new(8 * TIB));
    *wishes(&mut spec, 2).2 = BarPlacements::Each(vec![FixedBar { index: 2, place: at }]);
    let plan = made(&spec, &facts);
    check(&spec, &facts, &plan);
    let host = |index: u64| 16 * TIB + 0x21 * TIB + index * 256 * GIB;
    assert_eq!([0, 2, 4].map(|index| bar(&plan, "vfio0", index)), [host(0), host(2), host(4)]);
    assert_eq!(bar(&plan, "vfio2", 2), 8 * TIB);
    // Its other BARs are in the same window of its root port, those of the switch's other device near the first.
    assert!(bar(&plan, "vfio2", 0) < 9 * TIB && bar(&plan, "vfio1", 2) > host(0));
    assert_eq!(plan.window(WindowKind::PciMemory64).unwrap().start().get(), 8 * TIB);
}

#[test]
fn a_fixed_place_that_cannot_be_is_named_with_its_rule() {
    let said = |index: u8, place: BarPlacement| {
        let (mut spec, mut facts) = three_gpus();
        facts.functions[0].bars[1].start = 0;
        facts.cpu_vendor = "AuthenticAMD".to_owned();
        *wishes(&mut spec, 0).2 = BarPlacements::Each(vec![FixedBar { index, place }]);
        let error = plan(&spec, &facts).unwrap_err();
        assert!(error.help().is_some() && error.blame() == Blame::Configuration, "{error}");
        error.to_string()
    };
    let at = |address| BarPlacement::At(Gpa::new(address));
    assert!(said(1, at(0)).ends_with("the function has no such memory BAR"));
    assert!(said(2, BarPlacement::Host).ends_with("the host gave it no address"));
    assert!(said(2, at(8 * TIB + MIB)).ends_with("its address is not a multiple of its size"));
    assert!(said(0, at(GIB)).ends_with("guest memory ends at 0x140000000, and BARs come after it"));
    assert!(
        said(2, at(64 * TIB))
            .ends_with("guest addresses end at 0x400000000000, the end of 46 guest physical address bits")
    );
    assert!(said(0, at(0xfd_0000_0000)).ends_with("reserves 0xfd00000000..0x10000000000"));
}

#[test]
fn two_devices_at_one_place_are_both_named() {
    for other in [1, 2] {
        let (mut spec, facts) = three_gpus();
        for device in [0, other] {
            let place = BarPlacement::At(Gpa::new(8 * TIB));
            *wishes(&mut spec, device).2 = BarPlacements::Each(vec![FixedBar { index: 2, place }]);
        }
        let error = plan(&spec, &facts).unwrap_err().to_string();
        let names = [0, other].map(|device| format!("\"vfio{device}\""));
        assert!(
            names.iter().all(|name| error.contains(name)) && error.ends_with("has BARs there"),
            "{error}"
        );
    }
}

/// The interface for this machine, and why.
fn chosen(spec: &Spec, facts: &Facts) -> (Interface, String) {
    let assigned = made(spec, facts).passthrough.unwrap();
    (assigned.interface, assigned.why)
}

#[test]
fn iommufd_is_taken_where_it_can_do_everything() {
    let (mut spec, mut facts) = three_gpus();
    let why = |spec: &Spec, facts: &Facts| {
        let (interface, why) = chosen(spec, facts);
        assert_eq!(interface, Interface::Legacy);
        why
    };
    assert_eq!(why(&spec, &facts), "the host has no /dev/iommu");
    facts.iommu = Probe::Present(Iommu { groups: 9, iommufd: true });
    assert!(why(&spec, &facts).ends_with("for which iommufd needs Linux 6.19: this is 6.12.0"));
    facts.kernel = "6.19.2-1".to_owned();
    assert_eq!(chosen(&spec, &facts).0, Interface::Iommufd);
    facts.functions[1].place.cdev = None;
    assert_eq!(why(&spec, &facts), "0000:22:00.0 has no file in /dev/vfio/devices");
    facts.functions[1].place.cdev = Some("vfio1".to_owned());
    spec.egm = vec![slice(1, GIB)];
    spec.egm[0].regions = vec!["egm4".to_owned()];
    assert!(why(&spec, &facts).starts_with("egm0 is of egm4, memory without struct pages"));
    let plan = made(&spec, &facts);
    assert_eq!(plan.passthrough.unwrap().pinned, 4 * GIB, "what has no struct pages is not pinned");
}

#[test]
fn an_interface_that_cannot_map_the_memory_or_two_of_them_are_refused() {
    let (mut spec, mut facts) = three_gpus();
    facts.iommu = Probe::Present(Iommu { groups: 9, iommufd: true });
    *wishes(&mut spec, 1).0 = VfioBackend::Iommufd;
    let deaf = made(&spec, &facts);
    assert!(
        deaf.notes.iter().any(|note| note.starts_with("assigned functions do not reach each other's BARs")),
        "{:?}",
        deaf.notes
    );
    assert!(!of(&deaf, "vfio0").1.p2p && of(&deaf, "vfio0").1.clique.is_none());
    spec.egm = vec![slice(1, GIB)];
    spec.egm[0].regions = vec!["egm4".to_owned()];
    let error = plan(&spec, &facts).unwrap_err();
    assert!(error.to_string().contains("does not map egm0"), "{error}");
    facts.kernel = "6.14.0-1013-nvidia-64k".to_owned();
    assert!(plan(&spec, &facts).is_ok(), "NVIDIA's kernels map it");
    *wishes(&mut spec, 2).0 = VfioBackend::Legacy;
    assert!(matches!(plan(&spec, &facts), Err(PlanError::Assigned(AssignedRule::Interfaces { .. }))));
}

#[test]
fn gpus_behind_one_switch_are_a_clique_and_a_lie_is_noted() {
    let (mut spec, facts) = three_gpus();
    spec.memory.nodes[0].host_nodes = Some("0".parse().unwrap());
    let numbers = |spec: &Spec| {
        let plan = made(spec, &facts);
        (["vfio0", "vfio1", "vfio2"].map(|id| of(&plan, id).1.clique), plan.notes)
    };
    assert_eq!(numbers(&spec), ([Some(0), Some(0), None], Vec::new()));
    *wishes(&mut spec, 1).1 = Clique::Number(3);
    *wishes(&mut spec, 2).1 = Clique::Number(3);
    let (found, notes) = numbers(&spec);
    assert_eq!(found, [None, Some(3), Some(3)]);
    assert!(notes[0].contains("are both in clique 3: only the root complex is between them"), "{notes:?}");
    let (_, clique, _, p2p) = wishes(&mut spec, 2);
    (*clique, *p2p) = (Clique::Auto, false);
    *wishes(&mut spec, 1).1 = Clique::Off;
    assert_eq!(numbers(&spec).0, [None; 3]);
}

#[test]
fn functions_reach_memory_of_the_machine_itself_by_address_whichever_interface_it_is() {
    let (mut spec, mut facts) = three_gpus();
    spec.egm = vec![slice(7, GIB)];
    spec.egm[0].regions = vec!["guest-memfd".to_owned()];
    facts.regions[0].region.kind = RegionKind::GuestMemfd;
    for (backend, said) in [
        (VfioBackend::Legacy, "type 1 pins its pages by address"),
        (VfioBackend::Iommufd, "memfd and hugetlb by file"),
    ] {
        for index in 0..3 {
            *wishes(&mut spec, index).0 = backend;
        }
        let plan = made(&spec, &facts);
        let all: u64 = plan.backings.iter().map(|backing| backing.size).sum();
        assert_eq!(plan.passthrough.unwrap().pinned, all);
        assert!(plan.notes.iter().any(|note| note.contains(said)), "{:?}", plan.notes);
    }
}

#[test]
fn a_clique_is_for_nvidia_gpus() {
    let (mut spec, mut facts) = three_gpus();
    facts.functions[0].vendor = 0x1002;
    *wishes(&mut spec, 0).1 = Clique::Number(1);
    assert!(matches!(plan(&spec, &facts), Err(PlanError::Assigned(AssignedRule::Clique { .. }))));
}

#[test]
fn functions_that_share_a_group_are_listed_and_busy_neighbours_noted() {
    let (spec, mut facts) = three_gpus();
    facts.functions[1].iommu_group = facts.functions[0].iommu_group;
    let mut neighbour = gpu(0x30, &[]);
    (neighbour.iommu_group, neighbour.driver) =
        (facts.functions[2].iommu_group, Some("snd_hda_intel".to_owned()));
    facts.functions.push(neighbour);
    let plan = made(&spec, &facts);
    let groups = plan.passthrough.unwrap().groups;
    assert_eq!(groups[0].functions, [facts.functions[0].address, facts.functions[1].address]);
    assert!(
        plan.notes[0].ends_with("0000:30:00.0 by snd_hda_intel; egm-vmm bind 0000:30:00.0"),
        "{:?}",
        plan.notes
    );
}

#[test]
fn a_function_is_near_the_guest_node_with_memory_of_its_host_node() {
    let (mut spec, mut facts) = three_gpus();
    let mut second = node(3, GIB, "4");
    second.host_nodes = Some("1".parse().unwrap());
    spec.memory.nodes.push(second);
    spec.cpus.count = 5;
    facts.functions[2].numa_node = Some(1);
    let plan = made(&spec, &facts);
    assert_eq!(["vfio0", "vfio2"].map(|id| of(&plan, id).1.node), [None, Some(3)]);
}

/// The region that the slice really comes from counts: not the host's first that the configuration names, nor only what it
/// names by name.
#[test]
fn a_function_is_near_the_node_with_a_slice_of_its_host_node() {
    let (mut spec, mut facts) = three_gpus();
    spec.memory.nodes.push(node(3, 4 * GIB, "4"));
    spec.cpus.count = 5;
    facts.nodes[1].distances = vec![21, 10];
    facts.regions[1].region.node = Some(1);
    facts.functions[2].numa_node = Some(1);
    let near = |first: &[&str], second: &[&str]| {
        let mut spec = spec.clone();
        let regions = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let slices = [(0, first), (3, second)];
        spec.egm =
            slices.map(|(id, names)| EgmSlice { regions: regions(names), ..slice(id, 4 * GIB) }).into();
        let plan = made(&spec, &facts);
        ["vfio0", "vfio2"].map(|id| of(&plan, id).1.node)
    };
    assert_eq!(near(&["dax0.0"], &["egm4"]), [Some(0), Some(3)]);
    assert_eq!(near(&["egm4", "dax0.0"], &["dax0.0", "egm4"]), [Some(3), Some(0)]);
    assert_eq!(near(&["devdax"], &["egm"]), [Some(0), Some(3)]);
}

#[test]
fn nccl_gets_the_host_s_tree_under_the_guest_s_addresses() {
    let (mut spec, facts) = three_gpus();
    let xml = |spec: &Spec| nccl(&made(spec, &facts), &facts);
    let link = "link_speed=\"32.0 GT/s PCIe\" link_width=\"16\"";
    assert_eq!(
        xml(&spec),
        format!(
            "<system version=\"1\">\n\
             \x20 <cpu numaid=\"0\" affinity=\"0000000f\" arch=\"x86_64\">\n\
             \x20   <pci busid=\"0000:01:00.0\" class=\"0x060400\" {link}>\n\
             \x20     <pci busid=\"0000:03:00.0\" class=\"0x030200\" {link}/>\n\
             \x20     <pci busid=\"0000:04:00.0\" class=\"0x030200\" {link}/>\n\
             \x20   </pci>\n\
             \x20   <pci busid=\"0000:05:00.0\" class=\"0x030200\" {link}/>\n\
             \x20 </cpu>\n\
             </system>\n"
        )
    );
    spec.pcie.topology = PciTopology::Flat;
    assert!(xml(&spec).contains("<pci busid=\"ffff:11:00.0\" class=\"0x060400\""), "{}", xml(&spec));
}

#[test]
fn a_file_of_a_dax_file_system_is_refused_beside_a_function_and_beside_spare_ports() {
    let (mut spec, mut facts) = three_gpus();
    facts.regions.push(region(
        "pmem",
        RegionKind::Fsdax { folder: "/mnt/pmem/egm".into(), device: (259, 0) },
        8,
    ));
    spec.egm = vec![EgmSlice { regions: vec!["fsdax".to_owned()], ..slice(1, 4 * GIB) }];
    let refused = plan(&spec, &facts).unwrap_err();
    assert_eq!(refused.blame(), Blame::Configuration);
    let said = refused.to_string();
    assert!(
        said.starts_with("device \"vfio0\" reaches guest memory by DMA") && said.contains("pmem"),
        "{said}"
    );
    assert!(refused.help().unwrap().contains("\"devdax\""));
    spec.devices.clear();
    assert!(plan(&spec, &facts).is_ok());
    let (window64, window32) = (ByteSize::new(512 * GIB), ByteSize::new(16 * MIB));
    spec.pcie.spare = Some(SparePorts { ports: 2, window64, window32 });
    facts.iommu = Probe::Present(Iommu { groups: 9, iommufd: true });
    assert!(plan(&spec, &facts).unwrap_err().to_string().contains("plugged into a spare port"));
}

/// A machine with a network device and two spare ports.
fn with_spare(facts: &Facts) -> (Spec, Plan) {
    let mut spec = spec(vec![node(0, 4 * GIB, "0-3")]);
    spec.devices.push(device("rng0", false, DeviceKind::VirtioRng));
    let (window64, window32) = (ByteSize::new(512 * GIB), ByteSize::new(16 * MIB));
    spec.pcie.spare = Some(SparePorts { ports: 2, window64, window32 });
    let planned = plan(&spec, facts).unwrap();
    check(&spec, facts, &planned);
    (spec, planned)
}

#[test]
fn a_spare_port_has_a_bus_and_windows_and_memory_is_ready_for_what_comes() {
    let present = Facts { iommu: Probe::Present(Iommu { groups: 9, iommufd: true }), ..facts() };
    let (_, planned) = with_spare(&present);
    let ports: Vec<_> = planned.pci.iter().filter_map(|function| function.role.bridge()).collect();
    assert_eq!(ports.iter().map(|port| port.secondary).collect::<Vec<_>>(), [1, 2]);
    for port in ports {
        assert_eq!((port.window64.unwrap().size(), port.window32.unwrap().size()), (512 * GIB, 16 * MIB));
        assert!(port.window64.unwrap().start().is_aligned(512 * GIB), "a BAR of that size has a place");
    }
    let passthrough = planned.passthrough.unwrap();
    assert_eq!((passthrough.interface, passthrough.groups.len()), (Interface::Legacy, 0));
    let without = Facts { iommu: Probe::Absent("no IOMMU".to_owned()), ..facts() };
    assert_eq!(with_spare(&without).1.passthrough, None);
}

#[test]
fn a_function_is_placed_in_the_windows_of_a_spare_port_or_refused_with_the_size_it_needs() {
    let (_, planned) = with_spare(&facts());
    let port = planned.pci.iter().find_map(|function| function.role.bridge()).unwrap();
    let gpu = big_gpu(9);
    let new = device("gpu0", true, assigned(&gpu));
    let registers = DeviceRegisters { bars: gpu.shown_bars(), msix_vectors: 3 };
    let plugged = plug(&new, Some(&registers), port).unwrap();
    assert_eq!(plugged.msix_vectors, 3);
    let bars = plugged.bars;
    assert_eq!(bars.iter().map(|bar| bar.index).collect::<Vec<_>>(), [0, 2, 4]);
    for bar in &bars {
        assert!(port.window64.unwrap().covers(bar.span) && bar.span.start().is_aligned(bar.span.size()));
    }
    let small =
        BridgePlan { window64: Some(Span::new(port.window64.unwrap().start(), GIB).unwrap()), ..*port };
    let refused = plug(&new, Some(&registers), &small).unwrap_err();
    assert_eq!(refused.blame(), Blame::Configuration);
    let help = refused.help().unwrap();
    assert!(help.contains("\"window64\": \"512GiB\""), "{help}");
}

#[test]
fn a_virtio_device_is_placed_in_a_spare_port_as_behind_a_port_of_its_own() {
    let (spec, planned) = with_spare(&facts());
    let net = &spec.devices[0];
    let at_the_start = planned.pci.iter().find(|function| !function.bars.is_empty()).unwrap();
    let port = planned.pci.iter().find_map(|function| function.role.bridge()).unwrap();
    let plugged = plug(net, None, port).unwrap();
    let of = |function: &FunctionPlan| {
        let bars: Vec<_> = function.bars.iter().map(|bar| (bar.index, bar.kind, bar.span.size())).collect();
        (bars, function.msix_vectors, function.role.clone())
    };
    assert_eq!(of(&plugged), of(at_the_start));
    assert_eq!(plugged.address.bus(), port.secondary);
    assert!(port.window64.unwrap().covers(plugged.bars[0].span));
    let unplaced = BridgePlan { window64: None, ..*port };
    assert!(matches!(plug(net, None, &unplaced), Err(PlanError::SpareWindow { window: 64, .. })));
}
