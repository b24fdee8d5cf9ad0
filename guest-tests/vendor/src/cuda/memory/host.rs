//! Memory by the other calls: pools, pinned, registered, managed, ordinary; and copies. This is an unsafe module.
//!
//! It guarantees: each owner releases its resource once; addresses are whole mappings of at least as many bytes as were
//! requested; a copy is between parts of equal length that its GPU has mapped.
#![expect(unsafe_code, reason = "neither the driver's functions nor mmap have a safe interface")]

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use cudarc::driver::sys;
use rustix::mm::{self, MapFlags, ProtFlags};

use super::vmm::{length, of_device, read_and_write};
use crate::cuda::{Context, CudaError, Part, Stream};

/// `CU_MEMHOSTALLOC_PORTABLE` and `CU_MEMHOSTREGISTER_PORTABLE`: for all GPUs.
const PORTABLE: u32 = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP` and `CU_MEMHOSTREGISTER_DEVICEMAP`: mapped for the GPU.
const DEVICE_MAP: u32 = 2;
/// `CU_MEMHOSTREGISTER_IOMEMORY`: the range is a BAR.
const IO_MEMORY: u32 = 4;
/// `CU_MEM_ATTACH_GLOBAL`: for all GPUs and processors.
const ATTACH_GLOBAL: u32 = 1;

/// Anonymous private memory of this process, unmapped on drop.
pub(super) struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

impl Mapping {
    pub(super) fn new(bytes: u64) -> Result<Self, CudaError> {
        let (length, both) = (length(bytes), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a fresh private mapping at an address that the kernel chooses touches nothing that exists.
        let start = unsafe { mm::mmap_anonymous(ptr::null_mut(), length, both, MapFlags::PRIVATE) };
        let start = start.map_err(|error| CudaError::Map { bytes, source: error.into() })?;
        let none = || CudaError::Map { bytes, source: std::io::ErrorKind::OutOfMemory.into() };
        Ok(Self { start: NonNull::new(start.cast()).ok_or_else(none)?, length })
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is ours alone; addresses are valid only until here (`Memory::address`).
        let _ = unsafe { mm::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// A registration of addresses.
pub(super) struct Registered {
    context: Context,
    start: NonNull<u8>,
    address: u64,
}

impl Registered {
    /// Registers `bytes` bytes at `start`, which stay mapped while this lives; `io` is true for a BAR.
    pub(super) fn new(
        context: &Context,
        start: NonNull<u8>,
        bytes: u64,
        io: bool,
    ) -> Result<Self, CudaError> {
        let functions = context.enter()?;
        let (host, flags) = (start.as_ptr().cast(), PORTABLE | DEVICE_MAP | if io { IO_MEMORY } else { 0 });
        // SAFETY: the caller's mapping.
        unsafe { functions.cuMemHostRegister_v2(host, length(bytes), flags) }?;
        let mut registered = Self { context: context.clone(), start, address: 0 };
        // SAFETY: a local's address; the range was registered above.
        unsafe { functions.cuMemHostGetDevicePointer_v2(&raw mut registered.address, host, 0) }?;
        Ok(registered)
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Ok(functions) = self.context.enter() {
            // SAFETY: registered once, by `new`.
            let _ = unsafe { functions.cuMemHostUnregister(self.start.as_ptr().cast()) };
        }
    }
}

/// Memory as from `cudaMallocHost`.
pub(super) struct Pinned {
    context: Context,
    start: NonNull<u8>,
    address: u64,
}

impl Pinned {
    pub(super) fn new(context: &Context, bytes: u64) -> Result<Self, CudaError> {
        let (functions, mut start) = (context.enter()?, ptr::null_mut::<c_void>());
        // SAFETY: a local's address.
        unsafe { functions.cuMemHostAlloc(&raw mut start, length(bytes), PORTABLE | DEVICE_MAP) }?;
        let none = || CudaError::NoHostAddress(crate::cuda::Kind::Pinned);
        let start = NonNull::new(start.cast()).ok_or_else(none)?;
        let mut pinned = Self { context: context.clone(), start, address: 0 };
        let host = start.as_ptr().cast();
        // SAFETY: a local's address; the memory was allocated above.
        unsafe { functions.cuMemHostGetDevicePointer_v2(&raw mut pinned.address, host, 0) }?;
        Ok(pinned)
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn host(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(functions) = self.context.enter() {
            // SAFETY: allocated once, by `new`; addresses are valid only until here (`Memory::address`).
            let _ = unsafe { functions.cuMemFreeHost(self.start.as_ptr().cast()) };
        }
    }
}

/// Memory that the driver moves.
pub(super) struct Managed {
    context: Context,
    address: u64,
}

impl Managed {
    pub(super) fn new(context: &Context, bytes: u64) -> Result<Self, CudaError> {
        let (functions, mut address) = (context.enter()?, 0);
        // SAFETY: a local's address.
        unsafe { functions.cuMemAllocManaged(&raw mut address, length(bytes), ATTACH_GLOBAL) }?;
        Ok(Self { context: context.clone(), address })
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        if let Ok(functions) = self.context.enter() {
            // SAFETY: allocated once, by `new`; addresses are valid only until here (`Memory::address`).
            let _ = unsafe { functions.cuMemFree_v2(self.address) };
        }
    }
}

/// A pool of a NUMA node.
struct Pool {
    context: Context,
    raw: sys::CUmemoryPool,
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Ok(functions) = self.context.enter() {
            // SAFETY: made once, by `Pooled::new`; its memory was freed before.
            let _ = unsafe { functions.cuMemPoolDestroy(self.raw) };
        }
    }
}

/// Memory of a pool of its own.
pub(super) struct Pooled {
    address: u64,
    stream: Stream,
    _pool: Pool,
}

impl Pooled {
    pub(super) fn new(context: &Context, node: i32, bytes: u64) -> Result<Self, CudaError> {
        let what = sys::CUmemPoolProps {
            allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA,
                id: node,
            },
            win32SecurityAttributes: ptr::null_mut(),
            maxSize: 0,
            usage: 0,
            reserved: [0; 54],
        };
        let (functions, mut raw) = (context.enter()?, ptr::null_mut());
        // SAFETY: locals' addresses.
        unsafe { functions.cuMemPoolCreate(&raw mut raw, &raw const what) }?;
        let pool = Pool { context: context.clone(), raw };
        let access = read_and_write(of_device(context.device()));
        // SAFETY: a list of one.
        unsafe { functions.cuMemPoolSetAccess(raw, &raw const access, 1) }?;
        let (stream, mut address) = (Stream::new(context)?, 0);
        // SAFETY: a local's address; pool and stream are alive.
        unsafe { functions.cuMemAllocFromPoolAsync(&raw mut address, length(bytes), raw, stream.raw()) }?;
        let pooled = Self { address, stream, _pool: pool };
        pooled.stream.synchronize()?;
        Ok(pooled)
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        if let Ok(functions) = self.stream.context().enter() {
            // SAFETY: allocated once, by `new`; addresses are valid only until here (`Memory::address`).
            let _ = unsafe { functions.cuMemFreeAsync(self.address, self.stream.raw()) };
        }
        let _ = self.stream.synchronize();
    }
}

impl Stream {
    /// Has a copy engine copy `from` to `to`, which are as long as each other, later.
    ///
    /// # Errors
    /// [`CudaError::TooMuch`], [`CudaError::NotMapped`] and [`CudaError::Call`].
    pub fn copy(&self, to: Part<'_>, from: Part<'_>) -> Result<(), CudaError> {
        if to.bytes() != from.bytes() {
            return Err(CudaError::TooMuch { what: "the copy", is: from.bytes(), most: to.bytes() });
        }
        let (target, source) = (to.within(self.context())?, from.within(self.context())?);
        let functions = self.context().enter()?;
        // SAFETY: both parts lie in memory that stays mapped for this context's GPU until its queued work is complete,
        // because `Memory`'s drop waits for every context that `within` takes.
        unsafe { functions.cuMemcpyAsync(target, source, to.len(), self.raw()) }
    }
}
