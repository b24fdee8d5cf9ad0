//! HMAT figures as QEMU takes them.

use egm_config::Access;

use super::guest::Guest;

/// QEMU counts bandwidth in this.
const MIB: u64 = 1 << 20;
/// An entry has so many bits above the lowest that any of them uses (QEMU, `numa.c`).
const ENTRY_BITS: u32 = 16;

/// Latency and bandwidth between the processors of one node and the memory of another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Figure {
    /// Node of the processors.
    pub(super) from: u32,
    /// Node of the memory.
    pub(super) target: u32,
    /// Nanoseconds for a read or a write.
    pub(super) latency: u32,
    /// MiB a second, rounded down where entries would not fit otherwise.
    pub(super) bandwidth: u64,
}

/// All figures of a guest; the table has the first bits of the largest and the same ones of the others.
pub(super) fn figures(guest: &Guest) -> Vec<Figure> {
    let all = guest.nodes.iter().flat_map(|node| node.access.iter().map(|access| (node.id, access)));
    let mut figures: Vec<Figure> = all
        .map(|(target, access)| Figure {
            from: access.from,
            target,
            latency: access.latency_ns,
            bandwidth: mebibytes(access),
        })
        .collect();
    let most = figures.iter().map(|figure| figure.bandwidth).max().unwrap_or(0);
    let shift = (u64::BITS - most.leading_zeros()).saturating_sub(ENTRY_BITS);
    for figure in &mut figures {
        figure.bandwidth = ((figure.bandwidth >> shift) << shift).max(1 << shift);
    }
    figures
}

fn mebibytes(access: &Access) -> u64 {
    u64::from(access.bandwidth_mbps).saturating_mul(1_000_000) / MIB
}
