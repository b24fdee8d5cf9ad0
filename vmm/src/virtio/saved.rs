//! State of virtio functions in a snapshot. Types only; the owner of each value checks it.

use serde::{Deserialize, Serialize};

use crate::pci::{ConfigState, MsixTable};
use crate::snapshot::hex;

/// State of a virtio function: its transport and its device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FunctionState {
    pub(super) config: ConfigState,
    pub(super) msix: MsixTable,
    pub(super) registers: RegisterState,
    /// Interrupt status, which a read clears.
    pub(super) interrupt_status: u8,
    pub(super) generation: u8,
    /// The first bytes of the device configuration space, which a driver has read: the size of a disk.
    #[serde(with = "hex")]
    pub(super) device_config: Vec<u8>,
    /// Of a device that its driver has started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) device: Option<DeviceState>,
}

/// Registers of the common configuration (virtio 1.3 §4.1.4.3).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RegisterState {
    pub(super) device_feature_select: u32,
    pub(super) driver_feature_select: u32,
    /// Feature bits that the driver accepted.
    pub(super) driver_feature: u64,
    pub(super) config_vector: u16,
    pub(super) status: u8,
    pub(super) queue_select: u16,
    pub(super) queues: Vec<QueueRegisters>,
}

/// Registers of one queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct QueueRegisters {
    pub(super) size: u16,
    pub(super) vector: u16,
    pub(super) enable: bool,
    pub(super) descriptor: u64,
    pub(super) driver: u64,
    pub(super) device: u64,
}

/// State of a started device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceState {
    /// Position in each queue; `None` for one that the device does not use.
    pub(super) queues: Vec<Option<QueuePosition>>,
    /// Queue pairs that the driver of a network device uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) queue_pairs: Option<u16>,
}

impl DeviceState {
    /// State of a device that has no more than the positions in its queues.
    pub(super) const fn of_queues(queues: Vec<Option<QueuePosition>>) -> Self {
        Self { queues, queue_pairs: None }
    }
}

/// Position of a device in a queue: indexes of the rings, which count all chains modulo 65536.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct QueuePosition {
    /// The next chain to take.
    pub(super) available: u16,
    /// The next place in the used ring.
    pub(super) used: u16,
}
