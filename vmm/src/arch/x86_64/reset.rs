//! State of vCPUs and interrupt controllers before the guest's first instruction, to which a reset returns them.
//!
//! KVM resets a VM only by making another one, and assigned functions, slots and eventfds belong to this one.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_MAX_MSR_ENTRIES, Msrs,
    kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs,
};
use kvm_ioctls::{Cap, KvmNestedStateBuffer, VcpuFd};

use super::boot::Entry;
use super::vcpu::{Controllers, RFLAGS_RESERVED, begin, initial_fpu};
use crate::kvm::{Hypervisor, KvmError, Vm};

/// Registers that KVM's list of the state of a vCPU lacks before Linux 6.4: ranges of memory types (Intel SDM 12.11.2).
const MTRRS: [u32; 28] = [
    0x200, 0x201, 0x202, 0x203, 0x204, 0x205, 0x206, 0x207, 0x208, 0x209, 0x20a, 0x20b, 0x20c, 0x20d, 0x20e,
    0x20f, 0x250, 0x258, 0x259, 0x268, 0x269, 0x26a, 0x26b, 0x26c, 0x26d, 0x26e, 0x26f, 0x2ff,
];
const MSR_TSC: u32 = 0x10;
const CHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

/// State of a VM's vCPUs and interrupt controllers.
pub struct InitialState {
    chips: Vec<kvm_irqchip>,
    vcpus: Vec<InitialVcpu>,
}

struct InitialVcpu {
    sregs: kvm_sregs,
    msrs: Vec<kvm_msr_entry>,
    lapic: kvm_lapic_state,
    events: kvm_vcpu_events,
    activity: kvm_mp_state,
    debug: kvm_debugregs,
    /// Of processors with XSAVE.
    xcrs: Option<kvm_xcrs>,
    /// Of processors that the guest may use for guests of its own.
    nested: Option<Box<KvmNestedStateBuffer>>,
}

impl InitialState {
    /// The present state of `vcpus`, with their registers set, and of the interrupt controllers.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn of(hypervisor: &Hypervisor, vm: &Vm, _: Controllers, vcpus: &[VcpuFd]) -> Result<Self, KvmError> {
        let chip = |chip_id| {
            let mut chip = kvm_irqchip { chip_id, ..Default::default() };
            let read = vm.fd().get_irqchip(&mut chip);
            read.map(|()| chip).map_err(|error| KvmError::call("KVM_GET_IRQCHIP", error))
        };
        let known = hypervisor.kvm().get_msr_index_list();
        let known = known.map_err(|error| KvmError::call("KVM_GET_MSR_INDEX_LIST", error))?;
        let mut registers: Vec<u32> = known.as_slice().iter().copied().chain(MTRRS).collect();
        registers.sort_unstable();
        registers.dedup();
        registers.retain(|register| *register != MSR_TSC);
        let vcpu = |fd| InitialVcpu::of(fd, &registers, hypervisor);
        Ok(Self {
            chips: CHIPS.into_iter().map(chip).collect::<Result<_, _>>()?,
            vcpus: vcpus.iter().map(vcpu).collect::<Result<_, _>>()?,
        })
    }

    /// Returns the interrupt controllers to it, while no vCPU is in the guest.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn restore_controllers(&self, vm: &Vm) -> Result<(), KvmError> {
        let restore = |chip| vm.fd().set_irqchip(chip).map_err(|e| KvmError::call("KVM_SET_IRQCHIP", e));
        self.chips.iter().try_for_each(restore)
    }

    /// Returns vCPU `index` to it, on its own thread; the first begins at `entry`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn restore_vcpu(&self, index: usize, fd: &VcpuFd, entry: &Entry) -> Result<(), KvmError> {
        let Some(vcpu) = self.vcpus.get(index) else { return Ok(()) };
        vcpu.restore(fd)?;
        if index == 0 { begin(fd, entry) } else { Ok(()) }
    }
}

impl InitialVcpu {
    fn of(fd: &VcpuFd, registers: &[u32], hypervisor: &Hypervisor) -> Result<Self, KvmError> {
        let failed = |call| move |error| KvmError::call(call, error);
        let nested = hypervisor.has(Cap::NestedState).then(|| {
            let mut nested = Box::new(KvmNestedStateBuffer::empty());
            let read = fd.nested_state(&mut nested).map_err(failed("KVM_GET_NESTED_STATE"));
            read.map(|_| nested)
        });
        let xcrs = hypervisor.has(Cap::Xcrs).then(|| fd.get_xcrs().map_err(failed("KVM_GET_XCRS")));
        Ok(Self {
            sregs: fd.get_sregs().map_err(failed("KVM_GET_SREGS"))?,
            msrs: read(fd, registers)?,
            lapic: fd.get_lapic().map_err(failed("KVM_GET_LAPIC"))?,
            events: fd.get_vcpu_events().map_err(failed("KVM_GET_VCPU_EVENTS"))?,
            activity: fd.get_mp_state().map_err(failed("KVM_GET_MP_STATE"))?,
            debug: fd.get_debug_regs().map_err(failed("KVM_GET_DEBUGREGS"))?,
            xcrs: xcrs.transpose()?,
            nested: nested.transpose()?,
        })
    }

    /// Nested state comes first, because the other calls act on the guest's own guest while that runs; the local APIC's
    /// base register, in `sregs`, before the local APIC.
    fn restore(&self, fd: &VcpuFd) -> Result<(), KvmError> {
        let failed = |call| move |error| KvmError::call(call, error);
        if let Some(nested) = &self.nested {
            fd.set_nested_state(nested).map_err(failed("KVM_SET_NESTED_STATE"))?;
        }
        fd.set_sregs(&self.sregs).map_err(failed("KVM_SET_SREGS"))?;
        let regs = kvm_regs { rflags: RFLAGS_RESERVED, ..Default::default() };
        fd.set_regs(&regs).map_err(failed("KVM_SET_REGS"))?;
        fd.set_fpu(&initial_fpu()).map_err(failed("KVM_SET_FPU"))?;
        if let Some(xcrs) = &self.xcrs {
            fd.set_xcrs(xcrs).map_err(failed("KVM_SET_XCRS"))?;
        }
        write(fd, &self.msrs)?;
        fd.set_lapic(&self.lapic).map_err(failed("KVM_SET_LAPIC"))?;
        fd.set_debug_regs(&self.debug).map_err(failed("KVM_SET_DEBUGREGS"))?;
        fd.set_vcpu_events(&self.events).map_err(failed("KVM_SET_VCPU_EVENTS"))?;
        fd.set_mp_state(self.activity).map_err(failed("KVM_SET_MP_STATE"))
    }
}

/// Values of `registers`, without those that this vCPU lacks: KVM stops at each of them.
fn read(fd: &VcpuFd, registers: &[u32]) -> Result<Vec<kvm_msr_entry>, KvmError> {
    let mut values = Vec::with_capacity(registers.len());
    let mut rest: Vec<_> =
        registers.iter().map(|index| kvm_msr_entry { index: *index, ..Default::default() }).collect();
    while !rest.is_empty() {
        let mut batch = batch(&rest, "KVM_GET_MSRS")?;
        let done = fd.get_msrs(&mut batch).map_err(|error| KvmError::call("KVM_GET_MSRS", error))?;
        values.extend(batch.as_slice().iter().take(done));
        rest.drain(..handled(&batch, done));
    }
    Ok(values)
}

/// Writes `values` except those that KVM refuses, then 0 to the time stamp counter: KVM takes that as a request to match it
/// with the other vCPUs' (`kvm_synchronize_tsc`).
fn write(fd: &VcpuFd, values: &[kvm_msr_entry]) -> Result<(), KvmError> {
    let counter = kvm_msr_entry { index: MSR_TSC, ..Default::default() };
    let mut rest: Vec<_> = values.iter().copied().chain([counter]).collect();
    while !rest.is_empty() {
        let batch = batch(&rest, "KVM_SET_MSRS")?;
        let done = fd.set_msrs(&batch).map_err(|error| KvmError::call("KVM_SET_MSRS", error))?;
        rest.drain(..handled(&batch, done));
    }
    Ok(())
}

/// Entries of `batch` that are behind KVM when it has taken `done`: it refused the next one, if there is one.
fn handled(batch: &Msrs, done: usize) -> usize {
    batch.as_slice().len().min(done.saturating_add(1))
}

/// The first of `entries`, as many as KVM takes at once.
fn batch(entries: &[kvm_msr_entry], call: &'static str) -> Result<Msrs, KvmError> {
    let first = entries.get(..entries.len().min(KVM_MAX_MSR_ENTRIES)).unwrap_or_default();
    Msrs::from_entries(first).map_err(|_| KvmError::call(call, kvm_ioctls::Error::new(libc::E2BIG)))
}
