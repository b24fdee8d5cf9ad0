//! The parts of cloud-hypervisor's `VmConfig` that answers have of every machine.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Parts of the machine's `VmConfig`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(super) struct ShownConfig {
    pub(super) cpus: ShownCpus,
    pub(super) memory: ShownMemory,
    pub(super) payload: ShownPayload,
}

/// Processors of the guest, which keeps as many as it starts with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(super) struct ShownCpus {
    pub(super) boot_vcpus: u32,
    pub(super) max_vcpus: u32,
}

/// Memory of the guest, with its slices.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(super) struct ShownMemory {
    /// Size in bytes, slices included.
    pub(super) size: u64,
}

/// Files that are booted, and the kernel's command line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(super) struct ShownPayload {
    pub(super) kernel: String,
    pub(super) cmdline: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) initramfs: Option<String>,
}

impl ShownConfig {
    pub(super) fn new(vcpus: u32, memory: u64, payload: ShownPayload) -> Self {
        Self {
            cpus: ShownCpus { boot_vcpus: vcpus, max_vcpus: vcpus },
            memory: ShownMemory { size: memory },
            payload,
        }
    }
}
