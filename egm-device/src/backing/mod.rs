//! Backings: the files that hold a slice's bytes.
//!
//! ```text
//! open(region, slice) ──┬─ egm, reserved RAM, device-DAX ─► device.rs     a window of a device file
//!                       ├─ device-DAX, one per slice ───► dax.rs        a device made for the slice
//!                       ├─ fsdax ─────────────────────────► fsdax.rs      a file made for the slice
//!                       ├─ hugetlb, memfd ────────────────► anonymous.rs  a fresh file of the slice's size
//!                       └─ guest_memfd ───────────────────► guest_memfd.rs  needs a VM: its own constructor
//! adopt(region, slice, file)   the same for a descriptor that a broker passed
//! ```

mod anonymous;
pub(crate) mod dax;
mod device;
mod error;
pub(crate) mod fsdax;
mod guest_memfd;
mod huge_files;
mod interface;
mod retired_list;

use std::fs::File;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::huge_page::HugePage;
use crate::region::{DaxFiles, Region, RegionKind, Slice};

pub use anonymous::{Anonymous, AnonymousError};
pub(crate) use device::Window;
pub use error::{BackingError, DaxError, Holder};
pub use guest_memfd::GuestMemfdError;
pub use huge_files::{HugeFiles, HugeFilesError};
pub use interface::Backing;
pub(crate) use retired_list::retired_pages;
pub use retired_list::{RetiredListError, RetiredPages};

/// The memory of a slice, or the reason that it cannot be opened.
pub type OpenResult = Result<Box<dyn Backing>, BackingError>;

/// Progress and cancellation of a wait: the first open of an EGM device zeroes all of it, which takes minutes.
pub struct OpenWait<'a> {
    /// Called a few times a second with the time waited so far.
    pub progress: &'a dyn Fn(Duration),
    /// Set from any thread to stop waiting. The kernel still finishes zeroing and then closes the device by itself;
    /// where the driver allows it, the end of this process stops it at once.
    pub cancel: &'a AtomicBool,
}

/// Opens the memory of `slice`, which belongs to `region`; waits as long as the kernel needs.
///
/// # Errors
/// [`BackingError`]: the slice does not fit the region, the host refused, or the caller cancelled.
pub fn open(region: &Region, slice: &Slice, wait: &OpenWait<'_>) -> OpenResult {
    check(region, slice)?;
    match &region.kind {
        RegionKind::Egm { device } => {
            let node = device::DeviceNode::find(region, device)?;
            let file = device::wait_for(device, wait, move || node.open()).map_err(|e| e.of(region))?;
            window(region, slice, file)
        }
        RegionKind::Devdax { files: DaxFiles::PerSlice, .. } => dax::create(region, slice),
        RegionKind::Reserved { device } | RegionKind::Devdax { device, .. } => {
            let file = device::DeviceNode::find(region, device)?.open();
            window(region, slice, file.map_err(|source| BackingError::open(region, device, source))?)
        }
        RegionKind::Fsdax { .. } => fsdax::create(region, slice),
        RegionKind::Hugetlb => anonymous(region, slice, Some(huge_page(region)?)),
        RegionKind::Memfd => anonymous(region, slice, None),
        RegionKind::GuestMemfd => Err(BackingError::NeedsVm { region: region.name.clone() }),
    }
}

/// The memory of `slice` in `file`, which is open already: the region's device, or the memory itself.
///
/// # Errors
/// [`BackingError`]: the slice does not fit the region, or `file` is something else.
pub fn adopt(region: &Region, slice: &Slice, file: File) -> OpenResult {
    check(region, slice)?;
    match &region.kind {
        RegionKind::Egm { .. }
        | RegionKind::Reserved { .. }
        | RegionKind::Devdax { .. }
        | RegionKind::Fsdax { .. } => window(region, slice, file),
        RegionKind::Hugetlb | RegionKind::Memfd | RegionKind::GuestMemfd => {
            let (size, page) = (slice.size.get(), region.page_size.get());
            Anonymous::adopt(&region.name, file, size, page).map(boxed).map_err(BackingError::from)
        }
    }
}

fn boxed(backing: impl Backing + 'static) -> Box<dyn Backing> {
    Box::new(backing)
}

fn window(region: &Region, slice: &Slice, file: File) -> OpenResult {
    Window::new(region, slice, file).map(boxed)
}

fn anonymous(region: &Region, slice: &Slice, huge: Option<HugePage>) -> OpenResult {
    Ok(boxed(Anonymous::on_node(&region.name, slice.size.get(), huge, region.node)?))
}

fn huge_page(region: &Region) -> Result<HugePage, BackingError> {
    let page = region.page_size.get();
    HugePage::of(page).ok_or_else(|| BackingError::PageSize { region: region.name.clone(), page })
}

/// Whether `slice` is one of `region`: inside it and made of its pages.
fn check(region: &Region, slice: &Slice) -> Result<(), BackingError> {
    let (offset, bytes, page) = (slice.offset, slice.size.get(), region.page_size.get().max(1));
    let inside = offset.checked_add(bytes).is_some_and(|end| end <= region.size.get());
    let whole = bytes > 0 && offset.is_multiple_of(page) && bytes.is_multiple_of(page);
    if slice.region == region.name && inside && whole {
        return Ok(());
    }
    Err(BackingError::Slice {
        region: region.name.clone(),
        size: region.size.get(),
        page,
        named: slice.region.clone(),
        offset,
        bytes,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use egm_address::ByteSize;

    use super::*;
    use crate::retired::Retired;

    pub(crate) fn region(kind: RegionKind, size: u64, page: u64) -> Region {
        Region {
            name: "r".into(),
            kind,
            node: None,
            size: ByteSize::new(size),
            page_size: ByteSize::new(page),
            base: None,
            functions: Vec::new(),
            retired: Retired::default(),
        }
    }

    pub(crate) fn slice(offset: u64, size: u64) -> Slice {
        Slice { region: "r".into(), offset, size: ByteSize::new(size) }
    }

    fn opened(region: &Region, slice: &Slice) -> OpenResult {
        open(region, slice, &OpenWait { progress: &|_| {}, cancel: &AtomicBool::new(false) })
    }

    #[test]
    fn a_slice_that_is_not_one_of_the_region_is_refused() {
        let region = region(RegionKind::Memfd, 0x10_0000, 0x1000);
        for (offset, size) in [(0, 0), (0, 0x800), (0x800, 0x1000), (0xf_f000, 0x2000), (u64::MAX, 0x1000)] {
            let refused = opened(&region, &slice(offset, size));
            assert!(matches!(refused, Err(BackingError::Slice { .. })), "{offset:#x} {size:#x}");
        }
        let other = Slice { region: "other".into(), ..slice(0, 0x1000) };
        assert!(matches!(opened(&region, &other), Err(BackingError::Slice { .. })));
    }

    #[test]
    fn a_pool_gives_memory_of_the_slice_size_that_a_peer_can_adopt() {
        let region = region(RegionKind::Memfd, 0x10_0000, 0x1000);
        let memory = opened(&region, &slice(0x4000, 0x2000)).unwrap();
        assert_eq!((memory.offset(), memory.size(), memory.is_invisible()), (0, 0x2000, false));
        let duplicate = || memory.file().try_clone().unwrap();
        assert_eq!(adopt(&region, &slice(0x4000, 0x2000), duplicate()).unwrap().size(), 0x2000);
        assert!(adopt(&region, &slice(0x4000, 0x3000), duplicate()).is_err());
    }

    #[test]
    fn guest_memfd_states_that_it_needs_a_vm() {
        let region = region(RegionKind::GuestMemfd, 0x1000, 0x1000);
        assert!(matches!(opened(&region, &slice(0, 0x1000)), Err(BackingError::NeedsVm { .. })));
    }
}
