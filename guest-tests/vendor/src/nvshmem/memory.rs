//! Memory that every PE has at the same offset, and ranges in it.

use std::marker::PhantomData;

use crate::nvshmem::error::ShmemError;

/// Symmetric memory of this PE: of the heap, or a buffer of its own that was registered.
///
/// [`Pe::free`](crate::nvshmem::Pe::free) or [`Pe::unregister`](crate::nvshmem::Pe::unregister) returns it; both are collective.
/// Dropping it does nothing: the library frees all memory when the PE ends. It borrows its PE, so that the PE
/// cannot end before:
/// ```compile_fail,E0505
/// fn late(pe: egm_vendor::nvshmem::Pe) -> Result<usize, Box<dyn std::error::Error>> {
///     let memory = pe.allocate(64)?;
///     pe.end()?;
///     Ok(memory.len())
/// }
/// ```
/// ```
/// fn in_order(pe: egm_vendor::nvshmem::Pe) -> Result<(), Box<dyn std::error::Error>> {
///     let memory = pe.allocate(64)?;
///     pe.free(memory)?;
///     Ok(pe.end()?)
/// }
/// ```
#[must_use = "memory is given back by a call that all PEs make"]
pub struct Memory<'p> {
    address: usize,
    bytes: usize,
    gpu: Option<crate::cuda::Memory>,
    /// Borrows the PE, and the registered buffer.
    of: PhantomData<&'p ()>,
}

impl Memory<'_> {
    /// The caller chooses the lifetime: that of the library's source of the memory.
    pub(crate) const fn new(address: usize, bytes: usize, gpu: Option<crate::cuda::Memory>) -> Self {
        Self { address, bytes, gpu, of: PhantomData }
    }

    /// For kernels and copies of this PE's GPU; memory of the heap has it, a registered buffer is reached by its first
    /// address.
    pub const fn gpu(&self) -> Option<&crate::cuda::Memory> {
        self.gpu.as_ref()
    }

    pub(crate) const fn address(&self) -> usize {
        self.address
    }

    /// Its length in bytes.
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The `bytes` at `offset`.
    ///
    /// # Errors
    /// [`ShmemError::Range`] when they do not all lie in this memory.
    pub fn range(&self, offset: usize, bytes: usize) -> Result<Range<'_>, ShmemError> {
        let end = offset.checked_add(bytes).filter(|end| *end <= self.bytes);
        let address = end.and_then(|_| self.address.checked_add(offset));
        let outside = ShmemError::Range { offset, bytes, within: self.bytes };
        Ok(Range { address: address.ok_or(outside)?, bytes, of: PhantomData })
    }
}

/// Another PE's memory, for this PE's GPU.
pub struct Peer<'m> {
    gpu: crate::cuda::Memory,
    of: PhantomData<&'m Memory<'m>>,
}

impl<'m> Peer<'m> {
    pub(crate) const fn new(gpu: crate::cuda::Memory, _of: &'m Memory<'_>) -> Self {
        Self { gpu, of: PhantomData }
    }

    /// For kernels and copies.
    pub const fn gpu(&self) -> &crate::cuda::Memory {
        &self.gpu
    }
}

/// A part of [`Memory`].
#[derive(Debug, Clone, Copy)]
pub struct Range<'a> {
    address: usize,
    bytes: usize,
    of: PhantomData<&'a Memory<'a>>,
}

impl Range<'_> {
    /// Its address for this PE's GPU.
    pub const fn address(&self) -> usize {
        self.address
    }

    /// Its length in bytes.
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Number of its words of 8 bytes.
    ///
    /// # Errors
    /// [`ShmemError::Length`] when it is not made of aligned words.
    pub(crate) fn words(&self, what: &'static str) -> Result<usize, ShmemError> {
        if self.address.is_multiple_of(8) && self.bytes.is_multiple_of(8) {
            Ok(self.bytes / 8)
        } else {
            Err(ShmemError::Length { what, bytes: self.bytes, with: 8 })
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_range_lies_in_its_memory_or_is_refused(bytes in 0usize..64, offset: usize, length: usize) {
            let memory = Memory::new(0x1000, bytes, None);
            for (offset, length) in [(offset, length), (offset % 80, length % 80)] {
                match memory.range(offset, length) {
                    Ok(range) => {
                        prop_assert!(range.address() >= 0x1000 && range.address() + range.len() <= 0x1000 + bytes);
                    }
                    Err(_) => prop_assert!(offset.checked_add(length).is_none_or(|end| end > bytes)),
                }
            }
        }
    }

    #[test]
    fn words_are_aligned() {
        let memory = Memory::new(0x1000, 64, None);
        assert_eq!(memory.range(8, 16).unwrap().words("sum").unwrap(), 2);
        assert!(memory.range(4, 16).unwrap().words("sum").is_err());
        assert!(memory.range(8, 12).unwrap().words("sum").is_err());
    }
}
