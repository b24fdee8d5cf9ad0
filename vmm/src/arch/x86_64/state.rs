//! State of vCPUs and interrupt controllers that KVM keeps, as a file stores it.
//!
//! KVM takes back a vCPU's state only after its CPUID and its machine check banks (`vcpu::configure`): values of registers
//! depend on both. It reads guest memory meanwhile (page-directory pointers of a 32-bit guest, pages of a guest's own guest),
//! so memory is restored first. The values come from an untrusted file: KVM checks each of them, and the lengths
//! are checked here.

mod controllers;
mod msrs;
mod record;
#[cfg(test)]
mod tests;
mod xsave;

use kvm_bindings::{
    kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs,
};
use kvm_ioctls::{Cap, KvmNestedStateBuffer, VcpuFd};
use serde::{Deserialize, Serialize};

pub(super) use self::controllers::Chips;
pub use self::controllers::ControllersState;
use self::msrs::{MSR_TSC, MSR_TSC_DEADLINE, Msr, is_bank};
use self::xsave::XsaveSize;
use crate::kvm::{Hypervisor, KvmError};

/// The parts of a vCPU's state that this host's KVM has.
#[derive(Debug, Clone)]
pub struct VcpuInterface {
    /// Model-specific registers, ascending; a vCPU may lack some.
    registers: Vec<u32>,
    xsave: XsaveSize,
    has_xcrs: bool,
    /// Whether the guest may have guests of its own.
    has_nested: bool,
    has_frequency: bool,
}

impl VcpuInterface {
    /// Asks `hypervisor` for its registers and capabilities.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn of(hypervisor: &Hypervisor) -> Result<Self, KvmError> {
        Ok(Self {
            registers: msrs::known(hypervisor)?,
            xsave: XsaveSize::of(hypervisor),
            has_xcrs: hypervisor.has(Cap::Xcrs),
            has_nested: hypervisor.has(Cap::NestedState),
            has_frequency: hypervisor.has(Cap::GetTscKhz),
        })
    }
}

/// State of a vCPU outside the guest. A structure of KVM is an array of its bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuState {
    #[serde(deserialize_with = "record::exact")]
    regs: kvm_regs,
    #[serde(deserialize_with = "record::exact")]
    sregs: kvm_sregs,
    /// The area of XSAVE in its standard format, in 32-bit words. Processors without XSAVE fill what FXSAVE does.
    xsave: Vec<u32>,
    #[serde(deserialize_with = "record::exact_or_none")]
    xcrs: Option<kvm_xcrs>,
    /// With the time stamp counter; its value stands still while the state is in a file.
    msrs: Vec<Msr>,
    #[serde(deserialize_with = "record::exact")]
    lapic: kvm_lapic_state,
    #[serde(deserialize_with = "record::exact")]
    events: kvm_vcpu_events,
    /// Whether it runs, halts or waits for its start: one of `KVM_MP_STATE_*`.
    activity: u32,
    #[serde(deserialize_with = "record::exact")]
    debug: kvm_debugregs,
    nested: Option<Nested>,
    /// Frequency of the time stamp counter, in kHz.
    tsc_khz: Option<u32>,
}

impl VcpuState {
    /// The present state of a vCPU that has completed its accesses, on its own thread. The activity is read first: KVM handles
    /// INIT and SIPI at that, which changes the rest.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn save(fd: &VcpuFd, interface: &VcpuInterface) -> Result<Self, KvmError> {
        let activity = fd.get_mp_state().map_err(failed("KVM_GET_MP_STATE"))?.mp_state;
        let nested = || {
            let mut nested = Box::new(KvmNestedStateBuffer::empty());
            let read = fd.nested_state(&mut nested).map_err(failed("KVM_GET_NESTED_STATE"));
            read.map(|_| Nested(nested))
        };
        let xcrs = || fd.get_xcrs().map_err(failed("KVM_GET_XCRS"));
        let frequency = || fd.get_tsc_khz().map_err(failed("KVM_GET_TSC_KHZ"));
        Ok(Self {
            regs: fd.get_regs().map_err(failed("KVM_GET_REGS"))?,
            sregs: fd.get_sregs().map_err(failed("KVM_GET_SREGS"))?,
            xsave: interface.xsave.read(fd)?,
            xcrs: interface.has_xcrs.then(xcrs).transpose()?,
            msrs: msrs::read(fd, &interface.registers)?,
            lapic: fd.get_lapic().map_err(failed("KVM_GET_LAPIC"))?,
            events: fd.get_vcpu_events().map_err(failed("KVM_GET_VCPU_EVENTS"))?,
            activity,
            debug: fd.get_debug_regs().map_err(failed("KVM_GET_DEBUGREGS"))?,
            nested: interface.has_nested.then(nested).transpose()?,
            tsc_khz: interface.has_frequency.then(frequency).transpose()?,
        })
    }

    /// Returns a vCPU to it, on its own thread or before that starts. The order matters to KVM:
    ///
    /// - `sregs` has the base register of the local APIC, and EFER, which nested state needs;
    /// - the counter's frequency comes before its value;
    /// - the deadline of a timer comes after the local APIC: it needs that one's mode (Intel SDM 11.5.4.1);
    /// - events come after the registers: `KVM_SET_REGS` drops a pending exception;
    /// - nested state comes last: it makes the registers those of the guest's own guest.
    ///
    /// # Errors
    /// When the kernel refuses a value.
    pub fn restore(&self, fd: &VcpuFd, interface: &VcpuInterface) -> Result<(), KvmError> {
        if self.msrs.len() > interface.registers.len() {
            return Err(malformed("KVM_SET_MSRS"));
        }
        fd.set_sregs(&self.sregs).map_err(failed("KVM_SET_SREGS"))?;
        self.tsc_khz.map_or(Ok(()), |frequency| set_frequency(fd, frequency))?;
        let (deadline, others): (Vec<Msr>, Vec<Msr>) =
            self.msrs.iter().partition(|msr| msr.index == MSR_TSC_DEADLINE);
        msrs::write(fd, &others)?;
        if let Some(xcrs) = &self.xcrs {
            fd.set_xcrs(xcrs).map_err(failed("KVM_SET_XCRS"))?;
        }
        interface.xsave.write(fd, &self.xsave)?;
        fd.set_lapic(&self.lapic).map_err(failed("KVM_SET_LAPIC"))?;
        msrs::write(fd, &deadline)?;
        fd.set_regs(&self.regs).map_err(failed("KVM_SET_REGS"))?;
        fd.set_debug_regs(&self.debug).map_err(failed("KVM_SET_DEBUGREGS"))?;
        fd.set_vcpu_events(&self.events).map_err(failed("KVM_SET_VCPU_EVENTS"))?;
        let activity = kvm_mp_state { mp_state: self.activity };
        fd.set_mp_state(activity).map_err(failed("KVM_SET_MP_STATE"))?;
        self.restore_nested(fd)
    }

    /// Returns a vCPU that has run to it, as before its first instruction: `self` was saved then.
    ///
    /// Nested state comes first, because the other calls act on the guest's own guest while that runs.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(super) fn reset(&self, fd: &VcpuFd, interface: &VcpuInterface) -> Result<(), KvmError> {
        self.restore_nested(fd)?;
        self.restore(fd, interface)
    }

    /// Makes it the state after a reset. A counter of 0 has KVM match it with the other vCPUs' (`kvm_synchronize_tsc`), its
    /// frequency stays, and so do reports of bad memory in machine check banks (Intel SDM 17.3.2).
    pub(super) fn into_initial(mut self) -> Self {
        self.msrs.retain(|msr| !is_bank(msr.index));
        self.msrs.iter_mut().filter(|msr| msr.index == MSR_TSC).for_each(|counter| counter.value = 0);
        Self { tsc_khz: None, ..self }
    }

    fn restore_nested(&self, fd: &VcpuFd) -> Result<(), KvmError> {
        let Some(nested) = &self.nested else { return Ok(()) };
        fd.set_nested_state(&nested.0).map_err(failed("KVM_SET_NESTED_STATE"))
    }
}

/// State for guests of the guest.
#[derive(Clone, Serialize, Deserialize)]
#[serde(transparent)]
struct Nested(#[serde(deserialize_with = "record::boxed")] Box<KvmNestedStateBuffer>);

impl std::fmt::Debug for Nested {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nested").field("size", &self.0.size).finish_non_exhaustive()
    }
}

/// Sets the counter's frequency in kHz unless the vCPU has it: hosts that cannot scale the counter have only their own.
fn set_frequency(fd: &VcpuFd, frequency: u32) -> Result<(), KvmError> {
    let present = fd.get_tsc_khz().map_err(failed("KVM_GET_TSC_KHZ"))?;
    if present == frequency {
        return Ok(());
    }
    fd.set_tsc_khz(frequency).map_err(failed("KVM_SET_TSC_KHZ"))
}

fn failed(call: &'static str) -> impl Fn(kvm_ioctls::Error) -> KvmError {
    move |error| KvmError::call(call, error)
}

/// The error of a value that has the wrong form for `call`.
fn malformed(call: &'static str) -> KvmError {
    KvmError::call(call, kvm_ioctls::Error::new(libc::EINVAL))
}
