//! State of vCPUs and interrupt controllers before the guest's first instruction, to which a reset returns them.
//!
//! KVM resets a vCPU and an ITS by a request. It has none for a GICv3: its registers are written (Arm IHI 0069, 12.9).
//! The control register of the CPU interface stays: kernels write it before they enable interrupts.

use std::sync::Arc;

use kvm_bindings::{KVM_DEV_ARM_ITS_CTRL_RESET, KVM_DEV_ARM_VGIC_GRP_CTRL, kvm_vcpu_init};
use kvm_ioctls::VcpuFd;

use super::boot::Entry;
use super::gic::registers::{DISTRIBUTOR, Part, REDISTRIBUTOR};
use super::gic::{Controllers, attribute};
use super::state::VcpuInterface;
use super::vcpu::{begin, initialize, model};
use crate::kvm::{Hypervisor, KvmError, Vm};

/// State of a VM's vCPUs and interrupt controllers.
pub struct InitialState {
    controllers: Arc<Controllers>,
    model: kvm_vcpu_init,
}

impl InitialState {
    /// That of vCPUs of this host's model, and of `controllers`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn of(
        hypervisor: &Hypervisor,
        _: &VcpuInterface,
        vm: &Vm,
        controllers: &Arc<Controllers>,
        _: &[VcpuFd],
    ) -> Result<Self, KvmError> {
        Ok(Self { controllers: Arc::clone(controllers), model: model(hypervisor, vm)? })
    }

    /// Returns the interrupt controllers to it, while no vCPU is in the guest.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn restore_controllers(&self, _: &Vm) -> Result<(), KvmError> {
        let Controllers { gic, its, hardware_ids } = self.controllers.as_ref();
        let reset = attribute(KVM_DEV_ARM_VGIC_GRP_CTRL, KVM_DEV_ARM_ITS_CTRL_RESET, &());
        its.set_device_attr(&reset).map_err(|e| KvmError::call("KVM_DEV_ARM_ITS_CTRL_RESET", e))?;
        Part::distributor(gic).reset(&DISTRIBUTOR)?;
        hardware_ids.iter().try_for_each(|id| {
            Part::redistributor(gic, *id).reset(&REDISTRIBUTOR)?;
            Part::cpu_interface(gic, *id).reset_interface()
        })
    }

    /// Returns vCPU `index` to it, on its own thread; the first begins at `entry`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn restore_vcpu(&self, index: usize, fd: &VcpuFd, entry: &Entry) -> Result<(), KvmError> {
        initialize(fd, &self.model, index)?;
        if index == 0 { begin(fd, entry) } else { Ok(()) }
    }
}
