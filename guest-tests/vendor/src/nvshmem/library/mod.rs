//! The library's functions, by name.
//!
//! An unsafe module: its calls are sound by the reasons here and in [`pe`]. The loaded file is trusted to be NVSHMEM
//! of the ABI's first version, as a program that links to it trusts it: a name that is found has the type that the
//! headers give it. The file is never unloaded, since the library keeps threads and GPU state of its own.

#![expect(unsafe_code, reason = "calls into a library that is loaded at run time")]

mod collective;
mod pe;

use std::ffi::{c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use crate::nvshmem::abi::{InitAttributes, UniqueId};
use crate::nvshmem::error::ShmemError;

pub use pe::{Pe, Signal};

/// Declares [`Functions`] and reads each by its name.
macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        #[derive(Debug)]
        struct Functions { $($field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)* }

        impl Functions {
            fn of(library: &libloading::Library, path: &Path) -> Result<Self, ShmemError> {
                Ok(Self { $($field: symbol(library, path, $symbol)?,)* })
            }
        }
    };
}

type Address = *mut c_void;
type Words = *mut u64;

functions! {
    get_unique_id = "nvshmemx_get_uniqueid": fn(*mut UniqueId) -> c_int;
    set_unique_id = "nvshmemx_set_attr_uniqueid_args":
        fn(c_int, c_int, *const UniqueId, *mut InitAttributes) -> c_int;
    init = "nvshmemx_hostlib_init_attr": fn(c_uint, *mut InitAttributes) -> c_int;
    finalize = "nvshmemx_hostlib_finalize": fn();
    version = "nvshmemx_vendor_get_version_info": fn(*mut c_int, *mut c_int, *mut c_int);
    my_pe = "nvshmem_my_pe": fn() -> c_int;
    n_pes = "nvshmem_n_pes": fn() -> c_int;
    malloc = "nvshmem_malloc": fn(usize) -> Address;
    free = "nvshmem_free": fn(Address);
    pointer = "nvshmem_ptr": fn(*const c_void, c_int) -> Address;
    put = "nvshmem_putmem": fn(Address, *const c_void, usize, c_int);
    get = "nvshmem_getmem": fn(Address, *const c_void, usize, c_int);
    put_on = "nvshmemx_putmem_on_stream": fn(Address, *const c_void, usize, c_int, Address);
    get_on = "nvshmemx_getmem_on_stream": fn(Address, *const c_void, usize, c_int, Address);
    put_signal_on = "nvshmemx_putmem_signal_on_stream":
        fn(Address, *const c_void, usize, Words, u64, c_int, c_int, Address);
    signal_op_on = "nvshmemx_signal_op_on_stream": fn(Words, u64, c_int, c_int, Address);
    signal_wait_until_on = "nvshmemx_signal_wait_until_on_stream": fn(Words, c_int, u64, Address);
    quiet_on = "nvshmemx_quiet_on_stream": fn(Address);
    barrier_all = "nvshmem_barrier_all": fn();
    barrier_all_on = "nvshmemx_barrier_all_on_stream": fn(Address);
    sum_reduce_on = "nvshmemx_uint64_sum_reduce_on_stream": fn(i32, Words, *const u64, usize, Address) -> c_int;
    max_reduce_on = "nvshmemx_uint64_max_reduce_on_stream": fn(i32, Words, *const u64, usize, Address) -> c_int;
    broadcast_on = "nvshmemx_broadcastmem_on_stream":
        fn(i32, Address, *const c_void, usize, c_int, Address) -> c_int;
    fcollect_on = "nvshmemx_fcollectmem_on_stream": fn(i32, Address, *const c_void, usize, Address) -> c_int;
    alltoall_on = "nvshmemx_alltoallmem_on_stream": fn(i32, Address, *const c_void, usize, Address) -> c_int;
    register = "nvshmemx_buffer_register_symmetric": fn(Address, usize, c_int) -> Address;
    unregister = "nvshmemx_buffer_unregister_symmetric": fn(Address, usize) -> c_int;
}

/// Reads one function pointer; the caller names its type.
fn symbol<F: Copy>(library: &libloading::Library, path: &Path, name: &'static str) -> Result<F, ShmemError> {
    // SAFETY: `F` is the type that NVSHMEM's headers give this name (the table above).
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|found| *found).map_err(|source| ShmemError::Symbol {
        path: path.to_owned(),
        symbol: name,
        source,
    })
}

/// Functions of NVSHMEM's host library, which stays loaded until the process ends.
#[derive(Debug)]
pub struct Library {
    functions: Functions,
    path: PathBuf,
    /// Keeps the functions; never unloaded.
    _loaded: ManuallyDrop<libloading::Library>,
}

impl Library {
    /// Takes the functions of a library that was loaded from `path`.
    ///
    /// # Errors
    /// [`ShmemError::Symbol`] when one of them is missing.
    pub fn of(loaded: libloading::Library, path: impl Into<PathBuf>) -> Result<Self, ShmemError> {
        let path = path.into();
        Ok(Self { functions: Functions::of(&loaded, &path)?, path, _loaded: ManuallyDrop::new(loaded) })
    }

    /// The path that it was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version: major, minor, patch.
    pub fn version(&self) -> (i32, i32, i32) {
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: three places for one integer each.
        unsafe { (self.functions.version)(&raw mut major, &raw mut minor, &raw mut patch) };
        (major, minor, patch)
    }

    /// A new job's id. The process that requests it must become PE 0: the library listens there.
    ///
    /// # Errors
    /// [`ShmemError::Status`], for instance when no network interface is up (the loopback one is enough).
    pub fn unique_id(&self) -> Result<UniqueId, ShmemError> {
        let mut id = UniqueId::blank();
        // SAFETY: a place for one id, with its version word set.
        let status = unsafe { (self.functions.get_unique_id)(&raw mut id) };
        pe::checked("nvshmemx_get_uniqueid", status)?;
        Ok(id)
    }
}
