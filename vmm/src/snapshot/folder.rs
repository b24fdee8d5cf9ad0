//! A folder for a new snapshot: complete, or without a trace.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use super::error::{SaveReason, SnapshotError};
use super::format::{FORMAT, MACHINE, MANIFEST, MEMORY, Manifest, MemoryPiece, STATE, digest, mark, total};

/// Appended to the name of a file that is not complete.
const PARTIAL: &str = ".partial";
/// Flags of a folder.
const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// Bytes of a snapshot's number.
const ID: usize = 16;

/// The contents of a snapshot but for the memory.
pub(crate) struct Contents<'a> {
    pub(crate) machine: &'a str,
    pub(crate) state: &'a [u8],
    pub(crate) memory: Vec<MemoryPiece>,
}

/// A folder that takes a snapshot. Unless that is complete, dropping it removes the files, and a folder that it made.
pub(crate) struct NewSnapshot {
    path: PathBuf,
    folder: File,
    is_own: bool,
    /// Names of files that were made.
    made: Vec<String>,
}

impl NewSnapshot {
    /// Makes the folder `path`, or takes one without a snapshot: libvirt has a file of its own there.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub(crate) fn begin(path: &Path) -> Result<Self, SnapshotError> {
        let failed = |reason| SnapshotError { folder: path.to_owned(), reason };
        let file = |step| move |source| SaveReason::File { step, name: "the folder".to_owned(), source };
        let made = DirBuilder::new().mode(0o700).create(path);
        let is_own = match made {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(failed(file("cannot make")(error))),
        };
        let folder = rustix::fs::open(path, FOLDER, Mode::empty()).map_err(|error| {
            if is_own {
                let _ = fs::remove_dir(path);
            }
            failed(file("cannot open")(error.into()))
        })?;
        let new = Self { path: path.to_owned(), folder: folder.into(), is_own, made: Vec::new() };
        for name in [MANIFEST, MEMORY, MACHINE, STATE].map(str::to_owned) {
            for name in [format!("{name}{PARTIAL}"), name] {
                match rustix::fs::statat(&new.folder, &name, AtFlags::SYMLINK_NOFOLLOW) {
                    Err(Errno::NOENT) => {}
                    Ok(_) => return Err(failed(SaveReason::Present { name })),
                    Err(error) => return Err(failed(file("cannot search")(error.into()))),
                }
            }
        }
        Ok(new)
    }

    /// Writes `contents`, and the memory by `write_memory`, which gets an empty file of its full length. The files get their
    /// names once `confirm` agrees.
    ///
    /// # Errors
    /// [`SnapshotError`]; nothing is left in the folder.
    pub(crate) fn write(
        mut self,
        contents: &Contents<'_>,
        write_memory: impl FnOnce(&File) -> io::Result<()>,
        confirm: impl FnOnce() -> Result<(), SaveReason>,
    ) -> Result<(), SnapshotError> {
        let written = self.write_all(contents, write_memory, confirm);
        written.map_err(|reason| SnapshotError { folder: self.path.clone(), reason })
    }

    fn write_all(
        &mut self,
        contents: &Contents<'_>,
        write_memory: impl FnOnce(&File) -> io::Result<()>,
        confirm: impl FnOnce() -> Result<(), SaveReason>,
    ) -> Result<(), SaveReason> {
        let Contents { machine, state, memory } = contents;
        let mut id = [0; ID];
        getrandom(&mut id, GetRandomFlags::empty()).map_err(|error| failed(MANIFEST)(error.into()))?;
        self.write_memory(memory, &id, write_memory)?;
        let manifest = Manifest {
            format: FORMAT,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            architecture: std::env::consts::ARCH.to_owned(),
            id: id.to_vec(),
            machine: digest(machine.as_bytes()),
            state: digest(state),
            memory: memory.clone(),
        };
        let manifest =
            serde_json::to_vec_pretty(&manifest).map_err(|error| failed(MANIFEST)(error.into()))?;
        for (name, bytes) in [(MACHINE, machine.as_bytes()), (STATE, state), (MANIFEST, &manifest)] {
            let mut file = self.make(name)?;
            file.write_all(bytes).and_then(|()| file.sync_all()).map_err(failed(name))?;
        }
        confirm()?;
        // The manifest is the last: until it has its name, there is no snapshot.
        for name in [MEMORY, MACHINE, STATE, MANIFEST] {
            let partial = format!("{name}{PARTIAL}");
            self.rename(&partial, name)?;
            self.made.retain(|made| *made != partial);
            self.made.push(name.to_owned());
        }
        self.folder.sync_all().map_err(failed(MANIFEST))?;
        // One that this user may only write to cannot be synced.
        let parent = rustix::fs::openat(&self.folder, "..", FOLDER, Mode::empty()).ok();
        if let Some(parent) = parent.filter(|_| self.is_own) {
            File::from(parent).sync_all().map_err(failed(MANIFEST))?;
        }
        self.made.clear();
        self.is_own = false;
        Ok(())
    }

    fn write_memory(
        &mut self,
        pieces: &[MemoryPiece],
        id: &[u8],
        write: impl FnOnce(&File) -> io::Result<()>,
    ) -> Result<(), SaveReason> {
        use std::os::unix::fs::FileExt;
        let mark = mark(id);
        let end = total(pieces).ok_or_else(|| failed(MEMORY)(Errno::FBIG.into()))?;
        let size = end.saturating_add(u64::try_from(mark.len()).unwrap_or(0));
        if let Some(limit) = rustix::process::getrlimit(rustix::process::Resource::Fsize).current
            && limit < size
        {
            return Err(SaveReason::FileLimit { size, limit });
        }
        let file = self.make(MEMORY)?;
        let written = file.set_len(size).and_then(|()| write(&file));
        let written = written.and_then(|()| file.write_all_at(&mark, end)).and_then(|()| file.sync_all());
        written.map_err(failed(MEMORY))
    }

    /// Renames a file of the folder, unless another snapshot has come to have `name`.
    fn rename(&self, partial: &str, name: &str) -> Result<(), SaveReason> {
        let folder = &self.folder;
        match rustix::fs::renameat_with(folder, partial, folder, name, RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => Err(SaveReason::Present { name: name.to_owned() }),
            // Some file systems cannot check that at once.
            Err(Errno::INVAL | Errno::NOSYS) => rustix::fs::renameat(folder, partial, folder, name)
                .map_err(|error| failed(name)(error.into())),
            renamed => renamed.map_err(|error| failed(name)(error.into())),
        }
    }

    /// Makes the file `name`, by its name while it is not complete.
    fn make(&mut self, name: &str) -> Result<File, SaveReason> {
        let partial = format!("{name}{PARTIAL}");
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(&self.folder, &partial, flags, Mode::RUSR | Mode::WUSR);
        let file = made.map_err(|error| failed(name)(error.into()))?;
        self.made.push(partial);
        Ok(file.into())
    }
}

fn failed(name: &str) -> impl FnOnce(io::Error) -> SaveReason {
    let name = name.to_owned();
    move |source| SaveReason::File { step: "cannot write", name, source }
}

impl Drop for NewSnapshot {
    fn drop(&mut self) {
        for name in &self.made {
            let _ = rustix::fs::unlinkat(&self.folder, name, AtFlags::empty());
        }
        if self.is_own {
            let _ = fs::remove_dir(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Report;

    const PIECES: [MemoryPiece; 1] = [MemoryPiece { gpa: 0, size: 4096 }];

    fn contents() -> Contents<'static> {
        Contents { machine: "{}\n", state: b"{}", memory: PIECES.to_vec() }
    }

    fn names(path: &Path) -> Vec<String> {
        let entries = fs::read_dir(path).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_snapshot_is_all_its_files_and_takes_no_folder_with_one_of_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("other"), "").unwrap();
        NewSnapshot::begin(&path).unwrap().write(&contents(), |_| Ok(()), || Ok(())).unwrap();
        assert_eq!(names(&path), [MACHINE, MEMORY, "other", MANIFEST, STATE]);
        for name in [MANIFEST, MEMORY, MACHINE, STATE] {
            let error = NewSnapshot::begin(&path).err().unwrap();
            assert!(error.to_string().ends_with(&format!("new: the folder has {name} already")), "{error}");
            fs::remove_file(path.join(name)).unwrap();
        }
        let new = NewSnapshot::begin(&path).unwrap();
        let comes = || {
            fs::write(path.join(MANIFEST), "another snapshot").unwrap();
            Ok(())
        };
        let error = new.write(&contents(), |_| Ok(()), comes).unwrap_err();
        assert!(error.to_string().ends_with("new: the folder has snapshot.json already"), "{error}");
        assert_eq!(names(&path), ["other", MANIFEST]);
    }

    #[test]
    fn a_failure_leaves_nothing_but_a_folder_that_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        let full = |_: &File| Err(io::ErrorKind::StorageFull.into());
        for path in [path.as_path(), folder.path()] {
            let error = NewSnapshot::begin(path).unwrap().write(&contents(), full, || Ok(())).unwrap_err();
            assert!(error.help().unwrap().starts_with("free space"), "{error}");
        }
        let new = NewSnapshot::begin(&path).unwrap();
        new.write(&contents(), |_| Ok(()), || Err(SaveReason::NotPaused)).unwrap_err();
        assert!(names(folder.path()).is_empty());
    }
}
