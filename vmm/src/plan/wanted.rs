//! PCI resources that a device needs.

use egm_address::{Gpa, PciAddress};
use egm_vfio::host::HostFunction;

use crate::config::Device;
use crate::plan::BarKind;

/// A device of the configuration and what it needs.
pub(super) struct Wanted<'a> {
    pub(super) device: &'a Device,
    /// The host function that it is.
    pub(super) host: Option<&'a HostFunction>,
    pub(super) bars: Vec<WantedBar>,
    pub(super) msix_vectors: u16,
    /// The guest node that a host function is near to.
    pub(super) node: Option<u32>,
    /// The other host function of a Data Direct pair.
    pub(super) partner: Option<PciAddress>,
}

#[derive(Clone, Copy)]
pub(super) struct WantedBar {
    pub(super) index: u8,
    pub(super) kind: BarKind,
    pub(super) size: u64,
    /// Where it must be.
    pub(super) at: Option<Gpa>,
    /// Whether that is for Data Direct, not for the configuration.
    pub(super) data_direct: bool,
}

impl BarKind {
    /// Whether it lies in the 64-bit window.
    pub(super) const fn is_high(self) -> bool {
        matches!(self, Self::Memory64Prefetchable)
    }

    /// Whether it takes two registers.
    pub(super) const fn is_wide(self) -> bool {
        matches!(self, Self::Memory64 | Self::Memory64Prefetchable)
    }
}
