//! What an Arm guest reads in place of an x86 one's, byte by byte at the offsets of the specifications.

use egm_vmm::arch::aarch64::layout::LAYOUT;
use egm_vmm::firmware::ERROR_SECTIONS;

use super::*;

/// Four processors in two nodes, two threads a core; an EGM node 5 without processors, with a retired page; a GPU's node.
pub(crate) fn sample_plan() -> Plan {
    let mut plan = super::sample_plan();
    plan.arch = Architecture::Aarch64;
    let cores = [(0, 0, 0, 0), (0, 0, 1, 0), (1, 0, 0, 1), (1, 0, 1, 1)];
    plan.vcpus = (0..)
        .zip(cores)
        .map(|(index, (socket, core, thread, node))| VcpuPlan {
            index,
            hardware_id: if index == 3 { 0x100 } else { index },
            socket,
            core,
            thread,
            node,
            host_cpus: None,
        })
        .collect();
    let egm = |start, size, offset| MemoryPlan {
        span: span(start, size),
        kind: MemoryKind::Egm,
        node: 5,
        backing: 2,
        offset,
    };
    plan.memory = vec![
        memory(0x4020_0000, 0x3fe0_0000, 0),
        memory(0x8000_0000, 0x4000_0000, 1),
        egm(0x1_0000_0000, 0x1000_0000, 0),
        egm(0x1_1001_0000, 0x2fff_0000, 0x1001_0000),
    ];
    plan.windows = LAYOUT.fixed.iter().map(|w| window_plan(w.kind, w.label, w.span)).collect();
    plan.windows.extend([
        window(WindowKind::Firmware, "firmware tables", 0x4000_0000, 0x20_0000),
        window(WindowKind::PciMemory32, "PCI 32", 0x1000_0000, 0x3000_0000),
        window(WindowKind::Ecam, "ECAM", 0x2_0000_0000, 0x1000_0000),
        window(WindowKind::PciMemory64, "PCI 64", 0x100_0000_0000, 0x100_0000_0000),
    ]);
    let mut gpu = node(9, [], &[]);
    (gpu.memory, gpu.egm, gpu.initiator) = (0, false, Some("0000:02:00.0".parse().unwrap()));
    plan.nodes.insert(2, gpu);
    plan.distances =
        vec![vec![10, 21, 80, 80], vec![22, 10, 120, 90], vec![80, 120, 10, 80], vec![80, 90, 80, 10]];
    plan.lines = [(33, "serial"), (34, "errors"), (35, "power-button")]
        .map(|(gsi, owner)| LinePlan { gsi, owner: owner.to_owned() })
        .to_vec();
    plan.ports.clear();
    plan
}

fn window_plan(kind: WindowKind, label: &str, span: Span<Guest>) -> WindowPlan {
    WindowPlan { kind, label: label.to_owned(), span }
}

#[test]
fn an_arm_guest_has_the_tables_that_its_kernel_needs() {
    let names: Vec<String> = read(&build(&sample_plan()).unwrap()).into_keys().collect();
    let expected = [
        "APIC", "DSDT", "FACP", "GTDT", "HEST", "HMAT", "IORT", "MCFG", "PPTT", "SLIT", "SPCR", "SRAT",
        "XSDT",
    ];
    assert_eq!(names, expected);
}

#[test]
fn fadt_states_that_psci_is_called_by_hvc_and_has_no_registers() {
    let fadt = table(&sample_plan(), "FACP");
    assert_eq!((fadt.len(), fadt[8], fadt[131]), (276, 6, 5), "5.1 at least");
    assert_eq!(number(&fadt, 112, 4) & (1 << 20 | 1 << 10), 1 << 20, "reduced, and no reset register");
    assert_eq!(number(&fadt, 129, 2), 0b11);
    for register in [116, 244, 256] {
        assert_eq!(number(&fadt, register, 8) | number(&fadt, register + 4, 8), 0, "{register}");
    }
}

#[test]
fn madt_has_the_parts_of_the_gic_and_every_processor_by_its_affinity() {
    let madt = table(&sample_plan(), "APIC");
    assert_eq!(number(&madt, 36, 8), 0, "no local APIC");
    let found = structures(&madt[44..]);
    let kinds: Vec<u8> = found.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, [0x0c, 0x0b, 0x0b, 0x0b, 0x0b, 0x0e, 0x0f]);
    // Bodies begin behind type and length.
    let distributor = &found[0].1;
    assert_eq!((number(distributor, 6, 8), distributor[18]), (0x800_0000, 3), "GICv3");
    for (index, mpidr) in [(1, 0), (2, 1), (3, 2), (4, 0x100)] {
        let interface: &[u8] = &found[index].1;
        let uid = index as u64 - 1;
        assert_eq!((interface.len(), number(interface, 6, 4), number(interface, 10, 4)), (80, uid, 1));
        assert_eq!((number(interface, 18, 4), number(interface, 66, 8)), (23, mpidr), "PMU, MPIDR");
        assert_eq!([number(interface, 30, 8), number(interface, 58, 8)], [0, 0], "addresses that GICv2 has");
    }
    let (redistributors, its) = (&found[5].1, &found[6].1);
    assert_eq!((number(redistributors, 2, 8), number(redistributors, 10, 4)), (0x810_0000, 4 * 0x2_0000));
    assert_eq!((number(its, 2, 4), number(its, 6, 8)), (0, 0x808_0000));
}

#[test]
fn gtdt_has_the_private_interrupts_and_no_memory_mapped_counters() {
    let gtdt = table(&sample_plan(), "GTDT");
    assert_eq!((gtdt.len(), gtdt[8]), (104, 3));
    let interrupts: Vec<u64> = (0..4).map(|timer| number(&gtdt, 48 + 8 * timer, 4)).collect();
    assert_eq!(interrupts, [29, 30, 27, 26], "secure, EL1, virtual, EL2");
    assert_eq!(number(&gtdt, 60, 4), 4, "always on: Linux reads the flag of the EL1 timer");
    assert_eq!([number(&gtdt, 36, 8), number(&gtdt, 80, 8)], [u64::MAX; 2]);
    assert_eq!(number(&gtdt, 88, 8), 0, "no platform timers");
}

#[test]
fn spcr_names_the_pl011_and_its_interrupt() {
    let plan = sample_plan();
    let spcr = table(&plan, "SPCR");
    assert_eq!((spcr.len(), spcr[8], spcr[36]), (80, 2, 3));
    assert_eq!((&spcr[40..44], number(&spcr, 44, 8)), (&[0, 32, 0, 3][..], 0xb00_0000));
    assert_eq!((spcr[52], number(&spcr, 54, 4), spcr[58]), (8, 33, 7), "GIC, line, 115200 baud");
    assert_eq!(number(&spcr, 64, 4), 0xffff_ffff, "no PCI function");
    let mut without = plan;
    without.lines.clear();
    assert!(!read(&build(&without).unwrap()).contains_key("SPCR"));
}

#[test]
fn iort_sends_the_messages_of_every_function_to_the_its() {
    let iort = table(&sample_plan(), "IORT");
    assert_eq!((number(&iort, 36, 4), number(&iort, 40, 4)), (2, 48));
    let (group, root) = (&iort[48..72], &iort[72..]);
    assert_eq!((group[0], number(group, 1, 2), number(group, 16, 4), number(group, 20, 4)), (0, 24, 1, 0));
    assert_eq!((root[0], number(root, 1, 2), number(root, 8, 4)), (2, root.len() as u64, 1));
    assert_eq!((number(root, 16, 4), root[23] & 1), (1, 1), "coherent, as `_CCA` says");
    assert_eq!((number(root, 24, 4), number(root, 28, 4)), (0, 0), "no ATS, segment 0");
    let mapping = &root[usize::try_from(number(root, 12, 4)).unwrap()..];
    let fields: Vec<u64> = (0..5).map(|field| number(mapping, 4 * field, 4)).collect();
    assert_eq!(fields, [0, 0xffff, 0, 48, 0], "from, how many less one, to, of what, flags");
}

#[test]
fn pptt_has_sockets_cores_and_threads_and_processors_by_uid() {
    let pptt = table(&sample_plan(), "PPTT");
    let nodes: Vec<(u64, u64, u64)> = structures(&pptt[36..])
        .iter()
        .map(|(kind, body)| {
            assert_eq!((*kind, body.len()), (0, 18));
            (number(body, 2, 4), number(body, 6, 4), number(body, 10, 4))
        })
        .collect();
    let (package, leaf) = (0b11, 0b1110);
    let of_socket = |at: u64, number: u64, first: u64| {
        [(package, 0, number), (0, at, 0), (leaf, at + 20, first), (leaf, at + 20, first + 1)]
    };
    assert_eq!(nodes, [of_socket(36, 0, 0), of_socket(36 + 80, 1, 2)].concat());
    // Without threads a core is the leaf.
    let mut flat = sample_plan();
    for (vcpu, core) in flat.vcpus.iter_mut().zip([0, 1, 0, 1]) {
        (vcpu.core, vcpu.thread) = (core, 0);
    }
    let flags = |(_, body): &(u8, Vec<u8>)| number(body, 2, 4);
    let found: Vec<u64> = structures(&table(&flat, "PPTT")[36..]).iter().map(flags).collect();
    assert_eq!(found, [3, 0b1010, 0b1010, 3, 0b1010, 0b1010]);
}

#[test]
fn srat_has_processors_then_gpus_then_memory_with_the_firmware_and_without_holes() {
    let srat = table(&sample_plan(), "SRAT");
    let found = structures(&srat[48..]);
    let processors: Vec<(u64, u64, u64)> = found
        .iter()
        .take(4)
        .map(|(kind, body)| {
            assert_eq!((*kind, body.len()), (3, 16));
            (number(body, 0, 4), number(body, 4, 4), number(body, 8, 4))
        })
        .collect();
    assert_eq!(processors, [(0, 0, 1), (0, 1, 1), (1, 2, 1), (1, 3, 1)], "node, UID, enabled");
    let (kind, initiator) = &found[4];
    assert_eq!((*kind, initiator[1], number(initiator, 2, 4)), (5, 1, 9), "a PCI handle, the node");
    assert_eq!(number(initiator, 6, 8), 0x0002_0000, "segment, bus, device and function");
    let memory: Vec<(u64, u64, u64)> = found[5..]
        .iter()
        .map(|(kind, body)| {
            assert_eq!((*kind, number(body, 26, 4)), (1, 1));
            (number(body, 0, 4), number(body, 6, 8), number(body, 14, 8))
        })
        .collect();
    let expected =
        [(0, 0x4000_0000, 0x4000_0000), (1, 0x8000_0000, 0x4000_0000), (5, 0x1_0000_0000, 0x4000_0000)];
    assert_eq!(memory, expected, "a retired page is absent from the memory map, not from its node");
}

#[test]
fn dsdt_has_registers_where_x86_has_ports() {
    if iasl_is_missing() {
        return;
    }
    let text = dsdt_text(&sample_plan());
    for part in [
        "Device (P001) { Name (_HID, \"ACPI0010\" /* Processor Container Device */) Name (_UID, One) }",
        "Name (_HID, \"ARMH0011\")",
        "Memory32Fixed (ReadWrite, 0x0B000000, 0x00001000, ) Interrupt (ResourceConsumer, Level, ActiveHigh, \
         Exclusive, ,, ) { 0x00000021, }",
        "Name (_HID, \"QEMU0001\")",
        "Memory32Fixed (ReadWrite, 0x0B020000, 0x00001000, )",
        "Name (_HID, \"ACPI000E\"",
        "OperationRegion (REGS, SystemMemory, 0x0B010000, 0x04)",
        "Name (_CCA, One)",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    for part in ["_S5", "IO (Decode16", "PNP0501"] {
        assert!(!text.contains(part), "{part} is in {text}");
    }
}

/// `acpiexec` runs the method with every byte of the clock's register at one value, which makes five dates.
#[test]
fn the_clock_states_the_date_of_its_register() {
    if Command::new("acpiexec").arg("-v").output().is_err() {
        println!("skipped: acpiexec is missing; install acpica-tools");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("t.aml"), table(&sample_plan(), "DSDT")).unwrap();
    let dates = [
        (0x00, [1970, 1, 1, 0, 0, 0]),
        (0x2f, [1995, 2, 1, 6, 50, 23]),
        (0x38, [1999, 11, 21, 18, 21, 44]),
        (0x5e, [2020, 3, 3, 13, 40, 46]),
        (0x65, [2023, 11, 28, 3, 58, 29]),
        (0xff, [2106, 2, 7, 6, 28, 15]),
    ];
    for (fill, expected) in dates {
        let output = Command::new("acpiexec")
            .args(["-fv", &format!("{fill:#x}"), "-b", "evaluate \\_SB.CLCK._GRT", "t.aml"])
            .current_dir(folder.path())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let bytes = text.split("0000:").nth(1).unwrap_or_else(|| panic!("{text}"));
        let bytes: Vec<u8> = bytes
            .split_whitespace()
            .take(16)
            .map(|byte| u8::from_str_radix(byte, 16).unwrap_or_else(|_| panic!("{text}")))
            .collect();
        let found =
            [number(&bytes, 0, 2), bytes[2].into(), bytes[3].into(), bytes[4].into(), bytes[5].into()];
        assert_eq!(found, expected[..5], "{fill:#x}");
        assert_eq!((u64::from(bytes[6]), bytes[7]), (expected[5], 1), "{fill:#x}: seconds, valid");
        assert_eq!(bytes[8..], [0; 8], "{fill:#x}: UTC, no daylight saving");
    }
}

#[test]
fn an_arm_plan_without_what_a_table_needs_is_refused_by_name() {
    let without = |change: &dyn Fn(&mut Plan)| {
        let mut plan = sample_plan();
        change(&mut plan);
        build(&plan).unwrap_err().to_string()
    };
    assert!(without(&|p| p.windows.retain(|w| w.label != "GIC ITS")).contains("GIC ITS window is missing"));
    assert!(without(&|p| p.windows.retain(|w| w.label != "serial")).contains("serial"));
    assert!(without(&|p| p.windows.retain(|w| w.kind != WindowKind::Firmware)).contains("64 KiB"));
    assert!(without(&|p| p.memory[1].span = span(0x8000_0000, 0x1000)).contains("64 KiB"));
    let too_few = |p: &mut Plan| {
        let all = p.windows.iter_mut().find(|w| w.label == "GIC redistributors").unwrap();
        all.span = span(all.span.start().get(), 3 << 17);
    };
    assert!(without(&too_few).contains("128 KiB for each vCPU"));
}

#[test]
fn the_largest_arm_guest_fits() {
    let mut plan = sample_plan();
    let large = large_plan(MAX_VCPUS, 64);
    (plan.vcpus, plan.nodes, plan.distances) = (large.vcpus, large.nodes, large.distances);
    let image = build(&plan).unwrap();
    assert_eq!(structures(&read(&image)["APIC"][44..]).len(), 254 + 3);
}

#[test]
fn every_arm_configuration_has_tables_that_cover_its_memory() {
    let plans: Vec<Plan> = reviewed_plans().into_iter().filter(|p| p.arch == Architecture::Aarch64).collect();
    assert!(plans.len() >= 2, "{}", plans.len());
    for plan in plans {
        let tables = read(&build(&plan).unwrap());
        let affinities = structures(&tables["SRAT"][48..]);
        let count = |wanted: u8| affinities.iter().filter(|(kind, _)| *kind == wanted).count();
        let initiators = plan.nodes.iter().filter(|node| node.initiator.is_some()).count();
        assert_eq!((count(3), count(5)), (plan.vcpus.len(), initiators), "{}", plan.name);
        for piece in plan.memory.iter().map(|m| m.span).chain(plan.window(WindowKind::Firmware)) {
            let covers = |(kind, body): &(u8, Vec<u8>)| {
                *kind == 1 && span(number(body, 6, 8), number(body, 14, 8)).covers(piece)
            };
            assert!(affinities.iter().any(covers), "{}: {piece}", plan.name);
        }
    }
}

/// MADT as `iasl` before 2022 writes it: it has no word for the trace buffer's interrupt at the end of a processor.
pub(crate) fn without_trace_buffer(madt: &[u8]) -> Vec<u8> {
    let mut shorter = madt[..44].to_vec();
    for (kind, body) in structures(&madt[44..]) {
        let body = if kind == 0x0b { &body[..78] } else { &body[..] };
        shorter.extend([kind, u8::try_from(body.len() + 2).unwrap()]);
        shorter.extend(body);
    }
    shorter
}

/// The agent reads them back with a reader of its own. Written anew by `EGM_GOLDEN=write`, as plans are.
#[test]
fn the_agents_recorded_tables_are_those_of_the_plan() {
    let plan = reviewed_plans().into_iter().find(|plan| plan.name == "gb200-nvl4-egm").unwrap();
    for (name, bytes) in read(&build(&plan).unwrap()) {
        let file = Path::new("tests/golden-acpi").join(&name);
        match name.as_str() {
            "XSDT" => {} // Linux shows none
            _ if std::env::var_os("EGM_GOLDEN").is_some_and(|value| value == "write") => {
                std::fs::write(file, bytes).unwrap();
            }
            _ => assert!(std::fs::read(&file).unwrap() == bytes, "{} is not the plan's", file.display()),
        }
    }
}

#[test]
fn hest_leads_to_a_clear_error_block_that_an_event_device_reports() {
    let plan = sample_plan();
    let image = build(&plan).unwrap();
    let hest = table(&plan, "HEST");
    assert_eq!((hest.len(), number(&hest, 36, 4), number(&hest, 40, 2)), (104, 1, 9), "one generic source");
    assert_eq!((number(&hest, 44, 2), hest[47]), (0xffff, 1), "unrelated, enabled");
    let limits = [48, 52, 56].map(|at| number(&hest, at, 4));
    assert_eq!(limits, [1, ERROR_SECTIONS.into(), 0], "one record, its sections, nothing raw");
    assert_eq!((&hest[60..64], hest[72], hest[73]), (&[0, 64, 0, 4][..], 7, 28), "a qword; by an event");
    let block = image.errors.unwrap();
    let address = seen(&image, number(&hest, 64, 8));
    assert_eq!((number(address, 0, 8), number(&hest, 100, 4)), (block.start().get(), block.size()));
    assert!(seen(&image, block.start().get())[..4096].iter().all(|byte| *byte == 0));
    let window = plan.windows.iter().find(|window| window.kind == WindowKind::Firmware).unwrap();
    assert!(window.span.covers(block), "memory that the kernel keeps");
    if iasl_is_missing() {
        return;
    }
    let text = dsdt_text(&plan);
    for part in [
        "EisaId (\"PNP0C33\")",
        "\"ACPI0013\"",
        "(ResourceConsumer, Edge, ActiveHigh, Exclusive",
        "Notify (ERRD, 0x80)",
        "Device (PWRB) { Name (_HID, EisaId (\"PNP0C0C\") /* Power Button Device */)",
        "If ((Arg0 == 0x23)) { Notify (PWRB, 0x80)",
    ] {
        assert!(text.contains(part), "no {part} in {text}");
    }
}

#[test]
fn a_plan_without_a_line_for_errors_has_no_place_for_them() {
    let mut plan = sample_plan();
    plan.lines.retain(|line| line.owner != "errors");
    let image = build(&plan).unwrap();
    assert!(image.errors.is_none() && !read(&image).contains_key("HEST"));
}
