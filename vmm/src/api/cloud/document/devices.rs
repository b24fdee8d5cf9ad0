//! Devices of the document, and the limits of their rates.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{device_types, object_types, yes};

/// Default source of entropy of cloud-hypervisor.
const ENTROPY: &str = "/dev/urandom";

object_types! {
    /// A limit that devices share.
    RateLimitGroupConfig {
        #[serde(default)]
        id: String,
        #[serde(default)]
        rate_limiter_config: RateLimiterConfig,
    }

    /// A limit of bytes and operations.
    #[derive(Default)]
    RateLimiterConfig {
        bandwidth: Option<TokenBucketConfig>,
        ops: Option<TokenBucketConfig>,
    }

    /// A bucket of tokens.
    TokenBucketConfig {
        size: u64,
        one_time_burst: Option<u64>,
        refill_time: u64,
    }

    /// Host CPUs of a queue.
    VirtQueueAffinity {
        queue_index: u16,
        host_cpus: Vec<u64>,
    }

    /// A device to remove: what vm.remove-device takes.
    RemovedDevice {
        id: String,
    }

    /// New sizes of a machine: what vm.resize takes.
    Resize {
        desired_vcpus: Option<u32>,
        desired_ram: Option<u64>,
        desired_balloon: Option<u64>,
    }

    /// A TPM that another process emulates.
    TpmConfig {
        socket: PathBuf,
    }
}

device_types! {
    /// A disk.
    DiskConfig {
        path: Option<PathBuf>,
        #[serde(default)]
        readonly: bool,
        #[serde(default)]
        direct: bool,
        #[serde(default = "disk_queues")]
        num_queues: u64,
        #[serde(default = "disk_queue_size")]
        queue_size: u16,
        #[serde(default)]
        vhost_user: bool,
        vhost_socket: Option<String>,
        rate_limit_group: Option<String>,
        rate_limiter_config: Option<RateLimiterConfig>,
        #[serde(default)]
        disable_io_uring: bool,
        #[serde(default)]
        disable_aio: bool,
        serial: Option<String>,
        queue_affinity: Option<Vec<VirtQueueAffinity>>,
        #[serde(default)]
        backing_files: bool,
        #[serde(default = "yes")]
        sparse: bool,
        #[serde(default)]
        image_type: ImageType,
        #[serde(default)]
        lock_granularity: LockGranularity,
    }

    /// A network device.
    NetConfig {
        tap: Option<String>,
        ip: Option<String>,
        mask: Option<String>,
        mac: Option<String>,
        host_mac: Option<String>,
        mtu: Option<u16>,
        #[serde(default = "net_queues")]
        num_queues: u64,
        #[serde(default = "net_queue_size")]
        queue_size: u16,
        #[serde(default)]
        vhost_user: bool,
        vhost_socket: Option<String>,
        #[serde(default)]
        vhost_mode: VhostMode,
        fds: Option<Vec<i32>>,
        rate_limiter_config: Option<RateLimiterConfig>,
        #[serde(default = "yes")]
        offload_tso: bool,
        #[serde(default = "yes")]
        offload_ufo: bool,
        #[serde(default = "yes")]
        offload_csum: bool,
    }

    /// The entropy device.
    RngConfig {
        src: PathBuf,
    }

    /// A clock by virtio.
    RtcConfig {}

    /// A balloon.
    BalloonConfig {
        size: u64,
        #[serde(default)]
        deflate_on_oom: bool,
        #[serde(default)]
        free_page_reporting: bool,
    }

    /// A file system that virtiofsd serves.
    FsConfig {
        tag: String,
        socket: PathBuf,
        #[serde(default = "fs_queues")]
        num_queues: u64,
        #[serde(default = "fs_queue_size")]
        queue_size: u16,
    }

    /// A virtio device that another process serves.
    GenericVhostUserConfig {
        socket: PathBuf,
        queue_sizes: Vec<u16>,
        device_type: u32,
    }

    /// Persistent memory by virtio.
    PmemConfig {
        file: PathBuf,
        size: Option<u64>,
        #[serde(default)]
        discard_writes: bool,
    }

    /// A PCI function of the host.
    DeviceConfig {
        path: Option<PathBuf>,
        fd: Option<i32>,
        x_nv_gpudirect_clique: Option<u8>,
        #[serde(default)]
        x_exclude_mmap_bars: Vec<u64>,
    }

    /// A device that a vfio-user server has.
    UserDeviceConfig {
        socket: PathBuf,
    }

    /// A virtio device of the host's hardware.
    VdpaConfig {
        path: PathBuf,
        #[serde(default = "vdpa_queues")]
        num_queues: u64,
    }

    /// A virtio socket device.
    VsockConfig {
        cid: u32,
        socket: PathBuf,
    }

    /// Memory that machines share.
    IvshmemConfig {
        path: PathBuf,
        size: u64,
    }
}

/// Format of a disk's file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(crate) enum ImageType {
    FlatVmdk,
    FixedVhd,
    Qcow2,
    Raw,
    Vhdx,
    #[default]
    Unknown,
}

/// How much of a disk's file is locked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(crate) enum LockGranularity {
    #[default]
    ByteRange,
    Full,
}

/// Which side of vhost-user connects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(crate) enum VhostMode {
    #[default]
    Client,
    Server,
}

impl Default for RngConfig {
    fn default() -> Self {
        Self { src: ENTROPY.into(), id: None, iommu: false, pci_segment: 0, pci_device_id: None }
    }
}

const fn disk_queues() -> u64 {
    1
}

const fn disk_queue_size() -> u16 {
    128
}

const fn net_queues() -> u64 {
    2
}

const fn net_queue_size() -> u16 {
    256
}

const fn fs_queues() -> u64 {
    1
}

const fn fs_queue_size() -> u16 {
    1024
}

const fn vdpa_queues() -> u64 {
    1
}
