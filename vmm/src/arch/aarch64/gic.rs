//! The interrupt controllers, a GICv3 with an ITS, which the kernel has.

pub(super) mod read;
pub(super) mod registers;

use kvm_bindings::{
    KVM_DEV_ARM_VGIC_CTRL_INIT, KVM_DEV_ARM_VGIC_GRP_ADDR, KVM_DEV_ARM_VGIC_GRP_CTRL,
    KVM_DEV_ARM_VGIC_GRP_NR_IRQS, KVM_VGIC_ITS_ADDR_TYPE, KVM_VGIC_V3_ADDR_TYPE_DIST,
    KVM_VGIC_V3_ADDR_TYPE_REDIST_REGION, kvm_create_device, kvm_device_attr, kvm_device_type,
    kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_ITS, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3,
};
use kvm_ioctls::DeviceFd;

use super::interrupts::LINES;
use super::layout::{DISTRIBUTOR, ITS, REDISTRIBUTORS};
use crate::kvm::{KvmError, Vm};

/// A GICv3 and its ITS.
pub struct Controllers {
    pub(super) gic: DeviceFd,
    pub(super) its: DeviceFd,
    /// Affinity of each vCPU, as MPIDR has it.
    pub(super) hardware_ids: Vec<u32>,
}

/// Makes the controllers of a VM with vCPUs of these `hardware_ids`; they stay as long as it (KVM
/// devices/arm-vgic-v3.rst and arm-vgic-its.rst).
///
/// # Errors
/// When the kernel refuses.
pub(super) fn create(vm: &Vm, hardware_ids: Vec<u32>) -> Result<Controllers, KvmError> {
    let gic = device(vm, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3, "KVM_CREATE_DEVICE for a GICv3")?;
    let its = device(vm, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_ITS, "KVM_CREATE_DEVICE for an ITS")?;
    // Their number in bits 63 to 52, their address below, and 0 as the region's number.
    let redistributors = u64::try_from(hardware_ids.len()).unwrap_or(u64::MAX) << 52 | REDISTRIBUTORS;
    let attributes = [
        (&gic, KVM_DEV_ARM_VGIC_GRP_ADDR, KVM_VGIC_V3_ADDR_TYPE_DIST, DISTRIBUTOR),
        (&gic, KVM_DEV_ARM_VGIC_GRP_ADDR, KVM_VGIC_V3_ADDR_TYPE_REDIST_REGION, redistributors),
        (&gic, KVM_DEV_ARM_VGIC_GRP_NR_IRQS, 0, LINES.end.into()), // the kernel reads the lower half
        (&gic, KVM_DEV_ARM_VGIC_GRP_CTRL, KVM_DEV_ARM_VGIC_CTRL_INIT, 0),
        (&its, KVM_DEV_ARM_VGIC_GRP_ADDR, KVM_VGIC_ITS_ADDR_TYPE, ITS),
        (&its, KVM_DEV_ARM_VGIC_GRP_CTRL, KVM_DEV_ARM_VGIC_CTRL_INIT, 0),
    ];
    attributes.into_iter().try_for_each(|(device, group, attr, value)| {
        let attribute = attribute(group, attr, &value);
        device.set_device_attr(&attribute).map_err(|e| KvmError::call("KVM_SET_DEVICE_ATTR of the GIC", e))
    })?;
    Ok(Controllers { gic, its, hardware_ids })
}

fn device(vm: &Vm, type_: kvm_device_type, call: &'static str) -> Result<DeviceFd, KvmError> {
    let mut wanted = kvm_create_device { type_, ..Default::default() };
    vm.fd().create_device(&mut wanted).map_err(|error| KvmError::call(call, error))
}

/// An attribute; the kernel reads its value during the call.
pub(super) fn attribute<T>(group: u32, attr: impl Into<u64>, value: &T) -> kvm_device_attr {
    let addr = u64::try_from((&raw const *value).expose_provenance()).unwrap_or_default();
    kvm_device_attr { group, attr: attr.into(), addr, flags: 0 }
}
