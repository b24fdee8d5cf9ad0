//! State of vCPUs and interrupt controllers before the guest's first instruction, to which a reset returns them.
//!
//! KVM resets a VM only by making another one, and assigned functions, slots and eventfds belong to this one.

use std::sync::Arc;

use kvm_ioctls::VcpuFd;

use super::boot::Entry;
use super::state::{Chips, VcpuInterface, VcpuState};
use super::vcpu::{Controllers, begin};
use crate::kvm::{Hypervisor, KvmError, Vm};

/// State of a VM's vCPUs and interrupt controllers. The clock that KVM has for guests goes on.
pub struct InitialState {
    chips: Chips,
    interface: VcpuInterface,
    vcpus: Vec<VcpuState>,
}

impl InitialState {
    /// The present state of `vcpus`, with their registers set, and of the interrupt controllers.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn of(
        _: &Hypervisor,
        interface: &VcpuInterface,
        vm: &Vm,
        _: &Arc<Controllers>,
        vcpus: &[VcpuFd],
    ) -> Result<Self, KvmError> {
        let vcpu = |fd| VcpuState::save(fd, interface).map(VcpuState::into_initial);
        let vcpus = vcpus.iter().map(vcpu).collect::<Result<_, _>>()?;
        Ok(Self { chips: Chips::save(vm)?, interface: interface.clone(), vcpus })
    }

    /// Returns the interrupt controllers to it, while no vCPU is in the guest.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn restore_controllers(&self, vm: &Vm) -> Result<(), KvmError> {
        self.chips.restore(vm)
    }

    /// Returns vCPU `index` to it, on its own thread; the first begins at `entry`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn restore_vcpu(&self, index: usize, fd: &VcpuFd, entry: &Entry) -> Result<(), KvmError> {
        let Some(vcpu) = self.vcpus.get(index) else { return Ok(()) };
        vcpu.reset(fd, &self.interface)?;
        if index == 0 { begin(fd, entry) } else { Ok(()) }
    }
}
