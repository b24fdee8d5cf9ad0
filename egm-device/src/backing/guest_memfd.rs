//! Guest memory that belongs to a VM: guest_memfd, where the host's KVM can map it.

use std::io;
use std::os::fd::BorrowedFd;

use super::anonymous::{Anonymous, base_page};
use crate::sys;

/// Why a VM has no such memory.
#[derive(Debug, thiserror::Error)]
pub enum GuestMemfdError {
    /// KVM is too old, or this kind of VM has none.
    #[error(
        "memory \"{id}\": KVM lacks guest_memfd flags {wanted:#x} for this VM and has {has:#x} \
         (KVM_CAP_GUEST_MEMFD_MMAP, Linux 6.18): choose hugetlb or memfd memory"
    )]
    Unsupported {
        /// Whose memory.
        id: String,
        /// What is needed.
        wanted: u64,
        /// What there is.
        has: u64,
    },
    /// KVM refused it.
    #[error("memory \"{id}\": guest_memfd of {size:#x} bytes was refused")]
    Create {
        /// Whose memory.
        id: String,
        /// Its size in bytes.
        size: u64,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
}

/// Memory of one VM that this process maps too: as all anonymous memory once it is made.
impl Anonymous {
    /// `GUEST_MEMFD_FLAG_MMAP`: the host may map it. Always asked for.
    pub const GUEST_MEMFD_MMAP: u64 = 1 << 0;
    /// `GUEST_MEMFD_FLAG_INIT_SHARED`: its pages begin as shared; without it, touching one from the host is a SIGBUS
    /// until the guest shares it.
    pub const GUEST_MEMFD_INIT_SHARED: u64 = 1 << 1;

    /// `size` bytes for `id`, which belong to the VM with the descriptor `vm`.
    ///
    /// # Errors
    /// [`GuestMemfdError`].
    pub fn of_vm(id: &str, vm: BorrowedFd<'_>, size: u64, flags: u64) -> Result<Self, GuestMemfdError> {
        let wanted = flags | Self::GUEST_MEMFD_MMAP;
        let create = |source| GuestMemfdError::Create { id: id.to_owned(), size, source };
        let has = sys::guest_memfd_flags(vm).map_err(create)?;
        if has & wanted != wanted {
            return Err(GuestMemfdError::Unsupported { id: id.to_owned(), wanted, has });
        }
        let file = sys::create_guest_memfd(vm, size, wanted).map_err(create)?.into();
        Ok(Self { file, size, page_size: base_page() })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;
    use crate::mapping::Mapping;

    #[test]
    fn a_descriptor_that_is_no_vm_is_refused() {
        let null = File::open("/dev/null").unwrap();
        let refused = Anonymous::of_vm("test", null.as_fd(), 0x1000, 0);
        assert!(matches!(refused, Err(GuestMemfdError::Create { .. })), "{refused:?}");
    }

    #[test]
    fn memory_of_a_vm_can_be_mapped_or_kvm_is_named_as_what_lacks_it() {
        let Some(vm) = sys::tests::vm() else {
            println!("skipped: this host has no /dev/kvm that this user may open");
            return;
        };
        match Anonymous::of_vm("test", vm.as_fd(), 4 << 20, Anonymous::GUEST_MEMFD_INIT_SHARED) {
            Ok(memory) => {
                let mapping = Mapping::new(&memory, 0, 4 << 20, 0).unwrap();
                mapping.populate(0, 4 << 20).unwrap();
                mapping.zero(0, 4 << 20).unwrap();
            }
            Err(error) => assert!(matches!(error, GuestMemfdError::Unsupported { .. }), "{error:?}"),
        }
    }
}
