//! Errors of opening a host's function: the reason, the side at fault and the remedy.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use egm_address::PciAddress;

use crate::dma::DmaError;
use crate::host::{self, HostError, MISSING_REMEDY};
use crate::topology::{self, GroupError};

pub(super) const CONTAINER: &str = "/dev/vfio/vfio";

/// Side that must change before an open can succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The configuration names something wrong.
    Configuration,
    /// The host lacks something or forbids it.
    Host,
}

/// Why a function, or its address space, cannot be opened.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum OpenError {
    /// The function does not exist, or sysfs is not as documented.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Its driver, its group or another member of the group prevents it.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// A file of VFIO that does not exist.
    #[error("{} does not exist: {rule}", path.display())]
    NoFile {
        path: PathBuf,
        /// Explanation of the absence.
        rule: &'static str,
    },
    /// A file of VFIO that we may not open.
    #[error("{} belongs to user {owner} and group {group}: this user may not open it", path.display())]
    NotPermitted { path: PathBuf, owner: u32, group: u32 },
    /// Another process has the file open.
    #[error(
        "{} is in use: {} has {function}", path.display(),
        holder.as_ref().map_or_else(|| "another process, a virtual machine perhaps,".to_owned(), Holder::to_string)
    )]
    Busy {
        path: PathBuf,
        function: String,
        /// Process that has it open, if this user may see it.
        holder: Option<Holder>,
    },
    #[error("cannot {what}")]
    Refused {
        /// Operation that failed, with its object.
        what: String,
        #[source]
        source: io::Error,
    },
    /// The address space's maps could not be made again for it.
    #[error(transparent)]
    Dma(#[from] DmaError),
}

/// A process that has a file open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Process id, as in `/proc`.
    pub process: u32,
    /// Command line, cut after 200 characters.
    pub command: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.process, self.command)
    }
}

impl Holder {
    /// Longest command that is reported, in characters.
    const MOST: usize = 200;

    /// Finds the first process of `proc` (procfs), except `us`, that has `path` open. Root sees all, others their own.
    fn of(proc: &Path, path: &Path, us: u32) -> Option<Self> {
        let processes = fs::read_dir(proc).ok()?.flatten();
        let mut processes =
            processes.filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry)));
        processes.find_map(|(process, entry)| {
            if process == us {
                return None;
            }
            let mut files = fs::read_dir(entry.path().join("fd")).ok()?.flatten();
            files.find(|file| fs::read_link(file.path()).is_ok_and(|target| target == path))?;
            let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let command = String::from_utf8_lossy(&command).replace('\0', " ");
            Some(Self { process, command: command.trim_end().chars().take(Self::MOST).collect() })
        })
    }
}

/// Returns the IOMMU group of the function at `address` of the host at `root`, if the function can be assigned.
pub(super) fn group(root: &Path, address: PciAddress) -> Result<u32, OpenError> {
    let function = host::function(root, address)?;
    let Some(number) = function.iommu_group else {
        return Err(GroupError::NoGroup { function: address }.into());
    };
    let folder = root.join(format!("sys/kernel/iommu_groups/{number}/devices"));
    let names = fs::read_dir(folder).into_iter().flatten();
    let members = names.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let others = members.filter(|member| *member != address).map(|member| host::function(root, member));
    let mut functions = others.collect::<Result<Vec<_>, _>>()?;
    functions.push(function);
    topology::usable(&functions, address)?;
    Ok(number)
}

impl OpenError {
    /// For `map_err`: refused while trying `what`.
    pub(super) fn refused(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Refused { what, source }
    }

    /// For `map_err`: `path`, the VFIO file of `function`, could not be opened.
    pub(super) fn file(path: &Path, function: &str, rule: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.kind() {
            io::ErrorKind::NotFound => Self::NoFile { path: path.to_owned(), rule },
            io::ErrorKind::ResourceBusy => Self::busy(path, function),
            io::ErrorKind::PermissionDenied => match fs::metadata(path) {
                Ok(of) => Self::NotPermitted { path: path.to_owned(), owner: of.uid(), group: of.gid() },
                Err(_) => Self::Refused { what: format!("open {}", path.display()), source },
            },
            _ => Self::Refused { what: format!("open {}", path.display()), source },
        }
    }

    /// Error for `path`, the VFIO file of `function`, which another process has open.
    pub(super) fn busy(path: &Path, function: &str) -> Self {
        let holder = Holder::of(Path::new("/proc"), path, std::process::id());
        Self::Busy { path: path.to_owned(), function: function.to_owned(), holder }
    }

    /// Whether the configuration or the host is at fault.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Group(GroupError::Bridge { .. }) => Fault::Configuration,
            _ => Fault::Host,
        }
    }

    /// Command or change that resolves the error, if one is known.
    pub fn remedy(&self) -> Option<String> {
        Some(match self {
            Self::Group(error) => error.help(),
            Self::Host(HostError::Missing { .. }) => MISSING_REMEDY.to_owned(),
            Self::NotPermitted { path, .. } => {
                format!("as root: chown $USER {}, or a udev rule for the subsystem vfio", path.display())
            }
            Self::Busy { holder: Some(_), .. } => {
                "end it first, or give this machine another function".to_owned()
            }
            Self::Busy { path, .. } => format!("find the process, as root: fuser -v {}", path.display()),
            Self::Dma(error) => return error.remedy(),
            Self::NoFile { path, .. } if path == Path::new(CONTAINER) => {
                "modprobe vfio_iommu_type1".to_owned()
            }
            Self::Host(_) | Self::NoFile { .. } | Self::Refused { .. } => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;
    use std::os::unix::fs::symlink;

    use super::*;

    fn address(text: &str) -> PciAddress {
        text.parse().unwrap()
    }

    /// A host with two functions in group 7: `ours` and `other` are their drivers.
    fn host(ours: &str, other: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let devices = root.path().join("sys/kernel/iommu_groups/7/devices");
        fs::create_dir_all(&devices).unwrap();
        fs::write(devices.with_file_name("reserved_regions"), "").unwrap();
        for (address, driver) in [("0000:41:00.0", ours), ("0000:41:00.1", other)] {
            let folder = root.path().join("sys/bus/pci/devices").join(address);
            fs::create_dir_all(&folder).unwrap();
            for (name, text) in [("vendor", "0x10de"), ("device", "0x2335"), ("class", "0x030200")] {
                fs::write(folder.join(name), text).unwrap();
            }
            fs::write(folder.join("resource"), "").unwrap();
            symlink("../../../../kernel/iommu_groups/7", folder.join("iommu_group")).unwrap();
            symlink(format!("../drivers/{driver}"), folder.join("driver")).unwrap();
            fs::write(devices.join(address), "").unwrap();
        }
        root
    }

    #[test]
    fn a_function_of_vfio_alone_or_among_its_own_has_its_group() {
        assert_eq!(group(host("vfio-pci", "vfio-pci").path(), address("0000:41:00.0")).unwrap(), 7);
    }

    #[test]
    fn an_unbound_function_names_its_driver_and_the_command() {
        let error = group(host("nvme", "vfio-pci").path(), address("0000:41:00.0")).unwrap_err();
        assert!(error.to_string().contains("0000:41:00.0 is bound to nvme"), "{error}");
        assert_eq!(
            (error.remedy().unwrap().as_str(), error.fault()),
            ("egm-vmm bind 0000:41:00.0", Fault::Host)
        );
    }

    #[test]
    fn a_host_without_an_active_iommu_gets_the_way_to_switch_it_on() {
        let host = host("vfio-pci", "vfio-pci");
        fs::remove_file(host.path().join("sys/bus/pci/devices/0000:41:00.0/iommu_group")).unwrap();
        let error = group(host.path(), address("0000:41:00.0")).unwrap_err();
        assert!(error.to_string().starts_with("host function 0000:41:00.0 is in no IOMMU group"), "{error}");
        assert!(error.remedy().unwrap().contains("intel_iommu=on") && error.fault() == Fault::Host);
    }

    #[test]
    fn a_process_that_has_a_file_open_is_named_by_number_and_command() {
        let proc = tempfile::tempdir().unwrap();
        let path = Path::new("/dev/vfio/7");
        for (process, target) in [("self", "/dev/vfio/7"), ("41", "/dev/vfio/8"), ("42", "/dev/vfio/7")] {
            let files = proc.path().join(process).join("fd");
            fs::create_dir_all(&files).unwrap();
            symlink(target, files.join("9")).unwrap();
            fs::write(proc.path().join(process).join("cmdline"), "egm-vmm\0run\0a.json\0").unwrap();
        }
        let holder = Holder::of(proc.path(), path, 41).unwrap();
        assert_eq!(holder.to_string(), "process 42 (egm-vmm run a.json)");
        assert_eq!(Holder::of(proc.path(), path, 42), None, "it is the one that asks");
        assert_eq!(Holder::of(proc.path(), Path::new("/dev/vfio/9"), 1), None);
        let error = OpenError::Busy { path: path.to_owned(), function: "f".to_owned(), holder: Some(holder) };
        assert!(error.to_string().ends_with("in use: process 42 (egm-vmm run a.json) has f"), "{error}");
    }

    #[test]
    fn a_group_that_is_not_viable_names_the_other_members() {
        let error = group(host("vfio-pci", "snd_hda_intel").path(), address("0000:41:00.0")).unwrap_err();
        assert!(error.to_string().ends_with("0000:41:00.1 by snd_hda_intel"), "{error}");
        assert_eq!(error.remedy().unwrap(), "egm-vmm bind 0000:41:00.1");
    }

    #[test]
    fn an_error_of_the_kernel_about_a_file_becomes_what_it_means() {
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
        let missing = HostError::Missing { address: address("0000:41:00.0") };
        assert_eq!(OpenError::from(missing).fault(), Fault::Host);
        let bridge = GroupError::Bridge { function: address("0000:41:00.0") };
        assert_eq!(OpenError::from(bridge).fault(), Fault::Configuration);
    }
}
