//! Memory slots: the parts of this process that the guest sees as memory. This is an unsafe module.
//!
//! Why it exists: `KVM_SET_USER_MEMORY_REGION` gives the guest a piece of this process's address space, and
//! `KVM_SET_USER_MEMORY_REGION2` one of the machine's own file (guest_memfd), which this process maps too.
//! What callers may rely on: the memory of a slot is kept until the kernel no longer maps it.
//! What they must do: drop [`Slots`] after the vCPUs, which run in the memory that it keeps.
#![expect(unsafe_code, reason = "memory slots map this process's address space into the guest")]

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

use egm_address::Gpa;
use egm_vfio::memory::{HostBacking, HostMemory};
use kvm_bindings::{KVM_MEM_GUEST_MEMFD, kvm_userspace_memory_region, kvm_userspace_memory_region2};
use kvm_ioctls::VmFd;
use slab::Slab;

use super::KvmError;
use crate::lock::lock;

/// The memory slots of one machine.
pub struct Slots {
    fd: Arc<VmFd>,
    /// Dropped after `fd`: the guest's page tables go before the memory that they point to. Locked while the kernel
    /// works, which it does for one change at a time anyway; nothing that answers the guest's accesses waits for it.
    occupied: Mutex<Slab<SlotMemory>>,
}

/// The memory of a slot, and its guest address.
struct SlotMemory {
    gpa: Gpa,
    memory: Arc<dyn HostMemory>,
}

/// A slot in use. Dropping it changes nothing: [`SlotTable::remove`] does.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Slot(pub(crate) usize);

/// Puts memory into guest address space: [`Slots`], and a fake in tests.
pub(crate) trait SlotTable: Send + Sync {
    /// Puts `memory` at `gpa` of the guest, until [`SlotTable::remove`] or the machine's end.
    ///
    /// A slot that comes after interrupt controllers waits for readers of the in-kernel devices (an
    /// SRCU grace period: 6 ms instead of 0.1 ms, measured).
    ///
    /// # Errors
    /// When the kernel refuses: overlap, misalignment, no more slots.
    fn add(&self, gpa: Gpa, memory: Arc<dyn HostMemory>) -> Result<Slot, KvmError>;

    /// Removes the memory of `slot` from the guest's address space.
    ///
    /// # Errors
    /// When the kernel refuses; the memory is then kept to the machine's end.
    fn remove(&self, slot: Slot) -> Result<(), KvmError>;

    /// Whether this machine has KVM capability number `capability`, which is about slots.
    fn supports(&self, capability: u32) -> bool;
}

impl Slots {
    pub(super) fn new(fd: Arc<VmFd>) -> Self {
        Self { fd, occupied: Mutex::default() }
    }

    /// Fills slot number `slot` with the first `size` bytes of `memory`; 0 empties it.
    fn set(&self, slot: usize, gpa: Gpa, size: u64, memory: &dyn HostMemory) -> Result<(), KvmError> {
        let error = |source| KvmError::Memory { gpa, size: memory.size(), source };
        let address = memory.address().as_ptr().expose_provenance();
        let number = u32::try_from(slot).ok().zip(u64::try_from(address).ok());
        let (slot, userspace_addr) = number.ok_or_else(|| error(kvm_ioctls::Error::new(libc::ENOSPC)))?;
        let guest_phys_addr = gpa.get();
        if let HostBacking::GuestMemfd { file, offset } = memory.backing() {
            let region = kvm_userspace_memory_region2 {
                slot,
                flags: KVM_MEM_GUEST_MEMFD,
                guest_phys_addr,
                memory_size: size,
                userspace_addr,
                guest_memfd_offset: offset,
                guest_memfd: u32::try_from(file.as_raw_fd())
                    .map_err(|_| error(kvm_ioctls::Error::new(libc::EBADF)))?,
                ..Default::default()
            };
            // SAFETY: as below. The guest's page tables point into the file, and the kernel's own accesses go by the address.
            return unsafe { self.fd.set_user_memory_region2(region) }.map_err(error);
        }
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr,
            memory_size: size,
            userspace_addr,
        };
        // SAFETY: `HostMemory` promises the range while the value lives, and `self.occupied` keeps the value until the
        // slot is empty again or `self` is gone, the last to go of what can run this guest.
        unsafe { self.fd.set_user_memory_region(region) }.map_err(error)
    }
}

impl SlotTable for Slots {
    fn add(&self, gpa: Gpa, memory: Arc<dyn HostMemory>) -> Result<Slot, KvmError> {
        let mut occupied = lock(&self.occupied);
        let slot = occupied.vacant_key();
        self.set(slot, gpa, memory.size(), memory.as_ref())?;
        if egm_address::fault!("memory-behind-its-end") {
            let end = Gpa::new(gpa.get().saturating_add(memory.size()));
            let _ = self.set(slot.saturating_add(1000), end, 0x1000, memory.as_ref());
        }
        occupied.insert(SlotMemory { gpa, memory });
        Ok(Slot(slot))
    }

    fn supports(&self, capability: u32) -> bool {
        self.fd.check_extension_raw(capability.into()) > 0
    }

    fn remove(&self, slot: Slot) -> Result<(), KvmError> {
        let mut occupied = lock(&self.occupied);
        if let Some(SlotMemory { gpa, memory }) = occupied.get(slot.0) {
            self.set(slot.0, *gpa, 0, memory.as_ref())?;
        }
        occupied.try_remove(slot.0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::ptr::NonNull;

    use egm_device::{Anonymous, Backing, GuestMemfdError, Mapping};

    use super::*;
    use crate::kvm::{Hypervisor, Vm};

    const SIZE: u64 = 2 << 20;

    /// Memory of a VM, mapped here.
    struct Own(Anonymous, Mapping);

    // SAFETY: the mapping is readable, writable and shared, and stays where it is as long as the value.
    unsafe impl HostMemory for Own {
        fn address(&self) -> NonNull<u8> {
            self.1.start()
        }
        fn size(&self) -> u64 {
            SIZE
        }
        fn backing(&self) -> HostBacking<'_> {
            HostBacking::GuestMemfd { file: self.0.file().as_fd(), offset: 0 }
        }
    }

    /// A VM and memory of it; prints a note where the host has neither.
    fn machine() -> Option<(Vm, Arc<dyn HostMemory>)> {
        let Ok(hypervisor) = Hypervisor::open() else {
            println!("skipped: this host has no /dev/kvm that this user may open");
            return None;
        };
        let vm = hypervisor.create_vm(48).unwrap();
        match Anonymous::of_vm("own", vm.as_fd(), SIZE) {
            Ok(file) => {
                let mapping = Mapping::new(&file, 0, SIZE, 0).unwrap();
                Some((vm, Arc::new(Own(file, mapping))))
            }
            Err(GuestMemfdError::Unsupported { has, .. }) => {
                println!("skipped: KVM has flags {has:#x} of guest_memfd");
                None
            }
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn memory_of_a_machine_goes_into_its_own_slots_once_and_into_no_other_machines() {
        let (Some((vm, memory)), Some((other, _))) = (machine(), machine()) else { return };
        let add = |vm: &Vm, gpa| vm.slots().add(Gpa::new(gpa), Arc::clone(&memory));
        let refused = |result: Result<Slot, KvmError>| match result {
            Err(KvmError::Memory { source, .. }) => assert_eq!(source.errno(), libc::EINVAL),
            other => panic!("{other:?}"),
        };
        refused(add(&other, SIZE));
        let slot = add(&vm, SIZE).unwrap();
        refused(add(&vm, 2 * SIZE));
        vm.slots().remove(slot).unwrap();
        add(&vm, 2 * SIZE).unwrap();
    }
}
