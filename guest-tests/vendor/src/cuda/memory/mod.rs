//! Memory of every kind that GPUs use. The calls are in [`vmm`] and [`host`].

mod host;
mod vmm;

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use egm_address::PciAddress;

use crate::cuda::{Context, CudaError, Device, Kind, Words};

/// Granularity of registered memory: the largest known page of processors, in bytes.
const PAGE: u64 = 64 << 10;
/// Bytes of a fabric handle (`CU_IPC_HANDLE_SIZE`).
pub const FABRIC_HANDLE: usize = 64;

/// Releases the memory on drop.
#[expect(dead_code, reason = "held for what it does when it is dropped")]
enum Owner {
    Vmm(vmm::Mapped),
    Pool(host::Pooled),
    Pinned(host::Pinned),
    Managed(host::Managed),
    Registered(host::Registered, host::Mapping),
    EgmDevice(host::Registered, egm_memory::Memory),
    System(host::Mapping),
    Foreign,
}

/// Some memory, mapped for a GPU and, but for the GPU's own, for processors.
pub struct Memory {
    context: Context,
    /// Contexts of other GPUs that it is mapped for.
    peers: Vec<Context>,
    kind: Kind,
    bytes: u64,
    address: u64,
    host: Option<NonNull<u8>>,
    owner: Owner,
}

impl Memory {
    /// At least `bytes` bytes of `kind` for the GPU of `context`.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn new(context: &Context, kind: Kind, bytes: u64) -> Result<Self, CudaError> {
        let of = |bytes, address, host, owner| Self {
            context: context.clone(),
            peers: Vec::new(),
            kind,
            bytes,
            address,
            host,
            owner,
        };
        Ok(match kind {
            Kind::Device | Kind::HostNuma(_) => return Self::created(context, kind, bytes, &[]),
            Kind::Pool(node) => {
                let pooled = host::Pooled::new(context, node, bytes)?;
                of(bytes, pooled.address(), pointer(pooled.address()), Owner::Pool(pooled))
            }
            Kind::Pinned => {
                let pinned = host::Pinned::new(context, bytes)?;
                of(bytes, pinned.address(), Some(pinned.host()), Owner::Pinned(pinned))
            }
            Kind::Managed => {
                let managed = host::Managed::new(context, bytes)?;
                of(bytes, managed.address(), pointer(managed.address()), Owner::Managed(managed))
            }
            Kind::Registered => {
                let mapping = host::Mapping::new(bytes)?;
                let registered = host::Registered::new(context, mapping.start(), bytes, false)?;
                let (address, host) = (registered.address(), Some(mapping.start()));
                of(bytes, address, host, Owner::Registered(registered, mapping))
            }
            Kind::System => {
                let mapping = host::Mapping::new(bytes)?;
                let start = mapping.start();
                of(bytes, start.addr().get() as u64, Some(start), Owner::System(mapping))
            }
            Kind::EgmDevice(address) => {
                let found = egm_memory::find()?.functions;
                let function = found.iter().find(|function| function.address == address);
                let function = function.ok_or(CudaError::NoHostAddress(kind))?;
                Self::of_egm_device(context, address, function.map()?, 0, bytes.next_multiple_of(PAGE))?
            }
        })
    }

    /// The GPU's own memory, also mapped for the GPUs of `peers`. It keeps their contexts, because its drop waits for
    /// their queued work.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn for_peers(context: &Context, bytes: u64, peers: &[&Context]) -> Result<Self, CudaError> {
        Self::created(context, Kind::Device, bytes, peers)
    }

    /// `bytes` bytes from `offset` of the memory of the EGM device at `address`, registered.
    ///
    /// # Errors
    /// [`CudaError::Part`] when they do not lie inside or are not made of pages; [`CudaError::Call`].
    pub fn of_egm_device(
        context: &Context,
        address: PciAddress,
        memory: egm_memory::Memory,
        offset: u64,
        bytes: u64,
    ) -> Result<Self, CudaError> {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= memory.size());
        let whole = offset.is_multiple_of(PAGE) && bytes.is_multiple_of(PAGE) && bytes > 0;
        let start = usize::try_from(offset).ok().and_then(|offset| {
            let address = memory.address().addr().checked_add(offset)?;
            Some(memory.address().with_addr(address))
        });
        let (Some(start), true) = (start, inside && whole) else {
            return Err(CudaError::Part { offset, bytes, size: memory.size(), word: PAGE });
        };
        let registered = host::Registered::new(context, start, bytes, true)?;
        Ok(Self {
            context: context.clone(),
            peers: Vec::new(),
            kind: Kind::EgmDevice(address),
            bytes,
            address: registered.address(),
            host: Some(start),
            owner: Owner::EgmDevice(registered, memory),
        })
    }

    fn created(context: &Context, kind: Kind, bytes: u64, peers: &[&Context]) -> Result<Self, CudaError> {
        let bytes = bytes.next_multiple_of(Self::granularity(context, kind)?);
        let handle = vmm::Created::new(context, kind, bytes, vmm::POSIX_FD)?;
        Self::mapped(context, kind, handle, peers)
    }

    fn mapped(
        context: &Context,
        kind: Kind,
        handle: vmm::Created,
        peers: &[&Context],
    ) -> Result<Self, CudaError> {
        let bytes = handle.bytes();
        let devices: Vec<Device> = peers.iter().map(|peer| peer.device()).collect();
        let mapped = vmm::Mapped::new(context, kind, handle, &devices)?;
        let peers = peers.iter().map(|peer| (*peer).clone()).collect();
        let address = mapped.address();
        let host = if kind == Kind::Device { None } else { pointer(address) };
        Ok(Self { context: context.clone(), peers, kind, bytes, address, host, owner: Owner::Vmm(mapped) })
    }

    /// Granularity of sizes of `kind`, in bytes.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn granularity(context: &Context, kind: Kind) -> Result<u64, CudaError> {
        vmm::granularity(context, kind)
    }

    /// Memory that another process exported: `bytes` bytes of `kind`, as there.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn import(context: &Context, kind: Kind, bytes: u64, from: &impl AsFd) -> Result<Self, CudaError> {
        let handle = vmm::Created::import(context, bytes, from.as_fd())?;
        Self::mapped(context, kind, handle, &[])
    }

    /// A descriptor by which another process gets this memory; only for [`Kind::Device`] and [`Kind::HostNuma`].
    ///
    /// # Errors
    /// [`CudaError::Call`]; [`CudaError::NoHostAddress`] for other kinds, which have none.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        match &self.owner {
            Owner::Vmm(mapped) => mapped.export(),
            _ => Err(CudaError::NoHostAddress(self.kind)),
        }
    }

    /// A dma-buf of it, for devices of others.
    ///
    /// # Errors
    /// [`CudaError::Call`]; today's drivers have none for memory of the host.
    pub fn dma_buf(&self) -> Result<OwnedFd, CudaError> {
        vmm::dma_buf(&self.context, self.address, self.bytes, 0)
    }

    /// Exports the memory over PCI Express, even if processors reach the memory by another way: Data Direct needs this.
    ///
    /// # Errors
    /// [`CudaError::Call`]: not supported where the GPU has no such way, or the driver is older than CUDA 12.8.
    pub fn dma_buf_over_pcie(&self) -> Result<OwnedFd, CudaError> {
        vmm::dma_buf(&self.context, self.address, self.bytes, vmm::OVER_PCIE)
    }

    /// A handle by which other machines of an NVLink fabric would get such memory; the memory itself goes again.
    ///
    /// # Errors
    /// [`CudaError::Call`]: not permitted or not supported where there is no fabric.
    pub fn fabric_handle(context: &Context, kind: Kind) -> Result<[u8; FABRIC_HANDLE], CudaError> {
        let bytes = Self::granularity(context, kind)?;
        vmm::Created::new(context, kind, bytes, vmm::FABRIC)?.fabric_handle()
    }

    /// Kind that it was made as; [`Kind::Device`] for another library's memory.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Size in bytes, possibly rounded up from the requested one.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Address of the first byte for the GPU, valid while this memory lives.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// All of it, for the GPU.
    #[must_use]
    pub fn whole(&self) -> Part<'_> {
        Part { memory: self, offset: 0, bytes: self.bytes }
    }

    /// `bytes` bytes from `offset`, for the GPU; both multiples of 8.
    ///
    /// # Errors
    /// [`CudaError::Part`].
    pub fn part(&self, offset: u64, bytes: u64) -> Result<Part<'_>, CudaError> {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        if inside && offset.is_multiple_of(8) && bytes.is_multiple_of(8) {
            return Ok(Part { memory: self, offset, bytes });
        }
        Err(CudaError::Part { offset, bytes, size: self.bytes, word: 8 })
    }

    /// All of it, for processors.
    ///
    /// # Errors
    /// [`CudaError::NoHostAddress`] of the GPU's own memory.
    pub fn words(&self) -> Result<Words<'_>, CudaError> {
        let start = self.host.ok_or(CudaError::NoHostAddress(self.kind))?;
        Ok(Words::new(self, start, self.bytes / 8))
    }
}

impl Drop for Memory {
    /// Waits for every GPU that can have queued work on this memory, before the owner frees it.
    fn drop(&mut self) {
        for context in std::iter::once(&self.context).chain(&self.peers) {
            let _ = context.synchronize();
        }
    }
}

fn pointer(address: u64) -> Option<NonNull<u8>> {
    NonNull::new(std::ptr::with_exposed_provenance_mut(usize::try_from(address).ok()?))
}

/// A part of some memory, for a GPU.
#[derive(Clone, Copy)]
pub struct Part<'m> {
    memory: &'m Memory,
    offset: u64,
    bytes: u64,
}

impl Part<'_> {
    /// Address for the GPU, valid while the memory lives.
    #[must_use]
    pub fn address(self) -> u64 {
        self.memory.address + self.offset
    }

    /// Size in bytes, at most that of the memory.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    /// The same, for work in `context`: that of a GPU that its memory is mapped for, and waits for before it goes.
    pub(crate) fn within(self, context: &Context) -> Result<u64, CudaError> {
        let memory = self.memory;
        let mapped = std::iter::once(&memory.context).chain(&memory.peers).any(|of| of.is(context));
        let (what, gpu) = (memory.kind, context.device().ordinal);
        if mapped { Ok(self.address()) } else { Err(CudaError::NotMapped { what, gpu }) }
    }

    pub(crate) fn len(self) -> usize {
        // Its memory was mapped in this address space.
        usize::try_from(self.bytes).unwrap_or(usize::MAX)
    }
}
