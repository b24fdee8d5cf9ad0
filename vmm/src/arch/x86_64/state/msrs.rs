//! Model-specific registers of a vCPU.

use std::ops::Range;

use kvm_bindings::{KVM_MAX_MSR_ENTRIES, Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use crate::arch::x86_64::machine_check::BANKS;
use crate::kvm::{Hypervisor, KvmError};

/// Registers that KVM's list of the state of a vCPU lacks before Linux 6.4: ranges of memory types (Intel SDM 12.11.2).
const MTRRS: [u32; 28] = [
    0x200, 0x201, 0x202, 0x203, 0x204, 0x205, 0x206, 0x207, 0x208, 0x209, 0x20a, 0x20b, 0x20c, 0x20d, 0x20e,
    0x20f, 0x250, 0x258, 0x259, 0x268, 0x269, 0x26a, 0x26b, 0x26c, 0x26d, 0x26e, 0x26f, 0x2ff,
];
/// Registers of machine check banks, which the list lacks too: four of each bank (Intel SDM 17.3.2).
const MACHINE_CHECK_BANKS: Range<u32> = 0x400..0x400 + 4 * BANKS;
pub(super) const MSR_TSC: u32 = 0x10;
pub(super) const MSR_TSC_DEADLINE: u32 = 0x6e0;

/// A register and its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Msr {
    pub(super) index: u32,
    pub(super) value: u64,
}

impl From<Msr> for kvm_msr_entry {
    fn from(Msr { index, value }: Msr) -> Self {
        Self { index, data: value, ..Default::default() }
    }
}

/// Whether register `index` belongs to a machine check bank.
pub(super) fn is_bank(index: u32) -> bool {
    MACHINE_CHECK_BANKS.contains(&index)
}

/// Registers that a vCPU may have here, ascending.
pub(super) fn known(hypervisor: &Hypervisor) -> Result<Vec<u32>, KvmError> {
    let known = hypervisor.kvm().get_msr_index_list();
    let known = known.map_err(|error| KvmError::call("KVM_GET_MSR_INDEX_LIST", error))?;
    let mut registers: Vec<u32> =
        known.as_slice().iter().copied().chain(MTRRS).chain(MACHINE_CHECK_BANKS).collect();
    registers.sort_unstable();
    registers.dedup();
    Ok(registers)
}

/// Values of `registers`, without those that this vCPU lacks: KVM stops at each of them.
pub(super) fn read(fd: &VcpuFd, registers: &[u32]) -> Result<Vec<Msr>, KvmError> {
    let mut values = Vec::with_capacity(registers.len());
    let mut rest: Vec<_> = registers.iter().map(|index| Msr { index: *index, value: 0 }).collect();
    while !rest.is_empty() {
        let mut batch = batch(&rest, "KVM_GET_MSRS")?;
        let done = fd.get_msrs(&mut batch).map_err(|error| KvmError::call("KVM_GET_MSRS", error))?;
        let read = batch.as_slice().iter().take(done);
        values.extend(read.map(|entry| Msr { index: entry.index, value: entry.data }));
        rest.drain(..handled(&batch, done));
    }
    Ok(values)
}

/// Writes `values` in their order. KVM may refuse a value that the vCPU has already (a register that only reports the
/// processor), and 0 for a register that it lacks, because the guest could not have used it.
///
/// # Errors
/// When KVM refuses any other value.
pub(super) fn write(fd: &VcpuFd, values: &[Msr]) -> Result<(), KvmError> {
    let mut rest = values.to_vec();
    while !rest.is_empty() {
        let batch = batch(&rest, "KVM_SET_MSRS")?;
        let done = fd.set_msrs(&batch).map_err(|error| KvmError::call("KVM_SET_MSRS", error))?;
        let handled = handled(&batch, done);
        if let Some(Msr { index, value }) = rest.get(done).filter(|_| done < handled) {
            let present = read(fd, &[*index])?.first().map_or(0, |register| register.value);
            if present != *value {
                return Err(KvmError::Register { call: "KVM_SET_MSRS", register: u64::from(*index) });
            }
        }
        rest.drain(..handled);
    }
    Ok(())
}

/// Entries of `batch` that are behind KVM when it has taken `done`: it refused the next one, if there is one.
fn handled(batch: &Msrs, done: usize) -> usize {
    batch.as_slice().len().min(done.saturating_add(1))
}

/// The first of `values`, as many as KVM takes at once.
fn batch(values: &[Msr], call: &'static str) -> Result<Msrs, KvmError> {
    let first: Vec<_> = values.iter().take(KVM_MAX_MSR_ENTRIES).copied().map(kvm_msr_entry::from).collect();
    Msrs::from_entries(&first).map_err(|_| KvmError::call(call, kvm_ioctls::Error::new(libc::E2BIG)))
}
