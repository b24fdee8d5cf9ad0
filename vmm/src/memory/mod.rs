//! Guest RAM: the plan's backings, opened, mapped and made into what devices and KVM take. This is an unsafe room.
//!
//! Why it exists: `vm-memory` takes a mapping of ours only by raw pointer, and an IOMMU keeps one.
//! What callers may rely on: every region of [`GuestRam::memory`] points into a [`Mapping`] that the same
//! [`GuestRam`] holds, and nobody outlives it: the machine drops its devices first. A [`Lent`] is a whole mapping.
#![expect(unsafe_code, reason = "vm-memory takes our mappings by raw pointer, and an IOMMU keeps one")]

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

use egm_address::{CpuSet, Gpa, Span};
use egm_device::{
    Anonymous, AnonymousError, Backing, GuestMemfdError, HugePage, Mapping, MappingError, PrefaultError,
    prefault,
};
use egm_vfio::memory::{Behind, HostMemory};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use crate::config::PageSize;
use crate::error::{Blame, Report};
use crate::kvm::Vm;
use crate::plan::{BackingPlan, Plan};
use crate::resources::Leases;

/// Why guest memory cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A backing could not be made.
    #[error("cannot get guest memory")]
    Backing(#[from] AnonymousError),
    /// The machine has no memory of its own.
    #[error("cannot get memory that is the machine's own")]
    GuestMemfd(#[from] GuestMemfdError),
    /// A backing could not be mapped.
    #[error("cannot map guest memory \"{id}\"")]
    Mapping {
        /// The backing.
        id: String,
        /// The reason.
        #[source]
        source: MappingError,
    },
    /// Not all memory could be touched.
    #[error("cannot make guest memory \"{id}\" present")]
    Prefault {
        /// The backing.
        id: String,
        /// The reason.
        #[source]
        source: PrefaultError,
    },
    /// No descriptor for a piece of memory.
    #[error("cannot open guest memory at {at:#x} once more")]
    Descriptor {
        /// Where.
        at: Gpa,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The plan contradicts itself.
    #[error("guest memory at {at:#x} contradicts itself: {what}")]
    Plan {
        /// Where.
        at: Gpa,
        /// What is wrong.
        what: String,
    },
}

impl Report for MemoryError {
    fn blame(&self) -> Blame {
        match self {
            Self::Plan { .. } => Blame::Internal,
            _ => Blame::Host,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Backing(AnonymousError::Pool { missing, page, .. }) => Some(format!(
                "raise /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages by {missing}, or set \
                 \"memory\": {{ \"page_size\": \"auto\" }}",
                page >> 10
            )),
            Self::GuestMemfd(_) => Some("give \"region\" a list that ends in \"memfd\"".to_owned()),
            Self::Mapping { .. } | Self::Prefault { .. } => {
                Some("lower \"memory\".\"size\", or free memory on the host (free -h)".to_owned())
            }
            Self::Descriptor { .. } => Some("raise the limit of open files: ulimit -n 65536".to_owned()),
            _ => None,
        }
    }
}

/// Hears, from any thread, how many bytes of how many are present.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// A contiguous piece of guest memory: one mapping, one KVM slot.
pub struct Piece {
    /// Where the guest sees it.
    pub gpa: Gpa,
    /// Where we do.
    pub mapping: Arc<Mapping>,
    /// The same, for KVM and devices.
    pub lent: Arc<Lent>,
    /// Which of the plan's backings it is of.
    pub backing: usize,
    /// Offset of its first byte in the backing.
    pub offset: u64,
}

/// A piece as KVM and devices are lent it.
pub struct Lent {
    mapping: Arc<Mapping>,
    backing: Arc<dyn Backing>,
    /// Offset of its first byte in the backing's file.
    offset: u64,
    made_of: MadeOf,
}

/// What a backing's file is.
#[derive(Debug, Clone, Copy)]
enum MadeOf {
    /// Pages, as any process can have them: memfd, hugetlb.
    Pages,
    /// Pages of this VM.
    GuestMemfd,
    /// A device.
    Device,
}

impl Lent {
    fn new(
        mapping: &Arc<Mapping>,
        backing: &Arc<dyn Backing>,
        extent: Extent,
        of_vm: bool,
    ) -> Result<Self, MemoryError> {
        let descriptor = |source| MemoryError::Descriptor { at: Gpa::new(extent.gpa), source };
        let made_of = match (of_vm, backing.file().metadata().map_err(descriptor)?.is_file()) {
            (true, _) => MadeOf::GuestMemfd,
            (false, true) => MadeOf::Pages,
            (false, false) => MadeOf::Device,
        };
        Ok(Self {
            mapping: Arc::clone(mapping),
            backing: Arc::clone(backing),
            offset: backing.offset().saturating_add(extent.offset),
            made_of,
        })
    }
}

// SAFETY: a `Mapping` is readable, writable and shared, at one place until it is dropped, and `self` holds it. References
// to its bytes are never made.
unsafe impl HostMemory for Lent {
    fn address(&self) -> NonNull<u8> {
        self.mapping.start()
    }
    fn size(&self) -> u64 {
        u64::try_from(self.mapping.size()).unwrap_or(u64::MAX)
    }
    fn behind(&self) -> Behind<'_> {
        let (file, offset) = (self.backing.file().as_fd(), self.offset);
        match self.made_of {
            _ if self.backing.is_invisible() => Behind::Invisible,
            MadeOf::Pages => Behind::File { file, offset },
            MadeOf::GuestMemfd => Behind::GuestMemfd { file, offset },
            MadeOf::Device => Behind::Pages,
        }
    }
}

/// All of a guest's RAM.
pub struct GuestRam {
    /// For devices.
    pub memory: GuestMemoryMmap,
    /// For KVM, ascending.
    pub pieces: Vec<Piece>,
    /// In the order of the plan's; those of devices are theirs.
    backings: Vec<Option<Arc<dyn Backing>>>,
}

/// What is mapped: guest address, bytes, backing, offset in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Extent {
    gpa: u64,
    size: u64,
    backing: usize,
    offset: u64,
}

impl GuestRam {
    /// Opens and maps all guest memory; slices of regions come from `leases`, and guest_memfd from `vm`.
    ///
    /// # Errors
    /// [`MemoryError`]; everything is given back.
    pub fn open(plan: &Plan, leases: &Leases, vm: &Vm) -> Result<Self, MemoryError> {
        let backings = plan.backings.iter().map(|backing| match backing.device {
            true => Ok(None),
            false => open_backing(backing, leases, vm).map(Some),
        });
        let backings = backings.collect::<Result<Vec<_>, _>>()?;
        let mut pieces = Vec::new();
        let mut regions = Vec::new();
        for extent in extents(plan) {
            let described = plan.backings.get(extent.backing).zip(backings.get(extent.backing));
            let described = described.and_then(|(plan, backing)| Some((plan, backing.as_ref()?)));
            let (backing_plan, backing) = described.ok_or_else(|| wrong(extent.gpa, "no such backing"))?;
            let mapping = map(backing.as_ref(), backing_plan, extent)?;
            regions.push(region(backing.as_ref(), &mapping, extent)?);
            let lent = Arc::new(Lent::new(&mapping, backing, extent, backing_plan.guest_memfd)?);
            let Extent { backing, offset, .. } = extent;
            pieces.push(Piece { gpa: Gpa::new(extent.gpa), mapping, lent, backing, offset });
        }
        let memory = GuestMemoryMmap::from_regions(regions).map_err(|e| wrong(0, &e.to_string()))?;
        Ok(Self { memory, pieces, backings })
    }

    /// Touches memory: what the plan says, or `all`. `near` gives the host CPUs of a backing's nodes; `progress` hears of
    /// what is touched.
    ///
    /// # Errors
    /// [`MemoryError::Prefault`].
    pub fn prefault(
        &self,
        plan: &Plan,
        all: bool,
        near: impl Fn(&BackingPlan) -> Option<CpuSet>,
        progress: Progress<'_>,
    ) -> Result<(), MemoryError> {
        let wanted: Vec<_> = self
            .pieces
            .iter()
            .filter_map(|piece| plan.backings.get(piece.backing).map(|backing| (piece, backing)))
            .filter(|(_, backing)| all || backing.prefault)
            // Memory without struct pages is complete from the start, and the kernel refuses to touch it for us.
            .filter(|(piece, _)| {
                self.backings.get(piece.backing).and_then(Option::as_ref).is_some_and(|b| !b.is_invisible())
            })
            .collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let mappings: Vec<_> =
            wanted.iter().map(|(p, backing)| (p.mapping.as_ref(), near(backing))).collect();
        let as_u64 = |bytes| u64::try_from(bytes).unwrap_or(u64::MAX);
        let total = mappings.iter().map(|(mapping, _)| as_u64(mapping.size())).sum();
        prefault(&mappings, &|done| progress(as_u64(done), total)).map_err(|source| {
            let id = wanted.get(source.index).map_or_else(String::new, |(_, backing)| backing.id.clone());
            MemoryError::Prefault { id, source }
        })
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
    all.extend(plan.window_memory().map(|(span, backing, offset)| extent(span, backing, offset)));
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

/// The memory of a slice that is a device: on its nodes and, where the plan says so, present, by the processors `near` it.
/// Both stay when what this process maps for it goes.
///
/// # Errors
/// [`MemoryError`].
pub fn bytes(
    plan: &BackingPlan,
    leases: &Leases,
    vm: &Vm,
    near: Option<CpuSet>,
) -> Result<Arc<dyn Backing>, MemoryError> {
    let backing = open_backing(plan, leases, vm)?;
    let mapping = map(backing.as_ref(), plan, Extent { gpa: 0, size: plan.size, backing: 0, offset: 0 })?;
    if plan.prefault && !backing.is_invisible() {
        let prefaulted = prefault(&[(mapping.as_ref(), near)], &|_| {});
        prefaulted.map_err(|source| MemoryError::Prefault { id: plan.id.clone(), source })?;
    }
    Ok(backing)
}

fn open_backing(plan: &BackingPlan, leases: &Leases, vm: &Vm) -> Result<Arc<dyn Backing>, MemoryError> {
    if plan.region.is_some() {
        let lease = leases.get(&plan.id).ok_or_else(|| wrong(0, "a slice was not taken"))?;
        return Ok(Arc::clone(lease) as Arc<dyn Backing>);
    }
    if plan.guest_memfd {
        return Ok(Arc::new(Anonymous::of_vm(&plan.id, vm.as_fd(), plan.size)?));
    }
    let huge = match plan.page_size {
        PageSize::Size2M => Some(HugePage::Size2M),
        PageSize::Size1G => Some(HugePage::Size1G),
        PageSize::Auto | PageSize::Size4K => None,
    };
    Ok(Arc::new(Anonymous::new(&plan.id, plan.size, huge)?))
}

fn map(backing: &dyn Backing, plan: &BackingPlan, extent: Extent) -> Result<Arc<Mapping>, MemoryError> {
    let error = |source| MemoryError::Mapping { id: plan.id.clone(), source };
    let mapping = Mapping::new(backing, extent.offset, extent.size, extent.gpa).map_err(error)?;
    if let Some(nodes) = &plan.host_nodes {
        mapping.bind(nodes).map_err(error)?;
    }
    if !plan.page_size.is_hugetlb() {
        mapping.advise_huge(plan.page_size == PageSize::Auto);
    }
    Ok(Arc::new(mapping))
}

fn region(backing: &dyn Backing, mapping: &Mapping, extent: Extent) -> Result<GuestRegionMmap, MemoryError> {
    let descriptor = |source| MemoryError::Descriptor { at: Gpa::new(extent.gpa), source };
    let file = backing.file().try_clone().map_err(descriptor)?;
    let at = backing.offset().saturating_add(extent.offset);
    let builder = MmapRegionBuilder::new(mapping.size())
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
        .with_file_offset(FileOffset::new(file, at));
    // SAFETY: pointer and size are a whole mapping, readable, writable and shared, held by the same `GuestRam`.
    let builder = unsafe { builder.with_raw_mmap_pointer(mapping.as_ptr()) };
    let region = builder.build().map_err(|e| wrong(extent.gpa, &e.to_string()))?;
    GuestRegionMmap::new(region, GuestAddress(extent.gpa)).ok_or_else(|| wrong(extent.gpa, "it wraps"))
}

fn wrong(at: u64, what: &str) -> MemoryError {
    MemoryError::Plan { at: Gpa::new(at), what: what.to_owned() }
}
