//! Machine checks, which report bad memory to the guest that uses it.
//!
//! Pure but for [`takes_exceptions`]. The reports are those of QEMU, since guests know them: Intel SDM volume 3B, 17.9
//! (recoverable errors, which need `MCG_SER_P`); AMD APM volume 2, 9.3 (poison, deferred errors).

mod ioctls;

use egm_address::{Guest, Span};
use kvm_bindings::{Msrs, kvm_msr_entry, kvm_x86_mce};
use kvm_ioctls::VcpuFd;

pub use self::ioctls::{inject, setup, supported};
use crate::kvm::KvmError;

/// A report to a vCPU: one machine check.
pub type Check = kvm_x86_mce;

/// MCG_CAP: banks, their control register, recoverable errors.
pub(super) const BANKS: u32 = 10;
const MCG_CTL_P: u64 = 1 << 8;
const MCG_SER_P: u64 = 1 << 24;
/// Banks for memory that was read and for memory that was found bad: a note that the guest has not seen must not make
/// an exception one with lost events. The third bank informs other vCPUs of an exception that is not theirs.
const READ_BANK: u8 = 9;
const FOUND_BANK: u8 = 8;
const OTHERS_BANK: u8 = 1;

const MSR_MCG_STATUS: u32 = 0x17a;
const MCG_RIPV: u64 = 1;
const MCG_EIPV: u64 = 1 << 1;
const MCG_MCIP: u64 = 1 << 2;
const CR4_MCE: u64 = 1 << 6;

const VALID: u64 = 1 << 63;
const UNCORRECTED: u64 = 1 << 61;
const ENABLED: u64 = 1 << 60;
const MISC_VALID: u64 = 1 << 59;
const ADDRESS_VALID: u64 = 1 << 58;
const SIGNALLED: u64 = 1 << 56;
const ACTION_REQUIRED: u64 = 1 << 55;
const AMD_DEFERRED: u64 = 1 << 44;
const AMD_POISON: u64 = 1 << 43;
/// Compound error codes: a data read, and a memory scrubber's find.
const DATA_READ: u64 = 0x134;
const SCRUB: u64 = 0xc0;
/// MCi_MISC: the address is a guest physical one; the field below is the number of its low bits that mean nothing.
const PHYSICAL: u64 = 2 << 6;

/// MCG_CAP of every vCPU, where KVM offers what recovery needs.
pub const fn capability(supported: u64) -> Option<u64> {
    if supported & MCG_SER_P == 0 { None } else { Some(BANKS as u64 | (MCG_CTL_P | MCG_SER_P) & supported) }
}

/// Makes machine checks in the form of the guest's processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reporter {
    /// Whether CPUID reports an AMD processor.
    pub amd: bool,
}

impl Reporter {
    /// A reporter of each kind, for tests.
    #[cfg(test)]
    pub const ALL: &[Self] = &[Self { amd: false }, Self { amd: true }];

    /// The vCPU read bad memory: it gets an exception, and the program that read ends.
    pub fn consumed(self, bad: Span<Guest>) -> kvm_x86_mce {
        let kind = if self.amd { AMD_POISON } else { SIGNALLED | ACTION_REQUIRED | DATA_READ };
        Self::memory(READ_BANK, bad, kind | UNCORRECTED, MCG_MCIP | MCG_RIPV | MCG_EIPV)
    }

    /// Bad memory that was not read yet: an exception after which everything goes on. AMD's way is a note in the bank,
    /// which the guest finds when it looks (Linux: within five minutes).
    pub fn found(self, bad: Span<Guest>) -> Option<kvm_x86_mce> {
        if self.amd {
            return Some(Self::memory(FOUND_BANK, bad, AMD_DEFERRED | AMD_POISON, 0));
        }
        Some(Self::memory(FOUND_BANK, bad, SIGNALLED | UNCORRECTED | SCRUB, MCG_MCIP | MCG_RIPV))
    }

    /// Check for the other vCPUs when one gets an exception: Intel processors broadcast it, and a guest waits for all.
    pub fn of_others(self) -> Option<kvm_x86_mce> {
        let (status, mcg_status) = (VALID | UNCORRECTED, MCG_MCIP | MCG_RIPV);
        (!self.amd).then(|| kvm_x86_mce { status, mcg_status, bank: OTHERS_BANK, ..Default::default() })
    }

    fn memory(bank: u8, bad: Span<Guest>, kind: u64, mcg_status: u64) -> kvm_x86_mce {
        let status = VALID | ENABLED | MISC_VALID | ADDRESS_VALID | kind;
        let misc = PHYSICAL | u64::from(bad.size().max(1).ilog2());
        kvm_x86_mce { status, mcg_status, addr: bad.start().get(), misc, bank, ..Default::default() }
    }
}

/// Whether `check` is an exception and not only a note in a bank.
pub const fn is_exception(check: &kvm_x86_mce) -> bool {
    check.status & UNCORRECTED != 0
}

/// Whether an exception would find the vCPU ready: the guest has switched them on and handles none. Otherwise it would
/// shut down, as a real processor does.
///
/// # Errors
/// When the kernel refuses.
pub fn takes_exceptions(vcpu: &VcpuFd) -> Result<bool, KvmError> {
    let refused = |e| KvmError::call("KVM_GET_MSRS", e);
    let entry = kvm_msr_entry { index: MSR_MCG_STATUS, ..Default::default() };
    let mut msrs = Msrs::from_entries(&[entry]).map_err(|_| refused(kvm_ioctls::Error::new(libc::E2BIG)))?;
    vcpu.get_msrs(&mut msrs).map_err(refused)?;
    let handles_one = msrs.as_slice().first().is_some_and(|entry| entry.data & MCG_MCIP != 0);
    let sregs = vcpu.get_sregs().map_err(|e| KvmError::call("KVM_GET_SREGS", e))?;
    Ok(!handles_one && sregs.cr4 & CR4_MCE != 0)
}

#[cfg(test)]
mod tests {
    use egm_address::Gpa;

    use super::*;

    fn page(size: u64) -> Span<Guest> {
        Span::new(Gpa::new(0x1_2345_6000), size).unwrap()
    }

    #[test]
    fn an_intel_guest_gets_what_its_handbook_calls_action_required_and_action_optional() {
        let reporter = Reporter { amd: false };
        let (consumed, found) = (reporter.consumed(page(0x1000)), reporter.found(page(0x1000)).unwrap());
        assert_eq!((consumed.status, consumed.mcg_status), (0xbd80_0000_0000_0134, 7));
        assert_eq!((found.status, found.mcg_status), (0xbd00_0000_0000_00c0, 5));
        assert_eq!((consumed.addr, consumed.misc), (0x1_2345_6000, 0x8c));
        assert_eq!((consumed.bank, found.bank), (9, 8));
        let others = reporter.of_others().unwrap();
        assert_eq!((others.status, others.mcg_status, others.bank), (0xa000_0000_0000_0000, 5, 1));
    }

    #[test]
    fn an_amd_guest_gets_poison_and_deferred_errors_and_no_other_processor_does() {
        let reporter = Reporter { amd: true };
        let (consumed, found) = (reporter.consumed(page(0x20_0000)), reporter.found(page(0x1000)).unwrap());
        assert_eq!((consumed.status, consumed.mcg_status, consumed.misc), (0xbc00_0800_0000_0000, 7, 0x95));
        assert_eq!((found.status, found.mcg_status), (0x9c00_1800_0000_0000, 0));
        assert!(is_exception(&consumed) && !is_exception(&found));
        assert_eq!(reporter.of_others(), None);
    }

    #[test]
    fn without_recoverable_errors_there_are_no_machine_checks() {
        assert_eq!(capability(MCG_CTL_P), None);
        assert_eq!(capability(MCG_SER_P), Some(0x100_000a));
        assert_eq!(capability(u64::MAX), Some(0x100_010a));
    }
}
