//! The file system on the emulated host's persistent memory, made here: busybox makes none with a journal.

use std::fs;
use std::path::PathBuf;

use crate::engine::command::Tool;
use crate::engine::error::LabError;
use crate::images::cache::Cache;

/// Bytes of the persistent memory, as `memmap=nn!ss` in `qemu.rs` gives them.
const SIZE: &str = "256M";
/// Features that every kernel of the lab mounts without further modules.
const FEATURES: &str = "none,has_journal,extent,filetype,sparse_super,large_file,dir_index";
/// Name in the cache, which changes with the image.
const NAME: &str = "pmem-ext4-256M-journal.gz";

/// The image, compressed, from the cache.
pub(crate) fn image(cache: &Cache) -> Result<Vec<u8>, LabError> {
    let path = cache.path(NAME);
    let path = if path.exists() { path } else { make(cache)? };
    fs::read(&path).map_err(LabError::file("read", path))
}

fn make(cache: &Cache) -> Result<PathBuf, LabError> {
    let lock = cache.lock()?;
    let scratch = cache.scratch(&lock)?;
    let image = scratch.path().join("pmem.ext4");
    Tool::new("mke2fs", "e2fsprogs")
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4", "-O", FEATURES])
        .args([image.as_os_str(), SIZE.as_ref()])
        .bytes()?;
    let compressed = Tool::new("gzip", "gzip").args(["-n", "-c"]).args([image.as_os_str()]).bytes()?;
    let path = scratch.path().join("pmem.ext4.gz");
    fs::write(&path, compressed).map_err(LabError::file("write", &path))?;
    cache.publish(&path, NAME, &lock)
}
