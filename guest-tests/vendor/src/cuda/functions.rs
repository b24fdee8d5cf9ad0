//! The driver's functions, by name. This is an unsafe module: it assigns types to symbols.
//!
//! It guarantees: each field of [`Functions`] is a symbol of a loaded libcuda, of `cudarc`'s type for it (compared by
//! the compiler), except that results are numbers: an `enum` with a number that it has no name for would be undefined
//! behaviour. Callers follow the rules of `cuda.h` for arguments.
#![expect(unsafe_code, reason = "a symbol of a library is cast to the type that its header declares")]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys;
use libloading::Library;

use crate::cuda::CudaError;

/// Makes the table: fields, their loading, calls that check results, and the compiler's comparison with `cudarc`.
/// `type = theirs` is for arguments that are
/// numbers here and an `enum` there; `like` is for a function that cudarc has in its newest version only.
macro_rules! functions {
    ($($name:ident $(like $like:ident)? ($($argument:ident: $type:ty $(= $theirs:ty)?),*);)*) => {
        /// The functions of the driver that this package calls, all of them.
        pub const FUNCTIONS: &[&str] = &[$(stringify!($name)),*];

        #[expect(non_snake_case, reason = "the names of cuda.h")]
        pub(crate) struct Functions {
            $($name: unsafe extern "C" fn($($type),*) -> c_uint,)*
        }

        #[expect(non_snake_case, clippy::too_many_arguments, reason = "names and arguments of cuda.h")]
        impl Functions {
            fn load(library: &'static Library) -> Result<Self, CudaError> {
                Ok(Self { $($name: symbol(library, stringify!($name))?,)* })
            }

            $(
                /// # Safety
                /// As in `cuda.h`.
                pub(crate) unsafe fn $name(&self, $($argument: $type),*) -> Result<(), CudaError> {
                    // SAFETY: the caller follows `cuda.h`; the type was compared with cudarc's.
                    CudaError::check(stringify!($name), unsafe { (self.$name)($($argument),*) })
                }
            )*
        }

        $(const _: unsafe fn($(theirs!($type $(, $theirs)?)),*) -> sys::CUresult = function!($name $(, $like)?);)*
    };
}

macro_rules! theirs {
    ($type:ty) => {
        $type
    };
    ($type:ty, $theirs:ty) => {
        $theirs
    };
}

/// cudarc's function: of the same name, or the one that the table names after `like`.
macro_rules! function {
    ($name:ident) => {
        sys::$name
    };
    ($name:ident, $like:ident) => {
        sys::$like
    };
}

functions! {
    cuInit(flags: c_uint);
    cuDriverGetVersion(version: *mut c_int);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut sys::CUdevice, ordinal: c_int);
    cuDeviceGetName(name: *mut c_char, length: c_int, device: sys::CUdevice);
    cuDeviceGetPCIBusId(id: *mut c_char, length: c_int, device: sys::CUdevice);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: sys::CUdevice);
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int = sys::CUdevice_attribute, device: sys::CUdevice);
    cuDeviceCanAccessPeer(can: *mut c_int, device: sys::CUdevice, peer: sys::CUdevice);
    cuDeviceGetP2PAttribute(
        value: *mut c_int, attribute: c_int = sys::CUdevice_P2PAttribute, from: sys::CUdevice, to: sys::CUdevice
    );
    cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: sys::CUdevice);
    cuDevicePrimaryCtxRelease_v2(device: sys::CUdevice);
    cuCtxSetCurrent(context: sys::CUcontext);
    cuCtxSynchronize();
    cuStreamCreate(stream: *mut sys::CUstream, flags: c_uint);
    cuStreamDestroy_v2(stream: sys::CUstream);
    cuStreamSynchronize(stream: sys::CUstream);
    cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
    cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
    cuEventDestroy_v2(event: sys::CUevent);
    cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
    cuEventElapsedTime like cuEventElapsedTime_v2 (milliseconds: *mut f32, from: sys::CUevent, to: sys::CUevent);
    cuModuleLoadDataEx(
        module: *mut sys::CUmodule, image: *const c_void, count: c_uint,
        options: *mut c_uint = *mut sys::CUjit_option, values: *mut *mut c_void
    );
    cuModuleUnload(module: sys::CUmodule);
    cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
    cuLaunchKernel(
        function: sys::CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: sys::CUstream, arguments: *mut *mut c_void, extra: *mut *mut c_void
    );
    cuMemcpyAsync(to: sys::CUdeviceptr, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemGetAllocationGranularity(
        bytes: *mut usize, what: *const sys::CUmemAllocationProp,
        option: c_uint = sys::CUmemAllocationGranularity_flags
    );
    cuMemCreate(
        handle: *mut sys::CUmemGenericAllocationHandle, bytes: usize, what: *const sys::CUmemAllocationProp,
        flags: c_ulonglong
    );
    cuMemRelease(handle: sys::CUmemGenericAllocationHandle);
    cuMemAddressReserve(
        address: *mut sys::CUdeviceptr, bytes: usize, align: usize, wanted: sys::CUdeviceptr, flags: c_ulonglong
    );
    cuMemAddressFree(address: sys::CUdeviceptr, bytes: usize);
    cuMemMap(
        address: sys::CUdeviceptr, bytes: usize, offset: usize, handle: sys::CUmemGenericAllocationHandle,
        flags: c_ulonglong
    );
    cuMemUnmap(address: sys::CUdeviceptr, bytes: usize);
    cuMemSetAccess(address: sys::CUdeviceptr, bytes: usize, who: *const sys::CUmemAccessDesc, count: usize);
    cuMemExportToShareableHandle(
        shared: *mut c_void, handle: sys::CUmemGenericAllocationHandle,
        kind: c_uint = sys::CUmemAllocationHandleType, flags: c_ulonglong
    );
    cuMemImportFromShareableHandle(
        handle: *mut sys::CUmemGenericAllocationHandle, shared: *mut c_void,
        kind: c_uint = sys::CUmemAllocationHandleType
    );
    cuMemGetHandleForAddressRange(
        handle: *mut c_void, address: sys::CUdeviceptr, bytes: usize, kind: c_uint = sys::CUmemRangeHandleType,
        flags: c_ulonglong
    );
    cuMemPoolCreate(pool: *mut sys::CUmemoryPool, what: *const sys::CUmemPoolProps);
    cuMemPoolDestroy(pool: sys::CUmemoryPool);
    cuMemPoolSetAccess(pool: sys::CUmemoryPool, who: *const sys::CUmemAccessDesc, count: usize);
    cuMemAllocFromPoolAsync(
        address: *mut sys::CUdeviceptr, bytes: usize, pool: sys::CUmemoryPool, stream: sys::CUstream
    );
    cuMemFreeAsync(address: sys::CUdeviceptr, stream: sys::CUstream);
    cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemFreeHost(address: *mut c_void);
    cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint);
    cuMemHostUnregister(address: *mut c_void);
    cuMemHostGetDevicePointer_v2(address: *mut sys::CUdeviceptr, host: *mut c_void, flags: c_uint);
    cuMemAllocManaged(address: *mut sys::CUdeviceptr, bytes: usize, flags: c_uint);
    cuMemFree_v2(address: sys::CUdeviceptr);
}

/// The symbol `name`, of type `T`, which the table compared with cudarc's.
fn symbol<T: Copy>(library: &'static Library, name: &'static str) -> Result<T, CudaError> {
    // SAFETY: libcuda exports these names as functions, of the types of `cuda.h`, which are cudarc's.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| CudaError::NoFunction(name))
}

/// Loads the driver and finds every function.
pub(crate) fn load() -> Result<Functions, CudaError> {
    // SAFETY: the initialisers of NVIDIA's library are trusted as this program is.
    let present = unsafe { sys::is_culib_present() };
    if !present {
        return Err(CudaError::NoLibrary);
    }
    // SAFETY: as above; it was there a moment ago, so that this does not panic.
    Functions::load(unsafe { sys::culib() })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_function_is_named_once() {
        let names: BTreeSet<_> = FUNCTIONS.iter().collect();
        assert_eq!(names.len(), FUNCTIONS.len());
        assert!(FUNCTIONS.iter().all(|name| name.starts_with("cu")));
    }
}
