//! Definitions of NVSHMEM's headers `nvshmem_uniqueid.h`, `nvshmem_types.h`, `nvshmem_common_transport.h` and
//! `nvshmem_constants.h` of 3.4.5.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::str::FromStr;

/// Bytes of a unique id, its version word included (`nvshmemx_uniqueid_v1`).
pub const UNIQUE_ID_BYTES: usize = 128;
/// `NVSHMEMX_INIT_WITH_UNIQUEID`: start by an id and not by MPI or OpenSHMEM.
pub const INIT_WITH_UNIQUE_ID: u32 = 1 << 3;
/// `NVSHMEM_TEAM_WORLD`: the team of all PEs.
pub const TEAM_WORLD: i32 = 0;

/// `(1 << 16) + sizeof(T)`, the version word that each structure of the ABI's first version begins with.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "structures of at most 144 bytes"
)]
const fn version_of<T>() -> c_int {
    (1 << 16) + size_of::<T>() as c_int
}

/// The id of a job: PE 0 requests it, all PEs start with it (`nvshmemx_uniqueid_v1`).
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C, align(4))]
pub struct UniqueId([u8; UNIQUE_ID_BYTES]);

impl UniqueId {
    /// An id for the library to write, with the version that it expects.
    pub fn blank() -> Self {
        let mut bytes = [0; UNIQUE_ID_BYTES];
        let version = version_of::<Self>().to_ne_bytes();
        for (to, from) in bytes.iter_mut().zip(version) {
            *to = from;
        }
        Self(bytes)
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UniqueId({self})")
    }
}

/// As 256 hexadecimal digits, for another process's command line or standard input.
impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A text is not a unique id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a unique id has 256 hexadecimal digits")]
pub struct NotAnId;

impl FromStr for UniqueId {
    type Err = NotAnId;

    fn from_str(text: &str) -> Result<Self, NotAnId> {
        let mut bytes = [0; UNIQUE_ID_BYTES];
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        if pairs.len() != bytes.len() || !rest.is_empty() {
            return Err(NotAnId);
        }
        for (byte, pair) in bytes.iter_mut().zip(pairs) {
            let digit = |c: u8| char::from(c).to_digit(16).ok_or(NotAnId);
            *byte = u8::try_from(digit(pair[0])? << 4 | digit(pair[1])?).map_err(|_| NotAnId)?;
        }
        Ok(Self(bytes))
    }
}

/// `nvshmemx_uniqueid_args_v1`: the job's id, this PE's number and the number of PEs.
#[derive(Debug)]
#[repr(C)]
pub struct UniqueIdArgs {
    version: c_int,
    id: *const UniqueId,
    rank: c_int,
    ranks: c_int,
}

/// `nvshmemx_init_args_v1`: the arguments of a start by an id, and padding up to 128 bytes.
#[derive(Debug)]
#[repr(C)]
pub struct InitArgs {
    version: c_int,
    unique_id: UniqueIdArgs,
    content: [u8; 96],
}

/// `nvshmemx_init_attr_v1`: start attributes of a PE.
#[derive(Debug)]
#[repr(C)]
pub struct InitAttributes {
    version: c_int,
    mpi_comm: *mut c_void,
    args: InitArgs,
}

const _: () = assert!(size_of::<UniqueId>() == 128 && align_of::<UniqueId>() == align_of::<c_int>());
const _: () = assert!(size_of::<UniqueIdArgs>() == 24);
const _: () = assert!(size_of::<InitArgs>() == 128);
const _: () = assert!(size_of::<InitAttributes>() == 144);

impl Default for InitAttributes {
    /// The values of `NVSHMEMX_INIT_ATTR_INITIALIZER`: versions, and no id yet.
    fn default() -> Self {
        let unique_id =
            UniqueIdArgs { version: version_of::<UniqueIdArgs>(), id: std::ptr::null(), rank: -1, ranks: -1 };
        Self {
            version: version_of::<Self>(),
            mpi_comm: std::ptr::null_mut(),
            args: InitArgs { version: version_of::<InitArgs>(), unique_id, content: [0; 96] },
        }
    }
}

/// Operation of a signal on its word (`nvshmemx_signal_op_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum SignalOp {
    /// Stores the value (`NVSHMEM_SIGNAL_SET`).
    Set = 9,
    /// Adds the value atomically.
    Add = 10,
}

/// Comparison of a waiting PE (`nvshmemx_cmp_type_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Compare {
    /// The word equals the value (`NVSHMEM_CMP_EQ`).
    Equal = 0,
    /// Greater than or equal.
    AtLeast = 5,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn versions_are_those_of_the_headers_initialisers() {
        // (1 << 16) + sizeof, as NVSHMEMX_INIT_ATTR_INITIALIZER has them.
        let attributes = InitAttributes::default();
        assert_eq!(attributes.version, 0x1_0090);
        assert_eq!(attributes.args.version, 0x1_0080);
        assert_eq!(attributes.args.unique_id.version, 0x1_0018);
        assert_eq!(UniqueId::blank().0[..4], 0x1_0080_i32.to_ne_bytes());
    }

    #[test]
    fn a_text_that_is_no_id_is_refused() {
        for text in ["", "00", &"0".repeat(255), &"0".repeat(257), &"g".repeat(256), &"é".repeat(128)] {
            assert_eq!(text.parse::<UniqueId>(), Err(NotAnId), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn an_id_is_read_back_as_it_was_written(bytes: [u8; 32]) {
            let mut id = UniqueId::blank();
            id.0[96..].copy_from_slice(&bytes);
            prop_assert_eq!(id.to_string().parse::<UniqueId>(), Ok(id));
        }
    }
}
