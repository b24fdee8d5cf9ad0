//! Tables of Arm guests (ACPI 6.5: MADT 5.2.12, GTDT 5.2.25, PPTT 5.2.30; IORT: Arm DEN 0049; SPCR: Microsoft).

use std::collections::BTreeMap;

use super::{AcpiError, Bytes, HEADER, table};

/// The parts of a GIC.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Madt {
    /// Addresses of the distributors.
    pub(crate) distributors: Vec<u64>,
    /// Version of the last of them.
    pub(crate) version: u8,
    /// Addresses and sizes of ranges of redistributors.
    pub(crate) redistributors: Vec<(u64, u32)>,
    /// Addresses of interrupt translation services, by number.
    pub(crate) its: BTreeMap<u32, u64>,
    /// Affinities (MPIDR) of enabled processors, by UID.
    pub(crate) processors: BTreeMap<u32, u64>,
}

/// Reads a Multiple APIC Description Table.
pub(crate) fn madt(bytes: &[u8]) -> Result<Madt, AcpiError> {
    const WHAT: &str = "interrupt controller structure";
    let table = table(bytes, "APIC")?;
    let mut madt = Madt::default();
    for (kind, entry) in structures(table, HEADER + 8, WHAT)? {
        match kind {
            0x0b if entry.u32(12, WHAT)? & 1 == 1 => {
                madt.processors.insert(entry.u32(8, WHAT)?, entry.u64(68, WHAT)?);
            }
            0x0c => {
                madt.distributors.push(entry.u64(8, WHAT)?);
                madt.version = entry.u8(20, WHAT)?;
            }
            0x0e => madt.redistributors.push((entry.u64(4, WHAT)?, entry.u32(12, WHAT)?)),
            0x0f => {
                madt.its.insert(entry.u32(4, WHAT)?, entry.u64(8, WHAT)?);
            }
            _ => {}
        }
    }
    Ok(madt)
}

/// Type and bytes of the structures from `offset` on, each with its length in its second byte.
fn structures<'a>(
    table: Bytes<'a>,
    mut offset: usize,
    what: &'static str,
) -> Result<Vec<(u8, Bytes<'a>)>, AcpiError> {
    let mut found = Vec::new();
    while offset < table.0.len() {
        let size = usize::from(table.u8(offset + 1, what)?).max(2);
        found.push((table.u8(offset, what)?, table.part(offset, size, what)?));
        offset += size;
    }
    Ok(found)
}

/// Reads the interrupts of a Generic Timer Description Table: secure, EL1, virtual, EL2.
pub(crate) fn gtdt(bytes: &[u8]) -> Result<[u32; 4], AcpiError> {
    const WHAT: &str = "timer";
    let table = table(bytes, "GTDT")?;
    Ok([table.u32(48, WHAT)?, table.u32(56, WHAT)?, table.u32(64, WHAT)?, table.u32(72, WHAT)?])
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spcr {
    /// Type of the port: 3 is a PL011.
    pub(crate) kind: u8,
    pub(crate) base: u64,
    pub(crate) interrupt: u32,
}

/// Reads a Serial Port Console Redirection table.
pub(crate) fn spcr(bytes: &[u8]) -> Result<Spcr, AcpiError> {
    const WHAT: &str = "console";
    let table = table(bytes, "SPCR")?;
    Ok(Spcr { kind: table.u8(36, WHAT)?, base: table.u64(44, WHAT)?, interrupt: table.u32(54, WHAT)? })
}

/// Requester ids of a segment and their ids at an ITS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) segment: u32,
    /// First and last requester id.
    pub(crate) from: (u32, u32),
    /// The first one's id behind it.
    pub(crate) to: u32,
    /// The only ITS of the group that it leads to; `None` when it leads elsewhere.
    pub(crate) its: Option<u32>,
}

/// Reads the ways from root complexes of an I/O Remapping Table.
pub(crate) fn iort(bytes: &[u8]) -> Result<Vec<Mapping>, AcpiError> {
    const WHAT: &str = "IORT node";
    const ROOT_COMPLEX: u8 = 2;
    let table = table(bytes, "IORT")?;
    let mut mappings = Vec::new();
    let mut offset = table.size(40, WHAT)?;
    for _ in 0..table.u32(36, WHAT)? {
        let size = usize::from(table.u16(offset.saturating_add(1), WHAT)?).max(16);
        let node = table.part(offset, size, WHAT)?;
        if node.u8(0, WHAT)? == ROOT_COMPLEX {
            let segment = node.u32(28, WHAT)?;
            for index in 0..node.size(8, WHAT)? {
                let at = node.size(12, WHAT)?.saturating_add(index.saturating_mul(20));
                let (first, more) = (node.u32(at, WHAT)?, node.u32(at.saturating_add(4), WHAT)?);
                mappings.push(Mapping {
                    segment,
                    from: (first, first.saturating_add(more)),
                    to: node.u32(at.saturating_add(8), WHAT)?,
                    its: group(table, node.size(at.saturating_add(12), WHAT)?)?,
                });
            }
        }
        offset = offset.saturating_add(size);
    }
    Ok(mappings)
}

/// The ITS of the node at `offset`, when that is a group of one.
fn group(table: Bytes<'_>, offset: usize) -> Result<Option<u32>, AcpiError> {
    const WHAT: &str = "ITS group";
    let node = table.part(offset, 24, WHAT)?;
    let one = node.u8(0, WHAT)? == 0 && node.u32(16, WHAT)? == 1;
    one.then(|| node.u32(20, WHAT)).transpose()
}

/// Reads a Processor Properties Topology Table: the places in it of package and core of each processor, by UID.
pub(crate) fn pptt(bytes: &[u8]) -> Result<BTreeMap<u32, (u32, u32)>, AcpiError> {
    const WHAT: &str = "processor structure";
    const PACKAGE: u32 = 1 << 0;
    const THREAD: u32 = 1 << 2;
    const LEAF: u32 = 1 << 3;
    let table = table(bytes, "PPTT")?;
    let node = |offset: u32| {
        let node = table.part(usize::try_from(offset).unwrap_or(usize::MAX), 20, WHAT)?;
        Ok::<_, AcpiError>((node.u32(4, WHAT)?, node.u32(8, WHAT)?, node.u32(12, WHAT)?))
    };
    let mut processors = BTreeMap::new();
    let mut offset = u32::try_from(HEADER).unwrap_or(u32::MAX);
    for (kind, entry) in structures(table, HEADER, WHAT)? {
        let (own, size) = (offset, u32::try_from(entry.0.len()).unwrap_or(u32::MAX));
        offset = offset.saturating_add(size);
        let (flags, parent, uid) = if kind == 0 { node(own)? } else { continue };
        if flags & LEAF == 0 {
            continue;
        }
        let core = if flags & THREAD == 0 { own } else { parent };
        // Parents are earlier in the table, so this ends.
        let (mut package, mut above) = (own, parent);
        while above != 0 && above < package {
            package = above;
            let (flags, parent, _) = node(package)?;
            above = if flags & PACKAGE == 0 { parent } else { 0 };
        }
        processors.insert(uid, (package, core));
    }
    Ok(processors)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::acpi::tests::summed;

    const TABLES: [&[u8]; 5] = [
        include_bytes!("../../../../vmm/tests/golden-acpi/APIC"),
        include_bytes!("../../../../vmm/tests/golden-acpi/GTDT"),
        include_bytes!("../../../../vmm/tests/golden-acpi/IORT"),
        include_bytes!("../../../../vmm/tests/golden-acpi/PPTT"),
        include_bytes!("../../../../vmm/tests/golden-acpi/SPCR"),
    ];

    #[test]
    fn the_tables_of_a_grace_machine_are_read() {
        let madt = madt(TABLES[0]).unwrap();
        assert_eq!(
            (madt.version, madt.distributors, madt.its),
            (3, vec![0x800_0000], [(0, 0x808_0000)].into())
        );
        assert_eq!(madt.redistributors, [(0x810_0000, 8 << 17)]);
        assert_eq!(madt.processors, (0..8).map(|index| (index, u64::from(index))).collect());
        assert_eq!(gtdt(TABLES[1]).unwrap(), [29, 30, 27, 26]);
        let mapping = Mapping { segment: 0, from: (0, 0xffff), to: 0, its: Some(0) };
        assert_eq!(iort(TABLES[2]).unwrap(), [mapping]);
        let places: Vec<u32> = pptt(TABLES[3]).unwrap().values().map(|(package, _)| *package).collect();
        assert_eq!((&places[..4], &places[4..]), (&[36; 4][..], &[36 + 5 * 20; 4][..]));
        assert_eq!(spcr(TABLES[4]).unwrap(), Spcr { kind: 3, base: 0xb00_0000, interrupt: 33 });
    }

    #[test]
    fn a_mapping_that_leaves_the_table_is_refused() {
        let mut wrong = TABLES[2].to_vec();
        wrong[72 + 8] = 200; // mappings of the root complex
        assert!(matches!(iort(&summed(wrong)), Err(AcpiError::Outside { what: "IORT node", .. })));
    }

    proptest! {
        #[test]
        fn a_damaged_table_is_read_or_refused(which in 0usize..5, at in 36usize..400, byte: u8, cut in 0usize..400) {
            let mut bytes = TABLES[which].to_vec();
            if let Some(b) = bytes.get_mut(at) { *b = byte; }
            bytes.truncate(cut.max(10));
            let length = u32::try_from(bytes.len()).unwrap().to_le_bytes();
            bytes[4..8].copy_from_slice(&length);
            let bytes = summed(bytes);
            let _ = (madt(&bytes), gtdt(&bytes), iort(&bytes), pptt(&bytes), spcr(&bytes));
        }
    }
}
