//! The record's file, replaced as a whole or not at all.
//!
//! Each step is a method of [`Disk`], so that tests can make every single one fail, or be the last.
#![forbid(unsafe_code)]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::record::LIMIT;

/// The folders of the ledger's files.
#[derive(Debug, Clone)]
pub struct Paths {
    /// For files that outlive a boot: `/var/lib/egm-device`.
    pub state: PathBuf,
    /// For files that do not, shared by all processes that share the memory: `/run/egm-device`.
    pub run: PathBuf,
    /// Root of the host with the memory that the ledger records.
    pub(super) root: PathBuf,
}

impl Paths {
    /// The paths of the host at `root`.
    #[must_use]
    pub fn below(root: &Path) -> Self {
        Self {
            state: root.join("var/lib/egm-device"),
            run: root.join("run/egm-device"),
            root: root.to_owned(),
        }
    }
}

/// A file of the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LedgerFile {
    /// Grants, clean bytes and retired pages.
    Record,
    /// The next record, of either kind, until it is whole.
    New,
    /// A second record, of the bad pages only, so that they survive damage to the first.
    Retired,
    /// The last record that was not trusted.
    Aside,
    /// The newest record's number, in memory: it reveals an old record that was put back.
    Newest,
}

/// The steps that make up reading and replacing.
pub trait Disk: Send + Sync {
    /// The whole file, or its first bytes when it is longer than any record; `None` when there is none.
    fn read(&self, name: LedgerFile) -> io::Result<Option<Vec<u8>>>;

    /// Makes `bytes` the file's content.
    ///
    /// # Errors
    /// The kernel's; the file may have any part of them.
    fn write(&self, name: LedgerFile, bytes: &[u8]) -> io::Result<()>;

    /// Waits until the file's content would survive a loss of power.
    fn sync(&self, name: LedgerFile) -> io::Result<()>;

    /// Makes `to` a second name of the file `from`, replacing any file of that name.
    fn link(&self, from: LedgerFile, to: LedgerFile) -> io::Result<()>;

    /// Renames `from` to `to`, and replaces any file of that name.
    fn rename(&self, from: LedgerFile, to: LedgerFile) -> io::Result<()>;

    /// Waits until names would survive a loss of power.
    fn sync_names(&self) -> io::Result<()>;
}

/// Replaces the record by `bytes` with number `sequence`; with `keep`, keeps the old one aside.
///
/// Until the rename the old record is there, afterwards the new one. The number follows last: a record that is newer
/// than the number is trusted, an older one is not.
pub(super) fn replace(disk: &dyn Disk, bytes: &[u8], sequence: u64, keep: bool) -> io::Result<()> {
    if keep {
        disk.link(LedgerFile::Record, LedgerFile::Aside)?;
    }
    put(disk, LedgerFile::Record, bytes)?;
    disk.write(LedgerFile::Newest, format!("{sequence:020}\n").as_bytes())
}

/// Makes `bytes` the content of file `to`, as a whole or not at all.
pub(super) fn put(disk: &dyn Disk, to: LedgerFile, bytes: &[u8]) -> io::Result<()> {
    disk.write(LedgerFile::New, bytes)?;
    disk.sync(LedgerFile::New)?;
    disk.rename(LedgerFile::New, to)?;
    disk.sync_names()
}

/// The newest record's number, if this boot wrote one.
pub(super) fn newest(disk: &dyn Disk) -> io::Result<Option<u64>> {
    let text = disk.read(LedgerFile::Newest)?;
    Ok(text.and_then(|text| std::str::from_utf8(&text).ok()?.trim_end().parse().ok()))
}

#[derive(Debug)]
pub(super) struct LedgerFolder(pub(super) Paths);

impl LedgerFolder {
    fn path(&self, name: LedgerFile) -> PathBuf {
        match name {
            LedgerFile::Record => self.0.state.join("ledger.json"),
            LedgerFile::New => self.0.state.join("ledger.json.new"),
            LedgerFile::Retired => self.0.state.join("retired.json"),
            LedgerFile::Aside => self.0.state.join("ledger.json.aside"),
            LedgerFile::Newest => self.0.run.join("ledger.newest"),
        }
    }
}

/// Opens a ledger file for reading and writing, made if missing; readable by root only, because it names tenants.
pub(super) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

impl Disk for LedgerFolder {
    fn read(&self, name: LedgerFile) -> io::Result<Option<Vec<u8>>> {
        let file = match File::open(self.path(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(u64::try_from(LIMIT).unwrap_or(u64::MAX).saturating_add(1)).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    fn write(&self, name: LedgerFile, bytes: &[u8]) -> io::Result<()> {
        // Written over and then cut: a file that keeps its length needs no new space on a full disk.
        let mut file = open(&self.path(name))?;
        file.write_all(bytes)?;
        file.set_len(u64::try_from(bytes.len()).map_err(io::Error::other)?)
    }

    fn sync(&self, name: LedgerFile) -> io::Result<()> {
        File::open(self.path(name))?.sync_all()
    }

    fn link(&self, from: LedgerFile, to: LedgerFile) -> io::Result<()> {
        match fs::remove_file(self.path(to)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::hard_link(self.path(from), self.path(to))
    }

    fn rename(&self, from: LedgerFile, to: LedgerFile) -> io::Result<()> {
        fs::rename(self.path(from), self.path(to))
    }

    fn sync_names(&self) -> io::Result<()> {
        File::open(&self.0.state)?.sync_all()
    }
}
