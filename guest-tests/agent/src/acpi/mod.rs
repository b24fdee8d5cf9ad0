//! The firmware's tables as bytes, read without the kernel's help: SRAT, SLIT and HMAT, those of [`platform`] and of [`arm`].
//!
//! What Linux shows of them is filtered and renumbered; here the VMM's own words are read. Every length is checked
//! before use, so a wrong table is an error and never a panic. ACPI 6.5: SRAT 5.2.16, SLIT 5.2.17, HMAT 5.2.28.

pub(crate) mod arm;
pub(crate) mod platform;

use std::collections::BTreeMap;

use egm_address::{Gpa, Guest, PciAddress, Span};

/// Bytes of the header that all tables have (ACPI 6.5, 5.2.6).
pub(crate) const HEADER: usize = 36;

/// Reason why a table is malformed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AcpiError {
    /// Another table, or none.
    #[error("does not begin with {0}")]
    Signature(&'static str),
    /// The length field, a structure or an array leaves the table.
    #[error("{what} at {offset:#x} leaves the table of {size:#x} bytes")]
    Outside {
        /// The part that leaves it.
        what: &'static str,
        /// Its offset in the table.
        offset: usize,
        /// Size of the table.
        size: usize,
    },
    /// The bytes do not add up to 0.
    #[error("has the checksum {0:#x}, not 0")]
    Checksum(u8),
    /// A memory range that is none.
    #[error("has a memory range of {size:#x} bytes at {start:#x}")]
    Range { start: u64, size: u64 },
}

/// Bytes of a table; an access past their end is [`AcpiError::Outside`].
#[derive(Debug, Clone, Copy)]
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn array<const N: usize>(self, offset: usize, what: &'static str) -> Result<[u8; N], AcpiError> {
        self.part(offset, N, what)?.0.try_into().map_err(|_| self.outside(offset, what))
    }
    fn outside(self, offset: usize, what: &'static str) -> AcpiError {
        AcpiError::Outside { what, offset, size: self.0.len() }
    }
    fn part(self, offset: usize, size: usize, what: &'static str) -> Result<Self, AcpiError> {
        let end = offset.checked_add(size);
        end.and_then(|end| self.0.get(offset..end)).map(Bytes).ok_or_else(|| self.outside(offset, what))
    }
    fn u8(self, offset: usize, what: &'static str) -> Result<u8, AcpiError> {
        self.array::<1>(offset, what).map(|[byte]| byte)
    }
    fn u16(self, offset: usize, what: &'static str) -> Result<u16, AcpiError> {
        self.array(offset, what).map(u16::from_le_bytes)
    }
    fn u32(self, offset: usize, what: &'static str) -> Result<u32, AcpiError> {
        self.array(offset, what).map(u32::from_le_bytes)
    }
    fn u64(self, offset: usize, what: &'static str) -> Result<u64, AcpiError> {
        self.array(offset, what).map(u64::from_le_bytes)
    }
    fn size(self, offset: usize, what: &'static str) -> Result<usize, AcpiError> {
        self.u32(offset, what).map(|n| usize::try_from(n).unwrap_or(usize::MAX))
    }
}

/// Checks signature, length and checksum.
fn table<'a>(bytes: &'a [u8], signature: &'static str) -> Result<Bytes<'a>, AcpiError> {
    if !bytes.starts_with(signature.as_bytes()) {
        return Err(AcpiError::Signature(signature));
    }
    let size = Bytes(bytes).size(4, "length")?;
    let whole = Bytes(bytes).part(0, size.max(HEADER), "length")?;
    match whole.0.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)) {
        0 => Ok(whole),
        sum => Err(AcpiError::Checksum(sum)),
    }
}

/// Id of a processor in the SRAT.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Processor {
    /// x86: local APIC or x2APIC id.
    Apic(u32),
    /// Arm: ACPI processor UID.
    Uid(u32),
}

/// Affinities of enabled entries.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Srat {
    /// Proximity domain by processor.
    pub(crate) processors: BTreeMap<Processor, u32>,
    /// PCI functions that are generic initiators, and the domains of each, in table order.
    pub(crate) initiators: Vec<(PciAddress, u32)>,
    /// Memory and its proximity domain, in table order.
    pub(crate) memory: Vec<(Span<Guest>, u32)>,
}

/// Reads a System Resource Affinity Table.
pub(crate) fn srat(bytes: &[u8]) -> Result<Srat, AcpiError> {
    const WHAT: &str = "affinity structure";
    const PCI_HANDLE: u8 = 1;
    let table = table(bytes, "SRAT")?;
    let mut srat = Srat::default();
    let mut offset = HEADER + 12;
    while offset < table.0.len() {
        let size = usize::from(table.u8(offset + 1, WHAT)?).max(2);
        let entry = table.part(offset, size, WHAT)?;
        let enabled = |flags| entry.u32(flags, WHAT).map(|f| f & 1 == 1);
        match table.u8(offset, WHAT)? {
            0 if enabled(4)? => {
                let [low, apic] = entry.array(2, WHAT)?;
                let [a, b, c] = entry.array(9, WHAT)?;
                srat.processors.insert(Processor::Apic(apic.into()), u32::from_le_bytes([low, a, b, c]));
            }
            1 if enabled(28)? => {
                let (start, size) = (entry.u64(8, WHAT)?, entry.u64(16, WHAT)?);
                let span = Span::new(Gpa::new(start), size).map_err(|_| AcpiError::Range { start, size })?;
                srat.memory.push((span, entry.u32(2, WHAT)?));
            }
            2 if enabled(12)? => {
                srat.processors.insert(Processor::Apic(entry.u32(8, WHAT)?), entry.u32(4, WHAT)?);
            }
            3 if enabled(10)? => {
                srat.processors.insert(Processor::Uid(entry.u32(6, WHAT)?), entry.u32(2, WHAT)?);
            }
            5 if enabled(24)? && entry.u8(3, WHAT)? == PCI_HANDLE => {
                let (segment, [bus, devfn]) = (entry.u16(8, WHAT)?, entry.array(10, WHAT)?);
                let address = PciAddress::new(segment, bus, devfn >> 3, devfn & 7);
                let address = address.map_err(|_| entry.outside(10, "PCI function"))?;
                srat.initiators.push((address, entry.u32(4, WHAT)?));
            }
            _ => {}
        }
        offset += size;
    }
    Ok(srat)
}

/// Reads a System Locality Information Table: `[from][to]`, by proximity domain.
pub(crate) fn slit(bytes: &[u8]) -> Result<Vec<Vec<u8>>, AcpiError> {
    let table = table(bytes, "SLIT")?;
    let count = table.u64(HEADER, "locality count")?;
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    if count == 0 {
        return Ok(Vec::new());
    }
    let matrix = table.part(HEADER + 8, count.saturating_mul(count), "matrix")?;
    Ok(matrix.0.chunks(count).map(<[u8]>::to_vec).collect())
}

/// Property that a figure of the HMAT describes: latencies are in picoseconds, bandwidths in MB/s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Figure {
    ReadLatency,
    WriteLatency,
    ReadBandwidth,
    WriteBandwidth,
}

/// Figures of memory (not of its caches) by figure, initiator and target domain.
pub(crate) type Hmat = BTreeMap<(Figure, u32, u32), u64>;

/// Reads a Heterogeneous Memory Attribute Table.
pub(crate) fn hmat(bytes: &[u8]) -> Result<Hmat, AcpiError> {
    const WHAT: &str = "HMAT structure";
    let table = table(bytes, "HMAT")?;
    let mut figures = Hmat::new();
    let mut offset = HEADER + 4;
    while offset < table.0.len() {
        let size = table.size(offset + 4, WHAT)?.max(8);
        let entry = table.part(offset, size, WHAT)?;
        if table.u16(offset, WHAT)? == 1 {
            locality(entry, &mut figures)?;
        }
        offset += size;
    }
    Ok(figures)
}

/// Adds the figures of a System Locality Latency and Bandwidth Information Structure.
fn locality(entry: Bytes<'_>, figures: &mut Hmat) -> Result<(), AcpiError> {
    const WHAT: &str = "locality array";
    if entry.u8(8, WHAT)? & 0xf != 0 {
        return Ok(()); // a memory-side cache
    }
    let kinds: &[Figure] = match entry.u8(9, WHAT)? {
        0 => &[Figure::ReadLatency, Figure::WriteLatency],
        1 => &[Figure::ReadLatency],
        2 => &[Figure::WriteLatency],
        3 => &[Figure::ReadBandwidth, Figure::WriteBandwidth],
        4 => &[Figure::ReadBandwidth],
        5 => &[Figure::WriteBandwidth],
        _ => return Ok(()),
    };
    let (initiators, targets) = (entry.size(12, WHAT)?, entry.size(16, WHAT)?);
    let unit = entry.u64(24, WHAT)?;
    let from = entry.part(32, initiators.saturating_mul(4), WHAT)?;
    let to = entry.part(32 + from.0.len(), targets.saturating_mul(4), WHAT)?;
    let values = 32 + from.0.len() + to.0.len();
    entry.part(values, initiators.saturating_mul(targets).saturating_mul(2), WHAT)?;
    for i in 0..initiators {
        for t in 0..targets {
            let value = entry.u16(values + 2 * (i * targets + t), WHAT)?;
            if matches!(value, 0 | 0xffff) {
                continue; // not provided, not reachable
            }
            let (initiator, target) = (from.u32(4 * i, WHAT)?, to.u32(4 * t, WHAT)?);
            for kind in kinds {
                figures.insert((*kind, initiator, target), unit.saturating_mul(value.into()));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    const SRAT: &[u8] = include_bytes!("../../fixtures/q35/SRAT");
    const SLIT: &[u8] = include_bytes!("../../fixtures/q35/SLIT");
    const HMAT: &[u8] = include_bytes!("../../fixtures/q35/HMAT");

    /// `bytes` with a right checksum.
    pub(crate) fn summed(mut bytes: Vec<u8>) -> Vec<u8> {
        if bytes.len() > 9 {
            bytes[9] = 0;
            bytes[9] = bytes.iter().fold(0u8, |sum, byte| sum.wrapping_sub(*byte));
        }
        bytes
    }

    #[test]
    fn the_tables_of_a_machine_with_two_nodes_are_read() {
        let srat = srat(SRAT).unwrap();
        let processors: Vec<_> = srat.processors.into_iter().collect();
        assert_eq!(processors, [(Processor::Apic(0), 0), (Processor::Apic(1), 0)]);
        let far = Span::new(Gpa::new(0x2000_0000), 256 << 20).unwrap();
        assert!(srat.memory.contains(&(far, 1)));
        assert_eq!(slit(SLIT).unwrap(), [[10, 40], [40, 10]]);
        let hmat = hmat(HMAT).unwrap();
        assert_eq!(hmat[&(Figure::ReadLatency, 0, 1)], 400_000);
        assert_eq!(hmat[&(Figure::WriteBandwidth, 0, 1)], 51_200);
    }

    #[test]
    fn a_cut_table_is_refused() {
        assert_eq!(slit(&SLIT[..40]), Err(AcpiError::Outside { what: "length", offset: 0, size: 40 }));
        assert_eq!(slit(SRAT), Err(AcpiError::Signature("SLIT")));
        let mut wrong = SLIT.to_vec();
        wrong[44] ^= 1;
        assert!(matches!(slit(&wrong), Err(AcpiError::Checksum(_))));
    }

    #[test]
    fn a_count_that_leaves_the_table_is_refused() {
        let mut wide = SLIT.to_vec();
        wide[36..44].fill(0xff);
        assert!(matches!(slit(&summed(wide)), Err(AcpiError::Outside { what: "matrix", .. })));
    }

    proptest! {
        #[test]
        fn a_damaged_table_is_read_or_refused(which in 0usize..3, at in 36usize..200, byte: u8, cut in 0usize..200) {
            let mut bytes = [SRAT, SLIT, HMAT][which].to_vec();
            if let Some(b) = bytes.get_mut(at) { *b = byte; }
            bytes.truncate(cut.max(10));
            let length = u32::try_from(bytes.len()).unwrap().to_le_bytes();
            bytes[4..8].copy_from_slice(&length);
            let bytes = summed(bytes);
            let _ = (srat(&bytes), slit(&bytes), hmat(&bytes));
        }
    }
}
