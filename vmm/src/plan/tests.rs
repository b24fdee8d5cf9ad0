//! What a plan promises, on hand-made and on random machines.

use std::collections::BTreeMap;

use egm_address::{ByteSize, CpuSet, Guest, Io, Iova, Offset, PciAddress, Span};
use egm_device::carve::plan::Cause;
use egm_device::region::{DaxFiles, MemoryMap, Region, RegionKind};
use egm_device::retired::Retired;
use egm_vfio::host::{HostBar, HostBarKind, HostFunction, ReservedKind, ReservedRegion};
use egm_vfio::topology::FunctionPlacement;
use proptest::prelude::*;
use proptest::strategy::ValueTree;

mod arm;
mod assigned;
mod data_direct;
mod functions;
mod limits;
mod notes;
mod page;
mod pages;
mod rows;
mod served;
mod slices;
mod sources;
mod topology;
mod windows;

pub(crate) use arm::egm_first;

use super::*;
use crate::arch::layout_of;
use crate::config::{
    Architecture, BarPlacements, Boot, BootTables, Clique, Console, Cpus, Device, DeviceKind, EgmForm,
    EgmSlice, Memory, Node, OnReset, PageSize, PciTopology, Pcie, VfioBackend,
};
use crate::error::Report;
use crate::facts::{
    FACTS_VERSION, HeldGpu, HeldSpan, HostMemory, HostNode, HostRegion, HugeFiles, Kvm, Pool, Probe, Trust,
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn node(id: u32, size: u64, cpus: &str) -> Node {
    Node {
        id,
        size: ByteSize::new(size),
        cpus: cpus.parse().unwrap(),
        host_nodes: None,
        distances: BTreeMap::new(),
        access: Vec::new(),
    }
}

fn region(name: &str, kind: RegionKind, gib: u64) -> HostRegion {
    let region = Region {
        name: name.to_owned(),
        kind,
        node: Some(0),
        size: ByteSize::new(gib * GIB),
        page_size: ByteSize::new(64 << 10),
        base: None,
        functions: Vec::new(),
        retired: Retired::default(),
    };
    HostRegion { region, held: Vec::new(), clean: Vec::new(), gpus: Vec::new() }
}

fn slice(node: u32, size: u64) -> EgmSlice {
    EgmSlice {
        regions: vec!["local".to_owned()],
        size: ByteSize::new(size),
        node,
        form: EgmForm::Memory,
        page_size: PageSize::Auto,
        host_nodes: None,
        distances: BTreeMap::new(),
        access: Vec::new(),
    }
}

fn device(id: &str, root_port: bool, kind: DeviceKind) -> Device {
    Device { id: id.to_owned(), root_port, kind }
}

/// A machine with these nodes, one vCPU for each CPU that they name.
fn spec(nodes: Vec<Node>) -> Spec {
    let count = u32::try_from(nodes.iter().map(|node| node.cpus.len()).sum::<usize>()).unwrap();
    Spec {
        name: "test".to_owned(),
        description: String::new(),
        arch: Architecture::X86_64,
        cpus: Cpus { count, sockets: 1, cores: count, threads: 1, affinity: Vec::new() },
        memory: Memory {
            size: ByteSize::new(nodes.iter().map(|node| node.size.get()).sum()),
            page_size: PageSize::Auto,
            prefault: false,
            nodes,
        },
        boot: Boot {
            kernel: "vmlinuz".into(),
            initramfs: None,
            cmdline: String::new(),
            tables: BootTables::Acpi,
        },
        egm: Vec::new(),
        devices: Vec::new(),
        console: Console::Null,
        pcie: Pcie { window64: None, topology: PciTopology::Mirror, spare: None },
        on_reset: OnReset::Exit,
        trust_domain: None,
    }
}

fn facts() -> Facts {
    let memory = HostMemory { total: ByteSize::new(512 * GIB), available: ByteSize::new(500 * GIB) };
    let node = |id, cpus: &str| HostNode {
        id,
        cpus: cpus.parse().unwrap(),
        memory: HostMemory { total: ByteSize::new(256 * GIB), available: ByteSize::new(250 * GIB) },
        distances: vec![10, 21],
        pools: vec![Pool { page_size: ByteSize::new(GIB), total: 4, free: 3 }],
    };
    Facts {
        version: FACTS_VERSION,
        description: "made by hand".to_owned(),
        arch: Architecture::X86_64,
        product: String::new(),
        cpu_vendor: "GenuineIntel".to_owned(),
        kernel: "6.12.0".to_owned(),
        command_line: String::new(),
        address_bits: 46,
        kvm: Probe::Present(Kvm { max_vcpus: 1024, x2apic: true }),
        memory,
        memory_map: MemoryMap::default(),
        shmem_huge_pages: "advise".to_owned(),
        anonymous_huge_pages: "madvise".to_owned(),
        huge_page: ByteSize::new(2 << 20),
        huge_files: Probe::Present(HugeFiles { user_namespace: false }),
        nodes: vec![node(0, "0-31"), node(1, "32-63")],
        iommu: Probe::Absent("not asked".to_owned()),
        regions: vec![
            region("dax0.0", RegionKind::Devdax { device: "/dev/dax0.0".into(), files: DaxFiles::Static }, 8),
            region("egm4", RegionKind::Egm { device: "/dev/egm4".into() }, 64),
        ],
        functions: Vec::new(),
        servers: Vec::new(),
    }
}

fn gpu(bus: u8, bars: &[(u8, HostBarKind, u64)]) -> HostFunction {
    HostFunction {
        address: PciAddress::new(0, bus, 0, 0).unwrap(),
        vendor: 0x10de,
        device: 0x2335,
        class: 0x03_0200,
        driver: Some("vfio-pci".to_owned()),
        numa_node: Some(0),
        iommu_group: Some(u32::from(bus)),
        bars: bars.iter().map(|&(index, kind, size)| HostBar { index, kind, size, start: 0 }).collect(),
        msix_vectors: Some(6),
        reserved: vec![ReservedRegion {
            span: Span::<Io>::new(Iova::new(0xfee0_0000), MIB).unwrap(),
            kind: ReservedKind::Msi,
        }],
        place: FunctionPlacement::default(),
        iova_bits: None,
        memory: Vec::new(),
        card: None,
    }
}

fn big_gpu(bus: u8) -> HostFunction {
    let kind = HostBarKind::Memory64Prefetchable;
    gpu(bus, &[(0, kind, 16 * MIB), (2, kind, 256 * GIB), (4, kind, 32 * MIB)])
}

fn assigned(function: &HostFunction) -> DeviceKind {
    DeviceKind::Vfio {
        function: function.address,
        backend: VfioBackend::Auto,
        clique: Clique::Auto,
        bars: BarPlacements::Guest,
        p2p: true,
    }
}

fn assign(spec: &mut Spec, facts: &mut Facts, function: HostFunction, root_port: bool) {
    let kind = assigned(&function);
    spec.devices.push(device(&format!("vfio{}", spec.devices.len()), root_port, kind));
    facts.functions.push(function);
}

fn spans(plan: &Plan) -> Vec<String> {
    plan.memory.iter().map(|m| format!("{} +{:#x}", m.span, m.offset)).collect()
}

/// Everything that every plan promises.
fn check(spec: &Spec, facts: &Facts, plan: &Plan) {
    let mut all: Vec<Span<Guest>> = plan.memory.iter().map(|m| m.span).collect();
    all.extend(plan.windows.iter().map(|w| w.span));
    all.sort();
    assert!(all.windows(2).all(|pair| !pair[0].overlaps(pair[1])), "overlap in {all:?}");
    assert!(all.iter().all(|span| span.end().get() <= 1 << plan.address_bits), "beyond the address bits");
    check_backings(spec, plan);
    check_reserved(spec, facts, plan);
    check_bars(plan);
    let bytes: u64 = plan.nodes.iter().map(|node| node.memory).sum();
    assert_eq!(bytes, plan.memory.iter().map(|m| m.span.size()).sum::<u64>());
    let slices = spec.egm.iter().filter(|slice| slice.form == EgmForm::Memory);
    assert_eq!(plan.nodes.len(), spec.memory.nodes.len() + slices.count());
    for (i, row) in plan.distances.iter().enumerate() {
        assert_eq!((row.len(), row[i]), (plan.nodes.len(), 10));
    }
}

/// Each backing is used once and whole, but for the hole in the first; huge pages survive.
fn check_backings(spec: &Spec, plan: &Plan) {
    let hole = layout_of(plan.arch).ram_hole.size();
    for (index, backing) in plan.backings.iter().enumerate() {
        let mut pieces: Vec<_> = plan.memory.iter().filter(|m| m.backing == index).collect();
        pieces.sort_by_key(|m| m.offset);
        assert!(pieces.windows(2).all(|pair| pair[0].offset + pair[0].span.size() <= pair[1].offset));
        let used: u64 = pieces.iter().map(|m| m.span.size()).sum();
        let lost = if index == 0 { hole } else { 0 };
        let lost = if backing.device { backing.size } else { lost };
        assert_eq!(used + lost, backing.size, "{}", backing.id);
        let unit = backing.page_size.bytes().max(2 * MIB);
        let base = layout_of(plan.arch).ram[0].start().get();
        for piece in pieces {
            let apart = piece.span.start().get() - if index == 0 { base } else { 0 } - piece.offset;
            assert_eq!(apart % unit, 0, "{} at {}", backing.id, piece.span);
        }
    }
    for WindowMemory { span: window, backing, offset } in plan.window_memory() {
        let size = plan.backings[backing].size;
        assert!(plan.memory.iter().all(|m| {
            m.backing != backing || m.offset >= offset + window.size() || m.offset + m.span.size() <= offset
        }));
        assert!(offset + window.size() <= size);
    }
    let slices = spec.egm.iter().filter(|slice| slice.form == EgmForm::Memory);
    assert_eq!(plan.memory.iter().filter(|m| m.kind == MemoryKind::Egm).count(), slices.count());
}

fn check_reserved(spec: &Spec, facts: &Facts, plan: &Plan) {
    let assigned = |f: &&HostFunction| {
        spec.devices
            .iter()
            .any(|d| matches!(d.kind, DeviceKind::Vfio { function, .. } if function == f.address))
    };
    for region in facts.functions.iter().filter(assigned).flat_map(|f| &f.reserved) {
        let (start, end) = (region.span.start().get(), region.span.end().get());
        let clear = |span: Span<Guest>| span.end().get() <= start || end <= span.start().get();
        assert!(plan.memory.iter().all(|m| clear(m.span)), "memory in {region:?}");
        assert!(plan.pci.iter().flat_map(|f| &f.bars).all(|bar| clear(bar.span)), "BAR in {region:?}");
    }
}

fn check_bars(plan: &Plan) {
    let mut all: Vec<Span<Guest>> = plan.pci.iter().flat_map(|f| &f.bars).map(|bar| bar.span).collect();
    all.sort();
    assert!(all.windows(2).all(|pair| !pair[0].overlaps(pair[1])), "BARs overlap: {all:?}");
    for function in &plan.pci {
        let mut bridges = plan.pci.iter().filter_map(|f| f.role.bridge());
        let port = bridges.find(|bridge| bridge.secondary == function.address.bus());
        let port = port.map(|bridge| (bridge.window32, bridge.window64));
        for bar in &function.bars {
            assert!(bar.span.size().is_power_of_two() && bar.span.start().is_aligned(bar.span.size()));
            let high = bar.kind == BarKind::Memory64Prefetchable;
            let kind = if high { WindowKind::PciMemory64 } else { WindowKind::PciMemory32 };
            assert!(plan.window(kind).unwrap().covers(bar.span));
            if let Some((low_window, high_window)) = port {
                let window = if high { high_window } else { low_window }.unwrap();
                assert!(
                    window.covers(bar.span) && window.start().is_aligned(MIB) && window.end().is_aligned(MIB)
                );
            }
        }
    }
}

#[test]
fn a_small_machine_has_its_memory_below_the_hole() {
    let spec = spec(vec![node(0, 512 * MIB, "0-1")]);
    let plan = plan(&spec, &facts()).unwrap();
    check(&spec, &facts(), &plan);
    assert_eq!(spans(&plan), ["0x0..0xa0000 +0x0", "0x100000..0x20000000 +0x100000"]);
    assert_eq!(plan.window(WindowKind::PciMemory64).unwrap().to_string(), "0x1000000000..0x2000000000");
    assert_eq!((plan.line("serial"), plan.port("reset")), (Some(4), Some(0x604)));
    assert_eq!(plan.window_memory().map(|memory| memory.offset).collect::<Vec<_>>(), [0xc_0000, 0xe_0000]);
}

#[test]
fn a_node_goes_on_above_the_hole_and_egm_comes_last() {
    let mut spec = spec(vec![node(0, 2 * GIB, "0"), node(2, 2 * GIB, "1")]);
    spec.egm = vec![slice(7, GIB), slice(1, 4 * MIB)];
    let plan = plan(&spec, &facts()).unwrap();
    check(&spec, &facts(), &plan);
    assert_eq!(
        spans(&plan),
        [
            "0x0..0xa0000 +0x0",
            "0x100000..0x80000000 +0x100000",
            "0x80000000..0xc0000000 +0x0",
            "0x100000000..0x140000000 +0x40000000",
            "0x140000000..0x180000000 +0x0",
            "0x180000000..0x180400000 +0x0",
        ]
    );
    assert_eq!(plan.nodes.iter().map(|n| n.id).collect::<Vec<_>>(), [0, 2, 1, 7]);
}

#[test]
fn amd_hosts_keep_their_hypertransport_range_free() {
    let spec = spec(vec![node(0, 1100 * GIB, "0")]);
    let mut facts = facts();
    facts.cpu_vendor = "AuthenticAMD".to_owned();
    facts.memory.total = ByteSize::new(2048 * GIB);
    let plan = plan(&spec, &facts).unwrap();
    check(&spec, &facts, &plan);
    assert_eq!(plan.memory[2].span.end().get(), 0xfd_0000_0000);
    assert_eq!(plan.memory[3].span.start().get(), 0x100_0000_0000);
    assert!(plan.windows.iter().any(|w| w.label == "AMD HyperTransport"));
}

#[test]
fn eight_gpus_with_256_gib_bars_fit_and_each_has_its_port() {
    let (mut spec, mut facts) = (spec(vec![node(0, 64 * GIB, "0-7")]), facts());
    for bus in 1..=8 {
        assign(&mut spec, &mut facts, big_gpu(bus), true);
    }
    let plan = plan(&spec, &facts).unwrap();
    check(&spec, &facts, &plan);
    assert_eq!(plan.pci.len(), 17);
    assert_eq!(plan.pci[16].address.to_string(), "0000:08:00.0");
}

#[test]
fn port_bars_are_left_out_and_64_bit_ones_that_cannot_be_prefetched_stay_low() {
    let (mut spec, mut facts) = (spec(vec![node(0, GIB, "0")]), facts());
    let bars =
        [(0, HostBarKind::Memory64, 0x4000), (2, HostBarKind::Ports, 32), (3, HostBarKind::Memory32, 1000)];
    assign(&mut spec, &mut facts, gpu(1, &bars), true);
    let plan = plan(&spec, &facts).unwrap();
    check(&spec, &facts, &plan);
    let bars: Vec<_> = plan.pci[2].bars.iter().map(|b| (b.index, b.kind, b.span.to_string())).collect();
    assert_eq!(bars[0], (0, BarKind::Memory64, "0xc0000000..0xc0004000".to_owned()));
    assert_eq!(bars[1], (3, BarKind::Memory32, "0xc0004000..0xc0004400".to_owned()));
}

#[test]
fn apic_ids_have_fields_of_whole_bits() {
    let mut spec = spec(vec![node(0, GIB, "0-11")]);
    spec.cpus = Cpus { count: 12, sockets: 2, cores: 3, threads: 2, affinity: Vec::new() };
    let ids: Vec<_> = plan(&spec, &facts()).unwrap().vcpus.iter().map(|vcpu| vcpu.hardware_id).collect();
    assert_eq!(ids, [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]);
}

#[test]
fn memory_over_the_address_bits_states_by_how_much() {
    let mut facts = facts();
    facts.address_bits = 36;
    let error = plan(&spec(vec![node(0, 64 * GIB, "0")]), &facts).unwrap_err();
    assert!(
        matches!(error, PlanError::AddressSpace { short_by: GIB, bits: AddressBits::Guest(36), .. }),
        "{error}"
    );
    // A smaller one leaves room for a window, but not for the preferred 64 GiB.
    let small = spec(vec![node(0, 4 * GIB, "0")]);
    let window = plan(&small, &facts).unwrap().window(WindowKind::PciMemory64).unwrap();
    assert_eq!(window.to_string(), "0x800000000..0x1000000000");
}

#[test]
fn what_the_host_lacks_is_named_with_a_remedy() {
    let base = || spec(vec![node(0, 8 * GIB, "0-1")]);
    let mut huge = base();
    huge.memory.page_size = PageSize::Size1G;
    huge.memory.nodes[0].host_nodes = Some("1".parse().unwrap());
    let error = plan(&huge, &facts()).unwrap_err();
    assert_eq!(error.to_string(), "node0 needs 8 free huge pages of 1GiB, and host node 1 has 3");
    let help = error.help().unwrap();
    assert_eq!(
        help,
        "echo 9 > /sys/devices/system/node/node1/hugepages/hugepages-1048576kB/nr_hugepages (as root), or set \"page_size\": \"auto\""
    );

    let large = spec(vec![node(0, 600 * GIB, "0")]);
    assert!(
        matches!(plan(&large, &facts()), Err(PlanError::HostMemory { needed, .. }) if needed == 600 * GIB)
    );
    let mut bound = spec(vec![node(0, 300 * GIB, "0")]);
    bound.memory.nodes[0].host_nodes = Some("0".parse().unwrap());
    assert!(matches!(plan(&bound, &facts()), Err(PlanError::HostMemory { has, .. }) if has == 252 * GIB));
    let help = |spec: &Spec| plan(spec, &facts()).unwrap_err().help().unwrap();
    assert_eq!(help(&large), "lower \"memory.size\"");
    assert_eq!(help(&bound), "lower \"memory.size\", or bind it to other host nodes with \"host_nodes\"");
    bound.memory.nodes[0].host_nodes = Some("0,5".parse().unwrap());
    assert!(matches!(plan(&bound, &facts()), Err(PlanError::HostNode { node: 5, .. })));

    let mut pinned = base();
    pinned.cpus.affinity = vec!["0".parse().unwrap(), "63-64".parse().unwrap()];
    assert!(matches!(plan(&pinned, &facts()), Err(PlanError::HostCpu { vcpu: 1, cpu: 64, .. })));

    let mut few = facts();
    few.kvm = Probe::Present(Kvm { max_vcpus: 1, x2apic: true });
    assert_eq!(plan(&base(), &few), Err(PlanError::Vcpus { count: 2, max: 1 }));
    few.arch = Architecture::Aarch64;
    assert!(matches!(plan(&base(), &few), Err(PlanError::Architecture { .. })));
}

#[test]
fn an_egm_region_gives_no_more_than_it_has() {
    let mut spec = spec(vec![node(0, GIB, "0")]);
    spec.egm = vec![slice(1, 40 * GIB), slice(2, 40 * GIB)];
    for slice in &mut spec.egm {
        slice.regions = vec!["egm4".to_owned()];
    }
    let error = plan(&spec, &facts()).unwrap_err();
    let PlanError::NoPlacement { slice: 1, tried } = &error else { panic!("{error}") };
    let NoPlacement::Short { short, held } = &tried[0].1 else { panic!("{error}") };
    assert!(matches!(short.cause, Cause::Granted { short_by, .. } if short_by == 16 * GIB), "{short}");
    assert_eq!(held[0].owner, "this machine");
    spec.egm[0].regions = vec!["egm9".to_owned()];
    let text = plan(&spec, &facts()).unwrap_err().to_string();
    assert_eq!(text, "EGM slice 0 comes from region \"egm9\", and the host has dax0.0, egm4");
}

#[test]
fn a_slice_falls_back_along_its_list_and_the_plan_names_what_is_lost() {
    let mut spec = spec(vec![node(0, GIB, "0")]);
    spec.egm = vec![slice(1, 60 * GIB), slice(2, 6 * GIB), slice(3, 6 * GIB)];
    for slice in &mut spec.egm {
        slice.regions = ["egm", "devdax", "hugetlb", "memfd"].map(str::to_owned).to_vec();
    }
    let mut facts = facts();
    let mut hugetlb = facts.regions[0].clone();
    hugetlb.region.name = "hugetlb-1g-node0".to_owned();
    hugetlb.region.kind = RegionKind::Hugetlb;
    hugetlb.region.page_size = ByteSize::new(GIB);
    facts.regions.push(hugetlb);
    let from = |facts: &Facts| {
        let plan = plan(&spec, facts).unwrap();
        let regions = plan.backings.iter().skip(1).map(|backing| (backing.region.clone(), backing.page_size));
        (regions.collect::<Vec<_>>(), plan.notes)
    };
    let [egm, devdax] = ["egm4", "dax0.0"].map(|region| (Some(region.to_owned()), PageSize::Auto));
    let (regions, notes) = from(&facts);
    assert_eq!(
        regions,
        [egm.clone(), devdax.clone(), (Some("hugetlb-1g-node0".to_owned()), PageSize::Size1G)]
    );
    assert_eq!(notes.len(), 2);
    assert!(notes[0].contains("struct pages") && notes[1].contains("\"hugetlb\""), "{notes:?}");
    facts.regions.pop();
    let (regions, notes) = from(&facts);
    assert_eq!(regions, [egm, devdax, (None, PageSize::Auto)]);
    assert!(notes[1].contains("\"memfd\"") && notes[1].contains("its pages may be small"), "{notes:?}");
    spec.egm[2].regions.pop();
    let text = plan(&spec, &facts).unwrap_err().to_string();
    assert!(text.contains("\"hugetlb\": the host has none"), "{text}");
}

/// One slice that prefers memory of the machine's own VM, on a host with such memory in KVM.
fn of_the_machine(then: &[&str]) -> (Spec, Facts) {
    let (mut spec, mut facts) = (spec(vec![node(0, GIB, "0")]), facts());
    spec.egm = vec![slice(1, GIB)];
    spec.egm[0].regions = ["guest-memfd"].iter().chain(then).map(|&region| region.to_owned()).collect();
    facts.regions[0].region.kind = RegionKind::GuestMemfd;
    (spec, facts)
}

#[test]
fn memory_of_the_machine_itself_has_no_region_and_is_taken_from_the_hosts_ordinary_memory() {
    let (mut spec, mut facts) = of_the_machine(&["memfd"]);
    let made = plan(&spec, &facts).unwrap();
    let egm = &made.backings[1];
    assert_eq!((egm.guest_memfd, &egm.region, egm.page_size, egm.hpa), (true, &None, PageSize::Size4K, None));
    assert!(text(&made, &View::of(&facts)).contains("guest_memfd of the machine itself, 4 KiB pages"));
    assert_eq!((made.backings[0].guest_memfd, made.notes.len()), (false, 0));
    facts.memory.total = ByteSize::new(GIB + MIB);
    assert!(matches!(plan(&spec, &facts), Err(PlanError::HostMemory { .. })));
    facts.memory.total = ByteSize::new(64 * GIB);
    spec.egm[0].regions = ["hugetlb", "guest-memfd"].map(str::to_owned).to_vec();
    let notes = plan(&spec, &facts).unwrap().notes;
    assert!(notes[0].contains("its pages are small, and one that goes bad ends the machine"), "{notes:?}");
}

#[test]
fn a_host_without_memory_of_machines_is_named_as_what_lacks_it() {
    let (mut spec, mut facts) = of_the_machine(&["memfd"]);
    facts.regions.remove(0);
    let other = plan(&spec, &facts).unwrap();
    assert!(
        !other.backings[1].guest_memfd && other.notes[0].contains("KVM_CAP_GUEST_MEMFD_FLAGS"),
        "{:?}",
        other.notes
    );
    spec.egm[0].regions.pop();
    let error = plan(&spec, &facts).unwrap_err();
    assert!(
        error.to_string().contains("Linux 6.18") && error.blame() == crate::error::Blame::Host,
        "{error}"
    );
}

#[test]
fn a_choice_of_pages_or_nodes_excludes_memory_without_a_choice() {
    for key in ["page_size", "host_nodes"] {
        let (mut spec, facts) = of_the_machine(&[]);
        match key {
            "page_size" => spec.egm[0].page_size = PageSize::Size2M,
            _ => spec.egm[0].host_nodes = Some("0".parse().unwrap()),
        }
        let text = plan(&spec, &facts).unwrap_err().to_string();
        assert!(text.contains(&format!("the slice chooses \"{key}\"")), "{text}");
    }
}

#[test]
fn two_slices_of_a_region_do_not_overlap_and_a_busy_place_is_passed_over() {
    let (mut spec, mut facts) = (spec(vec![node(0, GIB, "0")]), facts());
    spec.egm = vec![slice(1, 2 * GIB), slice(2, GIB)];
    for slice in &mut spec.egm {
        slice.regions = vec!["egm4".to_owned()];
    }
    let span = Span::new(Offset::new(0), MIB).unwrap();
    facts.regions[1].held = vec![HeldSpan { span, owner: "vm9".to_owned(), trust: Trust::Alone }];
    let plan = plan(&spec, &facts).unwrap();
    let offsets: Vec<_> = plan.backings.iter().skip(1).map(|backing| backing.offset).collect();
    assert_eq!(offsets, [GIB, 3 * GIB]);
}

#[test]
fn retired_pages_are_holes_of_the_guests_memory_at_the_same_distance_from_its_start() {
    let (mut spec, mut facts) = (spec(vec![node(0, GIB, "0")]), facts());
    spec.egm = vec![slice(1, 64 * GIB)];
    spec.egm[0].regions = vec!["egm4".to_owned()];
    let page = 64 << 10;
    facts.regions[1].region.retired = Retired::new([(GIB, page), (0, page)], 64 * GIB, page);
    let plan = plan(&spec, &facts).unwrap();
    let pieces: Vec<_> = plan.memory.iter().filter(|m| m.kind == MemoryKind::Egm).collect();
    let base = pieces[0].span.start().get() - page;
    let offsets: Vec<_> =
        pieces.iter().map(|m| (m.offset, m.span.start().get() - base, m.span.size())).collect();
    assert_eq!(offsets, [(page, page, GIB - page), (GIB + page, GIB + page, 63 * GIB - page)]);
    assert!(base.is_multiple_of(GIB));
    assert_eq!(plan.nodes[1].memory, 64 * GIB - 2 * page);
}

#[test]
fn devices_that_do_not_fit_are_named() {
    let (mut spec, mut facts) = (spec(vec![node(0, GIB, "0")]), facts());
    assign(&mut spec, &mut facts, big_gpu(1), true);
    spec.pcie.window64 = Some(ByteSize::new(64 * GIB));
    let error = plan(&spec, &facts).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot place device \"vfio0\" in the 64-bit PCI window 0x1000000000..0x2000000000"
    );
    assert_eq!(error.help().unwrap(), "set \"pcie\": {\"window64\": \"512GiB\"}, or leave it out");
    spec.pcie.window64 = Some(ByteSize::new(512 * GIB));
    check(&spec, &facts, &plan(&spec, &facts).unwrap());

    let large = [(0, HostBarKind::Memory32, 512 * MIB), (1, HostBarKind::Memory32, 16)];
    assign(&mut spec, &mut facts, gpu(2, &large), false);
    let error = plan(&spec, &facts).unwrap_err();
    assert!(matches!(error, PlanError::Window { window: "32-bit", .. }), "{error}");
    facts.functions.clear();
    let unknown = plan(&spec, &facts).unwrap_err();
    assert!(matches!(unknown, PlanError::UnknownFunction { .. }));
    assert_eq!(unknown.blame(), crate::error::Blame::Host);
    spec.devices = (0..32).map(|i| device(&format!("rng{i}"), i % 2 == 0, DeviceKind::VirtioRng)).collect();
    assert_eq!(plan(&spec, &facts), Err(PlanError::Bus0 { devices: 32, max: 31 }));
}

fn any_node_sizes() -> impl Strategy<Value = Vec<u64>> {
    let size = prop_oneof![
        Just(0),
        (1u64..4096).prop_map(|pages| pages << 12),
        (1u64..2048).prop_map(|m| m * MIB),
        (1u64..200).prop_map(|g| g * GIB)
    ];
    prop::collection::vec(size, 1..5)
}

prop_compose! {
    fn any_function()(
        bars in prop::collection::vec((0u8..6, 0u8..5, prop_oneof![9 => 4u32..40, 1 => 40u32..64]), 0..6),
        reserved in prop::collection::vec((0u64..1 << 20, 1u64..1 << 12), 0..3),
    ) -> HostFunction {
        let kinds = [
            HostBarKind::Ports,
            HostBarKind::Memory32,
            HostBarKind::Memory32Prefetchable,
            HostBarKind::Memory64,
            HostBarKind::Memory64Prefetchable,
        ];
        // Registers are usually dealt in order, as hardware has them; overlapping ones are refused.
        let bars: Vec<_> = bars
            .iter()
            .map(|&(index, kind, shift)| {
                let kind = kinds[usize::from(kind)];
                let wide = kind == HostBarKind::Memory64Prefetchable;
                (index, kind, 1u64 << if wide { shift } else { shift % 26 })
            })
            .take(1 + bars.len() / 3)
            .collect();
        let mut function = gpu(1, &bars);
        let region = |(page, pages): (u64, u64)| {
            let span = Span::new(Iova::new(page << 20), pages << 16).unwrap();
            ReservedRegion { span, kind: ReservedKind::Direct }
        };
        function.reserved = reserved.into_iter().map(region).collect();
        function
    }
}

prop_compose! {
    fn any_machine()(
        aarch64: bool,
        sizes in any_node_sizes(),
        page_size in prop::sample::select(vec![PageSize::Auto, PageSize::Size4K]),
        egm in prop::collection::vec(1u64..3000, 0..3),
        functions in prop::collection::vec((any_function(), any::<bool>()), 0..4),
        virtio in prop::collection::vec(any::<bool>(), 0..6),
        window64 in prop::option::of(1u64..1 << 12),
        amd: bool,
        bits in 36u8..=52,
    ) -> (Spec, Facts) {
        let nodes = sizes.iter().zip(0u32..).map(|(size, i)| node(i * 3, *size, &i.to_string())).collect();
        let (mut spec, mut facts) = (spec(nodes), facts());
        let arch = if aarch64 { Architecture::Aarch64 } else { Architecture::X86_64 };
        (spec.arch, facts.arch) = (arch, arch);
        spec.memory.page_size = page_size;
        spec.egm = egm.iter().zip(20..).map(|(size, id)| slice(id, size * 2 * MIB)).collect();
        for (bus, (mut function, root_port)) in (1..).zip(functions) {
            function.address = PciAddress::new(0, bus, 0, 0).unwrap();
            assign(&mut spec, &mut facts, function, root_port);
        }
        for (i, root_port) in virtio.into_iter().enumerate() {
            spec.devices.push(device(&format!("rng{i}"), root_port, DeviceKind::VirtioRng));
        }
        spec.pcie.window64 = window64.map(|size| ByteSize::new(size * GIB));
        if amd {
            facts.cpu_vendor = "AuthenticAMD".to_owned();
        }
        facts.address_bits = bits;
        facts.memory.total = ByteSize::new(1 << 50);
        (spec, facts)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    #[test]
    fn any_machine_has_a_sound_plan_or_an_error((spec, facts) in any_machine()) {
        let first = plan(&spec, &facts);
        prop_assert_eq!(&first, &plan(&spec, &facts), "not deterministic");
        match first {
            Ok(plan) => check(&spec, &facts, &plan),
            Err(error) => prop_assert!(!matches!(error, PlanError::Internal(_)), "{}", error),
        }
    }
}

/// The property above proves little if nearly every random machine is refused.
#[test]
fn most_random_machines_have_a_plan() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let planned = (0..200)
        .filter(|_| {
            let (spec, facts) = any_machine().new_tree(&mut runner).unwrap().current();
            plan(&spec, &facts).is_ok()
        })
        .count();
    assert!(planned > 60, "{planned} of 200");
}

#[test]
fn a_plan_survives_its_json_form() {
    let (mut spec, mut facts) = (spec(vec![node(0, 5 * GIB, "0")]), facts());
    assign(&mut spec, &mut facts, big_gpu(3), true);
    let made = plan(&spec, &facts).unwrap();
    let text = serde_json::to_string(&made).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), made);
    let text = serde_json::to_string(&facts).unwrap();
    assert_eq!(serde_json::from_str::<Facts>(&text).unwrap(), facts);
}

#[test]
fn a_cpu_set_of_a_node_is_kept() {
    let plan = plan(&spec(vec![node(0, GIB, "0-1"), node(1, 0, "2")]), &facts()).unwrap();
    let cpus: Vec<CpuSet> = plan.nodes.iter().map(|node| node.cpus.clone()).collect();
    assert_eq!(cpus, ["0-1".parse().unwrap(), "2".parse().unwrap()]);
    assert_eq!(plan.vcpus.iter().map(|vcpu| vcpu.node).collect::<Vec<_>>(), [0, 0, 1]);
}

/// A machine with GPU 0009:01:00.0 and no slice, on a host where that GPU reaches region egm4.
fn with_a_gpu() -> (Spec, Facts) {
    let (mut spec, mut facts) = (spec(vec![node(0, GIB, "0")]), facts());
    let function = "0009:01:00.0".parse().unwrap();
    facts.regions[1].region.functions = vec![function];
    let (backend, clique, bars) = (VfioBackend::Auto, Clique::Auto, BarPlacements::Guest);
    spec.devices =
        vec![device("gpu0", true, DeviceKind::Vfio { function, backend, clique, bars, p2p: true })];
    (spec, facts)
}

#[test]
fn a_gpu_and_another_owners_slice_of_its_region_make_no_plan() {
    let (mut spec, mut facts) = with_a_gpu();
    let span = Span::new(Offset::new(0), MIB).unwrap();
    let refused = |spec: &Spec, facts: &Facts| matches!(plan(spec, facts), Err(PlanError::Exclusive(_)));
    for (theirs, ours, expected) in [
        (Trust::Unrecorded, None, false),
        (Trust::Alone, None, true),
        (Trust::Alone, Some("a"), true),
        (Trust::Domain("b".to_owned()), Some("a"), true),
        (Trust::Domain("a".to_owned()), Some("a"), false),
    ] {
        facts.regions[1].held = vec![HeldSpan { span, owner: "vm9".to_owned(), trust: theirs.clone() }];
        spec.trust_domain = ours.map(str::to_owned);
        assert_eq!(refused(&spec, &facts), expected, "{theirs:?} {ours:?}");
    }
    facts.regions[1].held = vec![HeldSpan { span, owner: "vm9".to_owned(), trust: Trust::Alone }];
    spec.trust_domain = None;
    let error = plan(&spec, &facts).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot give GPU 0009:01:00.0, which reaches all of region egm4, to machine \"test\" of no trust domain: vm9 of no \
         trust domain has a slice of the region"
    );
    assert!(error.help().unwrap().contains("--trust-domain") && error.blame() == crate::error::Blame::Host);
    // A GPU that no region names has no aperture to host memory.
    facts.regions[1].region.functions.clear();
    assert!(!refused(&spec, &facts));
}

#[test]
fn a_slice_of_a_region_that_anothers_gpu_reaches_comes_from_elsewhere_or_is_refused() {
    let (mut spec, mut facts) = (spec(vec![node(0, GIB, "0")]), facts());
    spec.egm = vec![slice(1, GIB)];
    spec.egm[0].regions = vec!["egm4".to_owned()];
    let function = "0009:01:00.0".parse().unwrap();
    facts.regions[1].gpus =
        vec![HeldGpu { function, owner: "vm9".to_owned(), trust: Trust::Domain("b".to_owned()) }];
    let error = plan(&spec, &facts).unwrap_err();
    assert_eq!(
        error.to_string(),
        "EGM slice 0 has no place: \"egm4\": cannot give a slice of region egm4 to machine \"test\" of no trust domain: the \
         region is exclusive to vm9 of trust domain \"b\", which has GPU 0009:01:00.0"
    );
    assert!(error.help().unwrap().contains("--trust-domain"));
    spec.egm[0].regions.push("memfd".to_owned());
    assert!(plan(&spec, &facts).unwrap().notes[0].contains("the region is exclusive to vm9"));
    spec.trust_domain = Some("b".to_owned());
    assert!(plan(&spec, &facts).unwrap().notes.is_empty());
}

/// The word of configurations is the region's, of another package.
#[test]
fn a_slice_names_memory_of_its_own_machine_as_the_region_does() {
    assert_eq!(RegionKind::GuestMemfd.word(), crate::config::GUEST_MEMFD);
}
