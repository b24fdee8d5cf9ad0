//! vCPUs and interrupt controllers, and a vCPU's registers at its first instruction.

use std::sync::Arc;

use kvm_bindings::{
    KVM_ARM_VCPU_PMU_V3, KVM_ARM_VCPU_PMU_V3_CTRL, KVM_ARM_VCPU_PMU_V3_INIT, KVM_ARM_VCPU_PMU_V3_IRQ,
    KVM_ARM_VCPU_POWER_OFF, KVM_ARM_VCPU_PSCI_0_2, KVM_ARM_VCPU_PTRAUTH_ADDRESS,
    KVM_ARM_VCPU_PTRAUTH_GENERIC, KVM_ARM_VCPU_SVE, KVM_CAP_ARM_INJECT_EXT_DABT, KVM_REG_ARM_CORE,
    KVM_REG_ARM64, KVM_REG_SIZE_U64, kvm_vcpu_init,
};
use kvm_ioctls::{Cap, VcpuFd};

use super::boot::Entry;
pub use super::gic::Controllers;
use super::gic::{self, attribute};
use super::layout::PERFORMANCE;
use super::machine_check::Reporter;
use crate::kvm::{Hypervisor, KvmError, Vm};
use crate::plan::Plan;

/// Optional features of a vCPU, used where the host has them: KVM's capability and the features it stands for.
const OPTIONAL: [(Cap, &[u32]); 3] = [
    (Cap::ArmPmuV3, &[KVM_ARM_VCPU_PMU_V3]),
    (Cap::ArmSve, &[KVM_ARM_VCPU_SVE]),
    // One without the other is refused.
    (Cap::ArmPtrAuthAddress, &[KVM_ARM_VCPU_PTRAUTH_ADDRESS, KVM_ARM_VCPU_PTRAUTH_GENERIC]),
];

/// Makes the vCPUs of `plan`, in its order, and then the interrupt controllers, which have a part for each. All vCPUs but the
/// first wait for the guest to start them (PSCI 0.2, `CPU_ON`).
///
/// # Errors
/// When the kernel refuses.
pub fn create(hypervisor: &Hypervisor, vm: &Vm, plan: &Plan) -> Result<Created, KvmError> {
    let vcpus: Vec<_> = plan.vcpus.iter().map(|vcpu| vm.create_vcpu(vcpu.index)).collect::<Result<_, _>>()?;
    let init = model(hypervisor, vm)?;
    for (index, vcpu) in vcpus.iter().enumerate() {
        initialize(vcpu, &init, index)?;
        finalize(vcpu, &init)?;
    }
    let hardware_ids = plan.vcpus.iter().map(|vcpu| vcpu.hardware_id).collect();
    let controllers = Arc::new(gic::create(vm, hardware_ids)?);
    if hypervisor.has(Cap::ArmPmuV3) {
        vcpus.iter().try_for_each(count_events)?;
    }
    Ok(Created { vcpus, controllers })
}

/// The vCPUs of a VM, and its interrupt controllers.
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct Created {
    pub vcpus: Vec<VcpuFd>,
    pub controllers: Arc<Controllers>,
}

/// Processor model and features of all vCPUs.
pub(super) fn model(hypervisor: &Hypervisor, vm: &Vm) -> Result<kvm_vcpu_init, KvmError> {
    let mut init = kvm_vcpu_init::default();
    let refused = |error| KvmError::call("KVM_ARM_PREFERRED_TARGET", error);
    vm.fd().get_preferred_target(&mut init).map_err(refused)?;
    let optional = OPTIONAL.into_iter().filter(|(cap, _)| hypervisor.has(*cap));
    let features = optional.flat_map(|(_, features)| features).chain(&[KVM_ARM_VCPU_PSCI_0_2]);
    let [first, ..] = &mut init.features;
    *first = features.fold(0, |all, feature| all | 1 << feature);
    Ok(init)
}

/// Resets vCPU `index` to its initial registers (`KVM_ARM_VCPU_INIT`). All but the first stay off until PSCI's `CPU_ON`.
pub(super) fn initialize(vcpu: &VcpuFd, model: &kvm_vcpu_init, index: usize) -> Result<(), KvmError> {
    let mut init = *model;
    let [features, ..] = &mut init.features;
    *features |= u32::from(index > 0) << KVM_ARM_VCPU_POWER_OFF;
    vcpu.vcpu_init(&init).map_err(|error| KvmError::call("KVM_ARM_VCPU_INIT", error))
}

/// Completes the features of a vCPU, once.
fn finalize(vcpu: &VcpuFd, model: &kvm_vcpu_init) -> Result<(), KvmError> {
    let [features, ..] = model.features;
    if features & 1 << KVM_ARM_VCPU_SVE != 0 {
        let feature = KVM_ARM_VCPU_SVE.cast_signed();
        vcpu.vcpu_finalize(&feature).map_err(|error| KvmError::call("KVM_ARM_VCPU_FINALIZE", error))?;
    }
    Ok(())
}

/// Gives the vCPU's counters their interrupt (KVM devices/vcpu.rst, 1).
fn count_events(vcpu: &VcpuFd) -> Result<(), KvmError> {
    let refused = |error| KvmError::call("KVM_SET_DEVICE_ATTR of the performance counters", error);
    let number = PERFORMANCE.cast_signed();
    let interrupt = attribute(KVM_ARM_VCPU_PMU_V3_CTRL, KVM_ARM_VCPU_PMU_V3_IRQ, &number);
    vcpu.set_device_attr(&interrupt).map_err(refused)?;
    let start = attribute(KVM_ARM_VCPU_PMU_V3_CTRL, KVM_ARM_VCPU_PMU_V3_INIT, &());
    vcpu.set_device_attr(&start).map_err(refused)
}

/// Number of a general register for `KVM_SET_ONE_REG`: `word` counts the 32-bit words of `struct kvm_regs` before it.
const fn register(word: u64) -> u64 {
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE as u64 | word
}

const X0: u64 = register(0);
const PROGRAM_COUNTER: u64 = register(64);

/// Has the first vCPU begin at `entry`, with the device tree's address in x0, the others being 0 (Linux
/// Documentation/arch/arm64/booting.rst). Returns how vCPUs get reports of bad memory, where KVM can deliver them.
///
/// # Errors
/// When the kernel refuses.
pub fn configure(
    hypervisor: &Hypervisor,
    _plan: &Plan,
    vcpus: &[VcpuFd],
    entry: &Entry,
) -> Result<Option<Reporter>, KvmError> {
    vcpus.first().map_or(Ok(()), |first| begin(first, entry))?;
    let aborts = hypervisor.kvm().check_extension_raw(KVM_CAP_ARM_INJECT_EXT_DABT.into()) > 0;
    Ok(aborts.then_some(Reporter))
}

/// Sets the registers of the first vCPU for `entry`.
pub(super) fn begin(vcpu: &VcpuFd, entry: &Entry) -> Result<(), KvmError> {
    [(X0, entry.tree), (PROGRAM_COUNTER, entry.address)].into_iter().try_for_each(|(register, value)| {
        let written = vcpu.set_one_reg(register, &value.get().to_le_bytes());
        written.map(drop).map_err(|error| KvmError::call("KVM_SET_ONE_REG", error))
    })
}

/// As on x86, where KVM's clock excuses a pause: guests of Arm have none, and their watchdog counts it.
pub const fn excuse_pause(_: &VcpuFd) {}

/// Where a vCPU is in the guest's code, for a message about its end.
pub fn program_counter(vcpu: &VcpuFd) -> Option<u64> {
    let mut value = [0; 8];
    vcpu.get_one_reg(PROGRAM_COUNTER, &mut value).ok().map(|_| u64::from_le_bytes(value))
}
