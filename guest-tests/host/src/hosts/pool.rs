//! Pools of hugetlb pages of node 0, resized while a scenario needs them.

use std::fs;
use std::path::PathBuf;

use crate::engine::error::LabError;

/// A pool of a chosen size; its earlier size is restored on drop.
pub(crate) struct Pool {
    folder: PathBuf,
    before: String,
}

impl Pool {
    /// Requests `pages` pages of `kib` KiB. The kernel may provide fewer: see [`Pool::free`].
    pub(crate) fn resize(kib: u64, pages: u64) -> Result<Self, LabError> {
        let folder = PathBuf::from(format!("/sys/devices/system/node/node0/hugepages/hugepages-{kib}kB"));
        let count = folder.join("nr_hugepages");
        let before = fs::read_to_string(&count).map_err(LabError::file("read", &count))?;
        let pool = Self { folder, before };
        fs::write(&count, pages.to_string()).map_err(LabError::file("write", &count))?;
        Ok(pool)
    }

    /// Pages that no process has.
    pub(crate) fn free(&self) -> Result<u64, LabError> {
        let path = self.folder.join("free_hugepages");
        let text = fs::read_to_string(&path).map_err(LabError::file("read", &path))?;
        let error = |_| LabError::Content { what: path.display().to_string(), problem: "no number".into() };
        text.trim().parse().map_err(error)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = fs::write(self.folder.join("nr_hugepages"), self.before.trim());
    }
}
