//! The kernel's calls for machine checks (KVM api.rst 4.104 to 4.106). This is an unsafe module.
//!
//! Why it exists: `kvm-ioctls` lacks them.
//! What callers may rely on: each call is given the type that its number encodes, and the kernel keeps none of it.
#![expect(unsafe_code, reason = "three ioctls that kvm-ioctls lacks")]

use kvm_bindings::{KVMIO, kvm_x86_mce};
use kvm_ioctls::{Cap, VcpuFd};
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};
use vmm_sys_util::{ioctl_ior_nr, ioctl_iow_nr};

use crate::kvm::{Hypervisor, KvmError};

ioctl_iow_nr!(KVM_X86_SETUP_MCE, KVMIO, 0x9c, u64);
ioctl_ior_nr!(KVM_X86_GET_MCE_CAP_SUPPORTED, KVMIO, 0x9d, u64);
ioctl_iow_nr!(KVM_X86_SET_MCE, KVMIO, 0x9e, kvm_x86_mce);

/// The bits of MCG_CAP that a vCPU may have; none where KVM gives guests no machine checks.
///
/// # Errors
/// When the kernel refuses.
pub fn supported(hypervisor: &Hypervisor) -> Result<u64, KvmError> {
    let mut bits = 0;
    if !hypervisor.has(Cap::Mce) {
        return Ok(bits);
    }
    // SAFETY: the kernel writes a u64, which `bits` is.
    let result = unsafe { ioctl_with_mut_ref(hypervisor.kvm(), KVM_X86_GET_MCE_CAP_SUPPORTED(), &mut bits) };
    check("KVM_X86_GET_MCE_CAP_SUPPORTED", result)?;
    Ok(bits)
}

/// Gives `vcpu` the machine check banks of `capability` (MCG_CAP); before it runs.
///
/// # Errors
/// When the kernel refuses.
pub fn setup(vcpu: &VcpuFd, capability: u64) -> Result<(), KvmError> {
    // SAFETY: the kernel reads a u64, which `capability` is.
    let result = unsafe { ioctl_with_ref(vcpu, KVM_X86_SETUP_MCE(), &capability) };
    check("KVM_X86_SETUP_MCE", result)
}

/// Gives `vcpu` a machine check; on its own thread, since any other thread waits until the vCPU leaves the guest.
///
/// # Errors
/// When the kernel refuses.
pub fn inject(vcpu: &VcpuFd, what: &kvm_x86_mce) -> Result<(), KvmError> {
    // SAFETY: the kernel reads a kvm_x86_mce.
    let result = unsafe { ioctl_with_ref(vcpu, KVM_X86_SET_MCE(), what) };
    check("KVM_X86_SET_MCE", result)
}

fn check(call: &'static str, result: i32) -> Result<(), KvmError> {
    if result < 0 { Err(KvmError::call(call, kvm_ioctls::Error::last())) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use egm_address::{Gpa, Span};
    use kvm_bindings::{Msrs, kvm_msr_entry};

    use super::*;
    use crate::arch::x86_64::machine_check::{Reporter, capability, takes_exceptions};
    use crate::arch::x86_64::vcpu::create_interrupt_controller;

    /// IA32_MC8_STATUS (0x400 + 4 × bank + 1), then address and the rest.
    const MC8_STATUS: u32 = 0x421;

    #[test]
    fn kvm_puts_what_is_reported_into_the_bank_that_the_guest_reads() {
        let Ok(hypervisor) = Hypervisor::open() else { return println!("skipped: no KVM") };
        let Some(capability) = capability(supported(&hypervisor).unwrap()) else {
            return println!("skipped: this KVM has no machine checks");
        };
        let vm = hypervisor.create_vm(48).unwrap();
        create_interrupt_controller(&vm).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        setup(&vcpu, capability).unwrap();
        let reported = Reporter { amd: true }.found(Span::new(Gpa::new(0x4000), 0x1000).unwrap()).unwrap();
        inject(&vcpu, &reported).unwrap();
        let entry = |index| kvm_msr_entry { index, ..Default::default() };
        let mut msrs = Msrs::from_entries(&[MC8_STATUS, MC8_STATUS + 1, MC8_STATUS + 2].map(entry)).unwrap();
        vcpu.get_msrs(&mut msrs).unwrap();
        let values: Vec<_> = msrs.as_slice().iter().map(|entry| entry.data).collect();
        assert_eq!(values, [reported.status, 0x4000, reported.misc]);
        assert!(!takes_exceptions(&vcpu).unwrap()); // it has not switched them on
        let wrong = kvm_x86_mce { bank: 200, ..reported };
        assert!(inject(&vcpu, &wrong).is_err());
    }
}
