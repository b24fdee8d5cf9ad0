//! Errors by name, with remedies.

use std::io;

use cudarc::driver::sys::CUresult;
use egm_memory::MemoryError;

/// Reason why a request to CUDA's driver failed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum CudaError {
    /// The loader finds no library.
    #[error(
        "no libcuda.so.1 on this machine: install NVIDIA's driver, or name its folder in LD_LIBRARY_PATH"
    )]
    NoLibrary,
    /// The library is too old for this program.
    #[error("libcuda lacks {0}: this driver is too old, install one of CUDA 12.6 (560) or newer")]
    NoFunction(&'static str),
    /// A function returned an error.
    #[error("{call}: {} ({code}){}", code_name(*code), remedy(*code))]
    Call {
        /// Name of the function.
        call: &'static str,
        /// Its result, a `CUresult`.
        code: u32,
    },
    /// The driver refused our kernels.
    #[error("the kernels of egm-vendor do not load: {source}; log of the driver: {log}")]
    Kernels {
        /// Error of the call.
        source: Box<CudaError>,
        log: String,
    },
    /// A part that is not inside its memory, or not made of whole words.
    #[error("{bytes:#x} bytes at {offset:#x} are no part of {size:#x} bytes in words of {word} bytes")]
    Part {
        /// Offset of the first byte.
        offset: u64,
        bytes: u64,
        /// Length of the memory in bytes.
        size: u64,
        /// Required alignment in bytes.
        word: u64,
    },
    /// Two parts that should be equally long, or an argument that would reach beyond one.
    #[error("{what} is {is:#x}, and {most:#x} fit")]
    TooMuch {
        /// Name of the argument.
        what: &'static str,
        is: u64,
        most: u64,
    },
    /// Memory that is not mapped for this GPU: dropping the memory would not wait for the GPU.
    #[error("{what} is not mapped for GPU {gpu}: name that one's context when the memory is made")]
    NotMapped {
        /// Kind of the memory.
        what: crate::cuda::Kind,
        gpu: i32,
    },
    /// Memory that processors cannot reach.
    #[error("{0} has no address for processors")]
    NoHostAddress(crate::cuda::Kind),
    /// Linux refuses to map memory.
    #[error("cannot map {bytes:#x} bytes: {source}")]
    Map {
        bytes: u64,
        #[source]
        source: io::Error,
    },
    /// Linux refuses to duplicate a descriptor.
    #[error("cannot copy a descriptor: {source}")]
    Descriptor {
        #[source]
        source: io::Error,
    },
    /// The EGM device's memory cannot be mapped.
    #[error(transparent)]
    Function(#[from] MemoryError),
    /// The driver returned a text that this program cannot parse.
    #[error("{call} returned {text:?}, which is not {form}")]
    Text {
        /// Name of the function.
        call: &'static str,
        text: String,
        form: &'static str,
    },
}

impl CudaError {
    /// Converts the result of `call`.
    pub(crate) fn check(call: &'static str, code: u32) -> Result<(), Self> {
        if code == 0 { Ok(()) } else { Err(Self::Call { call, code }) }
    }

    /// The `CUresult`, when it is one.
    #[must_use]
    pub fn code(&self) -> Option<u32> {
        match self {
            Self::Call { code, .. } => Some(*code),
            Self::Kernels { source, .. } => source.code(),
            _ => None,
        }
    }

    /// Whether the driver reports that the platform does not support the call or that this user is not permitted. A
    /// claim about it cannot be decided then.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        [CUresult::CUDA_ERROR_NOT_SUPPORTED, CUresult::CUDA_ERROR_NOT_PERMITTED]
            .iter()
            .any(|code| self.code() == Some(*code as u32))
    }
}

/// A table of codes: number to name, and to remedy.
macro_rules! codes {
    ($($name:ident $(=> $remedy:literal)?;)*) => {
        /// The name of a `CUresult` in `cuda.h`.
        #[must_use]
        pub fn code_name(code: u32) -> &'static str {
            $(if code == CUresult::$name as u32 { return stringify!($name); })*
            "a code that is not known here"
        }

        /// Its remedy, with a colon in front; empty without one.
        fn remedy(code: u32) -> &'static str {
            $($(if code == CUresult::$name as u32 { return concat!(": ", $remedy); })?)*
            ""
        }
    };
}

codes! {
    CUDA_SUCCESS;
    CUDA_ERROR_INVALID_VALUE;
    CUDA_ERROR_OUT_OF_MEMORY => "ask for less with --size, or end other programs that hold memory";
    CUDA_ERROR_NOT_INITIALIZED;
    CUDA_ERROR_DEINITIALIZED;
    CUDA_ERROR_STUB_LIBRARY => "a stub of the toolkit was loaded: name the driver's folder first in LD_LIBRARY_PATH";
    CUDA_ERROR_DEVICE_UNAVAILABLE => "another process holds the GPU for itself (nvidia-smi -q -d COMPUTE)";
    CUDA_ERROR_NO_DEVICE => "the driver has no GPU: see nvidia-smi and the kernel's log, and CUDA_VISIBLE_DEVICES";
    CUDA_ERROR_INVALID_DEVICE;
    CUDA_ERROR_DEVICE_NOT_LICENSED => "a vGPU without its licence";
    CUDA_ERROR_INVALID_IMAGE;
    CUDA_ERROR_INVALID_CONTEXT;
    CUDA_ERROR_MAP_FAILED;
    CUDA_ERROR_NO_BINARY_FOR_GPU => "the GPU is older than compute capability 7.5";
    CUDA_ERROR_ECC_UNCORRECTABLE => "the GPU's memory has an error: nvidia-smi -q -d ECC, then reset the GPU";
    CUDA_ERROR_NVLINK_UNCORRECTABLE => "NVLink has an error: see the kernel's log for Xid 74";
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    CUDA_ERROR_INVALID_PTX;
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION => "this driver is too old for the kernels, install a newer one";
    CUDA_ERROR_JIT_COMPILER_NOT_FOUND => "install libnvidia-ptxjitcompiler.so.1 of the same driver";
    CUDA_ERROR_INVALID_SOURCE;
    CUDA_ERROR_FILE_NOT_FOUND;
    CUDA_ERROR_SHARED_OBJECT_INIT_FAILED;
    CUDA_ERROR_OPERATING_SYSTEM => "see the kernel's log; the limit on locked memory (ulimit -l) may be too low";
    CUDA_ERROR_INVALID_HANDLE;
    CUDA_ERROR_ILLEGAL_STATE;
    CUDA_ERROR_NOT_FOUND;
    CUDA_ERROR_NOT_READY;
    CUDA_ERROR_ILLEGAL_ADDRESS => "a kernel reached memory that is not mapped for its GPU; this process is lost";
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    CUDA_ERROR_LAUNCH_TIMEOUT;
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    CUDA_ERROR_HARDWARE_STACK_ERROR;
    CUDA_ERROR_ILLEGAL_INSTRUCTION;
    CUDA_ERROR_MISALIGNED_ADDRESS;
    CUDA_ERROR_LAUNCH_FAILED => "see the kernel's log for an Xid; this process is lost";
    CUDA_ERROR_NOT_PERMITTED => "this user, or this machine, may not: for fabric handles an IMEX channel is missing";
    CUDA_ERROR_NOT_SUPPORTED => "driver and GPU have no such thing here";
    CUDA_ERROR_SYSTEM_NOT_READY => "the fabric manager or nvidia-persistenced is not up yet";
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => "libcuda and the kernel's module are of different drivers: reinstall, or reboot";
    CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE;
    CUDA_ERROR_TIMEOUT;
    CUDA_ERROR_EXTERNAL_DEVICE;
    CUDA_ERROR_UNKNOWN => "see the kernel's log for NVRM and Xid";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_call_the_code_and_what_to_do() {
        let text = CudaError::check("cuMemCreate", 2).unwrap_err().to_string();
        assert_eq!(
            text,
            "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2): ask for less with --size, or end other programs that hold memory"
        );
        let text = CudaError::check("cuMemMap", 1).unwrap_err().to_string();
        assert_eq!(text, "cuMemMap: CUDA_ERROR_INVALID_VALUE (1)");
    }

    #[test]
    fn a_code_of_a_newer_driver_is_a_number() {
        let text = CudaError::check("cuInit", 123_456).unwrap_err().to_string();
        assert_eq!(text, "cuInit: a code that is not known here (123456)");
        assert!(CudaError::check("cuInit", 0).is_ok());
    }

    #[test]
    fn what_is_not_there_or_not_allowed_is_unsupported_and_nothing_else_is() {
        let unsupported =
            (0..1000).filter(|code| CudaError::Call { call: "c", code: *code }.is_unsupported());
        assert_eq!(unsupported.collect::<Vec<_>>(), [800, 801]);
        assert!(!CudaError::NoLibrary.is_unsupported());
        let source = Box::new(CudaError::Call { call: "cuModuleLoadDataEx", code: 801 });
        assert!(CudaError::Kernels { source, log: String::new() }.is_unsupported());
    }
}
