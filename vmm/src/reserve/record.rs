//! Slices for the operator.

use egm_address::{InRegion, SpanSet};
use egm_device::owner::Owner;
use schemars::JsonSchema;
use serde::Serialize;

use crate::plan::BackingPlan;

/// A slice as the operator sees it.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(crate) struct SliceRecord {
    /// Id of the backing.
    pub(crate) id: String,
    /// Whether it is a PCI function.
    pub(crate) device: bool,
    /// Name of the region; `None` for memory of the machine itself.
    pub(crate) region: Option<String>,
    /// First byte, counted in the region.
    pub(crate) offset: u64,
    /// Size of the slice, in bytes.
    pub(crate) size: u64,
    /// Owner as the ledger has it; `None` for a slice of a broker, and for memory of the machine itself.
    pub(crate) owner: Option<Owner>,
    /// Bytes of it that were retired when the machine was planned: offset in the region, and size.
    pub(crate) retired: Vec<RetiredSpan>,
}

impl SliceRecord {
    /// The record of `backing`, a slice of `owner`, of which `retired` bytes of the region must not be used.
    pub(super) fn new(backing: &BackingPlan, owner: Option<Owner>, retired: &SpanSet<InRegion>) -> Self {
        let retired = retired.iter().map(|bad| RetiredSpan { offset: bad.start().get(), size: bad.size() });
        Self {
            id: backing.id.clone(),
            device: backing.device,
            region: backing.region.clone(),
            offset: backing.offset,
            size: backing.size,
            owner,
            retired: retired.collect(),
        }
    }
}

/// Bytes that must not be used.
#[derive(Debug, Clone, Copy, Serialize, JsonSchema)]
pub(crate) struct RetiredSpan {
    offset: u64,
    pub(crate) size: u64,
}
