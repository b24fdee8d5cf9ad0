//! Errors of NVSHMEM.

use std::path::PathBuf;

/// Reason why a call was not made, or its failure.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum ShmemError {
    /// The library lacks a function.
    #[error("{} has no {symbol}: NVSHMEM 3.3 or newer is needed, the wheel nvidia-nvshmem-cu13 has it", path.display())]
    Symbol {
        /// Name of the library.
        path: PathBuf,
        /// Name of the function.
        symbol: &'static str,
        source: libloading::Error,
    },
    /// CUDA's driver reported an error.
    #[error(transparent)]
    Cuda(#[from] crate::cuda::CudaError),
    #[error("{call} failed with {status} ({})", meaning(*status))]
    Status {
        /// Name of the call.
        call: &'static str,
        /// Value of `nvshmemx_status`, never 0.
        status: i32,
    },
    /// A call returned no address.
    #[error("{call} of {bytes:#x} bytes gave no address")]
    Null {
        /// Name of the call.
        call: &'static str,
        /// Size of the request in bytes.
        bytes: usize,
    },
    /// The library started another job than the requested one.
    #[error("started as PE {pe} of {pes}, asked for PE {asked_pe} of {asked_pes}")]
    Started {
        /// This PE's number, from the library.
        pe: i32,
        /// Number of PEs, from the library.
        pes: i32,
        asked_pe: i32,
        asked_pes: i32,
    },
    /// A range lies outside its memory.
    #[error("{bytes:#x} bytes at {offset:#x} lie outside symmetric memory of {within:#x}")]
    Range {
        /// Offset of the range in bytes.
        offset: usize,
        /// Its length in bytes.
        bytes: usize,
        /// Length of the memory in bytes.
        within: usize,
    },
    /// Two ranges of a transfer have different lengths, or a word is not aligned.
    #[error("{what}: {bytes:#x} bytes do not go with {with:#x}")]
    Length {
        what: &'static str,
        /// One length in bytes.
        bytes: usize,
        with: usize,
    },
    /// There is no such PE.
    #[error("there is no PE {pe} of {pes}")]
    NoPe { pe: i32, pes: i32 },
}

/// `nvshmemx_status` in words (`nvshmemx_error.h`).
fn meaning(status: i32) -> &'static str {
    match status {
        1 => "invalid value",
        2 => "out of memory",
        3 => "not supported",
        4 => "PEs called with different values",
        5 => "no GPU selected",
        6 => "collective launch failed",
        7 => "internal error; set NVSHMEM_DEBUG=INFO for details",
        _ => "not a known status",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_shown_in_words() {
        let error = ShmemError::Status { call: "nvshmemx_hostlib_init_attr", status: 5 };
        assert_eq!(error.to_string(), "nvshmemx_hostlib_init_attr failed with 5 (no GPU selected)");
        assert!(ShmemError::Status { call: "x", status: -9 }.to_string().ends_with("(not a known status)"));
    }
}
