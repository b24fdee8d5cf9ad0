//! vCPUs and interrupt controllers, and a vCPU's registers at its first instruction.

use std::arch::x86_64::__cpuid;
use std::sync::Arc;

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_fpu, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs,
};
use kvm_ioctls::{Cap, VcpuFd};

use super::boot::Entry;
use super::boot_layout::{GDT, PAGE_TABLES, STACK};
use super::cpuid::{Host, Topology, is_amd, leaves};
use super::layout::KVM_TSS;
use super::machine_check::{self, Reporter};
use crate::kvm::{Hypervisor, KvmError, Vm};
use crate::plan::{Plan, VcpuPlan};

const CR0_PE: u64 = 1;
const CR0_PG: u64 = 1 << 31;
const CR0_ET: u64 = 1 << 4;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// Flags of a vCPU before its first instruction.
const RFLAGS_RESERVED: u64 = 1 << 1;
const MSR_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
/// MTRRs on, everything write-back (Intel SDM 12.11.2.1): there is no firmware to set them up.
const MTRR_ENABLE_WRITE_BACK: u64 = 1 << 11 | 6;

/// The interrupt controllers, which need no descriptor but the VM's.
#[derive(Debug, Clone, Copy)]
pub struct Controllers;

/// The vCPUs of a VM, and its interrupt controllers.
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct Created {
    pub vcpus: Vec<VcpuFd>,
    pub controllers: Arc<Controllers>,
}

/// Makes the interrupt controllers and the vCPUs of `plan`, in its order.
///
/// # Errors
/// When the kernel refuses.
pub fn create(_: &Hypervisor, vm: &Vm, plan: &Plan) -> Result<Created, KvmError> {
    let tss = usize::try_from(KVM_TSS).unwrap_or(usize::MAX);
    vm.fd().set_tss_address(tss).map_err(|error| KvmError::call("KVM_SET_TSS_ADDR", error))?;
    create_interrupt_controller(vm)?;
    let vcpus = plan.vcpus.iter().map(|vcpu| vm.create_vcpu(vcpu.hardware_id)).collect::<Result<_, _>>()?;
    Ok(Created { vcpus, controllers: Arc::new(Controllers) })
}

/// Every vCPU made afterwards has a local one.
pub(super) fn create_interrupt_controller(vm: &Vm) -> Result<(), KvmError> {
    vm.fd().create_irq_chip().map_err(|error| KvmError::call("KVM_CREATE_IRQCHIP", error))
}

/// Gives the vCPUs of `plan` their CPUID and registers; the first begins at `entry`. Returns how they get reports of
/// bad memory, where KVM can deliver them.
///
/// # Errors
/// When the kernel refuses.
pub fn configure(
    hypervisor: &Hypervisor,
    plan: &Plan,
    vcpus: &[VcpuFd],
    entry: &Entry,
) -> Result<Option<Reporter>, KvmError> {
    let machine = Host { tsc_deadline: hypervisor.has(Cap::TscDeadlineTimer), emulated: is_emulated() };
    let topology = Topology::new(&plan.vcpus, plan.address_bits, machine);
    let host = hypervisor.kvm().get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
    let host = host.map_err(|error| KvmError::call("KVM_GET_SUPPORTED_CPUID", error))?;
    let checks = machine_check::capability(machine_check::supported(hypervisor)?);
    for (fd, vcpu) in vcpus.iter().zip(&plan.vcpus) {
        set_registers(fd, &host, topology, vcpu, entry)?;
        checks.map_or(Ok(()), |checks| machine_check::setup(fd, checks))?;
    }
    Ok(checks.map(|_| Reporter { amd: is_amd(host.as_slice()) }))
}

/// Where a vCPU is in the guest's code, for a message about its end.
pub fn program_counter(vcpu: &VcpuFd) -> Option<u64> {
    vcpu.get_regs().ok().map(|regs| regs.rip)
}

/// Lets the guest's watchdog not count the time in which `vcpu` was paused (KVM api.rst, `KVM_KVMCLOCK_CTRL`). A guest
/// that does not use KVM's clock has no such watchdog.
pub fn excuse_pause(vcpu: &VcpuFd) {
    let _ = vcpu.kvmclock_ctrl();
}

/// Whether QEMU emulates this host's processors, by its hypervisor leaf (`TCGTCGTCGTCG`).
fn is_emulated() -> bool {
    let leaf = __cpuid(0x4000_0000);
    let name = [leaf.ebx, leaf.ecx, leaf.edx].map(u32::to_le_bytes);
    name.as_flattened() == b"TCGTCGTCGTCG"
}

/// Gives `vcpu` its CPUID and, when it is the first, the state that `entry` asks for; the others wait for the guest
/// to start them.
fn set_registers(
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
        fd.set_fpu(&initial_fpu()).map_err(|e| KvmError::call("KVM_SET_FPU", e))?;
        begin(fd, entry)?;
    }
    Ok(())
}

/// Floating-point registers of a vCPU before its first instruction.
fn initial_fpu() -> kvm_fpu {
    kvm_fpu { fcw: 0x37f, mxcsr: 0x1f80, ..Default::default() }
}

/// Sets the registers of the first vCPU for `entry`.
pub(super) fn begin(fd: &VcpuFd, entry: &Entry) -> Result<(), KvmError> {
    let mut sregs = fd.get_sregs().map_err(|e| KvmError::call("KVM_GET_SREGS", e))?;
    let mut regs = kvm_regs { rflags: RFLAGS_RESERVED, ..Default::default() };
    enter(entry, &mut sregs, &mut regs);
    fd.set_sregs(&sregs).map_err(|e| KvmError::call("KVM_SET_SREGS", e))?;
    fd.set_regs(&regs).map_err(|e| KvmError::call("KVM_SET_REGS", e))
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
    sregs.gdt.base = GDT.get();
    sregs.gdt.limit = 31;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    match *entry {
        Entry::Linux64 { address, zero_page } => {
            sregs.cr3 = PAGE_TABLES.get();
            sregs.cr4 = CR4_PAE;
            sregs.cr0 = CR0_PE | CR0_ET | CR0_PG;
            sregs.efer = EFER_LME | EFER_LMA;
            regs.rip = address.get();
            regs.rsi = zero_page.get();
            regs.rsp = STACK.get();
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
