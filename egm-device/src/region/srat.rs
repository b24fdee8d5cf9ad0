//! The ACPI System Resource Affinity Table: which memory lies at which node, hidden memory included (ACPI 6.5, 5.2.16).

use egm_address::{Host, Hpa, Span};
use serde::{Deserialize, Serialize};

/// Memory and the node it lies at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Affinity {
    /// Proximity domain, the firmware's number of the node.
    pub domain: u32,
    /// The kernel's number of the node.
    pub node: u32,
    /// Host physical addresses of the memory.
    pub span: Span<Host>,
}

/// Bytes before the first structure: the table header and 12 reserved bytes.
const HEADER: usize = 48;

/// The enabled memory of `table`, in its order. Linux numbers nodes as domains appear: first those of processors and
/// initiators, then those with memory only. A truncated table yields the entries before its end.
#[must_use]
pub(super) fn parse(table: &[u8]) -> Vec<Affinity> {
    let mut domains: Vec<u32> = Vec::new();
    let mut memory = Vec::new();
    for entry in entries(table) {
        let domain = match entry.first() {
            Some(0) => low(entry).filter(|_| enabled(entry, 4)),
            Some(2) => u32_at(entry, 4).filter(|_| enabled(entry, 12)),
            Some(3) => u32_at(entry, 2).filter(|_| enabled(entry, 10)),
            Some(5) => u32_at(entry, 4).filter(|_| enabled(entry, 24)),
            Some(1) => {
                memory.extend(memory_of(entry).filter(|_| enabled(entry, 28)));
                None
            }
            _ => None,
        };
        domains.extend(domain);
    }
    domains.extend(memory.iter().map(|(domain, _)| *domain));
    let mut order: Vec<u32> = Vec::new();
    for domain in domains {
        if !order.contains(&domain) {
            order.push(domain);
        }
    }
    let node = |domain| order.iter().position(|d| *d == domain).and_then(|n| u32::try_from(n).ok());
    memory
        .into_iter()
        .filter_map(|(domain, span)| Some(Affinity { domain, node: node(domain)?, span }))
        .collect()
}

fn entries(table: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = table.get(HEADER..).unwrap_or_default();
    std::iter::from_fn(move || {
        let length = usize::from(*rest.get(1)?);
        let entry = rest.get(..length).filter(|_| length >= 2)?;
        rest = rest.get(length..)?;
        Some(entry)
    })
}

fn memory_of(entry: &[u8]) -> Option<(u32, Span<Host>)> {
    let span = Span::new(Hpa::new(u64_at(entry, 8)?), u64_at(entry, 16)?).ok()?;
    Some((u32_at(entry, 2)?, span))
}

/// The domain of a processor's local APIC: its lowest byte is apart from the others.
fn low(entry: &[u8]) -> Option<u32> {
    let high = entry.get(9..12)?;
    Some(u32::from_le_bytes([*entry.get(2)?, *high.first()?, *high.get(1)?, *high.get(2)?]))
}

fn enabled(entry: &[u8], flags: usize) -> bool {
    entry.get(flags).is_some_and(|byte| byte & 1 == 1)
}

fn u32_at(entry: &[u8], at: usize) -> Option<u32> {
    entry.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

fn u64_at(entry: &[u8], at: usize) -> Option<u64> {
    entry.get(at..)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn memory(domain: u32, start: u64, size: u64, flags: u32) -> Vec<u8> {
        let mut entry = vec![1, 40];
        entry.extend(domain.to_le_bytes());
        entry.extend([0; 2]);
        entry.extend(start.to_le_bytes());
        entry.extend(size.to_le_bytes());
        entry.extend([0; 4]);
        entry.extend(flags.to_le_bytes());
        entry.extend([0; 8]);
        entry
    }

    fn processor(domain: u32) -> Vec<u8> {
        let mut entry = vec![3, 18];
        entry.extend(domain.to_le_bytes());
        entry.extend([0; 4]);
        entry.extend([1, 0, 0, 0, 0, 0, 0, 0]);
        entry
    }

    #[test]
    fn memory_without_processors_gets_the_last_nodes() {
        let mut table = vec![0; HEADER];
        for entry in [
            memory(4, 0, 64 << 30, 1),
            memory(0, 64 << 30, 16 << 30, 1),
            processor(0),
            processor(1),
            memory(1, 1 << 44, 16 << 30, 1),
            memory(9, 7 << 44, 16 << 30, 0),
        ] {
            table.extend(entry);
        }
        let found: Vec<_> = parse(&table).iter().map(|a| (a.domain, a.node, a.span.start().get())).collect();
        assert_eq!(found, [(4, 2, 0), (0, 0, 64 << 30), (1, 1, 1 << 44)]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_table_or_none(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
        }
    }
}
