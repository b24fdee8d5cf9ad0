//! Effects of a guest's write beyond the bits that it changed.

use egm_address::{InBar, Span};

use super::image::Forward;

/// Result of a guest's write.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct Written {
    /// Writes for the device, in this order.
    pub forward: Vec<Forward>,
    /// Changes for the machine.
    pub effects: Effects,
}

/// Changes that the machine has to make; a field is `None` or false if nothing changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Effects {
    /// [`Shadow::decoded`](super::Shadow::decoded) returns another result than before.
    pub decoding: bool,
    /// New state of MSI.
    pub msi: Option<Msi>,
    /// New state of MSI-X.
    pub msix: Option<MsixControl>,
    /// INTx is now disabled, or not.
    pub intx_disabled: Option<bool>,
    /// Whether the function may now write memory. The forwarded write sets the device accordingly.
    pub bus_master: Option<bool>,
    /// New power state in the guest's view.
    pub power: Option<PowerState>,
    /// A function-level reset is requested. After it: [`Shadow::reset`](super::Shadow::reset), then
    /// [`Shadow::start`](super::Shadow::start).
    pub reset: bool,
}

/// A message signalled interrupt: a memory write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// Address of the write.
    pub address: u64,
    /// Data of the write.
    pub data: u32,
}

/// State of the MSI capability (PCI Express Base 6.0 §7.7.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Msi {
    /// Whether MSI is on.
    pub enabled: bool,
    /// Vectors that the guest allows: 1, 2, 4, 8, 16 or 32, as many as the function has at most.
    pub vectors: u8,
    /// The first vector's message.
    pub message: Message,
    /// Masked vectors by bit; 0 where the function has no masks.
    pub mask: u32,
}

impl Msi {
    /// Message of a vector below [`Msi::vectors`]: the number replaces the low bits of the data.
    pub fn vector(&self, number: u8) -> Message {
        let low = u32::from(self.vectors.saturating_sub(1));
        Message { address: self.message.address, data: self.message.data & !low | u32::from(number) & low }
    }

    /// Whether this vector is masked.
    pub fn is_masked(&self, number: u8) -> bool {
        self.mask.checked_shr(u32::from(number)).is_some_and(|mask| mask & 1 != 0)
    }
}

/// State of the MSI-X capability's control register (§7.7.2.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsixControl {
    /// Whether MSI-X is on.
    pub enabled: bool,
    /// Whether every vector is masked.
    pub masked: bool,
}

/// Power state (§5.3.1). D1 and D2 are not offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PowerState {
    /// On: answers in every space that is enabled.
    #[default]
    D0,
    /// Asleep: answers in configuration space only.
    D3Hot,
}

/// Location of a function's MSI-X structures (§7.7.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsixLayout {
    /// Vectors, 1 to 2048.
    pub vectors: u16,
    /// The table: 16 bytes a vector.
    pub table: BarRange,
    /// The pending bit array: 8 bytes for every 64 vectors.
    pub pending: BarRange,
}

impl MsixLayout {
    /// Parts of BAR `bar` that the machine answers instead of the device.
    pub fn in_bar(&self, bar: u8) -> impl Iterator<Item = Span<InBar>> {
        [self.table, self.pending].into_iter().filter(move |place| place.bar == bar).map(|place| place.span)
    }
}

/// A span of a BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BarRange {
    /// Number of the base address register, 0 to 5.
    pub bar: u8,
    /// Offsets in the BAR.
    pub span: Span<InBar>,
}
