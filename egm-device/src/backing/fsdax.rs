//! A file per slice on a file system that maps its medium directly, so that a slice's file reaches no other slice.
//!
//! ```text
//!  create: new file ─► all blocks ─► immutable ─► the owner's        name: first byte and bytes in the region, in hexadecimal
//!  return: no other description ─► no reference to a page ─► zeros on the medium ─► empty ─► deleted
//!                                                            └─ a page is bad ─► set aside as bad-…
//! ```
//! A file with a name is bytes that an owner may have left: names outlive kills, boots and records. The folder is the ledger's
//! alone, and an immutable file is neither opened for writing again nor truncated, extended or punched by a holder of its
//! descriptor. Its mappings stay writable.

pub(crate) mod busy;
pub(crate) mod rules;

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use egm_address::{ByteSize, InRegion, Span, align_up};
use rustix::fs::{
    AtFlags, Dev, FallocateFlags, IFlags, Mode, OFlags, RenameFlags, fallocate, ioctl_getflags,
    ioctl_setflags, makedev, openat, renameat_with, unlinkat,
};
use rustix::io::Errno;

use super::device::Window;
use super::error::DaxError;
use super::{Backing, BackingError, OpenResult, boxed};
use crate::mapping::base_page;
use crate::region::{Region, RegionKind, Slice, SliceFile};
use crate::sys;

/// Bytes that are allocated at a time: ext4 aligns such pieces for pages of this size where it has room.
const STEP: u64 = 2 << 20;

/// Bytes of the file that shows whether a file system can be written.
const PROBE: usize = 4096;

/// Prefix of the name of a file with a bad page. No grant uses its blocks again.
const BAD: &str = "bad-";

/// Flags of every open: none follows a link, and none waits for the lease of another process.
const OPEN: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);

/// The folder of a region.
#[derive(Debug)]
pub(crate) struct SliceFolder {
    path: PathBuf,
    folder: File,
}

/// The bytes of `slice` by a new file. No other file may have any of them.
pub(super) fn create(region: &Region, slice: &Slice) -> OpenResult {
    let failed = |source| failed(region, source);
    let span = slice.span();
    let span = span.ok_or_else(|| {
        failed(DaxError::at("name", Path::new("a file"))(io::ErrorKind::InvalidInput.into()))
    })?;
    let folder = SliceFolder::of(region)?;
    let file = folder.create(&SliceFile::of(span)).map_err(failed)?;
    Window::new(region, slice, file).map(boxed)
}

/// The error of a step with the file of a slice of `region`.
pub(crate) fn failed(region: &Region, source: DaxError) -> BackingError {
    BackingError::SliceFile { region: region.name.clone(), source }
}

impl SliceFolder {
    /// The folder of `region`.
    pub(crate) fn of(region: &Region) -> Result<Self, BackingError> {
        match &region.kind {
            RegionKind::Fsdax { folder, device: (major, minor) } => {
                Self::at(folder, makedev(*major, *minor)).map_err(|source| failed(region, source))
            }
            _ => {
                let none = DaxError::at("find the folder of", Path::new(&region.name));
                Err(failed(region, none(io::ErrorKind::InvalidInput.into())))
            }
        }
    }

    /// The folder at `path`, on the file system with the number `device`.
    fn at(path: &Path, device: Dev) -> Result<Self, DaxError> {
        let folder = rustix::fs::open(path, OPEN | OFlags::DIRECTORY, Mode::empty());
        let folder = File::from(folder.map_err(|error| DaxError::at("open", path)(error.into()))?);
        let facts = rules::FolderFacts::of(&folder).map_err(DaxError::at("identify", path))?;
        match facts.broken_rule(device) {
            None => Ok(Self { path: path.to_owned(), folder }),
            Some(rule) => Err(DaxError::at("use", path)(io::Error::other(rule))),
        }
    }

    fn failed(&self, step: &'static str, file: &SliceFile) -> impl Fn(io::Error) -> DaxError + use<> {
        let path = self.path.join(&file.name);
        move |source| DaxError::at(step, &path)(source)
    }

    /// The files of slices, by place.
    pub(crate) fn files(&self) -> Result<Vec<SliceFile>, DaxError> {
        let mut files: Vec<_> =
            self.entries()?.filter_map(|entry| SliceFile::parse(&entry.file_name())).collect();
        files.sort_by_key(|file| file.span.start());
        Ok(files)
    }

    fn entries(&self) -> Result<impl Iterator<Item = fs::DirEntry> + use<>, DaxError> {
        let entries = fs::read_dir(format!("/proc/self/fd/{}", self.folder.as_raw_fd()));
        Ok(entries.map_err(DaxError::at("list", &self.path))?.filter_map(Result::ok))
    }

    /// The files that have any of `span`.
    pub(crate) fn overlapping(&self, span: Span<InRegion>) -> Result<Vec<SliceFile>, DaxError> {
        let mut files = self.files()?;
        files.retain(|file| file.span.overlaps(span));
        Ok(files)
    }

    /// The file of exactly `span`, if there is one.
    pub(crate) fn find(&self, span: Span<InRegion>) -> Result<Option<SliceFile>, DaxError> {
        Ok(self.overlapping(span)?.into_iter().find(|file| file.span == span))
    }

    /// A new `file` with all of its blocks, which no holder of its descriptor changes.
    fn create(&self, file: &SliceFile) -> Result<File, DaxError> {
        let flags = OPEN | OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        let made = openat(&self.folder, &file.name, flags, Mode::RUSR | Mode::WUSR);
        let made = File::from(made.map_err(|error| self.failed("create", file)(error.into()))?);
        let filled = self.fill(file, &made);
        if filled.is_err() {
            // The first error is the reason; what is left is removed before the next grant of these bytes.
            drop(self.remove(file));
        }
        filled.map(|()| made)
    }

    fn fill(&self, file: &SliceFile, made: &File) -> Result<(), DaxError> {
        if !rules::is_dax(made).map_err(self.failed("identify", file))? {
            let why = "its file system is not mounted with \"dax\"";
            return Err(self.failed("map", file)(io::Error::other(why)));
        }
        allocate(made, file.span.size()).map_err(self.failed("allocate", file))?;
        seal(made, file.span.size()).map_err(self.failed("make immutable", file))?;
        // The name, which shows after a crash that these bytes are dirty.
        self.folder.sync_all().map_err(self.failed("store", file))
    }

    /// `file` by a descriptor that is no description to the kernel and opens nothing.
    pub(crate) fn name(&self, file: &SliceFile) -> Result<File, DaxError> {
        self.open(file, OFlags::PATH)
    }

    /// `file` for the scrub of what its earlier owner left. No other description of it may exist.
    pub(crate) fn reclaim(&self, file: &SliceFile) -> Result<File, DaxError> {
        self.unseal(file)?;
        self.open(file, OFlags::RDWR)
    }

    /// Deletes `file`, empty: descriptors that open nothing keep none of its blocks. The file system zeroes those before another
    /// file has them.
    ///
    /// # Errors
    /// [`DaxError`]: one of [`DaxError::is_timeout`] while something refers to a page of it.
    pub(crate) fn remove(&self, file: &SliceFile) -> Result<(), DaxError> {
        // A call that waits for pages has the file locked in the kernel.
        if busy::is_awaited(&self.name(file)?).map_err(self.failed("identify", file))? {
            return Err(self.failed("empty", file)(io::ErrorKind::TimedOut.into()));
        }
        let opened = self.reclaim(file)?;
        if !egm_address::fault!("slice-file-not-emptied") {
            busy::empty(&opened).map_err(self.failed("empty", file))?;
        }
        unlinkat(&self.folder, &file.name, AtFlags::empty())
            .map_err(|error| self.failed("delete", file)(error.into()))
    }

    /// Sets `file`, which has a bad page, aside: under its new name no grant uses it, and its blocks are never free.
    ///
    /// # Errors
    /// [`DaxError`], also where the file system cannot be written: then the page may be sound.
    pub(crate) fn set_aside(&self, file: &SliceFile) -> Result<(), DaxError> {
        self.probe()?;
        let metadata = self.name(file)?.metadata().map_err(self.failed("identify", file))?;
        self.unseal(file)?;
        let name = format!("{BAD}{}-{:x}", file.name, metadata.ino());
        renameat_with(&self.folder, &file.name, &self.folder, &name, RenameFlags::NOREPLACE)
            .map_err(|error| self.failed("set aside", file)(error.into()))?;
        self.folder.sync_all().map_err(self.failed("store the new name of", file))
    }

    /// Stores a block in a file without a name: a full or failed file system raises SIGBUS for sound pages.
    fn probe(&self) -> Result<(), DaxError> {
        let store = || -> io::Result<()> {
            let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
            let probe = File::from(openat(&self.folder, ".", flags, Mode::RUSR | Mode::WUSR)?);
            probe.write_all_at(&[0; PROBE], 0)?;
            probe.sync_all()
        };
        store().map_err(DaxError::at("write a file in", &self.path))
    }

    /// Bytes of the files that [`SliceFolder::set_aside`] kept.
    pub(crate) fn bad_bytes(&self) -> Result<u64, DaxError> {
        let bad =
            self.entries()?.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(BAD.as_bytes()));
        let sizes = bad.filter_map(|entry| Some(entry.metadata().ok()?.len()));
        Ok(sizes.fold(0, u64::saturating_add))
    }

    fn unseal(&self, file: &SliceFile) -> Result<(), DaxError> {
        let opened = self.open(file, OFlags::RDONLY)?;
        let clear = || ioctl_setflags(&opened, ioctl_getflags(&opened)?.difference(IFlags::IMMUTABLE));
        match clear() {
            // A file system without such flags has no immutable file.
            Ok(()) | Err(Errno::NOTTY | Errno::OPNOTSUPP) => Ok(()),
            Err(error) => Err(self.failed("make mutable", file)(error.into())),
        }
    }

    fn open(&self, file: &SliceFile, access: OFlags) -> Result<File, DaxError> {
        let opened = openat(&self.folder, &file.name, OPEN | access, Mode::empty());
        let opened = File::from(opened.map_err(|error| self.failed("open", file)(error.into()))?);
        match rules::broken_by(&opened, &self.folder).map_err(self.failed("identify", file))? {
            None => Ok(opened),
            Some(rule) => Err(self.failed("use", file)(io::Error::other(rule))),
        }
    }
}

/// Bytes of `backing`, a slice's new file, that no page of 2 MiB can map because of where its blocks lie.
pub(crate) fn small_pages(backing: &dyn Backing) -> io::Result<u64> {
    let huge = sys::extents(backing.file())?.iter().map(huge_bytes).fold(0, u64::saturating_add);
    Ok(backing.size().saturating_sub(huge))
}

/// Bytes of `extent` that pages of 2 MiB can map.
fn huge_bytes(extent: &sys::Extent) -> u64 {
    let sys::Extent { logical, physical, length } = *extent;
    if logical % STEP != physical % STEP {
        return 0;
    }
    let (start, end) = (align_up(logical, STEP), logical.saturating_add(length));
    let end = end.saturating_sub(end % STEP);
    start.map_or(0, |start| end.saturating_sub(start))
}

/// All that a left `file`, opened as [`SliceFolder::reclaim`] does, has; `None` for one without a byte.
pub(crate) fn left(region: &Region, file: &SliceFile, opened: File) -> io::Result<Option<Box<dyn Backing>>> {
    let length = opened.metadata()?.len();
    let size = align_up(length, base_page()).unwrap_or(length);
    let (region_name, offset, size) = (region.name.clone(), file.span.start().get(), ByteSize::new(size));
    let slice = Slice { region: region_name, offset, size };
    let window = (length > 0).then(|| Window::new(region, &slice, opened)).transpose();
    Ok(window.map_err(io::Error::other)?.map(boxed))
}

/// Gives `file` its `size` and every block of it.
fn allocate(file: &File, size: u64) -> io::Result<()> {
    for at in (0..size).step_by(usize::try_from(STEP).unwrap_or(usize::MAX)) {
        let step = STEP.min(size.saturating_sub(at));
        match fallocate(file, FallocateFlags::empty(), at, step) {
            Ok(()) => {}
            // Files without extents: what is written has its blocks.
            Err(Errno::OPNOTSUPP) => {
                let zeroes = vec![0; usize::try_from(step).map_err(io::Error::other)?];
                file.write_all_at(&zeroes, at)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    file.sync_all()?;
    let metadata = file.metadata()?;
    if metadata.len() == size && metadata.blocks().saturating_mul(512) >= size {
        return Ok(());
    }
    Err(io::Error::other("the file system left holes in it"))
}

/// Makes `file` of `size` bytes immutable. A file system that truncates it all the same is refused.
fn seal(file: &File, size: u64) -> io::Result<()> {
    if egm_address::fault!("slice-file-mutable") {
        return Ok(());
    }
    ioctl_setflags(file, ioctl_getflags(file)?.union(IFlags::IMMUTABLE))?;
    match file.set_len(size) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => Ok(()),
        Err(error) => Err(error),
        Ok(()) => Err(io::Error::other("its file system truncates an immutable file that is open: use ext4")),
    }
}

#[cfg(test)]
mod tests;
