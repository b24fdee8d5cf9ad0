//! Slices that are files with names: what earlier owners left of them.
//!
//! A name is made before an owner has the bytes and deleted after their scrub, so a file without a living owner holds bytes
//! that nothing has scrubbed, even if the record calls them clean. The kernel counts the descriptions of a file: at none, no process
//! reaches it, and none can open it again. References to its pages are the kernel's own (`backing/fsdax/busy.rs`).
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::Path;

use egm_address::{ByteSize, InRegion, Offset, Span, SpanSet};

use super::{Ledger, LedgerError, Memory, Watch, space_of};
use crate::backing::fsdax::{SliceFolder, busy, failed, left};
use crate::backing::{self, Backing, BackingError, DaxError, OpenResult};
use crate::free::{self, Evidence, Hold, Verdict};
use crate::region::{Region, Slice, SliceFile};
use crate::scrub::{self, Cause};

fn span(region: &Region, slice: &Slice) -> Result<Span<InRegion>, BackingError> {
    let none =
        |()| failed(region, DaxError::at("name", Path::new("a file"))(io::ErrorKind::InvalidInput.into()));
    slice.span().ok_or(()).map_err(none)
}

/// The folder of `region`, and the file of `slice` in it.
fn find(region: &Region, slice: &Slice) -> Result<(SliceFolder, SliceFile), BackingError> {
    let folder = SliceFolder::of(region)?;
    let file = folder.find(span(region, slice)?).map_err(|source| failed(region, source))?;
    let none = || DaxError::at("find the file of", Path::new("the slice"))(io::ErrorKind::NotFound.into());
    let file = file.ok_or_else(|| failed(region, none()))?;
    Ok((folder, file))
}

/// The error for `file` in use.
fn in_use(region: &Region, file: &SliceFile, evidence: Vec<Evidence>) -> BackingError {
    BackingError::InUse { evidence, region: region.name.clone(), bytes: file.span }
}

/// The limit of waits for pages during the work that `watch` is about.
fn limit<'a>(watch: &Watch<'a>) -> busy::WaitTimeout<'a> {
    busy::WaitTimeout::new(watch.pace.is_some(), watch.cancel)
}

/// The error for a wait for pages of `file` that failed.
fn not_idle(region: &Region, file: &SliceFile, source: io::Error) -> BackingError {
    match source.kind() {
        io::ErrorKind::TimedOut => in_use(region, file, Evidence::of(Hold::BusyPages).to_vec()),
        io::ErrorKind::Interrupted => cancelled(region, file),
        _ => failed(region, DaxError::at("wait for pages of", Path::new("a file"))(source)),
    }
}

fn cancelled(region: &Region, file: &SliceFile) -> BackingError {
    let device = format!("the file of {}", file.span).into();
    BackingError::Cancelled { region: region.name.clone(), device }
}

/// Waits until no thread of this process waits for pages of `named`, which is `file`.
fn expect_idle(
    region: &Region,
    file: &SliceFile,
    named: &File,
    watch: &Watch<'_>,
) -> Result<(), BackingError> {
    let joined = busy::join(named, file.span.size(), limit(watch));
    joined.map_err(|source| not_idle(region, file, source))
}

/// Waits until nothing refers to a page of `file`, which is `backing`.
fn expect_no_references(
    region: &Region,
    file: &SliceFile,
    backing: &dyn Backing,
    watch: &Watch<'_>,
) -> Result<(), BackingError> {
    busy::wait(backing, limit(watch)).map_err(|source| not_idle(region, file, source))
}

/// The file of `slice`, by name only.
///
/// # Errors
/// [`BackingError`]: `InUse` while this process still waits for pages of it.
pub(super) fn name(region: &Region, slice: &Slice, watch: &Watch<'_>) -> OpenResult {
    let (folder, file) = find(region, slice)?;
    let named = folder.name(&file).map_err(|source| failed(region, source))?;
    expect_idle(region, &file, &named, watch)?;
    backing::adopt(region, slice, named)
}

/// The file of `slice`, which its owner returns and no process has, for its scrub.
///
/// # Errors
/// [`BackingError`]: `InUse` while something refers to a page of it.
pub(super) fn reclaim(region: &Region, slice: &Slice, watch: &Watch<'_>) -> OpenResult {
    let (folder, file) = find(region, slice)?;
    let opened = folder.reclaim(&file).map_err(|source| failed(region, source))?;
    let backing = backing::adopt(region, slice, opened)?;
    expect_no_references(region, &file, backing.as_ref(), watch)?;
    Ok(backing)
}

/// Deletes the file of `slice`, which is scrubbed, or which no owner has had.
pub(super) fn release(region: &Region, slice: &Slice) {
    // The next grant of these bytes repeats what fails here, and reports it.
    let _ = SliceFolder::of(region).and_then(|folder| {
        let file = folder.find(span(region, slice)?).map_err(|source| failed(region, source))?;
        file.map_or(Ok(()), |file| folder.remove(&file).map_err(|source| failed(region, source)))
    });
}

/// Sets the file of `slice` aside, which has a bad page.
pub(super) fn set_aside(region: &Region, slice: &Slice) -> Result<(), BackingError> {
    let (folder, file) = find(region, slice)?;
    folder.set_aside(&file).map_err(|source| failed(region, source))
}

/// Fails while a process has `file`, or this one still waits for a page of it; returns it by name.
fn expect_unused(
    region: &Region,
    folder: &SliceFolder,
    file: &SliceFile,
    watch: &Watch<'_>,
) -> Result<File, BackingError> {
    let named = folder.name(file).map_err(|source| failed(region, source))?;
    expect_idle(region, file, &named, watch)?;
    // The kernel counts descriptions, in flight as well; `/proc` shows descriptors that are none.
    match free::look_at_file(&named, 0..file.span.size(), Vec::new()) {
        Verdict::Free => Ok(named),
        Verdict::InUse { evidence, .. } => Err(in_use(region, file, evidence)),
    }
}

/// Whether a process has a file of `slice`, or the kernel may refer to a page of one: a wait for such pages begins here, and
/// they are in use until it ends. What cannot be found out counts as used.
pub(super) fn is_in_use(region: &Region, slice: &Slice, watch: &Watch<'_>) -> bool {
    let look = || -> Result<(), BackingError> {
        let folder = SliceFolder::of(region)?;
        let files = folder.overlapping(span(region, slice)?).map_err(|source| failed(region, source))?;
        // Each wait begins, whatever the first one finds.
        let looks: Vec<_> = files.iter().map(|file| look_at(region, &folder, file, watch)).collect();
        looks.into_iter().collect()
    };
    look().is_err()
}

/// Fails while a process has `file`, or the kernel may refer to a page of it.
fn look_at(
    region: &Region,
    folder: &SliceFolder,
    file: &SliceFile,
    watch: &Watch<'_>,
) -> Result<(), BackingError> {
    let named = expect_unused(region, folder, file, watch)?;
    let unknown = |source| failed(region, DaxError::at("identify", Path::new("the file"))(source));
    if busy::is_over(&named).map_err(unknown)? {
        return Ok(());
    }
    drop(named);
    reach(region, folder, file)?
        .map_or(Ok(()), |backing| expect_no_references(region, file, backing.as_ref(), watch))
}

/// All that `file` has, which no process has; `None` for one without a byte.
fn reach(
    region: &Region,
    folder: &SliceFolder,
    file: &SliceFile,
) -> Result<Option<Box<dyn Backing>>, BackingError> {
    let opened = folder.reclaim(file).map_err(|source| failed(region, source))?;
    let backing = left(region, file, opened);
    backing.map_err(|source| failed(region, DaxError::at("measure", Path::new("a left file"))(source)))
}

/// Scrubs and deletes every file that has bytes of `slice`: the ledger's lock on them shows that each is left over.
///
/// # Errors
/// [`BackingError::InUse`] for a file in use, [`BackingError::Leftover`] for one that keeps its bytes.
pub(super) fn clear(
    memory: &dyn Memory,
    region: &Region,
    slice: &Slice,
    watch: &Watch<'_>,
) -> Result<(), BackingError> {
    let folder = SliceFolder::of(region)?;
    for file in folder.overlapping(span(region, slice)?).map_err(|source| failed(region, source))? {
        clear_file(memory, region, &folder, &file, watch).map_err(|error| match error {
            BackingError::InUse { .. } | BackingError::Cancelled { .. } | BackingError::Leftover { .. } => {
                error
            }
            error => leftover(region, &file, error),
        })?;
    }
    Ok(())
}

fn clear_file(
    memory: &dyn Memory,
    region: &Region,
    folder: &SliceFolder,
    file: &SliceFile,
    watch: &Watch<'_>,
) -> Result<(), BackingError> {
    expect_unused(region, folder, file, watch)?;
    let is_bad = match reach(region, folder, file)? {
        Some(backing) => {
            expect_no_references(region, file, backing.as_ref(), watch)?;
            scrub_left(memory, region, file, backing.as_ref(), watch)?
        }
        None => false,
    };
    let ended = if is_bad { folder.set_aside(file) } else { folder.remove(file) };
    ended.map_err(|source| failed(region, source))
}

fn leftover(
    region: &Region,
    file: &SliceFile,
    why: impl std::error::Error + Send + Sync + 'static,
) -> BackingError {
    BackingError::Leftover { region: region.name.clone(), bytes: file.span, source: Box::new(why) }
}

/// Makes `backing`, all that a left `file` has, zero; returns whether a page of it is bad.
fn scrub_left(
    memory: &dyn Memory,
    region: &Region,
    file: &SliceFile,
    backing: &dyn Backing,
    watch: &Watch<'_>,
) -> Result<bool, BackingError> {
    let bytes = file.span;
    let all = Span::new(bytes.start(), backing.size()).into_iter().collect();
    let zero = |todo: &SpanSet<InRegion>| memory.zero(backing, bytes.start(), todo, watch);
    let scrubbed = scrub::around_bad(all, zero);
    let is_bad = scrubbed.is_bad();
    scrubbed.end.map(|()| is_bad).map_err(|error| match error.cause {
        Cause::Cancelled => cancelled(region, file),
        _ => leftover(region, file, error),
    })
}

/// Bytes of `region` that files have: of living owners, and left.
pub(super) fn named(region: &Region) -> Result<SpanSet<InRegion>, BackingError> {
    let files = SliceFolder::of(region)?.files().map_err(|source| failed(region, source))?;
    Ok(files.iter().map(|file| file.span).collect())
}

impl Ledger {
    /// Slices of `region` by their first byte, with how much of each no page of 2 MiB can map because of where its blocks lie,
    /// as recorded at their grants: a look at a file that is in use could wait for its owner.
    pub fn small_pages(&self, region: &Region) -> Result<Vec<(Offset, ByteSize)>, LedgerError> {
        let space = space_of(region)?;
        let record = self.look()?.0;
        let small = record.grants.iter().filter(|entry| entry.space == space.name && entry.small_pages > 0);
        let small = small
            .filter_map(|entry| Some((space.offset(entry.span)?.start(), ByteSize::new(entry.small_pages))));
        Ok(small.collect())
    }

    /// Bytes of the file system of `region` that no grant uses, because a page of their file is bad.
    #[must_use]
    pub fn set_aside(&self, region: &Region) -> ByteSize {
        let bytes = self.folder(region).and_then(|folder| folder.bad_bytes().ok());
        ByteSize::new(bytes.unwrap_or_default())
    }

    /// The folder of `region`, where it has one that this process can look at.
    fn folder(&self, region: &Region) -> Option<SliceFolder> {
        let is_here = region.kind.has_slice_files() && self.0.memory.opens_devices;
        SliceFolder::of(region).ok().filter(|_| is_here)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use rustix::fs::{major, minor};

    use super::*;
    use crate::backing::fsdax::rules::is_dax;
    use crate::backing::tests::{region, slice};
    use crate::ledger::HostMemory;
    use crate::region::RegionKind;

    const SIZE: u64 = 2 << 20;

    /// A region in a folder on any medium, with a file of its first slice; or a line with the reason for none.
    fn left_file() -> Option<(tempfile::TempDir, Region, std::path::PathBuf)> {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: the folder of a region is root's");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        let number = folder.path().metadata().unwrap().dev();
        let kind = RegionKind::Fsdax { folder: folder.path().into(), device: (major(number), minor(number)) };
        let path = folder.path().join(format!("{:016x}-{SIZE:016x}", 0));
        File::create_new(&path).unwrap().set_len(SIZE).unwrap();
        Some((folder, region(kind, 4 * SIZE, SIZE), path))
    }

    #[test]
    fn a_review_waits_for_pages_of_a_file_that_an_earlier_process_had_quarantined() {
        let Some((_keep, region, path)) = left_file() else { return };
        let (slice, file) = (slice(0, SIZE), File::open(&path).unwrap());
        if !is_dax(&file).unwrap() {
            println!("skipped: the file system of {} does not map its medium directly", path.display());
            return;
        }
        assert!(is_in_use(&region, &slice, &Watch::unobserved()), "this process has it");
        drop(file);
        let _ = is_in_use(&region, &slice, &Watch::without_waiting());
        let named = |watch: &Watch<'_>| {
            expect_unused(
                &region,
                &SliceFolder::of(&region)?,
                &SliceFile::parse(path.file_name().unwrap()).unwrap(),
                watch,
            )
        };
        let named = named(&Watch::unobserved()).unwrap();
        assert!(busy::is_over(&named).unwrap(), "the wait that the review began");
        assert!(!is_in_use(&region, &slice, &Watch::without_waiting()));
    }

    #[test]
    fn a_file_that_breaks_a_rule_is_left_with_its_bytes_and_its_name() {
        let Some((keep, region, path)) = left_file() else { return };
        std::fs::hard_link(&path, keep.path().join("other")).unwrap();
        let memory = HostMemory::without_devices();
        let error = clear(&memory, &region, &slice(0, 2 * SIZE), &Watch::unobserved()).unwrap_err();
        let BackingError::Leftover { bytes, .. } = error else { panic!("{error}") };
        assert_eq!((bytes.start(), bytes.size()), (Offset::new(0), SIZE));
        assert!(clear(&memory, &region, &slice(SIZE, SIZE), &Watch::unobserved()).is_ok());
    }
}
