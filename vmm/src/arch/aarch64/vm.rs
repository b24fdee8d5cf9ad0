//! The kernel's VM.

use egm_vfio::variant::nvgrace::KVM_CACHEABLE_PFNMAP;
use kvm_ioctls::{Kvm, VmFd};

/// The capability that KVM needs to map, as cached, memory that the kernel has no pages of.
pub const CACHED_PFNMAP: Option<u32> = Some(KVM_CACHEABLE_PFNMAP);

/// Makes a VM with `address_bits` intermediate physical address bits.
///
/// # Errors
/// The kernel's.
pub fn create(kvm: &Kvm, address_bits: u8) -> Result<VmFd, kvm_ioctls::Error> {
    kvm.create_vm_with_ipa_size(address_bits.into())
}
