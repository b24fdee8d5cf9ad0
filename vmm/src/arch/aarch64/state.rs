//! State of vCPUs and interrupt controllers that KVM keeps, as a file stores it.
//!
//! KVM takes back the registers of a vCPU that `vcpu::create` has made: its features, and the lengths of its vectors, are those
//! of this host from then on. The values come from an untrusted file: KVM checks each of them, and the lengths are checked here.
//!
//! The virtual and the physical counter are registers of a vCPU (`KVM_REG_ARM_TIMER_CNT`) and stand still while the state is in a
//! file: KVM takes a value as the offset of the counter from that moment on. All vCPUs of a VM share the offset, so the value
//! that is written last counts. Guests see no step back, because no vCPU was in the guest when the first one was saved.

mod controllers;

use kvm_bindings::{RegList, kvm_mp_state, kvm_vcpu_events};
use kvm_ioctls::{VcpuFd, reg_size};
use serde::{Deserialize, Serialize};

pub use self::controllers::ControllersState;
use crate::kvm::{Hypervisor, KvmError};

/// Most registers that the bindings read at once.
const MOST_REGISTERS: usize = 500;

/// The parts of a vCPU's state that this host's KVM has: each vCPU reports its own.
#[derive(Debug, Clone)]
pub struct VcpuInterface;

impl VcpuInterface {
    /// The same on every host, unlike on x86.
    ///
    /// # Errors
    /// None.
    pub const fn of(_: &Hypervisor) -> Result<Self, KvmError> {
        Ok(Self)
    }
}

/// State of a vCPU outside the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuState {
    /// In the order of `KVM_GET_REG_LIST`.
    registers: Vec<Register>,
    /// A system error that the vCPU has not taken yet.
    serror: Option<SystemError>,
    /// Whether it runs, one of `KVM_MP_STATE_*`: a vCPU that is off waits for PSCI's `CPU_ON`.
    activity: u32,
}

/// A register and its value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Register {
    /// Number for `KVM_SET_ONE_REG`, which has the size.
    id: u64,
    /// Bytes in the order of memory.
    value: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SystemError {
    /// Its syndrome, for processors with RAS.
    syndrome: Option<u64>,
}

impl VcpuState {
    /// The present state of a vCPU that has completed its accesses, on its own thread.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn save(fd: &VcpuFd, _: &VcpuInterface) -> Result<Self, KvmError> {
        let mut list = RegList::new(MOST_REGISTERS)
            .map_err(|_| KvmError::call("KVM_GET_REG_LIST", kvm_ioctls::Error::new(libc::E2BIG)))?;
        fd.get_reg_list(&mut list).map_err(|error| KvmError::call("KVM_GET_REG_LIST", error))?;
        let register = |id: &u64| Register::read(fd, *id);
        let events = fd.get_vcpu_events().map_err(|error| KvmError::call("KVM_GET_VCPU_EVENTS", error))?;
        let activity = fd.get_mp_state().map_err(|error| KvmError::call("KVM_GET_MP_STATE", error))?;
        Ok(Self {
            registers: list.as_slice().iter().map(register).collect::<Result<_, _>>()?,
            serror: SystemError::of(&events),
            activity: activity.mp_state,
        })
    }

    /// Returns a new vCPU to it, on its own thread or before that starts, and before any vCPU runs: KVM takes firmware's and
    /// feature registers only until then.
    ///
    /// # Errors
    /// When the kernel refuses a value.
    pub fn restore(&self, fd: &VcpuFd, _: &VcpuInterface) -> Result<(), KvmError> {
        self.registers.iter().try_for_each(|register| register.write(fd))?;
        let events = events(self.serror);
        fd.set_vcpu_events(&events).map_err(|error| KvmError::call("KVM_SET_VCPU_EVENTS", error))?;
        let activity = kvm_mp_state { mp_state: self.activity };
        fd.set_mp_state(activity).map_err(|error| KvmError::call("KVM_SET_MP_STATE", error))
    }
}

impl Register {
    fn read(fd: &VcpuFd, id: u64) -> Result<Self, KvmError> {
        let mut value = vec![0; reg_size(id)];
        fd.get_one_reg(id, &mut value).map_err(|error| KvmError::call("KVM_GET_ONE_REG", error))?;
        Ok(Self { id, value })
    }

    /// Writes it. KVM may refuse a value that the vCPU has already (registers that report the processor, and the lengths of
    /// vectors, which `vcpu::create` has fixed), and 0 for a register that it lacks, because the guest could not have used it.
    fn write(&self, fd: &VcpuFd) -> Result<(), KvmError> {
        let refused = || KvmError::Register { call: "KVM_SET_ONE_REG", register: self.id };
        if !self.is_whole() {
            return Err(refused());
        }
        if fd.set_one_reg(self.id, &self.value).is_ok() {
            return Ok(());
        }
        let is_present = match Self::read(fd, self.id) {
            Ok(present) => present == *self,
            Err(_) => self.value.iter().all(|byte| *byte == 0),
        };
        if is_present { Ok(()) } else { Err(refused()) }
    }

    /// Whether the value has the size that the number encodes.
    fn is_whole(&self) -> bool {
        self.value.len() == reg_size(self.id)
    }
}

impl SystemError {
    fn of(events: &kvm_vcpu_events) -> Option<Self> {
        let exception = &events.exception;
        let syndrome = (exception.serror_has_esr != 0).then_some(exception.serror_esr);
        (exception.serror_pending != 0).then_some(Self { syndrome })
    }
}

/// The events of a vCPU with a system error. A failed access is none: KVM has given the guest that exception already.
fn events(error: Option<SystemError>) -> kvm_vcpu_events {
    let mut events = kvm_vcpu_events::default();
    if let Some(SystemError { syndrome }) = error {
        events.exception.serror_pending = 1;
        events.exception.serror_has_esr = u8::from(syndrome.is_some());
        events.exception.serror_esr = syndrome.unwrap_or_default();
    }
    events
}

#[cfg(test)]
mod tests {
    use kvm_bindings::{KVM_REG_ARM64, KVM_REG_SIZE_U64};

    use super::*;

    /// SVE register Z0 (0x15), which has the largest size, 2048 bits; KVM_REG_SIZE_U2048 is 8 << 52.
    const Z0: u64 = KVM_REG_ARM64 | 8 << 52 | 0x15 << 16;
    const X0: u64 = KVM_REG_ARM64 | KVM_REG_SIZE_U64 | 0x10 << 16;

    #[test]
    fn a_value_has_the_size_that_its_register_s_number_encodes() {
        for (id, size) in [(X0, 8), (Z0, 256), (KVM_REG_ARM64 | 2 << 52, 4), (u64::MAX, 32768)] {
            for (length, is_whole) in [(size, true), (size - 1, false), (size + 1, false), (0, false)] {
                let register = Register { id, value: vec![0; length] };
                assert_eq!(register.is_whole(), is_whole, "{id:#x} {length}");
            }
        }
    }

    #[test]
    fn a_system_error_waits_with_its_syndrome_or_without() {
        for error in [None, Some(SystemError { syndrome: None }), Some(SystemError { syndrome: Some(0) })] {
            assert_eq!(SystemError::of(&events(error)), error);
        }
        assert_eq!(events(Some(SystemError { syndrome: Some(7) })).exception.serror_esr, 7);
    }

    #[test]
    fn a_file_has_every_field_and_no_other() {
        let registers = vec![Register { id: X0, value: vec![1, 2, 3, 4, 5, 6, 7, 255] }];
        let state = VcpuState { registers, serror: None, activity: 5 };
        let mut file = serde_json::to_value(&state).unwrap();
        assert_eq!(serde_json::from_value::<VcpuState>(file.clone()).unwrap(), state);
        file["registers"][0]["size"] = 8.into();
        assert!(serde_json::from_value::<VcpuState>(file).is_err());
    }
}
