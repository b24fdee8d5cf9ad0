//! Why a host or its recorded facts could not be read.

use std::io;
use std::path::PathBuf;

use egm_address::PciAddress;
use egm_device::ledger::LedgerError;
use egm_device::region::HostFileError;
use egm_report::json::JsonError;
use egm_vfio::host::HostError;

use crate::error::{Blame, Remedy, Report};
use crate::facts::FACTS_VERSION;

/// Bridges of a PCI segment at most: bus 0 needs none.
pub(super) const MAX_BRIDGES: usize = 255;

/// Why there are no facts.
#[derive(Debug, thiserror::Error)]
pub enum FactsError {
    /// A file that cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A file of recorded facts that cannot be read.
    #[error("cannot read facts from {}", path.display())]
    Recorded {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A file of the kernel with undocumented content.
    #[error("{} holds \"{text}\", which is not {expected}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// Its text.
        text: String,
        /// The documented form.
        expected: &'static str,
    },
    /// A PCI function.
    #[error("cannot read the host's PCI functions")]
    Function(#[from] HostError),
    /// A host file.
    #[error("cannot read the host files")]
    HostFile(#[from] HostFileError),
    /// The ledger of the host's regions could not be read.
    #[error("cannot read the ledger of the host's regions")]
    Ledger(#[from] LedgerError),
    /// A host of another kind.
    #[error("{} is \"{arch}\", and guests run on x86_64 and aarch64 only", path.display())]
    Architecture {
        /// Where it was read.
        path: PathBuf,
        /// The host's instruction set.
        arch: String,
    },
    /// A file that does not hold facts.
    #[error("{}:{}:{}: not facts of a host", path.display(), source.line, source.column)]
    Json {
        /// The file.
        path: PathBuf,
        /// Fault in the text.
        source: Box<JsonError>,
    },
    /// A host that the other program recorded.
    #[error("{} was recorded by \"egm-device regions --json\", which is for --recorded", path.display())]
    OtherRecord {
        /// The file.
        path: PathBuf,
    },
    /// An impossible depth in the PCI tree: each bridge has a bus number of its own, of 8 bits.
    #[error("{}: {function} is behind {bridges} bridges, and a segment has {MAX_BRIDGES} at most", path.display())]
    Depth {
        /// The file.
        path: PathBuf,
        /// The function.
        function: PciAddress,
        /// Bridges above it.
        bridges: usize,
    },
    /// A facts file of another version of this program.
    #[error("{}: facts of version {version}, and this program reads version {FACTS_VERSION}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
}

impl Report for FactsError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Recorded { .. }
            | Self::Json { .. }
            | Self::OtherRecord { .. }
            | Self::Depth { .. }
            | Self::Version { .. } => {
                Blame::Configuration.help("record them on their host: egm-vmm facts > facts.json")
            }
            Self::HostFile(error) => error.remedy(),
            Self::Ledger(error) => Remedy { blame: Blame::Host, ..error.remedy() },
            _ => Blame::Host.into(),
        }
    }

    fn excerpt(&self) -> Option<String> {
        match self {
            Self::Json { source, .. } => Some(source.excerpt.clone()),
            Self::HostFile(error) => error.excerpt(),
            _ => None,
        }
    }
}
