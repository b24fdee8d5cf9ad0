//! Bad memory, reported to a vCPU as a synchronous external abort of its access: Linux then ends the reading program.

use egm_address::{Guest, Span};
use kvm_bindings::kvm_vcpu_events;
use kvm_ioctls::VcpuFd;

use crate::kvm::KvmError;

/// A report to a vCPU: its access in progress has failed. The guest knows which access that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Check;

/// Makes the reports; they are all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reporter;

impl Reporter {
    /// A reporter of each kind, for tests.
    #[cfg(test)]
    pub const ALL: &[Self] = &[Self];

    /// The vCPU read bad memory: its access fails.
    pub const fn consumed(self, _bad: Span<Guest>) -> Check {
        Check
    }

    /// Bad memory that was not read yet: firmware tables report it (HEST), not the vCPU.
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

/// Whether the vCPU is ready for an exception: always, since the exception is about its access in progress.
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
pub fn inject(vcpu: &VcpuFd, _check: &Check) -> Result<(), KvmError> {
    let mut events = kvm_vcpu_events::default();
    events.exception.ext_dabt_pending = 1;
    vcpu.set_vcpu_events(&events).map_err(|error| KvmError::call("KVM_SET_VCPU_EVENTS", error))
}
