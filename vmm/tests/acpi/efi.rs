//! The structures that lead an Arm guest's kernel to the tables: EFI's and SMBIOS's.

use super::*;

/// What the system table's configuration tables lead to, by the first four bytes of their GUIDs.
fn configuration(image: &Image) -> BTreeMap<u64, u64> {
    let table = seen(image, image.efi.unwrap().system_table.get());
    let (count, list) = (number(table, 104, 8), seen(image, number(table, 112, 8)));
    let entry = |index: usize| (number(list, 24 * index, 4), number(list, 24 * index + 16, 8));
    (0..usize::try_from(count).unwrap()).map(entry).collect()
}

const ACPI: u64 = 0x8868_e871;
const SMBIOS3: u64 = 0xf2fd_1544;
const RT_PROPERTIES: u64 = 0xeb66_918a;
const MEMRESERVE: u64 = 0x888e_b0c6;

#[test]
fn the_system_table_leads_to_acpi_smbios_and_states_that_there_are_no_services() {
    let image = build(&arm::sample_plan()).unwrap();
    let table = seen(&image, image.efi.unwrap().system_table.get());
    assert_eq!((&table[..8], number(table, 8, 4), number(table, 12, 4)), (&b"IBI SYST"[..], 0x20046, 120));
    assert_eq!(table[32..104], [0; 72], "no consoles, no runtime or boot services");
    let vendor = seen(&image, number(table, 24, 8));
    assert_eq!((&vendor[..14], &vendor[14..200]), (&b"e\0g\0m\0-\0v\0m\0m\0"[..], &[0; 186][..]));
    let found = configuration(&image);
    assert_eq!(found.len(), 4);
    assert_eq!(found[&ACPI], image.rsdp.get());
    assert_eq!(seen(&image, found[&RT_PROPERTIES])[..8], [1, 0, 8, 0, 0, 0, 0, 0]);
    assert_eq!(seen(&image, found[&MEMRESERVE])[..16], [0; 16]);
    // The whole of a GUID: its last eight bytes are as written.
    let list = seen(&image, number(table, 112, 8));
    assert_eq!(
        list[..16],
        [0x71, 0xe8, 0x68, 0x88, 0xf1, 0xe4, 0xd3, 0x11, 0xbc, 0x22, 0, 0x80, 0xc7, 0x3c, 0x88, 0x81]
    );
}

/// Type, span and attributes of every descriptor.
fn memory_map(image: &Image) -> Vec<(u64, Span<Guest>, u64)> {
    let map = image.efi.unwrap().memory_map;
    let bytes = &seen(image, map.start().get())[..usize::try_from(map.size()).unwrap()];
    let descriptor = |entry: &[u8]| {
        assert_eq!((entry.len(), number(entry, 4, 4), number(entry, 16, 8)), (48, 0, 0));
        (number(entry, 0, 4), span(number(entry, 8, 8), number(entry, 24, 8) << 12), number(entry, 32, 8))
    };
    bytes.chunks(48).map(descriptor).collect()
}

#[test]
fn the_memory_map_is_ram_without_retired_pages_and_the_tables_in_one_piece() {
    let image = build(&arm::sample_plan()).unwrap();
    let expected = [
        (9, span(0x4000_0000, 0x20_0000), 8),
        (7, span(0x4020_0000, 0x7fe0_0000), 8),
        (7, span(0x1_0000_0000, 0x1000_0000), 8),
        (7, span(0x1_1001_0000, 0x2fff_0000), 8),
    ];
    let map = memory_map(&image);
    assert_eq!(map, expected);
    let all = span(image.base.get(), image.bytes.len() as u64);
    assert!(map[0].1.covers(all), "no table crosses an edge");
    assert!(map.iter().all(|(_, span, _)| span.start().is_aligned(0x1_0000) && span.size() % 0x1_0000 == 0));
}

/// The kernel panics at about 1000 pieces, so a plan with more is refused; planning does not make one.
#[test]
fn more_pieces_of_memory_than_a_kernel_keeps_are_refused() {
    let mut plan = arm::sample_plan();
    let piece = |index: u64| MemoryPlan {
        span: span(0x1_0000_0000 + (index << 20), 0x8_0000),
        kind: MemoryKind::Egm,
        node: 5,
        backing: 2,
        offset: index << 20,
    };
    plan.memory.truncate(2); // which touch: one piece
    plan.memory.extend((0..899).map(piece));
    assert_eq!(memory_map(&build(&plan).unwrap()).len(), 901);
    plan.memory.push(piece(899));
    assert_eq!(build(&plan).unwrap_err(), FirmwareError::MemoryMap { regions: 901 });
}

/// NVIDIA's driver looks at one bit to know that the machine is virtual.
#[test]
fn smbios_names_the_machine_and_states_that_it_is_virtual() {
    let image = build(&arm::sample_plan()).unwrap();
    let entry = &seen(&image, configuration(&image)[&SMBIOS3])[..24];
    assert_eq!((&entry[..5], sum(entry), entry[6], &entry[7..11]), (&b"_SM3_"[..], 0, 24, &[3, 4, 0, 1][..]));
    let size = usize::try_from(number(entry, 12, 4)).unwrap();
    let mut rest = &seen(&image, number(entry, 16, 8))[..size];
    let mut found = Vec::new();
    while let [kind, length, ..] = *rest {
        let (fields, strings) = rest.split_at(length.into());
        let end = strings.windows(2).position(|pair| pair == [0, 0]).unwrap();
        let strings = strings[..end].split(|byte| *byte == 0).map(|s| String::from_utf8(s.to_vec()).unwrap());
        found.push((kind, fields.to_vec(), strings.collect::<Vec<_>>()));
        rest = &rest[usize::from(length) + end + 2..];
    }
    let kinds: Vec<(u8, usize)> = found.iter().map(|(kind, fields, _)| (*kind, fields.len())).collect();
    assert_eq!(kinds, [(0, 26), (1, 27), (3, 22), (127, 4)]);
    let (_, firmware, _) = &found[0];
    assert_eq!(firmware[0x13], 0x1c, "bit 4: a virtual machine");
    let (_, system, strings) = &found[1];
    assert_eq!(strings[usize::from(system[4]) - 1], "egm-vmm");
    assert_eq!(strings[usize::from(system[7]) - 1], "sample", "the name is the serial number");
}
