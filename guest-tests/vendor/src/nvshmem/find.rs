//! Usual paths of the library.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// File name of NVSHMEM's host library, for the loader.
pub const NAME: &str = "libnvshmem_host.so.3";

/// Most entries of a folder that are looked at.
const MAX_ENTRIES: usize = 256;

/// Files that may be the library, in the order to try them: only the given one, or the
/// loader's own search (`LD_LIBRARY_PATH` among it), then the wheel `nvidia-nvshmem-cu*` below each of `roots`
/// (prefixes as `/usr/local` or a virtual environment) and the distribution packages' folders.
///
/// This checks no file for existence, except for wheels: their path depends on the version of Python.
pub fn candidates(given: Option<&Path>, roots: &[PathBuf]) -> Vec<PathBuf> {
    if let Some(given) = given {
        return vec![if given.is_dir() { given.join(NAME) } else { given.to_owned() }];
    }
    let mut found = vec![PathBuf::from(NAME)];
    for root in roots {
        for python in folders(&root.join("lib"), "python3") {
            for packages in ["site-packages", "dist-packages"] {
                found.push(python.join(packages).join("nvidia/nvshmem/lib").join(NAME));
            }
        }
    }
    found.retain(|path| path.as_os_str() == OsStr::new(NAME) || path.is_file());
    // NVIDIA's packages: nvshmem-cuda-13 of the CUDA repositories, and the archive as /usr/local/nvshmem.
    for folder in
        ["/usr/lib/x86_64-linux-gnu/nvshmem", "/usr/lib/aarch64-linux-gnu/nvshmem", "/usr/lib64/nvshmem"]
    {
        found.extend(["13", "12"].map(|version| Path::new(folder).join(version).join(NAME)));
    }
    found.push(Path::new("/usr/local/nvshmem/lib").join(NAME));
    found
}

/// Folders in `folder` with names that begin with `prefix`, in order.
fn folders(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .take(MAX_ENTRIES)
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(prefix.as_bytes()))
        })
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_given_is_the_only_one() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(candidates(Some(folder.path()), &[]), [folder.path().join(NAME)]);
        let file = folder.path().join("other.so");
        assert_eq!(candidates(Some(&file), &[]), [file]);
    }

    #[test]
    fn a_wheel_is_found_below_a_prefix_and_the_loader_goes_first() {
        let root = tempfile::tempdir().unwrap();
        let lib = root.path().join("lib/python3.12/site-packages/nvidia/nvshmem/lib");
        std::fs::create_dir_all(&lib).unwrap();
        std::fs::create_dir_all(root.path().join("lib/python3.11/site-packages")).unwrap();
        std::fs::write(lib.join(NAME), "").unwrap();
        let found = candidates(None, &[root.path().to_owned(), PathBuf::from("/nowhere")]);
        assert_eq!(found[..2], [PathBuf::from(NAME), lib.join(NAME)]);
        assert!(found[2..].iter().all(|path| !path.starts_with(root.path())));
    }
}
