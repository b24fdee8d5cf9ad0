//! The parts of cloud-hypervisor's `VmConfig` that answers show of every machine.

use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::Boot;

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
    /// Of a machine with `vcpus` processors and `memory` bytes.
    pub(super) fn new(vcpus: u32, memory: u64, boot: &Boot) -> Self {
        // Paths of a command line may be no UTF-8, which JSON must be.
        let text = |path: &Path| path.to_string_lossy().into_owned();
        Self {
            cpus: ShownCpus { boot_vcpus: vcpus, max_vcpus: vcpus },
            memory: ShownMemory { size: memory },
            payload: ShownPayload {
                kernel: text(&boot.kernel),
                cmdline: boot.cmdline.clone(),
                initramfs: boot.initramfs.as_deref().map(text),
            },
        }
    }
}
