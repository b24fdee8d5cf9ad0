//! The kernel's VM.

use kvm_ioctls::{Kvm, VmFd};

/// The capability that KVM needs to map, as cached, memory that the kernel has no pages of: it always can.
pub const CACHED_PFNMAP: Option<u32> = None;

/// Makes a VM; its vCPUs' CPUID reports its number of address bits.
///
/// # Errors
/// The kernel's.
pub fn create(kvm: &Kvm, _address_bits: u8) -> Result<VmFd, kvm_ioctls::Error> {
    kvm.create_vm()
}
