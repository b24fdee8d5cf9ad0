//! Why a function is not plugged in or out.

use egm_address::PciAddress;
use egm_vfio::backend::BackendError;
use egm_vfio::host::HostError;
use egm_vfio::kernel::OpenError;

use crate::error::{Blame, Report, opening};
use crate::facts::FactsError;
use crate::passthrough::PassthroughError;
use crate::plan::PlanError;

/// Why a function is not plugged in or out; the machine is as before.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum HotplugError {
    /// All slots are taken.
    #[error("no slot is free for \"{id}\": all {slots} hot-plug ports of the machine are occupied")]
    NoSlot {
        /// Id that it would have had.
        id: String,
        /// Hot-plug ports of the machine.
        slots: usize,
    },
    /// Another function has the id.
    #[error("the machine has a device \"{id}\" already")]
    Taken { id: String },
    /// No function has the id.
    #[error("the machine has no function \"{id}\" in a slot")]
    Unknown { id: String },
    /// It is leaving already.
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
    /// The host's regions cannot be read.
    #[error(transparent)]
    Regions(#[from] FactsError),
    /// The machine has ended.
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
    fn blame(&self) -> Blame {
        match self {
            Self::NoSlot { .. }
            | Self::Taken { .. }
            | Self::Unknown { .. }
            | Self::Leaving { .. }
            | Self::Ended => Blame::Configuration,
            Self::Unprepared | Self::Host(_) | Self::Reset(_) => Blame::Host,
            Self::Exclusive { .. } => Blame::Configuration,
            Self::Regions(error) => error.blame(),
            Self::Plan(error) => error.blame(),
            Self::Open(error) => opening(error),
            Self::Assigned(error) => error.blame(),
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::NoSlot { .. } => {
                Some("give the machine more: \"pcie\": {\"spare\": {\"ports\": …}}".to_owned())
            }
            Self::Taken { .. } => Some("choose another id".to_owned()),
            Self::Unknown { .. } => {
                Some("name one that was plugged in, or that a hot-plug port had at the start".to_owned())
            }
            Self::Leaving { .. } => Some("wait until it is gone".to_owned()),
            Self::Ended | Self::Host(_) => None,
            Self::Unprepared => Some("switch the IOMMU on: intel_iommu=on, or in the firmware".to_owned()),
            Self::Exclusive { .. } => Some("name it in \"devices\" of the configuration".to_owned()),
            Self::Regions(error) => error.help(),
            Self::Plan(error) => error.help(),
            Self::Open(error) => error.remedy(),
            Self::Reset(_) => Some("look for its errors: dmesg, lspci -vv".to_owned()),
            Self::Assigned(error) => error.help(),
        }
    }
}
