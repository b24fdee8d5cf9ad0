//! The unsafe module of CUDA memory: registered by its address, where the driver resolves it or it is the host's, or as
//! a dma-buf past the processor.
//!
//! Callers rely on this: memory that is registered by its address is owned by its registration, as in [`crate::verbs::memory`].
//! It has no bytes that Rust refers to; what CUDA shows of it are copies and volatile words.
#![expect(
    unsafe_code,
    reason = "GPU memory that an RDMA device writes, and calls of libibverbs and libmlx5 about it"
)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::RawFd;
use std::ptr;

use crate::cuda::Memory;
use libloading::Library;

use crate::verbs::device::{Context, check};
use crate::verbs::library::find;
use crate::verbs::memory::{Access, DmaBuf, Domain, Registered};
use crate::verbs::{VerbsError, abi};

/// Longest path that the library returns, in bytes.
const MOST_PATH: usize = 4096;
/// Flag of `mlx5dv_reg_dmabuf_mr`: `MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT`.
const DATA_DIRECT: c_int = 1;

impl Domain<'_> {
    /// Registers memory of CUDA by its address: the GPU's own needs nvidia-peermem, or a platform where it is the kernel's
    /// memory too; HOST_NUMA memory needs neither.
    ///
    /// # Errors
    ///
    /// When the kernel or the device refuses (`EFAULT` for an unknown address); the memory is gone then.
    pub fn register_cuda(
        &self,
        memory: Memory,
        access: Access,
    ) -> Result<Registered<'_, Memory>, VerbsError> {
        let call = "ibv_reg_mr";
        let too_large = |_| VerbsError::Bound {
            what: "an address or a size of GPU memory",
            value: memory.address(),
            rule: "inside the address space",
        };
        let start = usize::try_from(memory.address()).map_err(too_large)?;
        let size = usize::try_from(memory.bytes()).map_err(too_large)?;
        let (place, access) = (ptr::without_provenance_mut::<c_void>(start), access.number().cast_signed());
        let register = self.context.verbs.functions.reg_mr;
        // SAFETY: the addresses are the memory's, which goes into the region that owns it; no reference to its bytes exists.
        let region = unsafe { register(self.pointer.as_ptr(), place, size, access) };
        Registered::new(self, call, region, memory.address(), size, memory)
    }

    /// Registers the first `size` bytes of a dma-buf for transfers that go past the processor (Data Direct); requests and
    /// the other side call its first byte `name`.
    ///
    /// # Errors
    ///
    /// When the driver refuses: `EOPNOTSUPP` where the device is not of mlx5.
    pub fn register_data_direct(
        &self,
        mlx5: &Mlx5,
        buffer: RawFd,
        size: usize,
        name: u64,
        access: Access,
    ) -> Result<Registered<'_, DmaBuf>, VerbsError> {
        let access = access.number().cast_signed();
        let domain = self.pointer.as_ptr();
        // SAFETY: the kernel looks the descriptor up, and holds the buffer while the region lives; none of it is our memory.
        let region = unsafe { (mlx5.register)(domain, 0, size, name, buffer, access, DATA_DIRECT) };
        Registered::new(self, "mlx5dv_reg_dmabuf_mr", region, name, size, DmaBuf)
    }
}

impl Registered<'_, Memory> {
    /// The memory, for the GPU to fill and to compare.
    #[must_use]
    pub fn cuda(&self) -> Option<&Memory> {
        self.memory()
    }
}

type DataDirectPath = unsafe extern "C" fn(*mut abi::Context, *mut c_char, usize) -> c_int;
type RegisterDirect = unsafe extern "C" fn(*mut c_void, u64, usize, u64, c_int, c_int, c_int) -> *mut abi::Mr;

/// Functions of libmlx5 that libibverbs' interface lacks.
#[derive(Debug)]
pub struct Mlx5 {
    path: DataDirectPath,
    register: RegisterDirect,
    /// Loaded for as long as its functions are called. libibverbs loads it too, for devices.
    _library: Library,
}

impl Mlx5 {
    /// File name of the library, for the loader.
    pub const NAME: &str = "libmlx5.so.1";

    /// Takes `library`, which is [`Mlx5::NAME`] or keeps its interface.
    ///
    /// # Errors
    ///
    /// When it has no Data Direct, which came with rdma-core 54.
    pub fn new(library: Library) -> Result<Self, VerbsError> {
        Ok(Self {
            path: find(&library, Self::NAME, "mlx5dv_get_data_direct_sysfs_path")?,
            register: find(&library, Self::NAME, "mlx5dv_reg_dmabuf_mr")?,
            _library: library,
        })
    }

    /// The function in `/sys` that reaches GPU memory past the processor for the device of `context`.
    ///
    /// # Errors
    ///
    /// `ENODEV` where there is none, `EOPNOTSUPP` where the device is not of mlx5.
    pub fn data_direct(&self, context: &Context<'_>) -> Result<String, VerbsError> {
        let mut path = [0u8; MOST_PATH];
        // SAFETY: the context is open, and the library writes at most the size that it is given.
        let done = unsafe { (self.path)(context.pointer.as_ptr(), path.as_mut_ptr().cast(), MOST_PATH) };
        check("mlx5dv_get_data_direct_sysfs_path", done)?;
        let text = CStr::from_bytes_until_nul(&path).map_err(|_| VerbsError::Bound {
            what: "the length of a path in /sys",
            value: MOST_PATH as u64,
            rule: "4095 at most",
        })?;
        Ok(text.to_string_lossy().into_owned())
    }
}
