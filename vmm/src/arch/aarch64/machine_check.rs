//! How a vCPU hears of bad memory: as a synchronous external abort of its access, which Linux ends the reading program for.

use egm_address::{Guest, Span};
use kvm_bindings::kvm_vcpu_events;
use kvm_ioctls::VcpuFd;

use crate::kvm::KvmError;

/// What is said: that the access which is being made has failed. The guest knows which it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Check;

/// Says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reporter;

impl Reporter {
    /// Of every kind.
    #[cfg(test)]
    pub const ALL: &[Self] = &[Self];

    /// The vCPU read bad memory: its access fails.
    pub const fn consumed(self, _bad: Span<Guest>) -> Check {
        Check
    }

    /// Bad memory that nobody has read: firmware tables tell of it (HEST), not the vCPU.
    pub const fn found(self, _bad: Span<Guest>) -> Option<Check> {
        None
    }

    /// Other vCPUs go on.
    pub const fn of_others(self) -> Option<Check> {
        None
    }
}

/// Whether `check` is an exception: it always is.
pub const fn is_exception(_check: &Check) -> bool {
    true
}

/// Whether an exception would find the vCPU ready: it is about what the vCPU does just now.
///
/// # Errors
/// None.
pub const fn takes_exceptions(_vcpu: &VcpuFd) -> Result<bool, KvmError> {
    Ok(true)
}

/// Gives `vcpu` the exception, from its own thread (KVM api.rst, `KVM_SET_VCPU_EVENTS`).
///
/// # Errors
/// When the kernel refuses.
pub fn give(vcpu: &VcpuFd, _check: &Check) -> Result<(), KvmError> {
    let mut events = kvm_vcpu_events::default();
    events.exception.ext_dabt_pending = 1;
    vcpu.set_vcpu_events(&events).map_err(|error| KvmError::call("KVM_SET_VCPU_EVENTS", error))
}
