//! Privileges that a broker needs before the first client connects.
//!
//! Without one of these it would start and then refuse or misjudge every request: a broker that cannot look into other
//! processes cannot see that they still map a slice.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use egm_report::{Blame, Remedy, Report};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::process::geteuid;
use rustix::thread::{CapabilitySet, capabilities};

use crate::backing::dax::create_attribute;
use crate::ledger::Paths;
use crate::region::{DaxFiles, Region, RegionKind};

/// Lines of the broker's unit that an fsdax region requires.
const UNIT: &str = "in egm-broker.service, enable the lines for fsdax: ReadWritePaths with the region's folder, and \
                    CapabilityBoundingSet=CAP_LINUX_IMMUTABLE";

/// A privilege that this process lacks.
#[derive(Debug, thiserror::Error)]
pub(super) enum MissingPrivilege {
    #[error(
        "cannot start the broker as user {uid}: the process has no {capability}, which it needs to {purpose}"
    )]
    Capability { uid: u32, capability: &'static str, purpose: &'static str },
    #[error("cannot start the broker: {} belongs to user {owner}, and the broker runs as user {uid}", path.display())]
    Ledger { path: PathBuf, owner: u32, uid: u32 },
    #[error("cannot start the broker: cannot open {} of region {region:?} for writing", path.display())]
    Device { region: String, path: PathBuf, source: io::Error },
    #[error("cannot start the broker: cannot read {}", path.display())]
    Folder { path: PathBuf, source: io::Error },
}

impl Report for MissingPrivilege {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Ledger { path, uid, .. } if *uid == 0 => {
                Blame::Host.help(format!("chown root {}", path.display()))
            }
            Self::Capability { uid: 0, capability: "CAP_LINUX_IMMUTABLE", .. } => Blame::Host.help(UNIT),
            Self::Device { source, .. } if source.kind() == io::ErrorKind::ReadOnlyFilesystem => {
                Blame::Host.help(UNIT)
            }
            _ => Blame::Host.help("start it as root: systemctl start egm-broker, or sudo egm-device broker"),
        }
    }
}

/// Checks the capabilities that every broker needs; a pool needs no more.
pub(super) fn check_process() -> Result<(), MissingPrivilege> {
    check_capability(
        CapabilitySet::SYS_PTRACE,
        "CAP_SYS_PTRACE",
        "find the processes that still map a slice",
    )?;
    let purpose = "find the processes that still have a descriptor of a slice or a GPU";
    check_capability(CapabilitySet::DAC_READ_SEARCH, "CAP_DAC_READ_SEARCH", purpose)
}

/// Checks that this process owns the folders of the ledger, which exist by now, and can open the devices of `regions`.
pub(super) fn check_host(paths: &Paths, regions: &[Region]) -> Result<(), MissingPrivilege> {
    let uid = geteuid().as_raw();
    for path in [&paths.state, &paths.run] {
        let folder =
            path.metadata().map_err(|source| MissingPrivilege::Folder { path: path.clone(), source })?;
        if folder.uid() != uid {
            return Err(MissingPrivilege::Ledger { path: path.clone(), owner: folder.uid(), uid });
        }
    }
    regions.iter().try_for_each(check_device)
}

/// Whether this process may open the device of `region`; the open itself would make the kernel zero an EGM device.
fn check_device(region: &Region) -> Result<(), MissingPrivilege> {
    let device: &Path = match &region.kind {
        RegionKind::Reserved { device } => {
            let purpose = "open /dev/mem";
            check_capability(CapabilitySet::SYS_RAWIO, "CAP_SYS_RAWIO", purpose)?;
            device
        }
        RegionKind::Fsdax { folder, .. } => {
            let purpose = "keep tenants from changing the files of their slices";
            check_capability(CapabilitySet::LINUX_IMMUTABLE, "CAP_LINUX_IMMUTABLE", purpose)?;
            folder
        }
        RegionKind::Devdax { device, files: DaxFiles::PerSlice } => &create_attribute(device),
        RegionKind::Egm { device } | RegionKind::Devdax { device, .. } => device,
        RegionKind::Hugetlb | RegionKind::Memfd | RegionKind::GuestMemfd => return Ok(()),
    };
    accessat(CWD, device, Access::READ_OK | Access::WRITE_OK, AtFlags::EACCESS).map_err(|errno| {
        let (region, path) = (region.name.clone(), device.to_owned());
        MissingPrivilege::Device { region, path, source: errno.into() }
    })
}

fn check_capability(
    needed: CapabilitySet,
    capability: &'static str,
    purpose: &'static str,
) -> Result<(), MissingPrivilege> {
    let uid = geteuid().as_raw();
    // A kernel that does not answer has none of them to give.
    let has = capabilities(None).is_ok_and(|sets| sets.effective.contains(needed));
    if has { Ok(()) } else { Err(MissingPrivilege::Capability { uid, capability, purpose }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::tests::region;

    #[test]
    fn a_unit_without_its_lines_for_fsdax_differs_from_a_user_without_rights() {
        let unable =
            |uid| MissingPrivilege::Capability { uid, capability: "CAP_LINUX_IMMUTABLE", purpose: "test" };
        let source = rustix::io::Errno::ROFS.into();
        let read_only =
            MissingPrivilege::Device { region: "pmem".to_owned(), path: "/mnt/pmem/egm".into(), source };
        for unable in [unable(0), read_only] {
            let help = unable.help().unwrap();
            assert!(help.contains("ReadWritePaths") && help.contains("CAP_LINUX_IMMUTABLE"), "{help}");
        }
        assert!(unable(1).help().unwrap().starts_with("start it as root"));
    }

    #[test]
    fn a_ledger_of_another_user_and_a_device_that_is_missing_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::below(folder.path());
        for path in [&paths.state, &paths.run] {
            std::fs::create_dir_all(path).unwrap();
        }
        assert!(check_host(&paths, &[]).is_ok());
        let device = folder.path().join("dax0.0");
        let error =
            check_host(&paths, &[region(RegionKind::Devdax { device, files: DaxFiles::Static }, 4096, 4096)])
                .unwrap_err();
        assert!(matches!(&error, MissingPrivilege::Device { region, .. } if region == "r"), "{error}");
        if geteuid().is_root() {
            std::os::unix::fs::chown(&paths.run, Some(4001), None).unwrap();
            let error = check_host(&paths, &[]).unwrap_err();
            assert!(matches!(error, MissingPrivilege::Ledger { owner: 4001, uid: 0, .. }), "{error}");
            assert_eq!(error.help(), Some(format!("chown root {}", paths.run.display())));
        }
    }
}
