//! One processing element: this process, after it has started.
//!
//! Calls here are sound because every address argument comes from the library itself ([`Memory`]) with its length,
//! every PE's number is below their count, [`Pe`] exists only between start and end, memory borrows it, and before
//! memory is freed or the PE ends, this GPU has completed all queued work.

#![expect(unsafe_code, reason = "calls into a library that is loaded at run time")]

use std::ffi::c_int;
use std::marker::PhantomData;

use crate::cuda::{Context, Stream};

use super::{Address, Library, Words};
use crate::nvshmem::abi::{Compare, INIT_WITH_UNIQUE_ID, InitAttributes, SignalOp, UniqueId};
use crate::nvshmem::error::ShmemError;
use crate::nvshmem::memory::{Memory, Peer, Range};

/// Makes an error of a status that is not zero.
pub(in crate::nvshmem::library) fn checked(call: &'static str, status: c_int) -> Result<(), ShmemError> {
    if status == 0 { Ok(()) } else { Err(ShmemError::Status { call, status }) }
}

/// A signal with data: a word of symmetric memory, and the value that it gets.
#[derive(Clone, Copy)]
pub struct Signal<'m> {
    /// One word of 8 bytes, aligned to 8, of the PE that receives the data.
    pub word: Range<'m>,
    /// Its value after the data has arrived.
    pub value: u64,
}

/// This process as one PE of a job. It stays on the thread that started it and uses that thread's CUDA context.
pub struct Pe {
    pub(super) library: Library,
    context: Context,
    pe: i32,
    pub(super) pes: i32,
    /// Neither `Send` nor `Sync`: `start` requests no support for several calling threads.
    stays: PhantomData<*const ()>,
}

impl Pe {
    /// Starts on the GPU of `context` as PE `pe` of `pes` of the job `id`; all PEs must, and wait for each other.
    ///
    /// # Errors
    /// [`ShmemError::Status`] with the library's code, [`ShmemError::Started`] when it started something else.
    pub fn start(
        library: Library,
        context: &Context,
        id: &UniqueId,
        pe: i32,
        pes: i32,
    ) -> Result<Self, ShmemError> {
        // The library takes the context that is current in this thread.
        context.synchronize()?;
        let mut attributes = InitAttributes::default();
        // SAFETY: the id is only noted in the attributes and outlives them.
        let status = unsafe { (library.functions.set_unique_id)(pe, pes, id, &raw mut attributes) };
        checked("nvshmemx_set_attr_uniqueid_args", status)?;
        // SAFETY: the attributes are complete, and the id that they point to lives until this call has returned.
        let status = unsafe { (library.functions.init)(INIT_WITH_UNIQUE_ID, &raw mut attributes) };
        checked("nvshmemx_hostlib_init_attr", status)?;
        // SAFETY: the library has started.
        let is_pe = unsafe { (library.functions.my_pe)() };
        // SAFETY: the library has started.
        let is_pes = unsafe { (library.functions.n_pes)() };
        if (is_pe, is_pes) != (pe, pes) {
            return Err(ShmemError::Started { pe: is_pe, pes: is_pes, asked_pe: pe, asked_pes: pes });
        }
        Ok(Self { library, context: context.clone(), pe, pes, stays: PhantomData })
    }

    /// Ends the job; all PEs must. Memory of the heap is gone afterwards.
    ///
    /// # Errors
    /// [`ShmemError::Cuda`] when queued work failed; then the job has not ended, and only the process can end.
    pub fn end(self) -> Result<(), ShmemError> {
        self.context.synchronize()?;
        // SAFETY: it has started, `self` is used up, no memory borrows it, and nothing that was queued still runs.
        unsafe { (self.library.functions.finalize)() }
        Ok(())
    }

    /// Its number, from 0.
    pub const fn number(&self) -> i32 {
        self.pe
    }

    /// Number of PEs in the job.
    pub const fn count(&self) -> i32 {
        self.pes
    }

    /// The library that this PE was started with.
    pub const fn library(&self) -> &Library {
        &self.library
    }

    fn peer(&self, pe: i32) -> Result<i32, ShmemError> {
        if (0..self.pes).contains(&pe) { Ok(pe) } else { Err(ShmemError::NoPe { pe, pes: self.pes }) }
    }

    /// Memory of the symmetric heap, on this PE's GPU. Collective: all PEs ask for the same length.
    ///
    /// # Errors
    /// [`ShmemError::Null`] when the heap is full.
    pub fn allocate(&self, bytes: usize) -> Result<Memory<'_>, ShmemError> {
        // SAFETY: any length is allowed.
        let address = unsafe { (self.library.functions.malloc)(bytes) };
        if address.is_null() {
            return Err(ShmemError::Null { call: "nvshmem_malloc", bytes });
        }
        // SAFETY: the library mapped it for this GPU, until `free` takes the memory or `end` the PE that it borrows.
        let gpu = unsafe { crate::cuda::Memory::foreign(&self.context, address.addr() as u64, bytes as u64) };
        Ok(Memory::new(address.addr(), bytes, Some(gpu)))
    }

    /// Frees memory of the heap once this GPU has completed its queued work. Collective.
    ///
    /// # Errors
    /// [`ShmemError::Cuda`] when queued work failed; the memory is then not freed.
    pub fn free(&self, memory: Memory<'_>) -> Result<(), ShmemError> {
        self.context.synchronize()?;
        // SAFETY: the library gave this address, `memory` is used up, and nothing that was queued here still uses it.
        unsafe { (self.library.functions.free)(pointer(memory.address())) }
        Ok(())
    }

    /// Makes `own`, memory of this PE's GPU or of a host node, symmetric: the same memory at a further address.
    /// Collective, with one length everywhere. The library checks that `cuMemCreate` made it, that its length is a
    /// multiple of `NVSHMEM_CUMEM_GRANULARITY` (512 MiB unless set), and its handle type (a descriptor unless set).
    ///
    /// # Errors
    /// [`ShmemError::Null`] when the library refuses it; it prints the reason on standard error.
    pub fn register<'p>(&'p self, own: &'p crate::cuda::Memory) -> Result<Memory<'p>, ShmemError> {
        let (address, bytes) = (whole(own.address()), whole(own.bytes()));
        // SAFETY: an allocation of this length, which the returned memory borrows; the library looks it up with the
        // driver and refuses any memory that is not from `cuMemCreate`.
        let symmetric = unsafe { (self.library.functions.register)(pointer(address), bytes, 0) };
        if symmetric.is_null() {
            return Err(ShmemError::Null { call: "nvshmemx_buffer_register_symmetric", bytes });
        }
        Ok(Memory::new(symmetric.addr(), bytes, None))
    }

    /// Undoes [`register`](Self::register) once this GPU has completed its queued work. Collective.
    ///
    /// # Errors
    /// [`ShmemError::Status`] with the library's code, [`ShmemError::Cuda`] when queued work failed.
    pub fn unregister(&self, memory: Memory<'_>) -> Result<(), ShmemError> {
        self.context.synchronize()?;
        // SAFETY: the library gave this address for a buffer of this length, `memory` is used up, and nothing that was
        // queued here still uses it.
        let status = unsafe { (self.library.functions.unregister)(pointer(memory.address()), memory.len()) };
        checked("nvshmemx_buffer_unregister_symmetric", status)
    }

    /// `pe`'s memory at the same offset, for this PE's GPU; `None` when the GPU cannot reach it directly.
    ///
    /// # Errors
    /// [`ShmemError::NoPe`].
    pub fn peer_memory<'m>(&self, memory: &'m Memory<'_>, pe: i32) -> Result<Option<Peer<'m>>, ShmemError> {
        let pe = self.peer(pe)?;
        // SAFETY: an address of symmetric memory and a PE that is there.
        let address = unsafe { (self.library.functions.pointer)(pointer(memory.address()), pe) };
        Ok((!address.is_null()).then(|| {
            let (at, bytes) = (address.addr() as u64, memory.len() as u64);
            // SAFETY: the library mapped the peer's memory for this GPU, until `free` takes the memory that it borrows.
            Peer::new(unsafe { crate::cuda::Memory::foreign(&self.context, at, bytes) }, memory)
        }))
    }

    pub(super) fn transfer(
        &self,
        what: &'static str,
        to: Range<'_>,
        from: Range<'_>,
        pe: i32,
    ) -> Result<i32, ShmemError> {
        if to.len() != from.len() {
            return Err(ShmemError::Length { what, bytes: from.len(), with: to.len() });
        }
        self.peer(pe)
    }

    /// Copies this PE's `from` to `pe`'s `to` and waits until the source may be reused.
    ///
    /// # Errors
    /// [`ShmemError::Length`], [`ShmemError::NoPe`]; when the transfer fails, the library ends the process.
    pub fn put(&self, to: Range<'_>, from: Range<'_>, pe: i32) -> Result<(), ShmemError> {
        let pe = self.transfer("put", to, from, pe)?;
        // SAFETY: two ranges of symmetric memory of one length, a PE that is there.
        unsafe { (self.library.functions.put)(pointer(to.address()), pointer(from.address()), to.len(), pe) };
        Ok(())
    }

    /// Copies `pe`'s `from` to this PE's `to`, and waits.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn get(&self, to: Range<'_>, from: Range<'_>, pe: i32) -> Result<(), ShmemError> {
        let pe = self.transfer("get", to, from, pe)?;
        // SAFETY: as in `put`.
        unsafe { (self.library.functions.get)(pointer(to.address()), pointer(from.address()), to.len(), pe) };
        Ok(())
    }

    /// Queues [`put`](Self::put) on a stream.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn put_on(&self, to: Range<'_>, from: Range<'_>, pe: i32, on: &Stream) -> Result<(), ShmemError> {
        let pe = self.transfer("put", to, from, pe)?;
        let (to, from, bytes) = (pointer(to.address()), pointer(from.address()), to.len());
        // SAFETY: as in `put`, and a stream of this context.
        unsafe { (self.library.functions.put_on)(to, from, bytes, pe, on.raw().cast()) };
        Ok(())
    }

    /// Queues [`get`](Self::get) on a stream.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn get_on(&self, to: Range<'_>, from: Range<'_>, pe: i32, on: &Stream) -> Result<(), ShmemError> {
        let pe = self.transfer("get", to, from, pe)?;
        let (to, from, bytes) = (pointer(to.address()), pointer(from.address()), to.len());
        // SAFETY: as in `put`, and a stream of this context.
        unsafe { (self.library.functions.get_on)(to, from, bytes, pe, on.raw().cast()) };
        Ok(())
    }

    /// Queues a put that is followed by a signal: a reader that sees its value in `pe`'s word also sees the data.
    ///
    /// # Errors
    /// As [`put`](Self::put); [`ShmemError::Length`] when the signal is not one aligned word.
    pub fn put_signal_on(
        &self,
        to: Range<'_>,
        from: Range<'_>,
        Signal { word, value }: Signal<'_>,
        pe: i32,
        on: &Stream,
    ) -> Result<(), ShmemError> {
        let pe = self.transfer("put with signal", to, from, pe)?;
        let (word, set) = (one_word(word)?, SignalOp::Set as c_int);
        let (to, from, bytes) = (pointer(to.address()), pointer(from.address()), to.len());
        // SAFETY: as in `put_on`, and one aligned word of symmetric memory.
        unsafe {
            (self.library.functions.put_signal_on)(to, from, bytes, word, value, set, pe, on.raw().cast())
        };
        Ok(())
    }

    /// Queues a signal to `pe`'s word.
    ///
    /// # Errors
    /// [`ShmemError::NoPe`]; [`ShmemError::Length`] when `signal` is not one aligned word.
    pub fn signal_op_on(
        &self,
        signal: Range<'_>,
        value: u64,
        what: SignalOp,
        pe: i32,
        on: &Stream,
    ) -> Result<(), ShmemError> {
        let (word, pe) = (one_word(signal)?, self.peer(pe)?);
        // SAFETY: one aligned word of symmetric memory, a PE that is there, a stream of this context.
        unsafe { (self.library.functions.signal_op_on)(word, value, what as c_int, pe, on.raw().cast()) };
        Ok(())
    }

    /// Queues a wait for this PE's own word.
    ///
    /// # Errors
    /// [`ShmemError::Length`] when `signal` is not one aligned word.
    pub fn signal_wait_until_on(
        &self,
        signal: Range<'_>,
        until: Compare,
        value: u64,
        on: &Stream,
    ) -> Result<(), ShmemError> {
        let word = one_word(signal)?;
        // SAFETY: one aligned word of symmetric memory, a stream of this context.
        unsafe {
            (self.library.functions.signal_wait_until_on)(word, until as c_int, value, on.raw().cast())
        };
        Ok(())
    }

    /// Queues a wait until everything that this PE queued has arrived.
    pub fn quiet_on(&self, on: &Stream) {
        // SAFETY: a stream of this context.
        unsafe { (self.library.functions.quiet_on)(on.raw().cast()) }
    }
}

/// A number of the driver's, which counts bytes of this address space.
fn whole(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// An address as the library takes it.
pub(super) const fn pointer(address: usize) -> Address {
    std::ptr::without_provenance_mut(address)
}

fn one_word(signal: Range<'_>) -> Result<Words, ShmemError> {
    match signal.words("signal")? {
        1 => Ok(pointer(signal.address()).cast()),
        _ => Err(ShmemError::Length { what: "signal", bytes: signal.len(), with: 8 }),
    }
}
