//! A vCPU's registers at its first instruction.

use std::arch::x86_64::__cpuid;

use kvm_bindings::{CpuId, Msrs, kvm_fpu, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::VcpuFd;

use super::boot::Entry;
use super::cpuid::{Topology, leaves};
use crate::kvm::KvmError;
use crate::plan::VcpuPlan;

/// Segment descriptors that the boot protocols ask for, as they lie in guest memory at [`super::boot::GDT`].
/// Linux 64-bit (boot.rst, "64-bit boot protocol"): __BOOT_CS at 0x10, __BOOT_DS at 0x18, flat.
pub(super) const GDT_TABLE: [u64; 4] = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];
/// PVH: a flat 32-bit code segment instead.
pub(super) const GDT_TABLE_PVH: [u64; 4] = [0, 0, 0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff];

const CR0_PE: u64 = 1;
const CR0_PG: u64 = 1 << 31;
const CR0_ET: u64 = 1 << 4;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
const RFLAGS_RESERVED: u64 = 1 << 1;
const MSR_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
/// MTRRs on, everything write-back (Intel SDM 12.11.2.1): there is no firmware to set them up.
const MTRR_ENABLE_WRITE_BACK: u64 = 1 << 11 | 6;

/// Whether this host's processors are emulated by QEMU, as its hypervisor leaf says (`TCGTCGTCGTCG`).
pub fn is_emulated() -> bool {
    let leaf = __cpuid(0x4000_0000);
    let name = [leaf.ebx, leaf.ecx, leaf.edx].map(u32::to_le_bytes);
    name.as_flattened() == b"TCGTCGTCGTCG"
}

/// Gives `vcpu` its CPUID and, when it is the first, the state that `entry` asks for; the others wait for the guest
/// to start them.
///
/// # Errors
/// When the kernel refuses.
pub fn configure(
    fd: &VcpuFd,
    host: &CpuId,
    topology: Topology,
    vcpu: &VcpuPlan,
    entry: &Entry,
) -> Result<(), KvmError> {
    let leaves = leaves(host.as_slice(), topology, vcpu);
    let cpuid = CpuId::from_entries(&leaves)
        .map_err(|_| KvmError::call("KVM_SET_CPUID2", kvm_ioctls::Error::new(libc::E2BIG)))?;
    fd.set_cpuid2(&cpuid).map_err(|e| KvmError::call("KVM_SET_CPUID2", e))?;
    set_msrs(fd)?;
    if vcpu.index == 0 {
        let fpu = kvm_fpu { fcw: 0x37f, mxcsr: 0x1f80, ..Default::default() };
        fd.set_fpu(&fpu).map_err(|e| KvmError::call("KVM_SET_FPU", e))?;
        let mut sregs = fd.get_sregs().map_err(|e| KvmError::call("KVM_GET_SREGS", e))?;
        let mut regs = kvm_regs { rflags: RFLAGS_RESERVED, ..Default::default() };
        enter(entry, &mut sregs, &mut regs);
        fd.set_sregs(&sregs).map_err(|e| KvmError::call("KVM_SET_SREGS", e))?;
        fd.set_regs(&regs).map_err(|e| KvmError::call("KVM_SET_REGS", e))?;
    }
    Ok(())
}

fn set_msrs(fd: &VcpuFd) -> Result<(), KvmError> {
    let entry = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    let msrs =
        [entry(MSR_MISC_ENABLE, MISC_ENABLE_FAST_STRING), entry(MSR_MTRR_DEF_TYPE, MTRR_ENABLE_WRITE_BACK)];
    let refused = |e| KvmError::call("KVM_SET_MSRS", e);
    let msrs = Msrs::from_entries(&msrs).map_err(|_| refused(kvm_ioctls::Error::new(libc::E2BIG)))?;
    fd.set_msrs(&msrs).map(drop).map_err(refused)
}

fn enter(entry: &Entry, sregs: &mut kvm_sregs, regs: &mut kvm_regs) {
    let long = matches!(entry, Entry::Linux64 { .. });
    let code = kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector: 0x10,
        type_: 0xb,
        present: 1,
        s: 1,
        g: 1,
        l: u8::from(long),
        db: u8::from(!long),
        ..Default::default()
    };
    let data = kvm_segment { selector: 0x18, type_: 0x3, l: 0, db: 1, ..code };
    sregs.cs = code;
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    let task =
        kvm_segment { base: 0, limit: 0x67, selector: 0, type_: 0xb, present: 1, ..Default::default() };
    sregs.tr = task;
    sregs.gdt.base = super::boot::GDT.get();
    sregs.gdt.limit = 31;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    match *entry {
        Entry::Linux64 { address, zero_page } => {
            sregs.cr3 = super::boot::PAGE_TABLES.get();
            sregs.cr4 = CR4_PAE;
            sregs.cr0 = CR0_PE | CR0_ET | CR0_PG;
            sregs.efer = EFER_LME | EFER_LMA;
            regs.rip = address.get();
            regs.rsi = zero_page.get();
            regs.rsp = super::boot::STACK.get();
        }
        Entry::Pvh { address, start_info } => {
            sregs.cr0 = CR0_PE | CR0_ET;
            sregs.cr4 = 0;
            sregs.efer = 0;
            regs.rip = address.get();
            regs.rbx = start_info.get();
        }
    }
}
