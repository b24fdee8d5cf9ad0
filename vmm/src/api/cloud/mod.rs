//! cloud-hypervisor's `VmConfig` (v54) as a machine of ours.
//!
//! ```text
//!  VmConfig ──table: usual values──► Refusals, notes
//!     │
//!     └──translate: honoured fields──► File ──egm-config──► Spec ──► Plan
//! ```
//! [`document`] has every field of v54; an unknown field is a mistake. [`table`] has a row for each: it is honoured,
//! derived by the plan, or refused with a remedy. [`mod@translate`] only maps: root ports, addresses, nodes of GPUs and
//! interrupts are the plan's. Nothing here opens a file.
#![forbid(unsafe_code)]

mod document;
mod table;
mod translate;

pub(crate) use document::{
    ConsoleOutputMode, DeviceConfig, DiskConfig, NetConfig, RemovedDevice, Resize, UserDeviceConfig,
    VmConfig, VsockConfig,
};
pub(crate) use translate::{Translation, added, translate, translate_with};

#[cfg(test)]
mod tests;
