//! A region with bytes that persist between unprivileged owners: a plain file in the place of `/dev/mem`.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use egm_address::{ByteSize, InRegion, Offset, Span, SpanSet};
use egm_device::Backing;
use egm_device::backing::{BackingError, RetiredListError};
use egm_device::carve::plan::Request;
use egm_device::ledger::{Identity, Ledger, Memory, Paths, Progress, Watch};
use egm_device::owner::Owner;
use egm_device::region::{DaxFiles, Region, RegionKind, Slice};
use egm_device::retired::Retired;
use egm_device::scrub::{Cause, ScrubError};

#[path = "../window/mod.rs"]
mod window;

pub(crate) use window::Window;

pub(crate) const PAGE: u64 = 4096;

/// Memory that is a plain file, opened anew by each owner.
pub(crate) struct PlainFile(pub(crate) PathBuf);

impl Memory for PlainFile {
    fn open(&self, region: &Region, slice: &Slice, _: &Watch<'_>) -> Result<Box<dyn Backing>, BackingError> {
        let file = OpenOptions::new().read(true).write(true).open(&self.0).map_err(|source| {
            BackingError::Open { region: region.name.clone(), device: self.0.clone(), source }
        })?;
        Ok(Box::new(Window(file, slice.offset, slice.size.get())))
    }

    /// By writing, page after page: the tests check order and not speed.
    fn zero(
        &self,
        backing: &dyn Backing,
        at: Offset,
        spans: &SpanSet<InRegion>,
        watch: &Watch<'_>,
    ) -> Result<(), ScrubError> {
        let mut done = Vec::new();
        let end = |done: &[_], cause| ScrubError { done: done.iter().copied().collect(), cause };
        for span in spans.iter() {
            let from = span.start().get() - at.get() + backing.offset();
            for page in (0..span.size()).step_by(4096) {
                if watch.cancel.load(std::sync::atomic::Ordering::Relaxed) {
                    return Err(end(&done, Cause::Cancelled));
                }
                let size = PAGE.min(span.size() - page);
                let zeroes = vec![0; usize::try_from(size).unwrap()];
                backing
                    .file()
                    .write_all_at(&zeroes, from + page)
                    .map_err(|source| end(&done, Cause::Guard(source)))?;
                let so_far = u64::try_from(done.len() + 1).unwrap() * PAGE;
                (watch.progress)(Progress::Scrubbing { done: so_far, of: spans.size() });
                done.push(Span::new(Offset::new(span.start().get() + page), size).unwrap());
            }
        }
        Ok(())
    }
}

/// Memory that its process opens once, for all its slices, as a broker does with an EGM device; the kernel lets others
/// open it too, and scrubs nothing when they do.
pub(crate) struct OneDescription {
    memory: PlainFile,
    file: File,
}

impl OneDescription {
    pub(crate) fn open(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        Self { memory: PlainFile(path.to_owned()), file }
    }
}

impl Memory for OneDescription {
    fn open(&self, region: &Region, slice: &Slice, _: &Watch<'_>) -> Result<Box<dyn Backing>, BackingError> {
        let file = self.file.try_clone().map_err(|source| BackingError::Open {
            region: region.name.clone(),
            device: self.memory.0.clone(),
            source,
        })?;
        Ok(Box::new(Window(file, slice.offset, slice.size.get())))
    }

    fn retired(&self, _: &Region, _: &dyn Backing) -> Result<Retired, RetiredListError> {
        Ok(Retired::default())
    }

    fn zero(
        &self,
        backing: &dyn Backing,
        at: Offset,
        spans: &SpanSet<InRegion>,
        watch: &Watch<'_>,
    ) -> Result<(), ScrubError> {
        self.memory.zero(backing, at, spans, watch)
    }
}

/// A region of `pages` pages in a fresh file in `folder`, every byte of which an earlier owner has written.
pub(crate) fn region(folder: &Path, pages: u64) -> (Region, Arc<dyn Memory>) {
    let path = folder.join("memory");
    if !path.exists() {
        std::fs::write(&path, vec![0xee; usize::try_from(pages * PAGE).unwrap()]).unwrap();
    }
    let region = Region {
        name: "test".to_owned(),
        kind: RegionKind::Devdax { device: path.clone(), files: DaxFiles::Static },
        node: None,
        size: ByteSize::new(pages * PAGE),
        page_size: ByteSize::new(PAGE),
        base: None,
        functions: Vec::new(),
        retired: Retired::default(),
    };
    (region, Arc::new(PlainFile(path)))
}

/// [`region`] as an EGM device that this process opens once.
pub(crate) fn egm_region(folder: &Path, pages: u64) -> (Region, Arc<dyn Memory>) {
    let (region, _) = region(folder, pages);
    let path = folder.join("memory");
    let memory = Arc::new(OneDescription::open(&path));
    (Region { kind: RegionKind::Egm { device: path }, ..region }, memory)
}

pub(crate) fn identity() -> Identity {
    Identity { machine: Some("host".to_owned()), boot: "boot".to_owned() }
}

pub(crate) fn ledger(folder: &Path) -> Ledger {
    Ledger::open(Paths::below(folder), identity()).unwrap()
}

pub(crate) fn request(name: &str, pages: u64) -> Request {
    Request::new(pages * PAGE, Owner::this(name))
}

pub(crate) fn set(page: u64, pages: u64) -> SpanSet<InRegion> {
    SpanSet::from_iter([Span::new(Offset::new(page * PAGE), pages * PAGE).unwrap()])
}

fn read(backing: &dyn Backing) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(backing.size()).unwrap()];
    backing.file().read_exact_at(&mut bytes, backing.offset()).unwrap();
    bytes
}

/// Fills the slice with `word`.
pub(crate) fn fill(backing: &dyn Backing, word: u64) {
    let bytes = word.to_le_bytes().repeat(usize::try_from(backing.size() / 8).unwrap());
    backing.file().write_all_at(&bytes, backing.offset()).unwrap();
}

pub(crate) fn is_full_of(backing: &dyn Backing, word: u64) -> bool {
    read(backing).chunks_exact(8).all(|bytes| bytes == word.to_le_bytes())
}

pub(crate) fn is_zero(backing: &dyn Backing) -> bool {
    is_full_of(backing, 0)
}
