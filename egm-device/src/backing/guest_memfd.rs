//! Guest memory that belongs to a VM: guest_memfd, where the host's KVM can map it.

use std::io;
use std::os::fd::BorrowedFd;

use super::anonymous::Anonymous;
use crate::mapping::base_page;
use crate::sys::{self, GUEST_MEMFD_FLAGS, can_map_guest_memfd};

/// A failure to make such memory.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum GuestMemfdError {
    /// KVM is too old, or this VM is of a kind with private memory: there x86 has no pages that begin as shared.
    #[error(
        "cannot make memory \"{id}\": KVM lacks guest_memfd flags {wanted:#x} for this VM and has {has:#x} \
         (KVM_CAP_GUEST_MEMFD_FLAGS, Linux 6.18): choose hugetlb or memfd memory"
    )]
    Unsupported { id: String, wanted: u64, has: u64 },
    #[error("cannot make memory \"{id}\": guest_memfd of {size:#x} bytes")]
    Create {
        id: String,
        size: u64,
        #[source]
        source: io::Error,
    },
}

/// Memory of one VM that this process maps too: as all anonymous memory once it is made.
impl Anonymous {
    /// `size` bytes for `id`, which belong to the VM with the descriptor `vm`: zero, in base pages, for no other VM, and
    /// gone with the last descriptor and mapping, which keep the VM.
    pub fn of_vm(id: &str, vm: BorrowedFd<'_>, size: u64) -> Result<Self, GuestMemfdError> {
        let create = |source| GuestMemfdError::Create { id: id.to_owned(), size, source };
        let has = sys::guest_memfd_flags(vm).map_err(create)?;
        if !can_map_guest_memfd(has) {
            return Err(GuestMemfdError::Unsupported { id: id.to_owned(), wanted: GUEST_MEMFD_FLAGS, has });
        }
        let file = sys::create_guest_memfd(vm, size, GUEST_MEMFD_FLAGS).map_err(create)?.into();
        Ok(Self { file, size, page_size: base_page() })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;
    use crate::backing::Backing;
    use crate::mapping::Mapping;

    #[test]
    fn memory_that_may_be_mapped_but_begins_as_private_is_of_no_use() {
        assert_eq!([0, 1, 2, 3, 7].map(can_map_guest_memfd), [false, false, false, true, true]);
    }

    #[test]
    fn a_descriptor_that_is_no_vm_is_refused() {
        let null = File::open("/dev/null").unwrap();
        let refused = Anonymous::of_vm("test", null.as_fd(), 0x1000);
        assert!(matches!(refused, Err(GuestMemfdError::Create { .. })), "{refused:?}");
    }

    #[test]
    fn memory_of_a_vm_can_be_mapped_or_kvm_is_named_as_what_lacks_it() {
        let Some(vm) = sys::tests::vm() else {
            println!("skipped: this host has no /dev/kvm that this user may open");
            return;
        };
        match Anonymous::of_vm("test", vm.as_fd(), 4 << 20) {
            Ok(memory) => {
                let mapping = Mapping::new(&memory, 0, 4 << 20, 0).unwrap();
                mapping.populate(0, 4 << 20).unwrap();
                mapping.zero(0, 4 << 20).unwrap();
                assert!(memory.file().set_len(0).is_err(), "a holder of the descriptor could shrink it");
            }
            Err(error) => assert!(matches!(error, GuestMemfdError::Unsupported { .. }), "{error:?}"),
        }
    }
}
