//! A slice between its record and its lease.

use std::fs::File;

use egm_address::{InRegion, Span, SpanSet};

use super::record::{Entry, InRecordSpace};
use super::{Ledger, RecordSpace};
use crate::audit::Actor;
use crate::owner::Owner;
use crate::region::{Region, Slice};

/// A slice that is locked and recorded, not opened yet.
#[derive(Debug)]
pub(crate) struct LockedSlice {
    pub(crate) ledger: Ledger,
    /// Includes all pages that are retired so far.
    pub(crate) region: Region,
    pub(crate) space: RecordSpace,
    pub(crate) slice: Slice,
    pub(crate) place: Span<InRecordSpace>,
    pub(crate) owner: Owner,
    /// For the audit log: the owner's process may have ended when the slice comes back.
    pub(crate) by: Actor,
    pub(crate) claim: File,
    /// Inode of the claim's file.
    pub(crate) lock: u64,
    /// Parts of the slice in grants that their owners left behind.
    pub(crate) before: Vec<Entry>,
    /// Bytes to scrub before the slice is used.
    pub(crate) dirty: SpanSet<InRegion>,
}
