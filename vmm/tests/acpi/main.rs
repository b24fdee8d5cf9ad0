//! The ACPI tables as a guest sees them: read back by a reader that shares no code with the writer, and by `iasl`.

#![expect(clippy::tests_outside_test_module, reason = "an integration test is a test module")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod arm;
mod efi;
mod tree;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use egm_address::{CpuSet, Gpa, Guest, PciAddress, Span};
use egm_vmm::config::{Access, Architecture, Console, MAX_VCPUS, OnReset};
use egm_vmm::error::{Blame, Report};
use egm_vmm::firmware::{FirmwareError, Image, RESET_VECTOR_SIZE, build};
use egm_vmm::plan::{
    BridgePlan, FunctionPlan, FunctionRole, LinePlan, MemoryKind, MemoryPlan, NodePlan, PLAN_VERSION, Plan,
    PortPlan, VcpuPlan, WindowKind, WindowPlan,
};
use proptest::prelude::*;

fn span(start: u64, size: u64) -> Span<Guest> {
    Span::new(Gpa::new(start), size).unwrap()
}

fn memory(start: u64, size: u64, node: u32) -> MemoryPlan {
    MemoryPlan { span: span(start, size), kind: MemoryKind::Ram, node, backing: 0, offset: 0 }
}

fn window(kind: WindowKind, label: &str, start: u64, size: u64) -> WindowPlan {
    WindowPlan { kind, label: label.to_owned(), span: span(start, size) }
}

fn vcpu(index: u32, hardware_id: u32, node: u32) -> VcpuPlan {
    VcpuPlan { index, hardware_id, socket: 0, core: index, thread: 0, node, host_cpus: None }
}

/// A node; an access figure is (looking node, nanoseconds, MB/s).
fn node(id: u32, cpus: impl IntoIterator<Item = u32>, access: &[(u32, u32, u32)]) -> NodePlan {
    let cpus: CpuSet = cpus.into_iter().collect();
    let access =
        access.iter().map(|&(from, latency_ns, bandwidth_mbps)| Access { from, latency_ns, bandwidth_mbps });
    NodePlan { id, egm: cpus.is_empty(), cpus, memory: 1 << 30, access: access.collect(), initiator: None }
}

fn root_port(device: u8, secondary: u8) -> FunctionPlan {
    let bridge = BridgePlan { secondary, subordinate: secondary, window32: None, window64: None, acs: None };
    let role = FunctionRole::RootPort { slot: secondary.into(), bridge };
    FunctionPlan {
        address: PciAddress::new(0, 0, device, 0).unwrap(),
        role,
        bars: Vec::new(),
        msix_vectors: 0,
    }
}

/// Four processors in two nodes, an EGM node 5 without any, two root ports.
fn sample_plan() -> Plan {
    let boot = serde_json::json!({ "kernel": "vmlinuz", "initramfs": null, "cmdline": "" });
    let port = |first, count, owner: &str| PortPlan { first, count, owner: owner.to_owned() };
    let host_bridge = FunctionPlan {
        address: PciAddress::new(0, 0, 0, 0).unwrap(),
        role: FunctionRole::HostBridge,
        bars: Vec::new(),
        msix_vectors: 0,
    };
    Plan {
        version: PLAN_VERSION,
        name: "sample".to_owned(),
        description: String::new(),
        arch: Architecture::X86_64,
        boot: serde_json::from_value(boot).unwrap(),
        console: Console::Null,
        on_reset: OnReset::Exit,
        address_bits: 46,
        vcpus: vec![vcpu(0, 0, 0), vcpu(1, 1, 0), vcpu(2, 0x10, 1), vcpu(3, 0x111, 1)],
        backings: Vec::new(),
        memory: vec![
            memory(0, 0xa_0000, 0),
            memory(0x10_0000, 0x3ff0_0000, 0),
            memory(0x4000_0000, 0x4000_0000, 0),
            memory(0x1_0000_0000, 0x4000_0000, 1),
            memory(0x1_4000_0000, 0x4000_0000, 5),
        ],
        windows: vec![
            window(WindowKind::Firmware, "firmware", 0xe_0000, 0x2_0000),
            window(WindowKind::PciMemory32, "PCI 32", 0xc000_0000, 0x2000_0000),
            window(WindowKind::Ecam, "ECAM", 0xe000_0000, 0x1000_0000),
            window(WindowKind::Interrupts, "I/O APIC", 0xfec0_0000, 0x1000),
            window(WindowKind::Interrupts, "local APIC", 0xfee0_0000, 0x1000),
            window(WindowKind::PciMemory64, "PCI 64", 0x100_0000_0000, 0x100_0000_0000),
        ],
        pci: vec![host_bridge, root_port(1, 1), root_port(2, 2)],
        expanders: Vec::new(),
        passthrough: None,
        nodes: vec![
            node(0, [0, 1], &[(0, 90, 204_800), (1, 140, 102_400)]),
            node(1, [2, 3], &[(0, 140, 102_400)]),
            node(5, [], &[(0, 350, 450_000), (1, 600, 38_004)]),
        ],
        distances: vec![vec![10, 21, 80], vec![22, 10, 90], vec![80, 90, 10]],
        lines: [(4, "serial"), (5, "power-button")]
            .map(|(gsi, owner)| LinePlan { gsi, owner: owner.to_owned() })
            .to_vec(),
        ports: vec![
            port(0x3f8, 8, "serial"),
            port(0x505, 1, "pvpanic"),
            port(0x600, 2, "sleep"),
            port(0x604, 1, "reset"),
        ],
        notes: Vec::new(),
    }
}

/// The reviewed plans of `configs/`.
fn reviewed_plans() -> Vec<Plan> {
    let files = std::fs::read_dir("tests/golden").unwrap().map(|entry| entry.unwrap().path());
    let plans = files.filter(|path| path.extension().is_some_and(|ext| ext == "json"));
    plans.map(|path| serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()).collect()
}

/// The bytes from `at` on, which lie in the image.
fn seen(image: &Image, at: u64) -> &[u8] {
    &image.bytes[usize::try_from(at - image.base.get()).unwrap()..]
}

fn number(bytes: &[u8], at: usize, size: usize) -> u64 {
    bytes[at..at + size].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

/// The table at `at`: its signature and its bytes, of which the checksum holds.
fn read_table(image: &Image, at: u64) -> (String, Vec<u8>) {
    let bytes = seen(image, at);
    let size = usize::try_from(number(bytes, 4, 4)).unwrap();
    let table = bytes[..size].to_vec();
    assert_eq!(sum(&table), 0, "checksum of {:?}", &table[..4]);
    (String::from_utf8(table[..4].to_vec()).unwrap(), table)
}

/// Everything that the root pointer leads to.
fn read(image: &Image) -> BTreeMap<String, Vec<u8>> {
    let pointer = seen(image, image.rsdp.get());
    assert_eq!((&pointer[..8], pointer[15]), (&b"RSD PTR "[..], 2));
    assert_eq!((sum(&pointer[..20]), sum(&pointer[..36])), (0, 0));
    assert_eq!(number(pointer, 16, 4), 0, "no RSDT");
    let (name, xsdt) = read_table(image, number(pointer, 24, 8));
    assert_eq!(name, "XSDT");
    let mut tables: BTreeMap<_, _> =
        (36..xsdt.len()).step_by(8).map(|at| read_table(image, number(&xsdt, at, 8))).collect();
    let (name, dsdt) = read_table(image, number(&tables["FACP"], 140, 8));
    tables.extend([(name, dsdt), ("XSDT".to_owned(), xsdt)]);
    tables
}

fn table(plan: &Plan, name: &str) -> Vec<u8> {
    read(&build(plan).unwrap()).remove(name).unwrap()
}

/// The structures of MADT or SRAT: type, then the bytes behind type and length.
fn structures(mut bytes: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut found = Vec::new();
    while let [kind, size, ..] = *bytes {
        found.push((kind, bytes[2..size.into()].to_vec()));
        bytes = &bytes[size.into()..];
    }
    found
}

#[test]
fn every_table_is_reached_from_the_root_pointer_and_lies_where_the_image_states() {
    let plan = sample_plan();
    let image = build(&plan).unwrap();
    let tables = read(&image);
    let names: Vec<&str> = tables.keys().map(String::as_str).collect();
    assert_eq!(names, ["APIC", "DSDT", "FACP", "HMAT", "MCFG", "SLIT", "SRAT", "XSDT"]);
    assert_eq!(image.tables.len(), tables.len());
    let mut end = image.rsdp.checked_add(36).unwrap();
    for placed in &image.tables {
        let (name, bytes) = read_table(&image, placed.span.start().get());
        assert_eq!((name.as_bytes(), bytes.len() as u64), (&placed.signature[..], placed.span.size()));
        assert!(placed.span.start() >= end && placed.span.start().is_aligned(16));
        end = placed.span.end();
    }
    assert!(
        plan.window(WindowKind::Firmware).unwrap().covers(span(image.base.get(), image.bytes.len() as u64))
    );
    assert!(image.rsdp.is_aligned(16));
}

#[test]
fn fadt_is_hardware_reduced_and_names_the_ports_for_reset_and_sleep() {
    let fadt = table(&sample_plan(), "FACP");
    let io = |at: usize| (fadt[at], fadt[at + 1], fadt[at + 3], number(&fadt, at + 4, 8));
    assert_eq!((fadt.len(), fadt[8], fadt[131]), (276, 6, 5), "ACPI 6.5");
    let flags = number(&fadt, 112, 4);
    assert_eq!(flags & (1 << 20 | 1 << 10 | 1), 1 << 20 | 1 << 10 | 1, "reduced, reset register, WBINVD");
    assert_eq!(number(&fadt, 109, 2), 0b10_0100, "no VGA, no CMOS clock; no legacy devices, no 8042");
    assert_eq!((io(116), fadt[128]), ((1, 8, 1, 0x604), 1), "reset register and value");
    assert_eq!(io(244), (1, 8, 1, 0x600), "sleep control");
    assert_eq!(io(256), (1, 8, 1, 0x601), "sleep status");
    assert_eq!(number(&fadt, 40, 4), 0, "only the 64-bit DSDT address");
}

#[test]
fn madt_has_the_processors_in_order_and_large_ids_as_x2apic() {
    let madt = table(&sample_plan(), "APIC");
    assert_eq!((number(&madt, 36, 4), number(&madt, 40, 4)), (0xfee0_0000, 0), "no 8259");
    let expected = vec![
        (0, vec![0, 0, 1, 0, 0, 0]),
        (0, vec![1, 1, 1, 0, 0, 0]),
        (0, vec![2, 0x10, 1, 0, 0, 0]),
        (9, vec![0, 0, 0x11, 1, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0]),
        (1, vec![0, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0]),
    ];
    assert_eq!(structures(&madt[44..]), expected);
}

#[test]
fn mcfg_covers_every_bus_of_the_window() {
    let mcfg = table(&sample_plan(), "MCFG");
    assert_eq!(mcfg.len(), 60);
    assert_eq!((number(&mcfg, 44, 8), number(&mcfg, 52, 2), mcfg[54], mcfg[55]), (0xe000_0000, 0, 0, 255));
}

#[test]
fn srat_names_processors_before_memory_and_joins_touching_spans_of_a_node() {
    let srat = table(&sample_plan(), "SRAT");
    assert_eq!((srat[8], number(&srat, 36, 4)), (3, 1), "32-bit domains need revision 2");
    let found = structures(&srat[48..]);
    let processors: Vec<(u8, u8, u64)> = found
        .iter()
        .filter_map(|(kind, body)| match kind {
            0 => Some((*kind, body[0], body[1].into())),
            2 => Some((*kind, body[2], number(body, 6, 4))),
            _ => None,
        })
        .collect();
    assert_eq!(processors, [(0, 0, 0), (0, 0, 1), (0, 1, 0x10), (2, 1, 0x111)]);
    let memory: Vec<(u64, u64, u64, u64)> = found[4..]
        .iter()
        .map(|(kind, body)| {
            assert_eq!((*kind, body.len()), (1, 38));
            (number(body, 0, 4), number(body, 6, 8), number(body, 14, 8), number(body, 26, 4))
        })
        .collect();
    let expected = [
        (0, 0, 0xa_0000, 1),
        (0, 0x10_0000, 0x7ff0_0000, 1),
        (1, 0x1_0000_0000, 0x4000_0000, 1),
        (5, 0x1_4000_0000, 0x4000_0000, 1),
    ];
    assert_eq!(memory, expected);
}

#[test]
fn slit_is_indexed_by_node_id_and_passes_linux_rules_where_ids_are_missing() {
    let slit = table(&sample_plan(), "SLIT");
    assert_eq!((number(&slit, 36, 8), slit.len()), (6, 44 + 36));
    let distance = |from: usize, to: usize| slit[44 + 6 * from + to];
    assert_eq!([distance(0, 1), distance(1, 0), distance(0, 5), distance(5, 1)], [21, 22, 80, 90]);
    for from in 0..6 {
        for to in 0..6 {
            assert!(
                if from == to { distance(from, to) == 10 } else { distance(from, to) > 10 },
                "{from} {to}"
            );
        }
    }
    assert_eq!(distance(0, 3), 255);
}

#[test]
fn hmat_has_every_figure_at_its_initiator_and_target() {
    let hmat = table(&sample_plan(), "HMAT");
    assert_eq!(hmat[8], 2, "revision 1 has other units");
    let domain =
        |at: usize| (number(&hmat, at, 2), number(&hmat, at + 4, 4), hmat[at + 8], number(&hmat, at + 16, 4));
    assert_eq!([domain(40), domain(80), domain(120)], [(0, 40, 1, 0), (0, 40, 1, 1), (0, 40, 0, 5)]);
    // Two initiators and three targets: 32 bytes, 5 ids, 6 entries.
    let size = 32 + 5 * 4 + 6 * 2;
    let matrix = |at: usize| {
        assert_eq!((number(&hmat, at, 2), number(&hmat, at + 4, 4)), (1, size as u64));
        assert_eq!((number(&hmat, at + 12, 4), number(&hmat, at + 16, 4)), (2, 3));
        let ids: Vec<u64> = (0..5).map(|i| number(&hmat, at + 32 + 4 * i, 4)).collect();
        assert_eq!(ids, [0, 1, 0, 1, 5]);
        let entries: Vec<u64> = (0..6).map(|i| number(&hmat, at + 52 + 2 * i, 2)).collect();
        (hmat[at + 9], number(&hmat, at + 24, 8), entries)
    };
    assert_eq!(matrix(160), (0, 1000, vec![90, 140, 350, 140, 0xffff, 600]), "latency, picoseconds");
    // 450000 does not fit 16 bits, so the unit is 10 MB/s and 38004 is rounded to 38000.
    assert_eq!(
        matrix(160 + size),
        (3, 10, vec![20480, 10240, 45000, 10240, 0xffff, 3800]),
        "bandwidth, MB/s"
    );
    assert_eq!(hmat.len(), 160 + 2 * size);
}

#[test]
fn a_plan_without_figures_has_no_hmat_and_one_without_nodes_no_affinity() {
    let mut plan = sample_plan();
    plan.nodes.iter_mut().for_each(|n| n.access.clear());
    assert!(!read(&build(&plan).unwrap()).contains_key("HMAT"));
    plan.nodes.clear();
    let names: Vec<String> = read(&build(&plan).unwrap()).into_keys().collect();
    assert_eq!(names, ["APIC", "DSDT", "FACP", "MCFG", "XSDT"]);
}

#[test]
fn figures_seen_from_a_node_without_processors_are_a_configuration_error() {
    let mut plan = sample_plan();
    plan.nodes[0].access[0].from = 5;
    let error = build(&plan).unwrap_err();
    assert_eq!(
        (error.blame(), &error),
        (Blame::Configuration, &FirmwareError::NoInitiator { node: 0, from: 5 })
    );
    assert!(error.help().unwrap().contains("node 5"));
}

/// `count` processors, one in each node but for the last node, which has the rest; every node sees every node.
fn large_plan(count: u32, nodes: u32) -> Plan {
    let mut plan = sample_plan();
    let last = nodes - 1;
    plan.vcpus = (0..count).map(|i| vcpu(i, i * 2, i.min(last))).collect();
    let access: Vec<_> = (0..nodes).map(|from| (from, 100, 100_000)).collect();
    plan.nodes = (0..nodes)
        .map(|id| node(id, plan.vcpus.iter().filter(|v| v.node == id).map(|v| v.index), &access))
        .collect();
    plan.distances = (0..nodes).map(|i| (0..nodes).map(|j| if i == j { 10 } else { 20 }).collect()).collect();
    plan
}

#[test]
fn the_largest_guest_fits_and_one_that_does_not_states_by_how_much() {
    let image = build(&large_plan(MAX_VCPUS, 64)).unwrap();
    assert_eq!(structures(&read(&image)["APIC"][44..]).len(), 255);

    let plan = large_plan(MAX_VCPUS, 200);
    let Err(FirmwareError::TooLarge { need, over, .. }) = build(&plan) else { panic!("it fits") };
    assert_eq!(
        (need - over, build(&plan).unwrap_err().blame()),
        (0x2_0000 - RESET_VECTOR_SIZE, Blame::Configuration)
    );
    let mut roomy = plan;
    roomy.windows[0].span = span(0xe_0000, need + RESET_VECTOR_SIZE);
    assert_eq!(build(&roomy).unwrap().bytes.len() as u64, need);
}

#[test]
fn a_plan_without_what_a_table_needs_is_refused_by_name() {
    let without = |change: &dyn Fn(&mut Plan)| {
        let mut plan = sample_plan();
        change(&mut plan);
        build(&plan).unwrap_err().to_string()
    };
    assert!(without(&|p| p.ports.retain(|p| p.owner != "reset")).contains("\"reset\""));
    assert!(without(&|p| p.ports[2].count = 1).contains("2 I/O ports for \"sleep\""));
    assert!(without(&|p| p.ports[2].first = 0xffff).contains("\"sleep\""));
    assert!(
        without(&|p| p.windows.retain(|w| w.kind != WindowKind::Ecam)).contains("ECAM window is missing")
    );
    assert!(without(&|p| p.windows[2].span = span(0xe000_0000, 0x1010_0000)).contains("256 MiB"));
    assert!(
        without(&|p| p.windows[3].span = span(1 << 32, 0x1000)).contains("I/O APIC window is 0x100000000")
    );
    assert!(without(&|p| p.windows[0].span = span(0xe_0008, 0x1000)).contains("16-byte"));
    assert!(without(&|p| p.nodes[2].id = 256).contains("node 256"));
    assert!(without(&|p| p.distances[1].truncate(2)).contains("from node 1 to node 5"));
}

#[test]
fn every_x86_configuration_has_tables() {
    let plans: Vec<Plan> = reviewed_plans().into_iter().filter(|p| p.arch == Architecture::X86_64).collect();
    assert!(plans.len() >= 3, "{}", plans.len());
    for plan in plans {
        let tables = read(&build(&plan).unwrap());
        let processors = structures(&tables["SRAT"][48..]).iter().filter(|(kind, _)| *kind != 1).count();
        assert_eq!(processors, plan.vcpus.len(), "{}", plan.name);
        let ids = plan.nodes.iter().map(|n| u64::from(n.id)).max().unwrap();
        assert_eq!(number(&tables["SLIT"], 36, 8), ids + 1, "{}", plan.name);
    }
}

/// Runs `iasl` in `folder`; its output when it succeeds.
fn iasl(folder: &Path, arguments: &[&str]) -> String {
    let output = Command::new("iasl").args(arguments).current_dir(folder).output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "iasl {arguments:?}: {text}");
    text
}

fn iasl_is_missing() -> bool {
    let missing = Command::new("iasl").arg("-v").output().is_err();
    if missing {
        println!("skipped: iasl is missing; install acpica-tools");
    }
    missing
}

/// The DSDT of `plan` as `iasl` reads it, without comments and with single blanks.
fn dsdt_text(plan: &Plan) -> String {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("t.dat"), table(plan, "DSDT")).unwrap();
    iasl(folder.path(), &["-d", "t.dat"]);
    let text = std::fs::read_to_string(folder.path().join("t.dsl")).unwrap();
    let without_comments = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    without_comments.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ")
}

/// Adds an assigned function at 02:00.0 to `plan`, with line `gsi` for its pin.
fn add_pin(plan: &mut Plan, gsi: u32) {
    let role = serde_json::json!({
        "role": "endpoint",
        "device": { "id": "gpu0", "root_port": true, "kind": { "type": "vfio", "function": "0000:65:00.0", "p2p": true } },
        "passed": { "function": "0000:65:00.0", "group": 7, "node": null, "clique": null, "p2p": true },
    });
    plan.pci.push(FunctionPlan {
        address: PciAddress::new(0, 2, 0, 0).unwrap(),
        role: serde_json::from_value(role).unwrap(),
        bars: Vec::new(),
        msix_vectors: 0,
    });
    plan.lines.push(LinePlan { gsi, owner: "gpu0 INTA".to_owned() });
}

/// A pin is named by the place on its host bridge's bus that it ends at, whatever lies in between.
#[test]
fn prt_has_the_line_of_each_host_function_and_is_missing_without_one() {
    if iasl_is_missing() {
        return;
    }
    let mut plan = sample_plan();
    assert!(!dsdt_text(&plan).contains("_PRT"));
    add_pin(&mut plan, 18);
    let expected = "Name (_PRT, Package (0x01) { Package (0x04) { 0x0002FFFF, Zero, Zero, 0x12 } })";
    let text = dsdt_text(&plan);
    assert!(text.contains(expected), "{expected} is not in {text}");
}

#[test]
fn an_expander_is_a_host_bridge_with_its_own_buses_windows_and_node() {
    if iasl_is_missing() {
        return;
    }
    let plans = reviewed_plans();
    let plan = plans.iter().find(|plan| plan.name == "cascaded-switches").unwrap();
    let (text, expander) = (dsdt_text(plan), plan.expanders[0].bridge);
    let (first, second) = text.split_once(&format!("Device (PC{:02X})", expander.secondary)).unwrap();
    assert!(first.contains("Name (_BBN, Zero)") && first.contains("Name (_PXM, Zero)"));
    assert!(second.contains(&format!("Name (_BBN, 0x{:02X})", expander.secondary)), "{second}");
    assert!(
        second.contains("Name (_PXM, One)") && second.contains("Method (_OSC") && second.contains("_PRT")
    );
    let window = expander.window64.unwrap();
    let range = format!("0x{:016X}, 0x{:016X}", window.start().get(), window.last().get());
    assert!(second.contains(&range) && !first.contains(&range), "{range} in {text}");
    // What it has is no other's: Linux drops a host bridge's window that overlaps another's.
    let all = plan.window(WindowKind::PciMemory64).unwrap();
    assert!(!first.contains(&format!("0x{:016X}, 0x{:016X}", all.start().get(), all.last().get())));
}

/// NVIDIA's driver looks for the properties at the GPU's own device.
#[test]
fn a_gpu_near_a_slice_has_the_slice_in_its_properties() {
    if iasl_is_missing() {
        return;
    }
    let mut plan = sample_plan();
    // Retired at its beginning and in its middle: the driver counts from where the slice begins.
    let backing = serde_json::json!({ "id": "egm0", "region": "egm4", "size": 0x4000_0000, "page_size": "auto",
                                      "host_nodes": null, "prefault": false });
    plan.backings = vec![serde_json::from_value(backing).unwrap()];
    let piece = |offset, size| MemoryPlan {
        kind: MemoryKind::Egm,
        offset,
        ..memory(0x1_4000_0000 + offset, size, 5)
    };
    plan.memory.pop();
    plan.memory.extend([piece(0x1_0000, 0x1000_0000), piece(0x2000_0000, 0x2000_0000)]);
    let role = |node: u32, egm: Option<usize>| {
        serde_json::json!({
            "role": "endpoint",
            "device": { "id": "gpu0", "root_port": true, "kind": { "type": "vfio", "function": "0009:01:00.0", "p2p": true } },
            "passed": { "function": "0009:01:00.0", "group": 7, "node": node, "clique": null, "p2p": true,
                        "memory": { "bars": [4], "first_node": 6, "egm": egm } },
        })
    };
    let address = PciAddress::new(0, 2, 0, 0).unwrap();
    let gpu = |node, egm| FunctionPlan {
        address,
        role: serde_json::from_value(role(node, egm)).unwrap(),
        bars: Vec::new(),
        msix_vectors: 0,
    };
    plan.pci.push(gpu(0, Some(0)));
    assert!(!dsdt_text(&plan).contains("nvidia,egm"), "its node is no slice");
    *plan.pci.last_mut().unwrap() = gpu(5, None);
    assert!(!dsdt_text(&plan).contains("nvidia,egm"), "its driver would count from elsewhere");
    *plan.pci.last_mut().unwrap() = gpu(5, Some(0));
    let text = dsdt_text(&plan);
    let at = text.find("Device (S10)").unwrap();
    assert!(text[at..].contains("Device (S00) { Name (_ADR, Zero)"), "{text}");
    for part in [
        "daffd814-6eba-4d8c-8a91-bc9bbf4aa301",
        "Package (0x02) { \"nvidia,egm-base-pa\", 0x0000000140000000 }",
        "Package (0x02) { \"nvidia,egm-size\", 0x40000000 }",
        "Package (0x02) { \"nvidia,egm-pxm\", 0x05 }",
    ] {
        assert!(text[at..].contains(part), "{part} is not in {text}");
    }
}

#[test]
fn dsdt_names_the_windows_ports_and_root_ports_of_the_plan() {
    if iasl_is_missing() {
        return;
    }
    let text = dsdt_text(&sample_plan());
    let memory = |kind: &str, first: u64, last: u64, size: u64| {
        format!(
            "{kind}, ReadWrite, 0x{:016X}, 0x{first:016X}, 0x{last:016X}, 0x{:016X}, 0x{size:016X},",
            0, 0
        )
    };
    for part in [
        "Name (\\_S5, Package (0x04) { 0x05, Zero, Zero, Zero })",
        "Device (C003) { Name (_HID, \"ACPI0007\" /* Processor Device */) Name (_UID, 0x03) }",
        "Memory32Fixed (ReadWrite, 0xE0000000, 0x10000000, )",
        &memory("NonCacheable", 0xc000_0000, 0xdfff_ffff, 0x2000_0000),
        &memory("Prefetchable", 0x100_0000_0000, 0x1ff_ffff_ffff, 0x100_0000_0000),
        "Name (_PXM, Zero)",
        "Device (S08) { Name (_ADR, 0x00010000) } Device (S10) { Name (_ADR, 0x00020000) }",
        "IO (Decode16, 0x03F8, 0x03F8, 0x01, 0x08, ) Interrupt (ResourceConsumer, Edge, ActiveHigh, Exclusive, ,, ) \
         { 0x00000004, }",
        "IO (Decode16, 0x0505, 0x0505, 0x01, 0x01, )",
        "Device (PWRB) { Name (_HID, EisaId (\"PNP0C0C\") /* Power Button Device */)",
        "If ((Arg0 == 0x05)) { Notify (PWRB, 0x80)",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

/// Disassembles every table and compiles the result. `iasl` finds nothing to complain about, and its tables have the
/// bytes of ours behind the header, where it writes its own name.
#[test]
fn iasl_reads_and_writes_every_table_as_we_do() {
    if iasl_is_missing() {
        return;
    }
    let mut far = large_plan(MAX_VCPUS, 8);
    far.windows[2].span = span(0x80_0000_0000, 0x1000_0000);
    for plan in reviewed_plans().into_iter().chain([sample_plan(), far, arm::sample_plan()]) {
        for (name, bytes) in read(&build(&plan).unwrap()) {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join("t.dat"), &bytes).unwrap();
            iasl(folder.path(), &["-d", "t.dat"]);
            let text = iasl(folder.path(), &["-oa", "-p", "back", "t.dsl"]);
            for bad in [" Errors", " Warnings", " Remarks"] {
                let clean = !text.contains(bad) || text.contains(&format!(" 0{bad}"));
                assert!(clean, "{name}: {text}");
            }
            let back = std::fs::read(folder.path().join("back.aml")).unwrap();
            let same = back.get(36..) == bytes.get(36..)
                || name == "APIC" && back.get(36..) == arm::without_trace_buffer(&bytes).get(36..);
            assert!(same, "{name} of {}: {bytes:x?} became {back:x?}", plan.name);
        }
    }
}

proptest! {
    /// Whatever the plan's numbers, the answer is tables that read back, or an error.
    #[test]
    fn any_plan_builds_or_errs(
        vcpus in prop::collection::vec((any::<u32>(), any::<u32>(), any::<u32>()), 0..300),
        nodes in prop::collection::vec((0u32..300, any::<bool>(), 0u64..2), 0..8),
        figures in prop::collection::vec((0u32..300, any::<u32>(), any::<u32>()), 0..4),
        spans in prop::collection::vec((any::<u64>(), any::<u64>()), 6),
        ports in prop::collection::vec((any::<u16>(), any::<u16>()), 4),
        gsi: u32,
        square: bool,
    ) {
        let mut plan = sample_plan();
        plan.vcpus = vcpus.into_iter().map(|(index, id, node)| vcpu(index, id, node)).collect();
        plan.nodes = nodes.iter().map(|&(id, cpu, memory)| {
            NodePlan { memory, ..node(id, cpu.then_some(0), &figures) }
        }).collect();
        plan.distances = vec![vec![20; if square { nodes.len() } else { 1 }]; nodes.len()];
        for (place, (start, size)) in plan.windows.iter_mut().zip(spans) {
            // Half of them wild, half a place that the tables can name.
            let tame = Span::new(Gpa::new(start >> 34 << 20), (size % 0x100 + 1) << 20);
            let wild = Span::new(Gpa::new(start), size);
            place.span = if size % 2 == 0 { tame } else { wild }.unwrap_or(place.span);
        }
        for (port, (first, count)) in plan.ports.iter_mut().zip(ports) {
            (port.first, port.count) = (first, count % 16);
        }
        plan.lines[0].gsi = gsi;
        if let Ok(image) = build(&plan) {
            prop_assert!(read(&image).contains_key("DSDT"));
        }
    }
}
