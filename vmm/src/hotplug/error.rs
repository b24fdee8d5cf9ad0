//! Errors of hot-plug.

use std::io;

use egm_address::PciAddress;
use egm_vfio::backend::BackendError;
use egm_vfio::host::HostError;
use egm_vfio::kernel::OpenError;

use crate::error::{Blame, Remedy, Report, opening};
use crate::facts::FactsError;
use crate::passthrough::{NEEDS_CACHING, PassthroughError};
use crate::plan::PlanError;
use crate::reserve::{ReserveError, ServerError};
use crate::resources::{AssignedError, DeviceError, SliceError};

/// Why a device is not plugged in or out; the machine is as before.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HotplugError {
    #[error("no slot is free for \"{id}\": all {slots} hot-plug ports of the machine are occupied")]
    NoSlot { id: String, slots: usize },
    #[error("the machine has no hot-plug port")]
    NoPorts,
    /// A resource of the host that one device has for itself, or a second vsock device.
    #[error("cannot plug in {what}: the machine has it already, as \"{id}\"")]
    Present { what: String, id: String },
    #[error("the machine has a device \"{id}\" already")]
    Taken { id: String },
    #[error("the machine has no device \"{id}\" in a slot")]
    Unknown { id: String },
    #[error("\"{id}\" is leaving already")]
    Leaving { id: String },
    /// The machine was not prepared for functions of the host.
    #[error("the machine takes no functions of the host: it was started without an IOMMU")]
    Unprepared,
    /// A GPU that reaches a whole region of the host.
    #[error(
        "cannot plug in GPU {function}: it reaches all of region {region}, which a machine claims at its start only"
    )]
    Exclusive { function: PciAddress, region: String },
    /// A GPU with memory that the guest's kernel finds at its start only.
    #[error(
        "cannot plug in GPU {function}: its memory is coherent, and a machine gets such memory at its start only"
    )]
    Coherent { function: PciAddress },
    /// The host's regions cannot be read.
    #[error(transparent)]
    Regions(#[from] FactsError),
    #[error("the machine has ended")]
    Ended,
    /// Its files in sysfs could not be read.
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Open(#[from] OpenError),
    /// It could not be reset: the guest would see its last user's data.
    #[error(transparent)]
    Reset(#[from] BackendError),
    /// Some servers serve one client, which a plan would use up.
    #[error("cannot plan \"{id}\": its registers come from its server, which a dry run does not connect to")]
    Unplannable { id: String },
    /// Its server would get a file of slices that are not this machine's.
    #[error(
        "cannot plug in \"{id}\": its server needs all of the guest's memory, and slices of region \"{region}\" are shared at the \
         start only"
    )]
    SliceMemory { id: String, region: String },
    /// Its server could shrink the guest's memory.
    #[error(
        "cannot plug in \"{id}\": its server needs the guest's memory as a sealed file, and \"{backing}\" is none"
    )]
    Unsealed { id: String, backing: String },
    /// Its vfio-user server.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The guest's memory for its vfio-user server.
    #[error(transparent)]
    Share(#[from] AssignedError),
    /// What a virtio device needs of the host.
    #[error("cannot open device \"{id}\"")]
    Device {
        id: String,
        #[source]
        source: DeviceError,
    },
    /// A virtio device could not be made.
    #[error("cannot make device \"{id}\"")]
    Make {
        id: String,
        #[source]
        source: io::Error,
    },
    /// It cannot be assigned to a guest.
    #[error(transparent)]
    Assigned(#[from] PassthroughError),
    /// A slice near a node that the guest does not have.
    #[error("cannot plug in a slice: the guest has no node {node}")]
    NoNode { node: u32 },
    /// The host does not grant the slice.
    #[error(transparent)]
    Reserve(Box<ReserveError>),
    #[error(transparent)]
    Slice(#[from] SliceError),
    #[error(
        "cannot plug in \"{id}\": KVM of this host does not map its memory as cached: it lacks capability {capability}"
    )]
    NotCacheable { id: String, capability: u32 },
    /// A slice without memory.
    #[error("the slice was not granted")]
    Ungranted,
}

impl From<ReserveError> for HotplugError {
    fn from(error: ReserveError) -> Self {
        Self::Reserve(Box::new(error))
    }
}

impl Report for HotplugError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::NoSlot { .. } => Blame::Configuration
                .help("start the machine with more: \"pcie\": {\"spare\": {\"ports\": …}}"),
            Self::NoPorts => {
                Blame::Configuration.help("start the machine with one: \"pcie\": {\"spare\": {\"ports\": 1}}")
            }
            Self::Present { .. } => Blame::Configuration.help("unplug it first"),
            Self::Taken { .. } => Blame::Configuration.help("choose another id"),
            Self::Unknown { .. } => Blame::Configuration
                .help("name one that was plugged in, or that a hot-plug port had at the start"),
            Self::Leaving { .. } => Blame::Configuration.help("wait until it is gone"),
            Self::Ended => Blame::Configuration.into(),
            Self::Host(_) => Blame::Host.into(),
            Self::Unprepared => Blame::Host.help("switch the IOMMU on: intel_iommu=on, or in the firmware"),
            Self::Exclusive { .. } | Self::Coherent { .. } | Self::SliceMemory { .. } => {
                Blame::Configuration.help("name it in \"devices\" of the configuration")
            }
            Self::Regions(error) => error.remedy(),
            Self::Plan(error) => error.remedy(),
            Self::Open(error) => opening(error),
            Self::Reset(_) => Blame::Host.help("look for its errors: dmesg, lspci -vv"),
            Self::Unsealed { .. } => Blame::Configuration.help(
                "start the machine with \"memory\": {\"page_size\": \"2M\"} or \"4K\", or set shmem_enabled to advise before its start; after run --restore or ctl restore: restore again with --prefault",
            ),
            Self::Unplannable { .. } => Blame::Configuration.help("plug it in without a dry run"),
            Self::Server(error) => error.remedy(),
            Self::Share(error) => error.remedy(),
            Self::Device { source, .. } => source.remedy(),
            Self::Make { .. } => Blame::Host
                .help("raise the limits of the machine's process: prlimit --pid PID --nofile=65536 --nproc=65536"),
            Self::Assigned(error) => error.remedy(),
            Self::NoNode { .. } => Blame::Configuration.help("set \"node\" to a node of the guest"),
            Self::Reserve(error) => error.remedy(),
            Self::Slice(error) => error.remedy(),
            Self::NotCacheable { .. } => Blame::Host.help(NEEDS_CACHING),
            Self::Ungranted => Blame::Internal.into(),
        }
    }
}
