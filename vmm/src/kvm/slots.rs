//! Memory slots: what of this process the guest sees as memory. This is an unsafe room.
//!
//! Why it exists: `KVM_SET_USER_MEMORY_REGION` gives the guest a piece of this process's address space.
//! What callers may rely on: memory that was lent is kept until the kernel has let go of it.
//! What they must do: drop [`Slots`] after the vCPUs, which run in the memory that it keeps.
#![expect(unsafe_code, reason = "memory slots lend this process's address space to the guest")]

use std::sync::{Arc, Mutex};

use egm_address::Gpa;
use egm_vfio::memory::HostMemory;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;

use super::KvmError;
use crate::lock::lock;

/// The memory slots of one machine.
pub struct Slots {
    fd: Arc<VmFd>,
    /// Dropped after `fd`: the guest's page tables go before the memory that they point to. Locked while the kernel
    /// works, which it does for one change at a time anyway; nothing that answers the guest's accesses waits for it.
    lent: Mutex<Vec<Option<Lent>>>,
}

/// What is in a slot.
struct Lent {
    gpa: Gpa,
    memory: Arc<dyn HostMemory>,
}

/// A slot in use. Dropping it changes nothing: [`SlotTable::remove`] does.
#[derive(Debug, PartialEq, Eq)]
pub struct Slot(pub(crate) usize);

/// What puts memory into guest address space: [`Slots`], and a fake in tests.
pub trait SlotTable: Send + Sync {
    /// The guest sees `memory` at `gpa`, until [`SlotTable::remove`] or the machine's end.
    ///
    /// A slot that comes after [`super::Vm::create_interrupt_controller`] waits for readers of the in-kernel devices (an
    /// SRCU grace period: 6 ms instead of 0.1 ms, measured).
    ///
    /// # Errors
    /// When the kernel refuses: overlap, misalignment, no more slots.
    fn add(&self, gpa: Gpa, memory: Arc<dyn HostMemory>) -> Result<Slot, KvmError>;

    /// The guest no longer sees what is in `slot`.
    ///
    /// # Errors
    /// When the kernel refuses; the memory is then kept to the machine's end.
    fn remove(&self, slot: Slot) -> Result<(), KvmError>;
}

impl Slots {
    pub(super) fn new(fd: Arc<VmFd>) -> Self {
        Self { fd, lent: Mutex::default() }
    }

    /// Fills slot number `slot` with the first `size` bytes of `memory`; 0 empties it.
    fn set(&self, slot: usize, gpa: Gpa, size: u64, memory: &dyn HostMemory) -> Result<(), KvmError> {
        let error = |source| KvmError::Memory { gpa, size: memory.size(), source };
        let address = memory.address().as_ptr().expose_provenance();
        let number = u32::try_from(slot).ok().zip(u64::try_from(address).ok());
        let (slot, userspace_addr) = number.ok_or_else(|| error(kvm_ioctls::Error::new(libc::ENOSPC)))?;
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: gpa.get(),
            memory_size: size,
            userspace_addr,
        };
        // SAFETY: `HostMemory` promises the range while the value lives, and `self.lent` keeps the value until the slot is
        // empty again or `self` is gone, the last to go of what can run this guest.
        unsafe { self.fd.set_user_memory_region(region) }.map_err(error)
    }
}

impl SlotTable for Slots {
    fn add(&self, gpa: Gpa, memory: Arc<dyn HostMemory>) -> Result<Slot, KvmError> {
        let mut lent = lock(&self.lent);
        let free = lent.iter().position(Option::is_none);
        let slot = free.unwrap_or(lent.len());
        self.set(slot, gpa, memory.size(), memory.as_ref())?;
        if free.is_none() {
            lent.push(None);
        }
        if let Some(place) = lent.get_mut(slot) {
            *place = Some(Lent { gpa, memory });
        }
        Ok(Slot(slot))
    }

    fn remove(&self, slot: Slot) -> Result<(), KvmError> {
        let mut lent = lock(&self.lent);
        let Some(place) = lent.get_mut(slot.0) else { return Ok(()) };
        if let Some(Lent { gpa, memory }) = place {
            self.set(slot.0, *gpa, 0, memory.as_ref())?;
        }
        *place = None;
        Ok(())
    }
}
