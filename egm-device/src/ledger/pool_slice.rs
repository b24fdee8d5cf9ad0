//! A slice of a pool, as the record keeps it for a later broker.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

use crate::free::MemoryFile;
use crate::policy::Charge;

/// Memory of a pool, and the account that it is on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolSlice {
    /// The memory file, for a broker that has no descriptor of it.
    pub file: MemoryFile,
    /// The account, together with the entry's owner.
    pub charge: Charge,
}
