//! The log's file: a line is one write, and a full file becomes `audit.jsonl.1`.
//!
//! Any number of processes append. The kernel appends each write as a whole, so lines do not mix; only a disk that fills up
//! can cut one, and the next writer ends it. A file is opened for each line, so that no writer keeps one that was rotated.
#![forbid(unsafe_code)]

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FlockOperation, OFlags, flock};

/// Files that are kept, the newest included.
pub const FILES: u32 = 8;

/// Bytes of a file, about: the next line goes to a new one.
const LIMIT: u64 = 16 << 20;

#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    limit: u64,
    /// Whether the last line may be cut: another writer's, or one that this process could not finish. Of a line that is being
    /// written, a part can be seen, which costs an empty line and nothing else.
    is_suspect: AtomicBool,
}

impl LogFile {
    pub(super) const fn new(path: PathBuf) -> Self {
        Self { path, limit: LIMIT, is_suspect: AtomicBool::new(true) }
    }

    #[cfg(test)]
    pub(super) const fn with_limit(path: PathBuf, limit: u64) -> Self {
        Self { path, limit, is_suspect: AtomicBool::new(true) }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends `line`.
    ///
    /// # Errors
    /// The kernel's; of a line that did not fit on the disk, a part may stay.
    pub(super) fn append(&self, line: &[u8]) -> io::Result<()> {
        let mut file = self.open()?;
        if file.metadata()?.size() >= self.limit {
            self.rotate()?;
            file = self.open()?;
        }
        let size = file.metadata()?.size();
        // While another process is stopped in the middle of a rotation, the file grows, to this.
        if size >= self.limit.saturating_mul(2) {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let is_suspect = self.is_suspect.swap(true, Ordering::Relaxed);
        let ending: &[u8] = if is_suspect && is_cut(&file, size)? { b"\n" } else { b"" };
        let bytes = [ending, line].concat();
        match file.write(&bytes)? {
            written if written == bytes.len() => {
                self.is_suspect.store(false, Ordering::Relaxed);
                Ok(())
            }
            _ => Err(io::ErrorKind::StorageFull.into()),
        }
    }

    fn open(&self) -> io::Result<File> {
        let flags = i32::try_from(OFlags::NOFOLLOW.bits()).map_err(io::Error::other)?;
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600).custom_flags(flags);
        match options.open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let folder = self.path.parent().ok_or(io::ErrorKind::NotFound)?;
                DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
                options.open(&self.path)
            }
            opened => opened,
        }
    }

    /// Renames every file to the next number; the last is replaced. One process does it, the others go on meanwhile.
    fn rotate(&self) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let lock =
            options.write(true).create(true).truncate(false).mode(0o600).open(self.numbered("lock"))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(()),
            locked => locked?,
        }
        // Another process may have been faster.
        if fs::metadata(&self.path)?.size() < self.limit {
            return Ok(());
        }
        for number in (1..FILES.saturating_sub(1)).rev() {
            let (from, to) =
                (self.numbered(&number.to_string()), self.numbered(&number.saturating_add(1).to_string()));
            match fs::rename(from, to) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::rename(&self.path, self.numbered("1"))
    }

    fn numbered(&self, suffix: &str) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".");
        name.push(suffix);
        name.into()
    }
}

/// Whether the file's last line has no end.
fn is_cut(file: &File, size: u64) -> io::Result<bool> {
    let Some(last) = size.checked_sub(1) else { return Ok(false) };
    let mut byte = [b'\n'];
    file.read_at(&mut byte, last)?;
    Ok(byte != *b"\n")
}
