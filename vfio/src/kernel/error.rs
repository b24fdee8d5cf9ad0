//! Why a host's function cannot be opened, whose turn it is, and what helps.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use egm_address::PciAddress;

use crate::dma::DmaError;
use crate::host::{self, HostError};

/// Who must act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The configuration names something wrong.
    Configuration,
    /// The host lacks something or forbids it.
    Host,
}

/// Why a function, or its address space, cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It does not exist, or sysfs is not as documented.
    #[error(transparent)]
    Host(#[from] HostError),
    /// No driver that lends it.
    #[error("{function} is not bound to VFIO: {}", driver.as_ref().map_or_else(|| "it has no driver".to_owned(), |driver| format!("the host's driver {driver} has it")))]
    NotBound {
        /// The function.
        function: PciAddress,
        /// The driver that has it.
        driver: Option<String>,
    },
    /// No IOMMU translates its DMA.
    #[error("{function} has no IOMMU group: no IOMMU translates what it reads and writes")]
    NoIommu {
        /// The function.
        function: PciAddress,
    },
    /// Others in its group belong to the host.
    #[error("{function} cannot be lent: the host uses others of its IOMMU group {group}: {}", list(members))]
    NotViable {
        /// The function.
        function: PciAddress,
        /// Its group.
        group: u32,
        /// Members that a driver of the host has, and the driver.
        members: Vec<(PciAddress, String)>,
    },
    /// A file of VFIO that does not exist.
    #[error("{} does not exist: {rule}", path.display())]
    NoFile {
        /// The file.
        path: PathBuf,
        /// What that means.
        rule: &'static str,
    },
    /// A file of VFIO that we may not open.
    #[error("{} belongs to user {owner} and group {group}: this user may not open it", path.display())]
    NotPermitted {
        /// The file.
        path: PathBuf,
        /// Its user.
        owner: u32,
        /// Its group.
        group: u32,
    },
    /// Another process has it.
    #[error("{} is in use: another process, a virtual machine perhaps, has {function}", path.display())]
    Busy {
        /// The file.
        path: PathBuf,
        /// The function.
        function: String,
    },
    /// Anything else.
    #[error("cannot {what}")]
    Refused {
        /// What was tried, with its object.
        what: String,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// The address space's maps could not be made again for it.
    #[error(transparent)]
    Dma(#[from] DmaError),
}

fn list(members: &[(PciAddress, String)]) -> String {
    let words = members.iter().map(|(function, driver)| format!("{function} ({driver})"));
    words.collect::<Vec<_>>().join(", ")
}

/// Members of IOMMU group `number` that a driver of the host has: those that make it not viable. Drivers of VFIO and
/// pci-stub leave functions alone, as pcieport does its bridges.
pub(super) fn used_by_host(root: &Path, number: u32) -> Vec<(PciAddress, String)> {
    let folder = root.join(format!("sys/kernel/iommu_groups/{number}/devices"));
    let names = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let functions = names.filter_map(|name| host::function(root, name.parse().ok()?).ok());
    let mut used: Vec<_> = functions
        .filter_map(|function| Some((function.address, function.driver?)))
        .filter(|(_, driver)| !is_vfio(driver) && driver != "pci-stub" && driver != "pcieport")
        .collect();
    used.sort();
    used
}

/// Whether a driver of this name lends its functions: `vfio-pci`, `nvgrace_gpu_vfio_pci`, `mlx5_vfio_pci`.
pub(super) fn is_vfio(driver: &str) -> bool {
    driver.replace('_', "-").ends_with("vfio-pci")
}

impl OpenError {
    /// For `map_err`: refused while trying `what`.
    pub(super) fn refused(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Refused { what, source }
    }

    /// For `map_err`: `path`, a file of VFIO that lends `function`, could not be opened.
    pub(super) fn file(path: &Path, function: &str, rule: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.kind() {
            io::ErrorKind::NotFound => Self::NoFile { path: path.to_owned(), rule },
            io::ErrorKind::ResourceBusy => {
                Self::Busy { path: path.to_owned(), function: function.to_owned() }
            }
            io::ErrorKind::PermissionDenied => match fs::metadata(path) {
                Ok(of) => Self::NotPermitted { path: path.to_owned(), owner: of.uid(), group: of.gid() },
                Err(_) => Self::Refused { what: format!("open {}", path.display()), source },
            },
            _ => Self::Refused { what: format!("open {}", path.display()), source },
        }
    }

    /// Who must act.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Host(HostError::Missing { .. }) => Fault::Configuration,
            _ => Fault::Host,
        }
    }

    /// What to do about it.
    pub fn remedy(&self) -> Option<String> {
        Some(match self {
            Self::Host(HostError::Missing { .. }) => "see: egm-vmm check".to_owned(),
            Self::NotBound { function, .. } => format!("as root: scripts/bind {function}"),
            Self::NoIommu { .. } => {
                "switch the IOMMU on in the firmware, and on x86 boot with intel_iommu=on or amd_iommu=on"
                    .to_owned()
            }
            Self::NotViable { members, .. } => {
                let names: Vec<String> = members.iter().map(|(function, _)| function.to_string()).collect();
                format!("as root: scripts/bind {}", names.join(" "))
            }
            Self::NotPermitted { path, .. } => {
                format!("as root: chown $USER {}, or a udev rule for the subsystem vfio", path.display())
            }
            Self::Busy { path, .. } => format!("see who: fuser -v {}", path.display()),
            Self::Dma(error) => return error.remedy(),
            Self::Host(_) | Self::NoFile { .. } | Self::Refused { .. } => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;

    fn address(text: &str) -> PciAddress {
        text.parse().unwrap()
    }

    #[test]
    fn an_unbound_function_names_its_driver_and_the_command() {
        let error = OpenError::NotBound { function: address("0000:41:00.0"), driver: Some("nvme".into()) };
        assert_eq!(error.to_string(), "0000:41:00.0 is not bound to VFIO: the host's driver nvme has it");
        assert_eq!(error.remedy().unwrap(), "as root: scripts/bind 0000:41:00.0");
        assert_eq!(error.fault(), Fault::Host);
    }

    #[test]
    fn a_group_that_is_not_viable_names_the_other_members() {
        let members = vec![(address("0000:41:00.1"), "snd_hda_intel".into())];
        let error = OpenError::NotViable { function: address("0000:41:00.0"), group: 7, members };
        assert!(error.to_string().ends_with("IOMMU group 7: 0000:41:00.1 (snd_hda_intel)"), "{error}");
        assert_eq!(error.remedy().unwrap(), "as root: scripts/bind 0000:41:00.1");
    }

    #[test]
    fn what_the_kernel_says_of_a_file_becomes_what_it_means() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("7");
        let error = |kind| OpenError::file(&path, "0000:41:00.0", "rule")(io::Error::from(kind));
        assert!(matches!(error(io::ErrorKind::NotFound), OpenError::NoFile { .. }));
        assert!(matches!(error(io::ErrorKind::PermissionDenied), OpenError::Refused { .. }));
        fs::write(&path, "").unwrap();
        assert!(matches!(error(io::ErrorKind::PermissionDenied), OpenError::NotPermitted { .. }));
        let busy = error(io::ErrorKind::ResourceBusy);
        assert!(busy.to_string().contains("another process, a virtual machine perhaps, has 0000:41:00.0"));
        assert!(busy.source().is_none());
        let missing = HostError::Missing { address: address("0000:41:00.0"), path };
        assert_eq!(OpenError::from(missing).fault(), Fault::Configuration);
    }
}
