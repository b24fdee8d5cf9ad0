//! PCI resources that a device needs.

use egm_address::{Gpa, PciAddress};
use egm_vfio::host::HostFunction;

use crate::config::Device;
use crate::plan::BarKind;

/// A device of the configuration and what it needs.
pub(in crate::plan) struct Wanted<'a> {
    pub(in crate::plan) device: &'a Device,
    /// The host function that it is.
    pub(in crate::plan) host: Option<&'a HostFunction>,
    pub(in crate::plan) bars: Vec<WantedBar>,
    pub(in crate::plan) msix_vectors: u16,
    /// The guest node that a host function is near to.
    pub(in crate::plan) node: Option<u32>,
    /// The other host function of a Data Direct pair.
    pub(in crate::plan) partner: Option<PciAddress>,
}

#[derive(Clone, Copy)]
pub(in crate::plan) struct WantedBar {
    pub(in crate::plan) index: u8,
    pub(in crate::plan) kind: BarKind,
    pub(in crate::plan) size: u64,
    /// Where it must be.
    pub(in crate::plan) at: Option<Gpa>,
    /// Whether that is for Data Direct, not for the configuration.
    pub(in crate::plan) data_direct: bool,
}

impl BarKind {
    /// Whether it lies in the 64-bit window.
    pub(in crate::plan) const fn is_high(self) -> bool {
        matches!(self, Self::Memory64Prefetchable)
    }

    /// Whether it takes two registers.
    pub(in crate::plan) const fn is_wide(self) -> bool {
        matches!(self, Self::Memory64 | Self::Memory64Prefetchable)
    }
}
