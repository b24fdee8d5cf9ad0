//! The whole document, its processors, payload, consoles and platform.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::devices::{
    BalloonConfig, DeviceConfig, DiskConfig, FsConfig, GenericVhostUserConfig, IvshmemConfig, NetConfig,
    PmemConfig, RateLimitGroupConfig, RngConfig, RtcConfig, TpmConfig, UserDeviceConfig, VdpaConfig,
    VsockConfig,
};
use super::memory::{MemoryConfig, NumaConfig};
use super::{device_types, object_types, yes};

/// Default number of processors of cloud-hypervisor.
const VCPUS: u32 = 1;
/// Default I/O port of its debug console.
const DEBUG_PORT: u16 = 0xe9;

object_types! {
    /// A virtual machine.
    VmConfig {
        #[serde(default)]
        cpus: CpusConfig,
        #[serde(default)]
        memory: MemoryConfig,
        payload: Option<PayloadConfig>,
        rate_limit_groups: Option<Vec<RateLimitGroupConfig>>,
        disks: Option<Vec<DiskConfig>>,
        net: Option<Vec<NetConfig>>,
        #[serde(default)]
        rng: RngConfig,
        balloon: Option<BalloonConfig>,
        generic_vhost_user: Option<Vec<GenericVhostUserConfig>>,
        fs: Option<Vec<FsConfig>>,
        pmem: Option<Vec<PmemConfig>>,
        #[serde(default)]
        serial: SerialConfig,
        #[serde(default)]
        console: ConsoleConfig,
        #[serde(default)]
        debug_console: DebugConsoleConfig,
        devices: Option<Vec<DeviceConfig>>,
        user_devices: Option<Vec<UserDeviceConfig>>,
        vdpa: Option<Vec<VdpaConfig>>,
        vsock: Option<VsockConfig>,
        pvmemcontrol: Option<PvmemcontrolConfig>,
        #[serde(default)]
        pvpanic: bool,
        #[serde(default)]
        iommu: bool,
        numa: Option<Vec<NumaConfig>>,
        #[serde(default)]
        watchdog: bool,
        rtc: Option<RtcConfig>,
        #[serde(default)]
        gdb: bool,
        pci_segments: Option<Vec<PciSegmentConfig>>,
        platform: Option<PlatformConfig>,
        tpm: Option<TpmConfig>,
        #[serde(default)]
        landlock_enable: bool,
        landlock_rules: Option<Vec<LandlockConfig>>,
        ivshmem: Option<IvshmemConfig>,
    }

    /// Processors.
    CpusConfig {
        boot_vcpus: u32,
        max_vcpus: u32,
        topology: Option<CpuTopology>,
        #[serde(default)]
        kvm_hyperv: bool,
        #[serde(default = "phys_bits")]
        max_phys_bits: u8,
        affinity: Option<Vec<CpuAffinity>>,
        #[serde(default)]
        features: CpuFeatures,
        #[serde(default = "yes")]
        nested: bool,
        #[serde(default)]
        core_scheduling: CoreScheduling,
        #[serde(default)]
        profile: CpuProfile,
    }

    /// Host CPUs of a vCPU.
    CpuAffinity {
        vcpu: u32,
        host_cpus: Vec<u64>,
    }

    /// Processor features that are off by default.
    #[derive(Default)]
    CpuFeatures {
        #[serde(default)]
        amx: bool,
    }

    /// Packages, dies, cores and threads; their product is the number of vCPUs.
    CpuTopology {
        threads_per_core: u16,
        cores_per_die: u16,
        dies_per_package: u16,
        packages: u16,
    }

    /// What is booted.
    PayloadConfig {
        firmware: Option<PathBuf>,
        kernel: Option<PathBuf>,
        cmdline: Option<String>,
        initramfs: Option<PathBuf>,
        igvm: Option<PathBuf>,
        host_data: Option<String>,
        fw_cfg_config: Option<FwCfgConfig>,
        /// Sent by kata-containers, and no field of cloud-hypervisor's.
        mrconfigid: Option<String>,
    }

    /// QEMU's fw_cfg device.
    FwCfgConfig {
        #[serde(default = "yes")]
        e820: bool,
        #[serde(default = "yes")]
        kernel: bool,
        #[serde(default = "yes")]
        cmdline: bool,
        #[serde(default = "yes")]
        initramfs: bool,
        #[serde(default = "yes")]
        acpi_tables: bool,
        items: Option<FwCfgItemList>,
    }

    /// Files of fw_cfg.
    FwCfgItemList {
        #[serde(default)]
        item_list: Vec<FwCfgItem>,
    }

    /// A file of fw_cfg.
    FwCfgItem {
        #[serde(default)]
        name: String,
        file: Option<PathBuf>,
        string: Option<String>,
    }

    /// The serial port.
    SerialConfig {
        file: Option<PathBuf>,
        mode: ConsoleOutputMode,
        socket: Option<PathBuf>,
        /// Sent by kata-containers, and no field of cloud-hypervisor's.
        #[serde(default)]
        iommu: bool,
    }

    /// The debug console of x86.
    DebugConsoleConfig {
        file: Option<PathBuf>,
        mode: ConsoleOutputMode,
        iobase: Option<u16>,
    }

    /// Memory control by the guest.
    PvmemcontrolConfig {}

    /// Shares of the address space for BARs.
    PciSegmentConfig {
        #[serde(default)]
        pci_segment: u16,
        #[serde(default = "weight")]
        mmio32_aperture_weight: u32,
        #[serde(default = "weight")]
        mmio64_aperture_weight: u32,
    }

    /// Identity, IOMMU and confidentiality of the machine.
    PlatformConfig {
        #[serde(default = "segments")]
        num_pci_segments: u16,
        iommu_segments: Option<Vec<u16>>,
        #[serde(default = "address_bits")]
        iommu_address_width_bits: u8,
        #[serde(alias = "serial_number")]
        system_serial_number: Option<String>,
        #[serde(alias = "uuid")]
        system_uuid: Option<String>,
        oem_strings: Option<Vec<String>>,
        system_manufacturer: Option<String>,
        system_product_name: Option<String>,
        system_version: Option<String>,
        system_family: Option<String>,
        system_sku_number: Option<String>,
        chassis_asset_tag: Option<String>,
        #[serde(default)]
        tdx: bool,
        #[serde(default)]
        sev_snp: bool,
        #[serde(default)]
        iommufd: bool,
        iommufd_fd: Option<i32>,
        #[serde(default = "yes")]
        vfio_p2p_dma: bool,
    }

    /// A path that the sandbox leaves open.
    LandlockConfig {
        path: PathBuf,
        access: String,
    }
}

device_types! {
    /// The virtio console.
    ConsoleConfig {
        file: Option<PathBuf>,
        mode: ConsoleOutputMode,
        socket: Option<PathBuf>,
    }
}

/// Which vCPU threads may share a core of the host with other threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(crate) enum CoreScheduling {
    #[default]
    Vm,
    Vcpu,
    Off,
}

/// Model of the processors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(crate) enum CpuProfile {
    #[default]
    Host,
}

/// Where a console goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(crate) enum ConsoleOutputMode {
    #[default]
    Off,
    Pty,
    Tty,
    File,
    Socket,
    Null,
}

impl Default for CpusConfig {
    fn default() -> Self {
        Self {
            boot_vcpus: VCPUS,
            max_vcpus: VCPUS,
            topology: None,
            kvm_hyperv: false,
            max_phys_bits: phys_bits(),
            affinity: None,
            features: CpuFeatures::default(),
            nested: true,
            core_scheduling: CoreScheduling::Vm,
            profile: CpuProfile::Host,
        }
    }
}

impl Default for SerialConfig {
    fn default() -> Self {
        Self { file: None, mode: ConsoleOutputMode::Null, socket: None, iommu: false }
    }
}

impl Default for ConsoleConfig {
    fn default() -> Self {
        Self {
            file: None,
            mode: ConsoleOutputMode::Tty,
            socket: None,
            id: None,
            iommu: false,
            pci_segment: 0,
            pci_device_id: None,
        }
    }
}

impl Default for DebugConsoleConfig {
    fn default() -> Self {
        Self { file: None, mode: ConsoleOutputMode::Off, iobase: Some(DEBUG_PORT) }
    }
}

const fn phys_bits() -> u8 {
    46
}

const fn segments() -> u16 {
    1
}

const fn address_bits() -> u8 {
    64
}

const fn weight() -> u32 {
    1
}
