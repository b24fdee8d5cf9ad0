//! Ids of vendors and devices that are treated as what they are (the PCI ID Repository).

/// NVIDIA: GPUs, and switches of their links.
pub(crate) const NVIDIA: u16 = 0x10de;
/// Mellanox: network adapters, today NVIDIA's too.
pub(crate) const MELLANOX: u16 = 0x15b3;
/// Mellanox's function of a ConnectX-8 that does the DMA of Data Direct.
pub(crate) const DATA_DIRECT: u16 = 0x2100;
