//! Failures to build a machine from a plan and its resources.

use std::io;
use std::path::PathBuf;

use super::bus::Overlap;
use super::tree::TreeError;
use crate::arch::boot::BootError;
use crate::error::{Blame, Remedy, Report};
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
    /// Two devices have one address.
    #[error("the plan contradicts itself")]
    Overlap(#[from] Overlap),
    /// The plan lacks something that every machine has.
    #[error("the plan has no {0}")]
    Missing(&'static str),
}

impl Report for BuildError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Kvm(error) => error.remedy(),
            Self::NotCacheable { .. } => Blame::Host.help(NEEDS_CACHING),
            Self::Firmware(error) => error.remedy(),
            Self::Boot { source, .. } => source.remedy(),
            Self::Descriptor(_) | Self::Tree(TreeError::Device { .. }) => {
                Blame::Host.help("raise the limit of open files: ulimit -n 65536")
            }
            Self::Thread(_) => Blame::Host.help(ThreadError::HELP),
            Self::Tree(TreeError::Assigned { source, .. }) => source.remedy(),
            Self::Tree(_) | Self::Overlap(_) | Self::Missing(_) => Blame::Internal.into(),
        }
    }
}
