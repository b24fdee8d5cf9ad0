//! Files that decide the use of this host's memory. They count only if root alone can have written them.
#![forbid(unsafe_code)]

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Mode bits that let a group or others write.
const WRITABLE: u32 = 0o022;

/// A file that others can have written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotRootOwned {
    pub(crate) uid: u32,
    pub(crate) mode: u32,
}

/// Accepts a file that root owns and no other user may write. `metadata` is that of an open file, so that the check and
/// the content belong together.
pub(crate) fn check(metadata: &Metadata) -> Result<(), NotRootOwned> {
    let (uid, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    let counts = (uid == 0 && mode & WRITABLE == 0) || egm_address::fault!("host-file-of-others-trusted");
    if counts { Ok(()) } else { Err(NotRootOwned { uid, mode }) }
}

/// Whether the files below `root` are those of this host, and not a copy of another one's.
pub(crate) fn is_this_host(root: &Path) -> bool {
    root.canonicalize().is_ok_and(|root| root == Path::new("/"))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;

    #[test]
    fn a_file_counts_when_only_root_can_have_written_it() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root can make files that are root's");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        let of = |uid, mode| {
            chown(&file, Some(uid), None).unwrap();
            fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
            check(&file.as_file().metadata().unwrap())
        };
        assert_eq!((of(0, 0o644), of(0, 0o600)), (Ok(()), Ok(())));
        assert_eq!(of(0, 0o664), Err(NotRootOwned { uid: 0, mode: 0o664 }));
        assert_eq!(of(0, 0o646), Err(NotRootOwned { uid: 0, mode: 0o646 }));
        assert_eq!(of(1000, 0o600), Err(NotRootOwned { uid: 1000, mode: 0o600 }));
    }

    #[test]
    fn only_the_root_folder_is_this_host() {
        let folder = tempfile::tempdir().unwrap();
        assert!(is_this_host(Path::new("/")) && is_this_host(Path::new("/./")));
        assert!(!is_this_host(folder.path()) && !is_this_host(Path::new("/nowhere")));
    }
}
