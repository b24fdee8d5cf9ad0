//! Why a host or its recorded facts could not be read.

use std::io;
use std::path::PathBuf;

use egm_address::PciAddress;
use egm_device::ledger::LedgerError;
use egm_device::record::RecordError;
use egm_device::region::HostFileError;
use egm_vfio::host::HostError;

use crate::error::{Blame, Remedy, Report};

/// Bridges of a PCI segment at most: bus 0 needs none.
pub(super) const MAX_BRIDGES: usize = 255;

/// Why there are no facts.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum FactsError {
    /// A file that cannot be read.
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// A record of a host.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A file of the kernel with undocumented content.
    #[error("{} holds \"{text}\", which is not {expected}", path.display())]
    Content { path: PathBuf, text: String, expected: &'static str },
    #[error("cannot read the host's PCI functions")]
    Function(#[from] HostError),
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
    /// An impossible depth in the PCI tree: each bridge has a bus number of its own, of 8 bits.
    #[error("{}: {function} is behind {bridges} bridges, and a segment has {MAX_BRIDGES} at most", path.display())]
    Depth { path: PathBuf, function: PciAddress, bridges: usize },
}

impl Report for FactsError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Depth { .. } => {
                Blame::Configuration.help("record them on their host: egm-vmm facts > facts.json")
            }
            Self::Record(error) => error.remedy(),
            Self::HostFile(error) => error.remedy(),
            Self::Ledger(error) => Remedy { blame: Blame::Host, ..error.remedy() },
            _ => Blame::Host.into(),
        }
    }

    fn excerpt(&self) -> Option<String> {
        match self {
            Self::Record(error) => error.excerpt(),
            Self::HostFile(error) => error.excerpt(),
            _ => None,
        }
    }
}
