//! Memory by handles: created or imported, mapped at a reserved address, opened for GPUs and processors. This is an
//! unsafe module.
//!
//! It guarantees: each owner releases its resource once, and a [`Mapped`] releases its mapping before the addresses and
//! the handle.
#![expect(unsafe_code, reason = "the driver's functions have no safe interface")]

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use cudarc::driver::sys;
use sys::{CUmemAllocationHandleType as Shared, CUmemLocationType as Location};

use crate::cuda::functions::Functions;
use crate::cuda::{Context, CudaError, Device, FABRIC_HANDLE, Kind};

/// Handles that other processes get by a descriptor.
pub(super) const POSIX_FD: Shared = Shared::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
/// Handles that other machines of a fabric get.
pub(super) const FABRIC: Shared = Shared::CU_MEM_HANDLE_TYPE_FABRIC;

/// Flag of `cuMemGetHandleForAddressRange`: `CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE`.
pub(super) const OVER_PCIE: u64 = 1;

/// For `usize` arguments: no memory is larger than an address space anyway.
pub(super) fn length(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn location(context: &Context, kind: Kind) -> sys::CUmemLocation {
    match kind {
        Kind::HostNuma(node) | Kind::Pool(node) => {
            sys::CUmemLocation { type_: Location::CU_MEM_LOCATION_TYPE_HOST_NUMA, id: node }
        }
        _ => of_device(context.device()),
    }
}

pub(super) fn of_device(device: Device) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: Location::CU_MEM_LOCATION_TYPE_DEVICE, id: device.ordinal }
}

pub(super) fn read_and_write(location: sys::CUmemLocation) -> sys::CUmemAccessDesc {
    sys::CUmemAccessDesc { location, flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE }
}

fn properties(context: &Context, kind: Kind, shared: Shared) -> sys::CUmemAllocationProp {
    // A GPU's memory must be declared as RDMA-capable where that is supported, or it cannot be exported as a dma-buf.
    let rdma = kind == Kind::Device && context.attributes().has(crate::cuda::Attribute::RDMA_WITH_VMM);
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: shared,
        location: location(context, kind),
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: u8::from(rdma),
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// Granularity of sizes: whole pages of the largest kind that the driver recommends.
pub(super) fn granularity(context: &Context, kind: Kind) -> Result<u64, CudaError> {
    let (mut bytes, properties) = (0_usize, properties(context, kind, POSIX_FD));
    let recommended = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED as c_uint;
    let functions = context.enter()?;
    // SAFETY: locals' addresses.
    unsafe { functions.cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, recommended) }?;
    // Sizes are rounded up to this, so any other value from the driver is an error.
    if bytes.is_power_of_two() && bytes >= 4096 {
        return Ok(bytes as u64);
    }
    let call = "cuMemGetAllocationGranularity";
    Err(CudaError::Text { call, text: bytes.to_string(), form: "a power of two, a page or more" })
}

/// Memory that has no address yet.
pub(super) struct Created {
    functions: &'static Functions,
    raw: u64,
    bytes: u64,
}

impl Created {
    /// `bytes` bytes, a multiple of the granularity.
    pub(super) fn new(context: &Context, kind: Kind, bytes: u64, shared: Shared) -> Result<Self, CudaError> {
        let (functions, mut raw, properties) = (context.enter()?, 0, properties(context, kind, shared));
        // SAFETY: locals' addresses.
        unsafe { functions.cuMemCreate(&raw mut raw, length(bytes), &raw const properties, 0) }?;
        Ok(Self { functions, raw, bytes })
    }

    /// Imports memory that another process exported.
    pub(super) fn import(context: &Context, bytes: u64, from: BorrowedFd<'_>) -> Result<Self, CudaError> {
        let (functions, mut raw) = (context.enter()?, 0);
        // For this kind of handle the pointer is the descriptor's number, and the driver refuses 0 as no pointer; a copy of a
        // descriptor is never one of the first three. The driver keeps what it needs.
        let copy = from.try_clone_to_owned().map_err(|source| CudaError::Descriptor { source })?;
        let number = ptr::without_provenance_mut(usize::try_from(copy.as_raw_fd()).unwrap_or(usize::MAX));
        // SAFETY: a local's address, and an open descriptor, which the driver checks.
        unsafe { functions.cuMemImportFromShareableHandle(&raw mut raw, number, POSIX_FD.0) }?;
        Ok(Self { functions, raw, bytes })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn fabric_handle(&self) -> Result<[u8; FABRIC_HANDLE], CudaError> {
        let mut handle = [0; FABRIC_HANDLE];
        let place = handle.as_mut_ptr().cast::<c_void>();
        // SAFETY: 64 bytes, the size of a fabric handle (`CUmemFabricHandle`).
        unsafe { self.functions.cuMemExportToShareableHandle(place, self.raw, FABRIC.0, 0) }?;
        Ok(handle)
    }
}

impl Drop for Created {
    fn drop(&mut self) {
        // SAFETY: the handle is ours; mappings keep the memory.
        let _ = unsafe { self.functions.cuMemRelease(self.raw) };
    }
}

/// Addresses from `cuMemAddressReserve`, freed on drop. Memory is mapped there later.
struct Reserved {
    functions: &'static Functions,
    address: u64,
    bytes: u64,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: the addresses are ours, and nothing is mapped there any more.
        let _ = unsafe { self.functions.cuMemAddressFree(self.address, length(self.bytes)) };
    }
}

/// Memory at an address.
pub(super) struct Mapped {
    place: Reserved,
    handle: Created,
}

impl Mapped {
    /// Maps `handle`, all of it, for the context's GPU, for `peers`, and for processors when it is memory of theirs.
    pub(super) fn new(
        context: &Context,
        kind: Kind,
        handle: Created,
        peers: &[Device],
    ) -> Result<Self, CudaError> {
        let functions = context.enter()?;
        let (mut address, bytes) = (0, length(handle.bytes));
        let align = length(granularity(context, kind)?);
        // SAFETY: a local's address; the driver picks where.
        unsafe { functions.cuMemAddressReserve(&raw mut address, bytes, align, 0, 0) }?;
        let place = Reserved { functions, address, bytes: handle.bytes };
        // SAFETY: the addresses were reserved for this.
        unsafe { functions.cuMemMap(address, bytes, 0, handle.raw, 0) }?;
        let mapped = Self { place, handle };
        let mut who = vec![read_and_write(of_device(context.device()))];
        who.extend(peers.iter().map(|peer| read_and_write(of_device(*peer))));
        who.extend(matches!(kind, Kind::HostNuma(_)).then(|| read_and_write(location(context, kind))));
        // SAFETY: a pointer to the list and its length; the mapped range is ours.
        unsafe { functions.cuMemSetAccess(address, bytes, who.as_ptr(), who.len()) }?;
        Ok(mapped)
    }

    pub(super) fn address(&self) -> u64 {
        self.place.address
    }

    pub(super) fn export(&self) -> Result<OwnedFd, CudaError> {
        let mut number: c_int = -1;
        let (place, functions) = ((&raw mut number).cast::<c_void>(), self.handle.functions);
        // SAFETY: a local's address, of the type that this kind of handle has.
        unsafe { functions.cuMemExportToShareableHandle(place, self.handle.raw, POSIX_FD.0, 0) }?;
        owned("cuMemExportToShareableHandle", number)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped once, by `new`; addresses are valid only until here (`Memory::address`).
        let _ = unsafe { self.place.functions.cuMemUnmap(self.place.address, length(self.place.bytes)) };
    }
}

impl super::Memory {
    /// Memory that another library allocated, for the GPU of `context` alone. Dropping it frees nothing.
    ///
    /// # Safety
    /// `bytes` bytes at `address`, a multiple of 8, are mapped for that GPU for as long as this lives.
    #[must_use]
    pub unsafe fn foreign(context: &Context, address: u64, bytes: u64) -> Self {
        let (kind, context, owner) = (Kind::Device, context.clone(), super::Owner::Foreign);
        Self { context, peers: Vec::new(), kind, bytes, address, host: None, owner }
    }
}

/// A dma-buf of `bytes` bytes at `address`, which is mapped.
pub(super) fn dma_buf(context: &Context, address: u64, bytes: u64, flags: u64) -> Result<OwnedFd, CudaError> {
    let mut number: c_int = -1;
    let place = (&raw mut number).cast::<c_void>();
    let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD as c_uint;
    let functions = context.enter()?;
    // SAFETY: a local's address, of the type that this kind of handle has.
    unsafe { functions.cuMemGetHandleForAddressRange(place, address, length(bytes), kind, flags) }?;
    owned("cuMemGetHandleForAddressRange", number)
}

/// A descriptor that the driver made for us.
fn owned(call: &'static str, number: c_int) -> Result<OwnedFd, CudaError> {
    if number < 0 {
        return Err(CudaError::Text { call, text: number.to_string(), form: "a descriptor" });
    }
    // SAFETY: the driver opened it for its caller, the only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
