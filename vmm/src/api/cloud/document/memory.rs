//! Memory and NUMA nodes of the document.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{object_types, yes};

/// Default memory of cloud-hypervisor, in bytes.
const SIZE: u64 = 512 << 20;

object_types! {
    /// Memory.
    MemoryConfig {
        size: u64,
        #[serde(default)]
        mergeable: bool,
        #[serde(default)]
        hotplug_method: HotplugMethod,
        hotplug_size: Option<u64>,
        hotplugged_size: Option<u64>,
        #[serde(default)]
        shared: bool,
        #[serde(default)]
        hugepages: bool,
        hugepage_size: Option<u64>,
        #[serde(default)]
        prefault: bool,
        #[serde(default)]
        reserve: bool,
        zones: Option<Vec<MemoryZoneConfig>>,
        #[serde(default = "yes")]
        thp: bool,
    }

    /// A part of memory, which a node names.
    MemoryZoneConfig {
        id: String,
        size: u64,
        file: Option<PathBuf>,
        #[serde(default)]
        shared: bool,
        #[serde(default)]
        hugepages: bool,
        hugepage_size: Option<u64>,
        host_numa_node: Option<u32>,
        hotplug_size: Option<u64>,
        hotplugged_size: Option<u64>,
        #[serde(default)]
        prefault: bool,
        #[serde(default)]
        reserve: bool,
        #[serde(default)]
        mergeable: bool,
    }

    /// A NUMA node.
    NumaConfig {
        guest_numa_id: u32,
        cpus: Option<Vec<u32>>,
        distances: Option<Vec<NumaDistance>>,
        memory_zones: Option<Vec<String>>,
        pci_segments: Option<Vec<u16>>,
        device_id: Option<String>,
    }

    /// Distance to another node.
    NumaDistance {
        #[serde(default)]
        destination: u32,
        #[serde(default)]
        distance: u8,
    }
}

/// How memory is added while the guest runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(crate) enum HotplugMethod {
    #[default]
    Acpi,
    VirtioMem,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            size: SIZE,
            mergeable: false,
            hotplug_method: HotplugMethod::Acpi,
            hotplug_size: None,
            hotplugged_size: None,
            shared: false,
            hugepages: false,
            hugepage_size: None,
            prefault: false,
            reserve: false,
            zones: None,
            thp: true,
        }
    }
}
