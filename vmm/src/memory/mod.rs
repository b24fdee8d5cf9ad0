//! Guest RAM: the plan's backings, opened and mapped for devices and KVM. This is an unsafe module.
//!
//! Why it exists: `vm-memory` takes a mapping of ours only by raw pointer, and an IOMMU keeps one.
//! What callers may rely on: every region of [`GuestRam::memory`] points into a [`Mapping`] that the same
//! [`GuestRam`] holds, and no user outlives it: the machine drops its devices first. A [`SharedPiece`] is a whole mapping.
#![expect(unsafe_code, reason = "vm-memory takes our mappings by raw pointer, and an IOMMU keeps one")]

mod error;
mod huge;
mod kept;
mod saved;

use std::fs::File;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

use egm_address::{CpuSet, Gpa, Span};
use egm_device::{Anonymous, Backing, HugeFiles, HugePage, Mapping, prefault};
use egm_vfio::memory::{HostBacking, HostMemory};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

pub(crate) use self::error::MemoryError;
pub(crate) use self::huge::Present;
pub(crate) use self::kept::Beginning;
pub(crate) use self::saved::MemoryImage;
use crate::config::PageSize;
use crate::kept::KeptFiles;
use crate::kvm::Vm;
use crate::plan::{Allocation, BackingPlan, Plan};
use crate::reserve::Leases;
use crate::snapshot::MemoryPiece;

/// Callback, from any thread: bytes that are present so far, and bytes in total.
pub(crate) type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// A piece and its backing in the plan.
struct Planned<'a> {
    piece: &'a Piece,
    backing: &'a BackingPlan,
}

/// A contiguous piece of guest memory: one mapping, one KVM slot.
pub struct Piece {
    /// Where the guest sees it.
    pub gpa: Gpa,
    /// Where this process sees it.
    pub mapping: Arc<Mapping>,
    /// The same, for KVM and devices.
    pub shared: Arc<SharedPiece>,
    /// Index of its backing in the plan.
    pub backing: usize,
    /// Offset of its first byte in the backing.
    pub offset: u64,
}

/// A piece in the form that KVM and devices use.
pub struct SharedPiece {
    mapping: Arc<Mapping>,
    source: Source,
    /// Offset of its first byte in the backing's file.
    offset: u64,
    made_of: MadeOf,
}

/// Where the bytes of a backing are.
#[derive(Clone)]
enum Source {
    File(Arc<dyn Backing>),
    /// In private memory of this process.
    Private,
}

impl Source {
    fn is_invisible(&self) -> bool {
        matches!(self, Self::File(backing) if backing.is_invisible())
    }
}

/// Kind of a backing's file.
#[derive(Debug, Clone, Copy)]
enum MadeOf {
    /// Pages, as any process can have them: memfd, tmpfs, hugetlb.
    Pages,
    /// Pages of this VM.
    GuestMemfd,
    /// A device, or no file.
    Other,
}

impl SharedPiece {
    fn new(
        mapping: &Arc<Mapping>,
        source: &Source,
        extent: Extent,
        of_vm: bool,
    ) -> Result<Self, MemoryError> {
        let descriptor = |source| MemoryError::Descriptor { at: Gpa::new(extent.gpa), source };
        let (offset, made_of) = match source {
            Source::Private => (0, MadeOf::Other),
            Source::File(backing) => {
                let is_file = backing.file().metadata().map_err(descriptor)?.is_file();
                let made_of = match (of_vm, is_file) {
                    (true, _) => MadeOf::GuestMemfd,
                    (false, true) => MadeOf::Pages,
                    (false, false) => MadeOf::Other,
                };
                (backing.offset().saturating_add(extent.offset), made_of)
            }
        };
        Ok(Self { mapping: Arc::clone(mapping), source: source.clone(), offset, made_of })
    }
}

// SAFETY: a `Mapping` is readable and writable at one place until it is dropped, and `self` holds it; it is shared, or private to
// this process and never copied. References to its bytes are never made.
unsafe impl HostMemory for SharedPiece {
    fn address(&self) -> NonNull<u8> {
        self.mapping.start()
    }
    fn size(&self) -> u64 {
        u64::try_from(self.mapping.size()).unwrap_or(u64::MAX)
    }
    fn backing(&self) -> HostBacking<'_> {
        let Source::File(backing) = &self.source else { return HostBacking::Pages };
        let (file, offset) = (backing.file().as_fd(), self.offset);
        match self.made_of {
            _ if backing.is_invisible() => HostBacking::Invisible,
            MadeOf::Pages => HostBacking::File { file, offset },
            MadeOf::GuestMemfd => HostBacking::GuestMemfd { file, offset },
            MadeOf::Other => HostBacking::Pages,
        }
    }
}

/// All of a guest's RAM.
pub struct GuestRam {
    /// For devices: regions that point into the mappings of `pieces`.
    pub memory: GuestMemoryMmap,
    /// For KVM: ascending by guest address, a slot each.
    pub pieces: Vec<Piece>,
    /// In the plan's order; `None` for a slice that is a device, which has its own.
    backings: Vec<Option<Source>>,
}

/// A piece to map: guest address, bytes, backing, offset in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Extent {
    gpa: u64,
    size: u64,
    backing: usize,
    offset: u64,
}

impl GuestRam {
    /// Opens and maps all guest memory; slices of regions come from `leases`, and guest_memfd from `vm`. Its bytes are those
    /// of `beginning`, or zero.
    ///
    /// # Errors
    /// `MemoryError`; everything is released.
    pub(crate) fn open(
        plan: &Plan,
        leases: &Leases,
        vm: &Vm,
        beginning: Beginning<'_>,
    ) -> Result<Self, MemoryError> {
        let image = beginning.image();
        let mut opener = Opener { leases, vm, kept: beginning.kept(), files: None };
        let backings = plan.backings.iter().map(|backing| match backing.device {
            true => Ok(None),
            false => opener.open(backing).map(Some),
        });
        let backings = backings.collect::<Result<Vec<_>, _>>()?;
        let (mut pieces, mut regions) = (Vec::new(), Vec::new());
        let extents = extents(plan);
        let planned = |extent: &Extent| MemoryPiece { gpa: extent.gpa, size: extent.size };
        if let Some(image) = image {
            image.check(&extents.iter().map(planned).collect::<Vec<_>>())?;
        }
        let mut start = 0_u64;
        for extent in extents {
            let described = plan.backings.get(extent.backing).zip(backings.get(extent.backing));
            let described = described.and_then(|(plan, backing)| Some((plan, backing.as_ref()?)));
            let (backing_plan, source) = described.ok_or_else(|| wrong(extent.gpa, "no such backing"))?;
            let mapped = image.filter(|image| !image.copy && matches!(source, Source::Private));
            let mapped = mapped.map(|image| InImage { file: image.file, offset: start });
            let mapping = map(source, backing_plan, extent, mapped)?;
            regions.push(region(source, &mapping, extent)?);
            let shared = Arc::new(SharedPiece::new(&mapping, source, extent, backing_plan.guest_memfd)?);
            let Extent { backing, offset, .. } = extent;
            let piece = Piece { gpa: Gpa::new(extent.gpa), mapping, shared, backing, offset };
            if let Some(image) = image.filter(|_| mapped.is_none()) {
                image.fill(&piece, start).map_err(|source| MemoryError::Image { source })?;
            }
            start = start.saturating_add(extent.size);
            pieces.push(piece);
        }
        let memory = GuestMemoryMmap::from_regions(regions).map_err(|e| wrong(0, &e.to_string()))?;
        Ok(Self { memory, pieces, backings })
    }

    /// Touches the memory that the plan prefaults, or `all`. `near` gives the host CPUs of a backing's nodes;
    /// `progress` receives the bytes touched.
    ///
    /// # Errors
    /// `MemoryError::Prefault`.
    pub fn prefault(
        &self,
        plan: &Plan,
        all: bool,
        near: impl Fn(&BackingPlan) -> Option<CpuSet>,
        progress: Progress<'_>,
    ) -> Result<(), MemoryError> {
        let wanted = self.prefaulted(plan, all);
        if wanted.is_empty() {
            return Ok(());
        }
        let mappings: Vec<_> =
            wanted.iter().map(|planned| (planned.piece.mapping.as_ref(), near(planned.backing))).collect();
        let as_u64 = |bytes| u64::try_from(bytes).unwrap_or(u64::MAX);
        let total = mappings.iter().map(|(mapping, _)| as_u64(mapping.size())).sum();
        prefault(&mappings, &|done| progress(as_u64(done), total)).map_err(|source| {
            let id = wanted.get(source.index).map_or_else(String::new, |planned| planned.backing.id.clone());
            MemoryError::Prefault { id, source }
        })
    }

    /// Huge pages of the host in the memory that [`GuestRam::prefault`] touches; `None` where it touches none.
    pub fn present(&self, plan: &Plan, all: bool) -> Option<Present> {
        let pieces = self.prefaulted(plan, all);
        (!pieces.is_empty()).then(|| Present::of(&pieces))
    }

    fn prefaulted<'a>(&'a self, plan: &'a Plan, all: bool) -> Vec<Planned<'a>> {
        // Memory without struct pages is complete from the start, and the kernel refuses to touch it for us.
        let has_pages = |piece: &Piece| {
            self.backings.get(piece.backing).and_then(Option::as_ref).is_some_and(|b| !b.is_invisible())
        };
        let planned = |piece: &'a Piece| Some(Planned { piece, backing: plan.backings.get(piece.backing)? });
        let all_pieces = self.pieces.iter().filter_map(planned);
        let is_touched =
            |planned: &Planned<'_>| (all || planned.backing.prefault) && has_pages(planned.piece);
        all_pieces.filter(is_touched).collect()
    }
}

/// The plan's RAM and its windows that are memory, neighbours in guest and backing merged: fewer mappings, fewer slots, and
/// huge pages across the seam.
fn extents(plan: &Plan) -> Vec<Extent> {
    let extent = |span: Span<_>, backing, offset| Extent {
        gpa: span.start().get(),
        size: span.size(),
        backing,
        offset,
    };
    let mut all: Vec<_> = plan.memory.iter().map(|m| extent(m.span, m.backing, m.offset)).collect();
    all.extend(plan.window_memory().map(|memory| extent(memory.span, memory.backing, memory.offset)));
    all.sort_unstable_by_key(|e| e.gpa);
    let mut merged: Vec<Extent> = Vec::with_capacity(all.len());
    for next in all {
        match merged.last_mut() {
            Some(last)
                if last.gpa.saturating_add(last.size) == next.gpa
                    && last.backing == next.backing
                    && last.offset.saturating_add(last.size) == next.offset =>
            {
                last.size = last.size.saturating_add(next.size);
            }
            _ => merged.push(next),
        }
    }
    merged
}

/// Memory of a slice that is a device, on its nodes and, with `prefault`, made present by the processors `near` it.
/// Placement and pages outlast the mapping of this process.
///
/// # Errors
/// [`MemoryError`].
pub(crate) fn bytes(
    plan: &BackingPlan,
    leases: &Leases,
    vm: &Vm,
    near: Option<CpuSet>,
) -> Result<Arc<dyn Backing>, MemoryError> {
    let source = Opener { leases, vm, kept: None, files: None }.open(plan)?;
    let Source::File(backing) = &source else { return Err(wrong(0, "memory behind a BAR is a file")) };
    let mapping = map(&source, plan, Extent { gpa: 0, size: plan.size, backing: 0, offset: 0 }, None)?;
    if plan.prefault && !backing.is_invisible() {
        let prefaulted = prefault(&[(mapping.as_ref(), near)], &|_| {});
        prefaulted.map_err(|source| MemoryError::Prefault { id: plan.id.clone(), source })?;
    }
    Ok(Arc::clone(backing))
}

/// Opens backings; one mount serves all of them.
struct Opener<'a> {
    leases: &'a Leases,
    vm: &'a Vm,
    kept: Option<&'a KeptFiles>,
    files: Option<HugeFiles>,
}

impl Opener<'_> {
    fn open(&mut self, plan: &BackingPlan) -> Result<Source, MemoryError> {
        if plan.region.is_some() {
            let lease = self.leases.get(&plan.id).ok_or_else(|| wrong(0, "a slice was not taken"))?;
            return Ok(Source::File(lease as Arc<dyn Backing>));
        }
        if plan.guest_memfd {
            return Ok(file(Anonymous::of_vm(&plan.id, self.vm.as_fd(), plan.size)?));
        }
        if let Some(kept) = self.kept {
            let part = kept.part(&KeptFiles::memory(&plan.id));
            let memory = part.ok_or_else(|| wrong(0, "its memory is not kept"))?.first();
            let memory = memory.map_err(|source| MemoryError::Image { source })?;
            return Ok(file(Anonymous::adopt(&plan.id, memory, plan.size, plan.page_size.bytes())?));
        }
        let huge = match plan.page_size {
            PageSize::Size2M => Some(HugePage::Size2M),
            PageSize::Size1G => Some(HugePage::Size1G),
            PageSize::Auto | PageSize::Size4K => None,
        };
        Ok(match plan.pages.as_ref().map(|pages| pages.allocation) {
            Some(Allocation::Private) => Source::Private,
            Some(Allocation::HugeFile) => file(self.files()?.create(&plan.id, plan.size)?),
            Some(Allocation::Memfd) | None => file(Anonymous::new(&plan.id, plan.size, huge)?),
        })
    }

    fn files(&mut self) -> Result<&HugeFiles, MemoryError> {
        let files = self.files.take().map_or_else(HugeFiles::mount, Ok)?;
        Ok(self.files.insert(files))
    }
}

fn file(memory: Anonymous) -> Source {
    Source::File(Arc::new(memory))
}

/// A place in the memory file of a snapshot.
#[derive(Clone, Copy)]
struct InImage<'a> {
    file: &'a File,
    offset: u64,
}

/// Maps `extent` of `source`; private memory has the bytes of `image`, if there is one.
fn map(
    source: &Source,
    plan: &BackingPlan,
    extent: Extent,
    image: Option<InImage<'_>>,
) -> Result<Arc<Mapping>, MemoryError> {
    let error = |source| MemoryError::Mapping { id: plan.id.clone(), source };
    let mapping = match (source, image) {
        (Source::File(backing), _) => Mapping::new(backing.as_ref(), extent.offset, extent.size, extent.gpa),
        (Source::Private, None) => Mapping::private(extent.size, extent.gpa),
        (Source::Private, Some(InImage { file, offset })) => {
            Mapping::private_of(file, offset, extent.size, extent.gpa)
        }
    };
    let mut mapping = mapping.map_err(error)?;
    if let Some(nodes) = &plan.host_nodes {
        mapping.bind(nodes).map_err(error)?;
    }
    // A file has no huge pages, and the advice would have the kernel read one at each touch.
    if !plan.page_size.is_hugetlb() && image.is_none() {
        let page = plan.pages.as_ref().map_or(0, |pages| pages.size.get());
        let page = usize::try_from(page).unwrap_or(0);
        mapping.advise_huge((plan.page_size == PageSize::Auto).then_some(page));
    }
    Ok(Arc::new(mapping))
}

fn region(source: &Source, mapping: &Mapping, extent: Extent) -> Result<GuestRegionMmap, MemoryError> {
    let descriptor = |source| MemoryError::Descriptor { at: Gpa::new(extent.gpa), source };
    let builder = MmapRegionBuilder::new(mapping.size()).with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
    let builder = match source {
        Source::File(backing) => {
            let file = backing.file().try_clone().map_err(descriptor)?;
            let at = backing.offset().saturating_add(extent.offset);
            let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
            builder.with_mmap_flags(flags).with_file_offset(FileOffset::new(file, at))
        }
        Source::Private => {
            builder.with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE)
        }
    };
    // SAFETY: pointer and size are a whole mapping, readable and writable, held by the same `GuestRam`.
    let builder = unsafe { builder.with_raw_mmap_pointer(mapping.as_ptr()) };
    let region = builder.build().map_err(|e| wrong(extent.gpa, &e.to_string()))?;
    GuestRegionMmap::new(region, GuestAddress(extent.gpa)).ok_or_else(|| wrong(extent.gpa, "it wraps"))
}

fn wrong(at: u64, what: &str) -> MemoryError {
    MemoryError::Plan { at: Gpa::new(at), what: what.to_owned() }
}
