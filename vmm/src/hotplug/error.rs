//! Errors of hot-plug.

use egm_address::PciAddress;
use egm_vfio::backend::BackendError;
use egm_vfio::host::HostError;
use egm_vfio::kernel::OpenError;

use crate::error::{Blame, Remedy, Report, opening};
use crate::facts::FactsError;
use crate::passthrough::PassthroughError;
use crate::plan::PlanError;

/// Why a function is not plugged in or out; the machine is as before.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HotplugError {
    #[error("no slot is free for \"{id}\": all {slots} hot-plug ports of the machine are occupied")]
    NoSlot { id: String, slots: usize },
    #[error("the machine has no hot-plug port")]
    NoPorts,
    #[error("cannot plug in {function}: the machine has it already, as \"{id}\"")]
    Present { function: PciAddress, id: String },
    #[error("the machine has a device \"{id}\" already")]
    Taken { id: String },
    #[error("the machine has no function \"{id}\" in a slot")]
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
    /// It cannot be assigned to a guest.
    #[error(transparent)]
    Assigned(#[from] PassthroughError),
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
            Self::Exclusive { .. } | Self::Coherent { .. } => {
                Blame::Configuration.help("name it in \"devices\" of the configuration")
            }
            Self::Regions(error) => error.remedy(),
            Self::Plan(error) => error.remedy(),
            Self::Open(error) => opening(error),
            Self::Reset(_) => Blame::Host.help("look for its errors: dmesg, lspci -vv"),
            Self::Assigned(error) => error.remedy(),
        }
    }
}
