//! The kernel's call that reads a device's attribute. This is an unsafe module.
//!
//! Why it exists: KVM writes the value to an address, which `kvm-ioctls` takes as a number.
//! What callers may rely on: every attribute of a GIC and an ITS has at most the eight bytes that are here.
#![expect(unsafe_code, reason = "the kernel writes a value to an address that it gets as a number")]

use kvm_bindings::kvm_device_attr;
use kvm_ioctls::DeviceFd;

use crate::kvm::KvmError;

/// Value of attribute `attr` of a GIC or an ITS, of 32 or 64 bits; the guest's byte order is ours.
///
/// # Errors
/// When the kernel refuses.
pub(in crate::arch::aarch64) fn read(device: &DeviceFd, group: u32, attr: u64) -> Result<u64, KvmError> {
    let mut value = 0_u64;
    let addr = u64::try_from((&raw mut value).expose_provenance()).unwrap_or_default();
    let mut attribute = kvm_device_attr { group, attr, addr, flags: 0 };
    // SAFETY: the kernel writes four or eight bytes to `value`, which outlives the call.
    let result = unsafe { device.get_device_attr(&mut attribute) };
    result.map_err(|error| KvmError::call("KVM_GET_DEVICE_ATTR of the GIC", error))?;
    Ok(value)
}
