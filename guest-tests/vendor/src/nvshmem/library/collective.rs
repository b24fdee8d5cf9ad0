//! Collective operations of all PEs: barriers, reductions, copies from and to all.
//!
//! Sound for the reasons of [`super::pe`].

#![expect(unsafe_code, reason = "calls into a library that is loaded at run time")]

use crate::cuda::Stream;

use super::Words;
use super::pe::{Pe, checked, pointer};
use crate::nvshmem::abi::TEAM_WORLD;
use crate::nvshmem::error::ShmemError;
use crate::nvshmem::memory::Range;

impl Pe {
    /// Waits until all PEs have reached the barrier and all their transfers have arrived. Collective.
    pub fn barrier(&self) {
        // SAFETY: the library has started.
        unsafe { (self.library.functions.barrier_all)() }
    }

    /// Queues [`barrier`](Self::barrier) on a stream. Collective.
    pub fn barrier_on(&self, on: &Stream) {
        // SAFETY: a stream of this context.
        unsafe { (self.library.functions.barrier_all_on)(on.raw().cast()) }
    }

    /// Queues the sum of each word of all PEs' `from`, into every PE's `to`. Collective.
    ///
    /// # Errors
    /// [`ShmemError::Length`] when the ranges are not as many aligned words; [`ShmemError::Status`].
    pub fn sum_reduce_on(&self, to: Range<'_>, from: Range<'_>, on: &Stream) -> Result<(), ShmemError> {
        let (words, to, from) = reduction(to, from)?;
        // SAFETY: two ranges of as many aligned words of symmetric memory, a stream of this context.
        checked("nvshmemx_uint64_sum_reduce_on_stream", unsafe {
            (self.library.functions.sum_reduce_on)(TEAM_WORLD, to, from, words, on.raw().cast())
        })
    }

    /// Queues the maximum of each word of all PEs' `from`, into every PE's `to`. Collective.
    ///
    /// # Errors
    /// As [`sum_reduce_on`](Self::sum_reduce_on).
    pub fn max_reduce_on(&self, to: Range<'_>, from: Range<'_>, on: &Stream) -> Result<(), ShmemError> {
        let (words, to, from) = reduction(to, from)?;
        // SAFETY: as in `sum_reduce_on`.
        checked("nvshmemx_uint64_max_reduce_on_stream", unsafe {
            (self.library.functions.max_reduce_on)(TEAM_WORLD, to, from, words, on.raw().cast())
        })
    }

    /// Queues a copy of `root`'s `from` into every PE's `to`. Collective.
    ///
    /// # Errors
    /// [`ShmemError::Length`], [`ShmemError::NoPe`], [`ShmemError::Status`].
    pub fn broadcast_on(
        &self,
        to: Range<'_>,
        from: Range<'_>,
        root: i32,
        on: &Stream,
    ) -> Result<(), ShmemError> {
        let root = self.transfer("broadcast", to, from, root)?;
        let (to, from, bytes) = (pointer(to.address()), pointer(from.address()), to.len());
        // SAFETY: as in `put_on`.
        checked("nvshmemx_broadcastmem_on_stream", unsafe {
            (self.library.functions.broadcast_on)(TEAM_WORLD, to, from, bytes, root, on.raw().cast())
        })
    }

    /// Queues a copy of every PE's `from`, one after the other by number, into every PE's `to`. Collective.
    ///
    /// # Errors
    /// [`ShmemError::Length`] when `to` is too short for all; [`ShmemError::Status`].
    pub fn fcollect_on(&self, to: Range<'_>, from: Range<'_>, on: &Stream) -> Result<(), ShmemError> {
        self.blocks("fcollect", to, from.len())?;
        let (to, from, bytes) = (pointer(to.address()), pointer(from.address()), from.len());
        // SAFETY: `to` has room for a block of `bytes` of each PE; a stream of this context.
        checked("nvshmemx_fcollectmem_on_stream", unsafe {
            (self.library.functions.fcollect_on)(TEAM_WORLD, to, from, bytes, on.raw().cast())
        })
    }

    /// Queues an exchange: block `i` of this PE's `from` becomes block number-of-this-PE of PE `i`'s `to`.
    /// Collective; `block` is the length of a block in bytes.
    ///
    /// # Errors
    /// [`ShmemError::Length`] when a range has no block for each PE; [`ShmemError::Status`].
    pub fn alltoall_on(
        &self,
        to: Range<'_>,
        from: Range<'_>,
        block: usize,
        on: &Stream,
    ) -> Result<(), ShmemError> {
        self.blocks("alltoall", to, block)?;
        self.blocks("alltoall", from, block)?;
        let (to, from) = (pointer(to.address()), pointer(from.address()));
        // SAFETY: both have a block of `block` bytes for each PE; a stream of this context.
        checked("nvshmemx_alltoallmem_on_stream", unsafe {
            (self.library.functions.alltoall_on)(TEAM_WORLD, to, from, block, on.raw().cast())
        })
    }

    fn blocks(&self, what: &'static str, range: Range<'_>, block: usize) -> Result<(), ShmemError> {
        let pes = usize::try_from(self.pes).unwrap_or(0);
        if block.checked_mul(pes) == Some(range.len()) {
            Ok(())
        } else {
            Err(ShmemError::Length { what, bytes: range.len(), with: block })
        }
    }
}

fn reduction(to: Range<'_>, from: Range<'_>) -> Result<(usize, Words, *const u64), ShmemError> {
    let words = from.words("reduction")?;
    if to.words("reduction")? != words {
        return Err(ShmemError::Length { what: "reduction", bytes: from.len(), with: to.len() });
    }
    Ok((words, pointer(to.address()).cast(), pointer(from.address()).cast_const().cast()))
}
