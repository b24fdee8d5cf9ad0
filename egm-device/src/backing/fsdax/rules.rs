//! Rules for a region's folder and its files, checked at each opening. Pure but for the queries.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{AtFlags, Dev, StatVfsMountFlags, StatxAttributes, StatxFlags, fstatvfs, statx};

use crate::backing::error::{BackingError, DaxError};
use crate::region::Region;

/// The kernel's switch of leases of files.
const LEASES: &str = "/proc/sys/fs/leases-enable";

/// Whether `file` is a slice's: a regular file that is mapped directly.
pub(in crate::backing) fn check(region: &Region, file: &File) -> Result<(), BackingError> {
    let unknown = |source| BackingError::SliceFile {
        region: region.name.clone(),
        source: DaxError::at("identify", Path::new("the file"))(source),
    };
    let found = match file.metadata().map_err(unknown)?.is_file() {
        true if is_dax(file).map_err(unknown)? => return Ok(()),
        true => "a file in the page cache",
        false => "no regular file",
    };
    let wanted = "a file of a file system that is mounted with \"dax\"";
    Err(BackingError::NotTheDevice { region: region.name.clone(), found: found.to_owned(), wanted })
}

pub(crate) fn is_dax(file: &File) -> io::Result<bool> {
    let found = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?;
    Ok(found.stx_attributes.contains(StatxAttributes::DAX))
}

/// Facts of a region's folder.
#[derive(Debug, Clone, Copy)]
pub(super) struct FolderFacts {
    uid: u32,
    mode: u32,
    /// Number of its file system.
    device: Dev,
    is_read_only: bool,
    has_leases: bool,
}

impl FolderFacts {
    pub(super) fn of(folder: &File) -> io::Result<Self> {
        let metadata = folder.metadata()?;
        let flags = fstatvfs(folder)?.f_flag;
        // Without that file the lease itself fails where there is none, which counts as in use.
        let has_leases = fs::read_to_string(LEASES).map_or(true, |text| text.trim() != "0");
        Ok(Self {
            uid: metadata.uid(),
            mode: metadata.mode() & 0o7777,
            device: metadata.dev(),
            is_read_only: flags.contains(StatVfsMountFlags::RDONLY),
            has_leases,
        })
    }

    /// The first rule that the folder of a region breaks, which was found on `device`.
    pub(super) fn broken_rule(&self, device: Dev) -> Option<&'static str> {
        let rules = [
            (self.uid == 0, "it does not belong to root"),
            (self.mode == 0o700, "its mode is not 0700"),
            (self.device == device, "another file system than at discovery is mounted there"),
            (!self.is_read_only, "its file system is mounted read-only"),
            (self.has_leases, "fs.leases-enable is 0, which hides open files: sysctl fs.leases-enable=1"),
        ];
        rules.iter().find(|(holds, _)| !holds).map(|(_, rule)| *rule)
    }
}

/// The first rule that `file` of a slice in `folder` breaks.
pub(super) fn broken_by(file: &File, folder: &File) -> io::Result<Option<&'static str>> {
    let (file, folder) = (file.metadata()?, folder.metadata()?);
    let rules = [
        (file.is_file(), "it is no regular file"),
        (file.nlink() == 1, "it has another name as well"),
        (file.uid() == 0, "it does not belong to root"),
        (file.dev() == folder.dev(), "it lies on another file system than its folder"),
    ];
    Ok(rules.iter().find(|(holds, _)| !holds).map(|(_, rule)| *rule))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_keeps_every_rule_or_is_refused_by_name() {
        let good = FolderFacts { uid: 0, mode: 0o700, device: 1, is_read_only: false, has_leases: true };
        assert_eq!(good.broken_rule(1), None);
        for (facts, word) in [
            (FolderFacts { uid: 1, ..good }, "root"),
            (FolderFacts { mode: 0o701, ..good }, "mode"),
            (FolderFacts { mode: 0o1700, ..good }, "mode"),
            (FolderFacts { device: 2, ..good }, "another file system"),
            (FolderFacts { is_read_only: true, ..good }, "read-only"),
            (FolderFacts { has_leases: false, ..good }, "fs.leases-enable=1"),
        ] {
            let rule = facts.broken_rule(1).unwrap();
            assert!(rule.contains(word), "{rule}");
        }
    }
}
