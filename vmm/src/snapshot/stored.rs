//! A snapshot that was written, as its reader finds it: untrusted, bounded, and checked before a machine is made.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use serde::de::DeserializeOwned;

use super::error::{RestoreError, RestoreReason};
use super::format::{
    FORMAT, MACHINE, MANIFEST, MEMORY, Manifest, MemoryPiece, PAGE, STATE, Version, digest, mark, total,
};

/// Most bytes of `snapshot.json` and `machine.json`: a configuration has no more.
const MAX_SMALL: u64 = 1 << 20;
/// Most bytes of `state.json`: 254 vCPUs and 255 devices need a quarter of it.
const MAX_STATE: u64 = 256 << 20;

/// An open snapshot with the digests that its manifest has.
#[derive(Debug)]
pub(crate) struct StoredSnapshot {
    path: PathBuf,
    machine: Vec<u8>,
    state: Vec<u8>,
    memory: File,
    pieces: Vec<MemoryPiece>,
}

impl StoredSnapshot {
    /// Opens and checks the snapshot in the folder `path`.
    ///
    /// # Errors
    /// [`RestoreError`].
    pub(crate) fn open(path: &Path) -> Result<Self, RestoreError> {
        Self::read(path).map_err(|reason| reason.of(path))
    }

    fn read(path: &Path) -> Result<Self, RestoreReason> {
        let folder =
            rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let folder = folder.map_err(|error| file(MANIFEST)(error.into()))?;
        let open = |name| opened(&folder, name).map_err(file(name));
        let read = |name, most| open(name).and_then(|file| bytes(file, most).map_err(self::file(name)));
        let manifest = read(MANIFEST, MAX_SMALL)?;
        let Version { format: found } = json(MANIFEST, &manifest)?;
        if found != FORMAT {
            return Err(RestoreReason::Format { found, known: FORMAT });
        }
        let manifest: Manifest = json(MANIFEST, &manifest)?;
        let host = std::env::consts::ARCH;
        if manifest.architecture != host {
            let found = manifest.architecture.escape_debug().take(16).collect();
            return Err(RestoreReason::Architecture { found, host });
        }
        let checked = |name, most, expected: &[u8]| match read(name, most)? {
            bytes if digest(&bytes) == expected => Ok(bytes),
            _ => Err(RestoreReason::Changed { name }),
        };
        let machine = checked(MACHINE, MAX_SMALL, &manifest.machine)?;
        let state = checked(STATE, MAX_STATE, &manifest.state)?;
        let memory = open(MEMORY)?;
        check_memory(&memory, &manifest)?;
        Ok(Self { path: path.to_owned(), machine, state, memory, pieces: manifest.memory })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The configuration of its machine.
    pub(crate) fn machine(&self) -> &[u8] {
        &self.machine
    }

    /// The state of its machine.
    ///
    /// # Errors
    /// [`RestoreError`]: another form.
    pub(crate) fn state<T: DeserializeOwned>(&self) -> Result<T, RestoreError> {
        json(STATE, &self.state).map_err(|reason| reason.of(&self.path))
    }

    /// Whether only root and this user can change the memory file while it is mapped.
    pub(crate) fn is_ours(&self) -> bool {
        let user = rustix::process::geteuid().as_raw();
        self.memory
            .metadata()
            .is_ok_and(|file| (file.uid() == 0 || file.uid() == user) && file.mode() & 0o022 == 0)
    }

    /// The memory file, and the pieces that it has one after another.
    pub(crate) fn memory(&self) -> (&File, &[MemoryPiece]) {
        (&self.memory, &self.pieces)
    }
}

fn file(name: &'static str) -> impl Fn(io::Error) -> RestoreReason {
    move |source| RestoreReason::File { name, source }
}

fn json<T: DeserializeOwned>(name: &'static str, bytes: &[u8]) -> Result<T, RestoreReason> {
    serde_json::from_slice(bytes).map_err(|source| RestoreReason::Json { name, source })
}

/// The regular file `name` of `folder`, open for reading.
fn opened(folder: &impl std::os::fd::AsFd, name: &str) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::openat(folder, name, flags, Mode::empty())?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("not a regular file")),
    }
}

/// All bytes of `file`, `most` at most.
fn bytes(file: File, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    let fits = u64::try_from(bytes.len()).is_ok_and(|length| length <= most);
    if fits { Ok(bytes) } else { Err(io::ErrorKind::FileTooLarge.into()) }
}

fn check_memory(memory: &File, manifest: &Manifest) -> Result<(), RestoreReason> {
    let end = total(&manifest.memory).ok_or(RestoreReason::Memory)?;
    let mark = mark(&manifest.id);
    let length = end.checked_add(PAGE as u64).ok_or(RestoreReason::Memory)?;
    let mut last = [0; PAGE];
    let has_length = memory.metadata().map_err(file(MEMORY))?.len() == length;
    let is_read = has_length && memory.read_exact_at(&mut last, end).is_ok();
    if is_read && last == mark { Ok(()) } else { Err(RestoreReason::Memory) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_format_is_refused_by_its_number_whatever_else_it_has() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(MANIFEST), r#"{"format":2,"other":{}}"#).unwrap();
        let error = StoredSnapshot::open(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with("it has format 2, and this program reads format 1"), "{error}");
    }
}
