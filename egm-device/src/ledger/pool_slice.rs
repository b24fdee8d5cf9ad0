//! A slice of a pool, as the record keeps it for a later broker.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

use crate::free::MemoryFile;
use crate::policy::Charge;

/// Memory of a pool, and the account that it is on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolSlice {
    /// Its file.
    pub file: MemoryFile,
    /// The account, with the owner's user.
    pub charge: Charge,
}
