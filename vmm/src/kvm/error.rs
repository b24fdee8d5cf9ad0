//! What can go wrong between us and the kernel's hypervisor.

use egm_address::Gpa;
use kvm_ioctls::Cap;

use crate::error::{Blame, Report};

/// Why KVM cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// No such device.
    #[error("/dev/kvm does not exist: this host offers no hardware virtualisation to us")]
    Missing,
    /// Not permitted.
    #[error("/dev/kvm: permission denied: it belongs to group \"{group}\"")]
    Permission {
        /// Name or number of the owning group.
        group: String,
    },
    /// An interface that nobody has shipped since 2007, or not KVM at all.
    #[error("/dev/kvm speaks version {version} of its interface: 12 is the only stable one")]
    Version {
        /// What it said.
        version: i32,
    },
    /// The kernel's KVM lacks something.
    #[error("this host's KVM lacks {what} ({cap:?})")]
    Capability {
        /// Which.
        cap: Cap,
        /// For a person.
        what: &'static str,
    },
    /// A memory slot was refused.
    #[error("KVM refused {size:#x} bytes of guest memory at {gpa:#x}")]
    Memory {
        /// Guest physical address.
        gpa: Gpa,
        /// Bytes.
        size: u64,
        /// The kernel's reason.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// Any other call.
    #[error("{call} failed")]
    Call {
        /// Which.
        call: &'static str,
        /// The kernel's reason.
        #[source]
        source: kvm_ioctls::Error,
    },
}

impl KvmError {
    pub(crate) fn call(call: &'static str, source: kvm_ioctls::Error) -> Self {
        Self::Call { call, source }
    }
}

impl Report for KvmError {
    fn blame(&self) -> Blame {
        Blame::Host
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Missing => Some(
                "load kvm_amd or kvm_intel, switch virtualisation on in the firmware, or boot in the lab: scripts/demo"
                    .to_owned(),
            ),
            Self::Permission { group } => {
                Some(format!("add yourself to the group and log in again: sudo usermod -aG {group} $USER"))
            }
            Self::Version { .. } | Self::Capability { .. } => {
                Some("use a kernel from 2022 or later with its own KVM module".to_owned())
            }
            Self::Call { source, .. } if matches!(source.errno(), libc::EMFILE | libc::ENFILE) => {
                Some("raise the limit of open files: ulimit -n 65536".to_owned())
            }
            Self::Memory { .. } | Self::Call { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_open_files_are_told_with_the_remedy() {
        let error = |errno| KvmError::call("KVM_CREATE_VM", kvm_ioctls::Error::new(errno));
        assert!(error(libc::EMFILE).help().is_some_and(|help| help.contains("ulimit")));
        assert_eq!(error(libc::EINVAL).help(), None);
    }
}
