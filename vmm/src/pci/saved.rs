//! State of PCI functions in a snapshot. Types only; the owner of each value checks it.

use serde::{Deserialize, Serialize};

use crate::snapshot::hex;

/// Bits of configuration space that the guest may write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ConfigState(
    /// All bytes up to the last one with such a bit; other bits are 0.
    #[serde(with = "hex")]
    pub(super) Vec<u8>,
);

/// The MSI-X table and its pending bits. The enable and mask bits of the function are in [`ConfigState`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MsixTable(pub(super) Vec<SavedVector>);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedVector {
    pub(super) address: u64,
    pub(super) data: u32,
    pub(super) masked: bool,
    pub(super) pending: bool,
}

/// State of a bridge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BridgeState {
    pub(super) config: ConfigState,
    /// Of a hot-plug port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) slot: Option<SlotState>,
}

/// State of the slot of a hot-plug port, as its port keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SlotState {
    pub(super) control: u16,
    /// Events of Slot Status.
    pub(super) events: u16,
    /// Secondary bus resets above that have begun and not ended.
    pub(super) held: i32,
    /// Number of the last reset.
    pub(super) times: u32,
    /// Whether its interrupt waits.
    pub(super) pending: bool,
}
