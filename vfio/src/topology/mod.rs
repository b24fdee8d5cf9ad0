//! Topology of a host's PCI functions: switches, IOMMU groups, and which functions reach each other.
//!
//! Everything here is arithmetic over a list of [`HostFunction`]s, as [`crate::host`] reads it from sysfs and as recorded
//! facts keep it; only `place` reads files. Nothing is printed: verdicts carry their reasons as values.
//!
//! ```text
//!  place      position of one function, from sysfs and configuration space
//!  relation   two functions: PIX PXB PHB NODE SYS, as NCCL and nvidia-smi call them
//!  peer       a function that writes to another's BAR: does it arrive, which way, why
//!  group      whether a function can be assigned to a guest
//!  advice     settings of switches and adapters that would make the way shorter
//! ```
#![forbid(unsafe_code)]

mod advice;
mod class;
mod group;
mod peer;
mod placement;
mod relation;

use egm_address::PciAddress;

pub use advice::{Advice, advice};
pub use class::{class_name, vendor_name};
pub use group::{GroupError, IOMMU_REMEDY, Member, is_bridge, is_vfio_driver, members, remedy, usable};
pub use peer::{Peer, Reason, Route, peer};
pub use placement::{Acs, Ats, Express, FunctionPlacement, Link, Port};
pub use relation::{Relation, relation, upstream_port};

use crate::host::HostFunction;

/// The function at `address`, if `functions` has it.
pub fn find(functions: &[HostFunction], address: PciAddress) -> Option<&HostFunction> {
    functions.iter().find(|function| function.address == address)
}

/// The bridges above `function` that `functions` has, from the root port downwards.
pub fn bridges<'a>(
    functions: &'a [HostFunction],
    function: &'a HostFunction,
) -> impl Iterator<Item = &'a HostFunction> {
    function.place.bridges.iter().filter_map(|address| find(functions, *address))
}

#[cfg(test)]
pub(crate) mod testing;
