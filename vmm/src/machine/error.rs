//! Failures to build a machine from a plan and its resources.

use std::io;
use std::path::PathBuf;

use super::bus::Overlap;
use super::tree::TreeError;
use crate::arch::boot::BootError;
use crate::error::{Blame, Report};
use crate::firmware::FirmwareError;
use crate::kvm::KvmError;
use crate::passthrough::NEEDS_CACHING;
use crate::resources::ThreadError;

/// Why a machine could not be built.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum BuildError {
    #[error("cannot build the virtual machine")]
    Kvm(#[from] KvmError),
    /// KVM would refuse the slice.
    #[error(
        "KVM of this host does not map the memory of \"{backing}\" as cached: it lacks capability {capability}"
    )]
    NotCacheable {
        /// Id of the backing.
        backing: String,
        /// Number of the capability.
        capability: u32,
    },
    #[error("cannot boot {}", file.display())]
    Boot {
        /// The file that failed to load: kernel or initramfs.
        file: PathBuf,
        #[source]
        source: BootError,
    },
    #[error("cannot write the guest's firmware tables")]
    Firmware(#[from] FirmwareError),
    #[error("cannot make an event descriptor")]
    Descriptor(#[from] io::Error),
    /// The thread that plugs functions in and out.
    #[error("cannot take care of host functions")]
    Thread(#[from] ThreadError),
    #[error("cannot build the PCI tree")]
    Tree(#[from] TreeError),
    /// Two devices want one address.
    #[error("the plan contradicts itself")]
    Overlap(#[from] Overlap),
    /// The plan lacks something that every machine has.
    #[error("the plan has no {0}")]
    Missing(&'static str),
}

impl Report for BuildError {
    fn blame(&self) -> Blame {
        match self {
            Self::Kvm(error) => error.blame(),
            Self::Boot { source, .. } => source.blame(),
            Self::Firmware(error) => error.blame(),
            Self::NotCacheable { .. } => Blame::Host,
            Self::Descriptor(_) | Self::Thread(_) | Self::Tree(TreeError::Device { .. }) => Blame::Host,
            Self::Tree(TreeError::Assigned { source, .. }) => source.blame(),
            Self::Tree(_) | Self::Overlap(_) | Self::Missing(_) => Blame::Internal,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Kvm(error) => error.help(),
            Self::NotCacheable { .. } => Some(NEEDS_CACHING.to_owned()),
            Self::Firmware(error) => error.help(),
            Self::Boot { source, .. } => source.help(),
            Self::Descriptor(_) | Self::Tree(TreeError::Device { .. }) => {
                Some("raise the limit of open files: ulimit -n 65536".to_owned())
            }
            Self::Thread(_) => Some(ThreadError::HELP.to_owned()),
            Self::Tree(TreeError::Assigned { source, .. }) => source.help(),
            Self::Tree(_) | Self::Overlap(_) | Self::Missing(_) => None,
        }
    }
}
