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

use super::{Ledger, Memory, Watch, bytes_of};
use crate::backing::fsdax::{SliceFile, SliceFolder, busy, left};
use crate::backing::{self, Backing, BackingError, DaxError};
use crate::free::{self, Evidence, Hold, Verdict};
use crate::region::{Region, Slice};
use crate::scrub;

fn failed(region: &Region, source: DaxError) -> BackingError {
    BackingError::SliceFile { region: region.name.clone(), source }
}

fn span(region: &Region, slice: &Slice) -> Result<Span<InRegion>, BackingError> {
    let none =
        |()| failed(region, DaxError::at("name", Path::new("a file"))(io::ErrorKind::InvalidInput.into()));
    bytes_of(slice).ok_or(()).map_err(none)
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

/// Fails while this process still waits for pages of `named`, which is `file`.
fn expect_idle(region: &Region, file: &SliceFile, named: &File) -> Result<(), BackingError> {
    let unknown = |source| failed(region, DaxError::at("identify", Path::new("the file"))(source));
    if busy::is_awaited(named).map_err(unknown)? {
        return Err(in_use(region, file, Evidence::of(Hold::BusyPages).to_vec()));
    }
    Ok(())
}

/// Waits until nothing refers to a page of `file`, which is `backing`.
fn expect_no_references(
    region: &Region,
    file: &SliceFile,
    backing: &dyn Backing,
) -> Result<(), BackingError> {
    busy::wait(backing).map_err(|source| match source.kind() {
        io::ErrorKind::TimedOut => in_use(region, file, Evidence::of(Hold::BusyPages).to_vec()),
        _ => failed(region, DaxError::at("wait for pages of", Path::new("a file"))(source)),
    })
}

/// The file of `slice`, by name only.
///
/// # Errors
/// [`BackingError`]: `InUse` while this process still waits for pages of it.
pub(super) fn name(region: &Region, slice: &Slice) -> Result<Box<dyn Backing>, BackingError> {
    let (folder, file) = find(region, slice)?;
    let named = folder.name(&file).map_err(|source| failed(region, source))?;
    expect_idle(region, &file, &named)?;
    backing::adopt(region, slice, named)
}

/// The file of `slice`, which its owner returns and no process has, for its scrub.
///
/// # Errors
/// [`BackingError`]: `InUse` while something refers to a page of it.
pub(super) fn reclaim(region: &Region, slice: &Slice) -> Result<Box<dyn Backing>, BackingError> {
    let (folder, file) = find(region, slice)?;
    let opened = folder.reclaim(&file).map_err(|source| failed(region, source))?;
    let backing = backing::adopt(region, slice, opened)?;
    expect_no_references(region, &file, backing.as_ref())?;
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
///
/// # Errors
/// [`BackingError`].
pub(super) fn set_aside(region: &Region, slice: &Slice) -> Result<(), BackingError> {
    let (folder, file) = find(region, slice)?;
    folder.set_aside(&file).map_err(|source| failed(region, source))
}

/// Fails while a process has `file`, or the kernel a reference to a page of it that this process waits for.
fn expect_unused(region: &Region, folder: &SliceFolder, file: &SliceFile) -> Result<(), BackingError> {
    let named = folder.name(file).map_err(|source| failed(region, source))?;
    expect_idle(region, file, &named)?;
    // The kernel counts descriptions, in flight as well; `/proc` shows descriptors that are none.
    match free::look_at_file(&named, 0..file.span.size(), Vec::new()) {
        Verdict::Free => Ok(()),
        Verdict::InUse { evidence, .. } => Err(in_use(region, file, evidence)),
    }
}

/// Whether a process has a file of `slice`. What cannot be found out counts as used.
pub(super) fn is_in_use(region: &Region, slice: &Slice) -> bool {
    let look = || -> Result<(), BackingError> {
        let folder = SliceFolder::of(region)?;
        let files = folder.overlapping(span(region, slice)?).map_err(|source| failed(region, source))?;
        files.iter().try_for_each(|file| expect_unused(region, &folder, file))
    };
    look().is_err()
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
    let failed = |source| failed(region, source);
    let folder = SliceFolder::of(region)?;
    for file in folder.overlapping(span(region, slice)?).map_err(failed)? {
        expect_unused(region, &folder, &file)?;
        let opened = folder.reclaim(&file).map_err(failed)?;
        let backing = left(region, &file, opened);
        let backing =
            backing.map_err(|source| failed(DaxError::at("measure", Path::new("a left file"))(source)))?;
        let is_bad = match backing {
            Some(backing) => {
                expect_no_references(region, &file, backing.as_ref())?;
                scrub_left(memory, region, &file, backing.as_ref(), watch)?
            }
            None => false,
        };
        if is_bad { folder.set_aside(&file) } else { folder.remove(&file) }.map_err(failed)?;
    }
    Ok(())
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
    let is_bad = !scrubbed.bad.is_empty();
    let leftover =
        |source| BackingError::Leftover { region: region.name.clone(), bytes, source: Box::new(source) };
    scrubbed.end.map(|()| is_bad).map_err(leftover)
}

/// Bytes of `region` that files have: of living owners, and left.
///
/// # Errors
/// [`BackingError`].
pub(super) fn named(region: &Region) -> Result<SpanSet<InRegion>, BackingError> {
    let files = SliceFolder::of(region)?.files().map_err(|source| failed(region, source))?;
    Ok(files.iter().map(|file| file.span).collect())
}

impl Ledger {
    /// Slices of `region` by their first byte, with how much of each no page of 2 MiB can map because of where its blocks lie.
    /// None of a region with files that this process cannot look at.
    #[must_use]
    pub fn small_pages(&self, region: &Region) -> Vec<(Offset, ByteSize)> {
        let small = || -> Option<Vec<_>> {
            let folder = self.folder(region)?;
            let files = folder.files().ok()?;
            let small = files.iter().map(|file| Some((file.span.start(), folder.small_pages(file).ok()?)));
            small.collect()
        };
        small()
            .unwrap_or_default()
            .into_iter()
            .filter(|(_, bytes)| *bytes > 0)
            .map(|(at, bytes)| (at, ByteSize::new(bytes)))
            .collect()
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
