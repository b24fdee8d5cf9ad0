//! Limits that `/dev/kvm` of this host reports.

use std::io;

use kvm_bindings::{KVM_CAP_ARM_VM_IPA_SIZE, KVM_CAP_MAX_VCPUS, KVM_CAP_NR_VCPUS, KVM_CAP_X2APIC_API};

use crate::facts::{Kvm, Probe};

/// What a plan needs of KVM, and guest physical address bits (Arm only; x86 has them in `/proc/cpuinfo`).
pub(super) struct Probed {
    pub(super) kvm: Probe<Kvm>,
    pub(super) address_bits: Option<u8>,
}

/// Probes `/dev/kvm`; absence is a result.
pub(super) fn probe() -> Probed {
    let kvm = match kvm_ioctls::Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => return Probed { kvm: Probe::Absent(reason(error.errno())), address_bits: None },
    };
    let number = |cap: u32| u32::try_from(kvm.check_extension_raw(cap.into())).unwrap_or(0);
    let recommended = number(KVM_CAP_NR_VCPUS).max(4); // api.rst 4.4: 4 when the kernel reports none
    let max = number(KVM_CAP_MAX_VCPUS);
    let max_vcpus = if max == 0 { recommended } else { max };
    let address_bits = u8::try_from(number(KVM_CAP_ARM_VM_IPA_SIZE)).ok().filter(|bits| *bits > 0);
    Probed { kvm: Probe::Present(Kvm { max_vcpus, x2apic: number(KVM_CAP_X2APIC_API) > 0 }), address_bits }
}

fn reason(errno: i32) -> String {
    let error = io::Error::from_raw_os_error(errno);
    match error.kind() {
        io::ErrorKind::NotFound => {
            "/dev/kvm does not exist: load kvm_intel, kvm_amd or a kernel with KVM".to_owned()
        }
        io::ErrorKind::PermissionDenied => {
            "/dev/kvm may not be opened: join its group, usually kvm".to_owned()
        }
        _ => format!("/dev/kvm cannot be opened: {error}"),
    }
}
