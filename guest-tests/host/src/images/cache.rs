//! The cache of kernels between runs: `${XDG_CACHE_HOME:-~/.cache}/egm-lab`.
//!
//! An entry appears by a rename, so an entry with its final name is complete. Writers hold the lock, readers need not.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::engine::error::LabError;
use crate::engine::progress::Stage;

/// Age at which a kernel is looked up again, so that Debian's updates arrive without a network call a run.
const FRESH: Duration = Duration::from_secs(30 * 24 * 3600);

#[derive(Debug, Clone)]
pub(crate) struct Cache {
    root: PathBuf,
}

/// An entry of the cache.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) path: PathBuf,
    /// Whether it is newer than [`FRESH`].
    is_fresh: bool,
}

/// Held while an entry is made; the kernel releases it when the process ends in any way.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Cache {
    /// The user's cache, made when missing.
    pub(crate) fn open() -> Result<Self, LabError> {
        let base = std::env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
            .or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
            .ok_or_else(|| LabError::Host {
                what: "no cache directory".into(),
                remedy: "set HOME or XDG_CACHE_HOME".into(),
            })?;
        Self::at(base.join("egm-lab"))
    }

    /// A cache in `root`, made when missing.
    pub(crate) fn at(root: PathBuf) -> Result<Self, LabError> {
        fs::create_dir_all(&root).map_err(LabError::file("make", &root))?;
        Ok(Self { root })
    }

    /// The path that an entry has or will have.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Waits until no other process makes an entry.
    pub(crate) fn lock(&self) -> Result<Lock, LabError> {
        let path = self.path("lock");
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(LabError::file("open", &path))?;
        file.lock().map_err(LabError::file("lock", &path))?;
        Ok(Lock { _file: file })
    }

    /// The newest entry with a name `prefix…suffix`.
    pub(crate) fn newest(&self, prefix: &str, suffix: &str) -> Option<Entry> {
        let entries = fs::read_dir(&self.root).ok()?;
        let mut found: Vec<_> = entries
            .flatten()
            .filter(|entry| {
                let name = entry.file_name();
                let name = name.to_string_lossy();
                name.starts_with(prefix) && name.ends_with(suffix)
            })
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .collect();
        found.sort();
        let (modified, path) = found.pop()?;
        let age = SystemTime::now().duration_since(modified).unwrap_or_default();
        Some(Entry { path, is_fresh: age < FRESH })
    }

    /// The entry when it is fresh, else a new one; without a network an old entry is better than none.
    pub(crate) fn obtain(
        &self,
        prefix: &str,
        suffix: &str,
        refresh: bool,
        make: impl FnOnce(&Self, &Lock) -> Result<PathBuf, LabError>,
    ) -> Result<PathBuf, LabError> {
        let newest = || self.newest(prefix, suffix);
        let fresh = || newest().filter(|entry| entry.is_fresh && !refresh).map(|entry| entry.path);
        if let Some(path) = fresh() {
            return Ok(path);
        }
        let lock = self.lock()?;
        // Another process may have made it while this one waited.
        if let Some(path) = fresh() {
            return Ok(path);
        }
        make(self, &lock).or_else(|error| match newest() {
            Some(Entry { path, .. }) => {
                Stage::note(&format!("{error}; using {} from the cache", path.display()));
                Ok(path)
            }
            None => Err(error),
        })
    }

    /// Marks an entry as looked up now and returns its path; if that fails, it is looked up again next time.
    pub(crate) fn touch(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        let _ = File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        path
    }

    /// An empty directory for work in progress; it first removes a dead process's files.
    pub(crate) fn scratch(&self, _held: &Lock) -> Result<Scratch, LabError> {
        let path = self.path("work");
        let scratch = Scratch { path };
        scratch.remove();
        fs::create_dir_all(&scratch.path).map_err(LabError::file("make", &scratch.path))?;
        Ok(scratch)
    }

    /// Gives `made`, a file or directory of this cache's file system, its final name.
    pub(crate) fn publish(&self, made: &Path, name: &str, _held: &Lock) -> Result<PathBuf, LabError> {
        let path = self.path(name);
        if path.is_dir() {
            fs::remove_dir_all(&path).map_err(LabError::file("replace", &path))?;
        }
        fs::rename(made, &path).map_err(LabError::file("write", &path))?;
        Ok(path)
    }
}

/// A directory that goes away when dropped.
#[derive(Debug)]
pub(crate) struct Scratch {
    path: PathBuf,
}

impl Scratch {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn remove(&self) {
        // A missing directory counts as removed; other errors show up when it is made.
        let _ = fs::remove_dir_all(&self.path);
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.remove();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache() -> (tempfile::TempDir, Cache) {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::at(root.path().join("egm-lab")).unwrap();
        (root, cache)
    }

    #[test]
    fn an_entry_is_found_once_published_and_not_before() {
        let (_root, cache) = cache();
        let lock = cache.lock().unwrap();
        let scratch = cache.scratch(&lock).unwrap();
        let made = scratch.path().join("x");
        fs::write(&made, "kernel").unwrap();
        assert_eq!(cache.newest("l1-", ".bzImage"), None);
        let path = cache.publish(&made, "l1-7.bzImage", &lock).unwrap();
        assert_eq!(cache.newest("l1-", ".bzImage"), Some(Entry { path, is_fresh: true }));
    }

    #[test]
    fn scratch_is_empty_and_does_not_outlive_its_owner() {
        let (_root, cache) = cache();
        let lock = cache.lock().unwrap();
        fs::create_dir_all(cache.path("work/left-over")).unwrap();
        let scratch = cache.scratch(&lock).unwrap();
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
        drop(scratch);
        assert!(!cache.path("work").exists());
    }

    #[test]
    fn two_makers_exclude_each_other() {
        let (_root, cache) = cache();
        let lock = cache.lock().unwrap();
        let other = File::open(cache.path("lock")).unwrap();
        assert!(other.try_lock().is_err());
        drop(lock);
        assert!(other.try_lock().is_ok());
    }
}
