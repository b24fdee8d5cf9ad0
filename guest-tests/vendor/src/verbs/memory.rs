//! The unsafe module of memory that a device reads and writes.
//!
//! Callers rely on this: memory moves into a [`Registered`] whole and comes back only after its region is deregistered,
//! so that no reference to a byte exists while the device may write it. Owning it rather than borrowing it makes
//! forgetting a registration harmless: the memory is then forgotten with it. If deregistration fails, the memory is
//! leaked. Until then callers see it only as volatile copies.
#![expect(unsafe_code, reason = "memory that an RDMA device writes, and calls of libibverbs about it")]

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::BitOr;
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};

use crate::verbs::device::Context;
use crate::verbs::{VerbsError, abi};

/// Memory that stays where it is.
///
/// # Safety
///
/// From [`Memory::start`] on, [`Memory::size`] bytes can be read and written for as long as the value lives, also when
/// the value is moved, and only the value's owner has access to them.
pub unsafe trait Memory {
    /// Address of its first byte.
    fn start(&self) -> NonNull<u8>;
    /// Bytes, at least 1.
    fn size(&self) -> usize;
}

/// Accesses to memory that a device is allowed (`enum ibv_access_flags`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access(u32);

impl Access {
    /// Reads for requests of this side only.
    pub const NONE: Self = Self(0);
    /// The device writes what arrives for this process.
    pub const LOCAL_WRITE: Self = Self(1);
    /// The other side writes.
    pub const REMOTE_WRITE: Self = Self(1 << 1);
    /// The other side reads.
    pub const REMOTE_READ: Self = Self(1 << 2);
    /// The other side changes words.
    pub const REMOTE_ATOMIC: Self = Self(1 << 3);
    /// Pages are made present when the device accesses them.
    pub const ON_DEMAND: Self = Self(1 << 6);
    /// Writes may pass each other on PCI Express; left out where the kernel does not support it.
    pub const RELAXED_ORDERING: Self = Self(1 << 20);
    /// Reads and writes of both sides.
    pub const DATA: Self = Self(0b111);
    /// [`Access::DATA`], and atomics of the other side.
    pub const ALL: Self = Self(0b1111);
    /// Flags that an old kernel may ignore (`IBV_ACCESS_OPTIONAL_RANGE`).
    const OPTIONAL: u32 = (1 << 30) - (1 << 20);

    /// Bits of `enum ibv_access_flags`.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }
}

impl BitOr for Access {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A protection domain: what belongs together.
#[derive(Debug)]
pub struct Domain<'c> {
    pub(crate) context: &'c Context<'c>,
    pub(crate) pointer: NonNull<c_void>,
}

impl Context<'_> {
    /// Makes a protection domain.
    ///
    /// # Errors
    ///
    /// When the device has no more.
    pub fn domain(&self) -> Result<Domain<'_>, VerbsError> {
        // SAFETY: the context is open.
        let pointer = unsafe { (self.verbs.functions.alloc_pd)(self.pointer.as_ptr()) };
        let pointer = NonNull::new(pointer).ok_or_else(|| VerbsError::last("ibv_alloc_pd"))?;
        Ok(Domain { context: self, pointer })
    }
}

impl Domain<'_> {
    /// Registers memory.
    ///
    /// # Errors
    ///
    /// When the kernel or the device refuses, for instance by the limit on locked memory (`ENOMEM`); the memory is gone then.
    pub fn register<M: Memory>(&self, memory: M, access: Access) -> Result<Registered<'_, M>, VerbsError> {
        let (start, size) = (memory.start().as_ptr().cast::<c_void>(), memory.size());
        let domain = self.pointer.as_ptr();
        let functions = &self.context.verbs.functions;
        let (call, region) = if access.0 & Access::OPTIONAL == 0 {
            let access = access.0.cast_signed();
            // SAFETY: the memory is the caller's own and goes into the region that owns it.
            ("ibv_reg_mr", unsafe { (functions.reg_mr)(domain, start, size, access) })
        } else {
            let place = as_number(memory.start());
            // SAFETY: as above.
            let region = unsafe { (functions.reg_mr_iova2)(domain, start, size, place, access.0) };
            ("ibv_reg_mr_iova2", region)
        };
        Registered::new(self, call, region, as_number(memory.start()), size, memory)
    }

    /// Registers the whole address space, on demand and for local use, and takes pieces of `memory` only.
    ///
    /// # Errors
    ///
    /// When the kernel or the device refuses; the memory is gone then.
    pub fn register_implicit<M: Memory>(&self, memory: M) -> Result<Registered<'_, M>, VerbsError> {
        let access = (Access::LOCAL_WRITE | Access::ON_DEMAND).0.cast_signed();
        let register = self.context.verbs.functions.reg_mr;
        // SAFETY: the other side gets no key, and requests of this one name pieces of `memory` alone.
        let region = unsafe { register(self.pointer.as_ptr(), ptr::null_mut(), usize::MAX, access) };
        let (start, size) = (as_number(memory.start()), memory.size());
        Registered::new(self, "ibv_reg_mr", region, start, size, memory)
    }

    /// Registers `size` bytes of a dma-buf from `offset` on; requests and the other side call its first byte `name`.
    ///
    /// # Errors
    ///
    /// When the library, the driver or the exporter refuses.
    pub fn register_dmabuf(
        &self,
        buffer: RawFd,
        offset: u64,
        size: usize,
        name: u64,
        access: Access,
    ) -> Result<Registered<'_, DmaBuf>, VerbsError> {
        let call = "ibv_reg_dmabuf_mr";
        let register = self.context.verbs.functions.reg_dmabuf_mr.ok_or(VerbsError::NoCall { call })?;
        let access = access.0.cast_signed();
        // SAFETY: the kernel looks the descriptor up, and holds the buffer while the region lives; none of it is our memory.
        let region = unsafe { register(self.pointer.as_ptr(), offset, size, name, buffer, access) };
        Registered::new(self, call, region, name, size, DmaBuf)
    }

    /// Whether the driver takes dma-bufs, asked as NCCL does: with a descriptor that is none, which only a driver that
    /// takes them gets far enough to find out.
    ///
    /// # Errors
    ///
    /// When the answer is neither, for instance that such a descriptor was registered.
    pub fn takes_dmabuf(&self) -> Result<bool, VerbsError> {
        let error = match self.register_dmabuf(-1, 0, 0, 0, Access::NONE) {
            Ok(_) => {
                let what = "the descriptor of a dma-buf that was registered";
                return Err(VerbsError::Bound { what, value: u64::MAX, rule: "which is none" });
            }
            Err(error) => error,
        };
        match (&error, error.number()) {
            (_, Some(libc::EBADF)) => Ok(true),
            (VerbsError::NoCall { .. }, _) => Ok(false),
            // No such call of the driver; no such call of the kernel; an emulation's answer to the same.
            (_, Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOSYS)) => Ok(false),
            _ => Err(error),
        }
    }
}

impl Drop for Domain<'_> {
    fn drop(&mut self) {
        // SAFETY: what was made in the domain borrows it, and is gone. An error could only be logged.
        let _ = unsafe { (self.context.verbs.functions.dealloc_pd)(self.pointer.as_ptr()) };
    }
}

/// Memory behind a dma-buf: not this process's, so it has no bytes to load or store.
#[derive(Debug, Clone, Copy)]
pub struct DmaBuf;

/// Memory that a device may use.
#[derive(Debug)]
pub struct Registered<'d, M> {
    domain: &'d Domain<'d>,
    region: NonNull<abi::Mr>,
    start: u64,
    size: usize,
    local_key: u32,
    remote_key: u32,
    /// `None` when it has been given back.
    memory: Option<M>,
}

impl<'d, M> Registered<'d, M> {
    pub(crate) fn new(
        domain: &'d Domain<'_>,
        call: &'static str,
        region: *mut abi::Mr,
        start: u64,
        size: usize,
        memory: M,
    ) -> Result<Self, VerbsError> {
        let region = NonNull::new(region).ok_or_else(|| VerbsError::last(call))?;
        // SAFETY: the library returned a region, which is its own until it is deregistered.
        let local_key = unsafe { (*region.as_ptr()).lkey };
        // SAFETY: as above.
        let remote_key = unsafe { (*region.as_ptr()).rkey };
        Ok(Self { domain, region, start, size, local_key, remote_key, memory: Some(memory) })
    }

    /// The memory, while it is registered.
    pub(crate) fn memory(&self) -> Option<&M> {
        self.memory.as_ref()
    }

    /// Size of the memory in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Its first byte's address, as requests and the other side call it.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.start
    }

    /// A piece of it for a request of this side.
    ///
    /// # Errors
    ///
    /// When it does not lie inside, or is larger than the 32 bits of a request can express.
    pub fn sge(&self, offset: usize, size: usize) -> Result<Sge<'_>, VerbsError> {
        let address = self.inside(offset, size)?;
        let length = u32::try_from(size).map_err(|_| VerbsError::Bound {
            what: "a request's size",
            value: size as u64,
            rule: "0xffffffff at most",
        })?;
        Ok(Sge { address, length, lkey: self.local_key, of: PhantomData })
    }

    /// Address and key that the other side needs to use `size` bytes from `offset`.
    ///
    /// # Errors
    ///
    /// When they do not lie inside.
    pub fn remote(&self, offset: usize, size: usize) -> Result<Remote, VerbsError> {
        Ok(Remote { address: self.inside(offset, size)?, rkey: self.remote_key })
    }

    /// The address of `size` bytes at `offset`, which lie inside.
    fn inside(&self, offset: usize, size: usize) -> Result<u64, VerbsError> {
        let end = offset.checked_add(size).filter(|end| *end <= self.size);
        let address = end.and_then(|_| self.start.checked_add(offset as u64));
        address.ok_or_else(|| VerbsError::Bound {
            what: "the end of a piece of registered memory",
            value: (offset as u64).saturating_add(size as u64),
            rule: "inside of it",
        })
    }

    /// Deregisters the memory. If that fails, the memory must never be used again.
    fn release(&mut self) -> Option<M> {
        let memory = self.memory.take()?;
        // SAFETY: the region is registered, once and until here.
        let done = unsafe { (self.domain.context.verbs.functions.dereg_mr)(self.region.as_ptr()) };
        if done == 0 {
            return Some(memory);
        }
        std::mem::forget(memory);
        None
    }
}

impl<M: Memory> Registered<'_, M> {
    /// Copies bytes from `offset` on out of the memory, as far as both go.
    pub fn load(&self, offset: usize, bytes: &mut [u8]) {
        let Some(source) = self.place(offset, bytes.len()) else { return };
        if source.addr().is_multiple_of(8) {
            let (words, rest) = bytes.as_chunks_mut::<8>();
            let after = words.len() * 8;
            for (index, word) in words.iter_mut().enumerate() {
                let from = source.wrapping_add(index * 8).cast::<u64>();
                // SAFETY: aligned and inside, by `place`.
                *word = unsafe { from.read_volatile() }.to_ne_bytes();
            }
            load_bytes(source.wrapping_add(after), rest);
        } else {
            load_bytes(source, bytes);
        }
    }

    /// Copies bytes into the memory from `offset` on; nothing when they do not fit.
    pub fn store(&mut self, offset: usize, bytes: &[u8]) {
        let Some(target) = self.place(offset, bytes.len()) else { return };
        if target.addr().is_multiple_of(8) {
            let (words, rest) = bytes.as_chunks::<8>();
            let after = words.len() * 8;
            for (index, word) in words.iter().enumerate() {
                let to = target.wrapping_add(index * 8).cast::<u64>();
                // SAFETY: aligned and inside, by `place`.
                unsafe { to.write_volatile(u64::from_ne_bytes(*word)) };
            }
            store_bytes(target.wrapping_add(after), rest);
        } else {
            store_bytes(target, bytes);
        }
    }

    fn place(&self, offset: usize, size: usize) -> Option<*mut u8> {
        self.inside(offset, size).ok()?;
        Some(self.memory.as_ref()?.start().as_ptr().wrapping_add(offset))
    }
}

/// Bytes one by one, from memory that `Registered::place` found.
fn load_bytes(source: *const u8, bytes: &mut [u8]) {
    for (index, byte) in bytes.iter_mut().enumerate() {
        // SAFETY: inside, by `place`.
        *byte = unsafe { source.wrapping_add(index).read_volatile() };
    }
}

/// Bytes one by one, into memory that `Registered::place` found.
fn store_bytes(target: *mut u8, bytes: &[u8]) {
    for (index, byte) in bytes.iter().enumerate() {
        // SAFETY: inside, by `place`.
        unsafe { target.wrapping_add(index).write_volatile(*byte) };
    }
}

impl<M> Drop for Registered<'_, M> {
    fn drop(&mut self) {
        drop(self.release());
    }
}

/// A scatter/gather element: a piece of registered memory, for one request.
#[derive(Debug, Clone, Copy)]
pub struct Sge<'m> {
    address: u64,
    length: u32,
    lkey: u32,
    of: PhantomData<&'m ()>,
}

impl Sge<'_> {
    /// The same as the library's structure.
    pub(crate) const fn entry(self) -> abi::Sge {
        abi::Sge { addr: self.address, length: self.length, lkey: self.lkey }
    }
}

/// Memory of the other side, as that side described it: only its device decides what may be done with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remote {
    /// Address of the first byte, in the other side's registration.
    pub address: u64,
    /// Key of its registration, for remote access.
    pub rkey: u32,
}

impl Remote {
    /// The address `bytes` further on, modulo 2⁶⁴, under the same key.
    #[must_use]
    pub const fn plus(self, bytes: u64) -> Self {
        Self { address: self.address.wrapping_add(bytes), ..self }
    }
}

/// An address as a number for a device.
fn as_number(start: NonNull<u8>) -> u64 {
    start.as_ptr().expose_provenance() as u64
}
