//! Errors of the kernel's hypervisor.

use egm_address::Gpa;
use kvm_ioctls::Cap;

use crate::error::{Blame, Remedy, Report};

/// Mode of a device that its group may read and write.
const GROUP_MAY: u32 = 0o060;

/// Why KVM cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    #[error("/dev/kvm does not exist: this host offers no hardware virtualisation to us")]
    Missing,
    #[error("/dev/kvm: permission denied: it belongs to group \"{group}\"")]
    Permission {
        /// Name or number of the owning group.
        group: String,
    },
    /// Not permitted, and no group has permission.
    #[error("/dev/kvm: permission denied: its mode lets only its owner open it")]
    OwnersOnly,
    /// An interface that no kernel has had since 2007, or not KVM at all.
    #[error("/dev/kvm speaks version {version} of its interface: 12 is the only stable one")]
    Version {
        /// Version that the device reports.
        version: i32,
    },
    /// The kernel's KVM lacks something.
    #[error("this host's KVM lacks {what} ({cap:?})")]
    Capability {
        cap: Cap,
        /// Its use, for the message.
        what: &'static str,
    },
    /// A memory slot was refused.
    #[error("KVM refused {size:#x} bytes of guest memory at {gpa:#x}")]
    Memory {
        gpa: Gpa,
        size: u64,
        #[source]
        source: kvm_ioctls::Error,
    },
    /// A register of a saved vCPU was refused.
    #[error("{call} refused the saved value of register {register:#x}")]
    Register {
        /// Name of the call.
        call: &'static str,
        /// Number of the register as the call has it.
        register: u64,
    },
    #[error("{call} failed")]
    Call {
        /// Name of the call.
        call: &'static str,
        #[source]
        source: kvm_ioctls::Error,
    },
}

impl KvmError {
    pub(crate) fn call(call: &'static str, source: kvm_ioctls::Error) -> Self {
        Self::Call { call, source }
    }

    /// Why a user may not open a device of this group's number and mode, with the text of `/etc/group`.
    pub(super) fn denied(device: Option<(u32, u32)>, groups: &str) -> Self {
        let Some((gid, mode)) = device else { return Self::Permission { group: "kvm".to_owned() } };
        if mode & GROUP_MAY != GROUP_MAY {
            return Self::OwnersOnly;
        }
        let gid = gid.to_string();
        let mut lines = groups.lines().map(|line| line.split(':').collect::<Vec<_>>());
        let own = lines.find(|fields| fields.get(2) == Some(&gid.as_str()));
        let name = own.and_then(|fields| fields.first().map(|name| (*name).to_owned()));
        Self::Permission { group: name.unwrap_or(gid) }
    }
}

impl Report for KvmError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Missing => Blame::Host.help(
                "load kvm_amd or kvm_intel, switch virtualisation on in the firmware, or boot in the lab: scripts/demo",
            ),
            Self::Permission { group } => Blame::Host
                .help(format!("add yourself to the group and log in again: sudo usermod -aG {group} $USER")),
            Self::OwnersOnly => Blame::Host.help(
                "run it as root, or have root give it to a group that you are in: chgrp kvm /dev/kvm; chmod 660 /dev/kvm",
            ),
            Self::Version { .. } | Self::Capability { .. } => {
                Blame::Host.help("use a kernel from 2022 or later with its own KVM module")
            }
            Self::Call { source, .. } if matches!(source.errno(), libc::EMFILE | libc::ENFILE) => {
                Blame::Host.help("raise the limit of open files: ulimit -n 65536")
            }
            Self::Register { .. } => {
                Blame::Host.help("restore the machine on a host with the processor and kernel that saved it")
            }
            Self::Memory { .. } | Self::Call { .. } => Blame::Host.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_open_files_are_reported_with_the_remedy() {
        let error = |errno| KvmError::call("KVM_CREATE_VM", kvm_ioctls::Error::new(errno));
        assert!(error(libc::EMFILE).help().is_some_and(|help| help.contains("ulimit")));
        assert_eq!(error(libc::EINVAL).help(), None);
    }

    #[test]
    fn a_group_is_named_that_may_open_the_device_and_no_other() {
        let help =
            |gid, mode| KvmError::denied(Some((gid, mode)), "root:x:0:\nkvm:x:104:me\n").help().unwrap();
        assert!(help(104, 0o20660).ends_with("usermod -aG kvm $USER"));
        assert!(help(7, 0o20660).ends_with("usermod -aG 7 $USER"));
        for mode in [0o20600, 0o20640] {
            assert!(help(0, mode).starts_with("run it as root") && help(0, mode).contains("chmod 660"));
        }
    }
}
