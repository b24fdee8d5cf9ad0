//! Why a host function cannot become a guest's.

use std::io;

use egm_vfio::backend::BackendError;
use egm_vfio::dma::DmaError;
use egm_vfio::pci::shadow::ConfigError;

use super::coherent::MemoryFault;
use crate::error::{Blame, Remedy, Report};

/// Why a host function cannot be assigned to a guest.
#[derive(Debug, thiserror::Error)]
pub enum PassthroughError {
    /// Its configuration space is unusable.
    #[error("{function} cannot be shown to a guest")]
    Config {
        /// Name of the function.
        function: String,
        #[source]
        source: ConfigError,
    },
    /// It refused an operation.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// It is larger than the plan knew.
    #[error("BAR {bar} of {function} has {real:#x} bytes, more than the {planned:#x} of the plan")]
    Grown {
        /// Name of the function.
        function: String,
        bar: u8,
        /// Bytes that the device has.
        real: u64,
        /// Bytes according to sysfs or the recorded facts.
        planned: u64,
    },
    /// Devices cannot reach a BAR: the machine does without.
    #[error("some devices do not reach BAR {bar} of {function}: what they exchange goes through memory")]
    Unreachable {
        /// Name of the function.
        function: String,
        bar: u8,
        #[source]
        source: DmaError,
    },
    /// Devices cannot reach a BAR that is memory, and they must.
    #[error("devices do not reach the memory in BAR {bar} of {function}")]
    MemoryUnreachable {
        /// Name of the function.
        function: String,
        bar: u8,
        #[source]
        source: DmaError,
    },
    /// Its memory cannot be a guest's.
    #[error(transparent)]
    Memory(#[from] MemoryFault),
    #[error("cannot make an event descriptor")]
    Descriptor(#[from] io::Error),
}

impl Report for PassthroughError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Grown { .. } => {
                Blame::Host.help("start again: its BARs were resized, or the facts are old (egm-vmm facts)")
            }
            Self::Descriptor(_) => Blame::Host.help("raise the limit of open files: ulimit -n 65536"),
            Self::Backend(_) => {
                Blame::Host.help("look for its errors: dmesg, lspci -vv, or its server's log")
            }
            Self::Unreachable { source, .. } | Self::MemoryUnreachable { source, .. } => {
                Remedy { blame: Blame::Host, help: source.remedy() }
            }
            Self::Memory(fault) => Blame::Host.help(fault.remedy()),
            Self::Config { .. } => Blame::Host.into(),
        }
    }
}
