//! Default distances between NUMA nodes (ACPI SLIT, ACPI 6.5, 5.2.17).

/// A node's distance to itself.
pub const LOCAL: u8 = 10;
/// Between two nodes, as Linux assumes it (`REMOTE_DISTANCE`).
pub(crate) const REMOTE: u8 = 20;

/// Between parts of one GPU's memory; this and those below are as the firmware of a GB200 gives them.
pub const SAME_GPU: u8 = 11;
/// Between parts of two GPUs.
pub const OTHER_GPU: u8 = 40;
/// Between a GPU and the processors and memory of its socket.
pub const NEAR_GPU: u8 = 80;
/// Between a GPU and the processors and memory of another socket.
pub const FAR_GPU: u8 = 120;

/// The distance between two nodes without a GPU where none is written.
#[must_use]
pub const fn assumed(from: u32, to: u32) -> u8 {
    if from == to { LOCAL } else { REMOTE }
}
