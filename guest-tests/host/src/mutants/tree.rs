//! A copy of the checkout, so that no mutated source is ever in the checkout itself.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::engine::command::Tool;
use crate::engine::error::LabError;

/// Copies the tracked files of `from`, and the untracked ones that git does not ignore, to `to`, which is replaced.
/// Every file is new to cargo, which would otherwise take the program of the last mutant for that of the file.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<(), LabError> {
    if to.exists() {
        fs::remove_dir_all(to).map_err(LabError::file("remove", to))?;
    }
    let names = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let names = Tool::new("git", "git").within(from).args(names).bytes()?;
    for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let name = Path::new(OsStr::from_bytes(name));
        let (source, target) = (from.join(name), to.join(name));
        // A deleted file is tracked until the deletion is staged.
        if source.is_file() {
            copy_file(&source, &target)?;
        }
    }
    Ok(())
}

fn copy_file(source: &Path, target: &Path) -> Result<(), LabError> {
    if let Some(folder) = target.parent() {
        fs::create_dir_all(folder).map_err(LabError::file("make", folder))?;
    }
    fs::copy(source, target).map(drop).map_err(LabError::file("copy", source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_files_that_git_does_not_ignore_as_new_and_no_others() {
        let root = tempfile::tempdir().unwrap();
        let (from, to) = (root.path().join("from"), root.path().join("to"));
        fs::create_dir_all(from.join("src")).unwrap();
        fs::create_dir_all(to.join("old")).unwrap();
        for (name, text) in [(".gitignore", "/out"), ("src/lib.rs", "fn f() {}"), ("out", "built")] {
            fs::write(from.join(name), text).unwrap();
        }
        let hour_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
        fs::File::open(from.join("src/lib.rs")).unwrap().set_modified(hour_ago).unwrap();
        Tool::new("git", "git").within(&from).args(["init", "--quiet"]).bytes().unwrap();
        copy(&from, &to).unwrap();
        assert_eq!(fs::read_to_string(to.join("src/lib.rs")).unwrap(), "fn f() {}");
        let changed = |root: &Path| fs::metadata(root.join("src/lib.rs")).unwrap().modified().unwrap();
        assert!(changed(&from) < changed(&to), "cargo compares times of change");
        assert!(!to.join("out").exists() && !to.join("old").exists());
    }
}
