//! The ioctls of VFIO and iommufd, and descriptors of functions. This is an unsafe module, the only one in `kernel`.
//!
//! Callers can rely on this: the kernel writes only to the messages and buffers passed here, and maps for devices only
//! memory that a [`HostMemory`] vouches for. The caller keeps that memory until it is unmapped.
#![expect(unsafe_code, reason = "ioctl and raw descriptors have no safe interface")]

use std::ffi::CStr;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use egm_address::{Io, Span};
use iommufd_bindings::iommufd::{iommu_ioas_iova_ranges, iommu_iova_range};
use vfio_bindings::bindings::vfio::{
    VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, vfio_iommu_type1_dma_map as DmaMap,
};
use vfio_ioctls::VfioDevice;

use super::message::Message;
use crate::dma::Access;
use crate::memory::HostMemory;

/// An ioctl of VFIO, `_IO(VFIO_TYPE, VFIO_BASE + n)`. The number encodes no size; the argument holds its own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request(u8);

/// Ioctls that take a [`Message`] without pointers.
impl Request {
    pub(super) const GROUP_GET_STATUS: Self = Self(3);
    pub(super) const DEVICE_GET_INFO: Self = Self(7);
    pub(super) const DEVICE_GET_REGION_INFO: Self = Self(8);
    pub(super) const DEVICE_GET_IRQ_INFO: Self = Self(9);
    pub(super) const DEVICE_SET_IRQS: Self = Self(10);
    pub(super) const DEVICE_GET_PCI_HOT_RESET_INFO: Self = Self(12);
    pub(super) const DEVICE_PCI_HOT_RESET: Self = Self(13);
    pub(super) const IOMMU_GET_INFO: Self = Self(12);
    pub(super) const IOMMU_UNMAP_DMA: Self = Self(14);
}

const GET_API_VERSION: Request = Request(0);
const CHECK_EXTENSION: Request = Request(1);
const SET_IOMMU: Request = Request(2);
const GROUP_SET_CONTAINER: Request = Request(4);
const GROUP_GET_DEVICE_FD: Request = Request(6);
const DEVICE_RESET: Request = Request(11);
const IOMMU_MAP_DMA: Request = Request(13);

/// `IOMMU_IOAS_IOVA_RANGES` of linux/iommufd.h, `_IO(';', 0x84)`.
const IOAS_IOVA_RANGES: libc::Ioctl = 0x3b84;

impl Request {
    fn number(self) -> libc::Ioctl {
        const BASE: libc::Ioctl = 0x3b64; // _IO(';', 100)
        BASE.saturating_add(libc::Ioctl::from(self.0))
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Sends `message`, which the kernel overwrites with its answer.
pub(super) fn exchange(
    file: BorrowedFd<'_>,
    request: Request,
    message: &mut Message,
) -> io::Result<libc::c_int> {
    let bytes = message.seal();
    // SAFETY: the first word holds the length in bytes, the kernel accesses no more of them and follows no pointer in
    // them. The address in a message of `map` is of memory that the caller keeps.
    check(unsafe { libc::ioctl(file.as_raw_fd(), request.number(), bytes.as_mut_ptr()) })
}

/// As [`exchange`], repeated with a larger message if the kernel needs one.
pub(super) fn exchange_all(
    file: BorrowedFd<'_>,
    request: Request,
    mut message: Message,
) -> io::Result<Message> {
    let question = message.clone();
    exchange(file, request, &mut message)?;
    let Some(needed) = message.bytes_needed() else { return Ok(message) };
    let mut message = question.resized(needed);
    exchange(file, request, &mut message)?;
    Ok(message)
}

/// Sends an ioctl with a number, or nothing, as its argument.
fn number(file: BorrowedFd<'_>, request: Request, argument: libc::c_ulong) -> io::Result<libc::c_int> {
    // SAFETY: the argument is a number, no memory is involved.
    check(unsafe { libc::ioctl(file.as_raw_fd(), request.number(), argument) })
}

/// Whether `container` has the API version that we support and an IOMMU of type `iommu`.
pub(super) fn has_iommu(container: BorrowedFd<'_>, iommu: u32) -> io::Result<bool> {
    let known = number(container, GET_API_VERSION, 0)? == 0;
    Ok(known && number(container, CHECK_EXTENSION, iommu.into())? > 0)
}

/// Sets the IOMMU type of a container, which must already hold a group.
pub(super) fn set_iommu(container: BorrowedFd<'_>, iommu: u32) -> io::Result<()> {
    number(container, SET_IOMMU, iommu.into()).map(drop)
}

pub(super) fn reset(function: BorrowedFd<'_>) -> io::Result<()> {
    number(function, DEVICE_RESET, 0).map(drop)
}

/// Puts a group into a container; it leaves when its descriptor is closed.
pub(super) fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> io::Result<()> {
    let container: RawFd = container.as_raw_fd();
    // SAFETY: the kernel reads one descriptor's number.
    check(unsafe { libc::ioctl(group.as_raw_fd(), GROUP_SET_CONTAINER.number(), &raw const container) })
        .map(drop)
}

/// Opens a function of a group, by its address as sysfs writes it.
pub(super) fn function(group: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads a NUL-terminated string.
    let file = check(unsafe { libc::ioctl(group.as_raw_fd(), GROUP_GET_DEVICE_FD.number(), name.as_ptr()) })?;
    Ok(owned(file))
}

/// Closes the file of `function` without the `Drop` of vfio-ioctls, which panics if the kernel refuses to detach the
/// function. The function's table of regions and its share of the address space leak.
pub(super) fn close_attached(function: VfioDevice) {
    let file = function.as_raw_fd();
    std::mem::forget(function);
    drop(owned(file));
}

/// Takes ownership of `file`. Callers pass a descriptor that the kernel has just created for them, or the one of a value
/// that they have forgotten.
fn owned(file: RawFd) -> OwnedFd {
    // SAFETY: `function` and `close_attached` are the only callers, and in both no other code owns the descriptor.
    unsafe { OwnedFd::from_raw_fd(file) }
}

/// Maps by address, in a container. The caller keeps `memory` until the span is unmapped.
pub(super) fn map(
    container: BorrowedFd<'_>,
    iova: Span<Io>,
    memory: &dyn HostMemory,
    offset: u64,
    access: Access,
) -> io::Result<()> {
    let address = address(memory, offset, iova.size())?;
    let write = if access == Access::ReadWrite { VFIO_DMA_MAP_FLAG_WRITE } else { 0 };
    let mut message = Message::of::<DmaMap>(0)
        .with(offset_of!(DmaMap, flags), VFIO_DMA_MAP_FLAG_READ | write)
        .with_long(offset_of!(DmaMap, vaddr), address)
        .with_long(offset_of!(DmaMap, iova), iova.start().get())
        .with_long(offset_of!(DmaMap, size), iova.size());
    exchange(container, IOMMU_MAP_DMA, &mut message).map(drop)
}

/// The address of `size` bytes of `memory` from `offset`, for the kernel; an error when they do not lie in it.
pub(super) fn address(memory: &dyn HostMemory, offset: u64, size: u64) -> io::Result<u64> {
    let inside = offset.checked_add(size).is_some_and(|end| end <= memory.size());
    let start = u64::try_from(memory.address().as_ptr().expose_provenance()).ok();
    start
        .and_then(|start| start.checked_add(offset))
        .filter(|_| inside)
        .ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// Ranges (first and last address) that an I/O address space of iommufd can map, and its page size.
pub(super) fn iova_ranges(iommufd: BorrowedFd<'_>, ioas: u32) -> io::Result<(Vec<(u64, u64)>, u64)> {
    const MOST: usize = 1024;
    let mut ranges = vec![iommu_iova_range::default(); MOST];
    let mut question = iommu_ioas_iova_ranges {
        size: u32::try_from(size_of::<iommu_ioas_iova_ranges>()).unwrap_or(0),
        ioas_id: ioas,
        num_iovas: u32::try_from(MOST).unwrap_or(0),
        allowed_iovas: u64::try_from(ranges.as_mut_ptr().expose_provenance()).unwrap_or(0),
        ..Default::default()
    };
    // SAFETY: the kernel writes to the structure, which holds its own size, and at most `num_iovas` ranges to `ranges`;
    // the pointer to `ranges` is exposed.
    check(unsafe { libc::ioctl(iommufd.as_raw_fd(), IOAS_IOVA_RANGES, &raw mut question) })?;
    ranges.truncate(usize::try_from(question.num_iovas).unwrap_or(MOST));
    Ok((ranges.iter().map(|range| (range.start, range.last)).collect(), question.out_iova_alignment))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use super::*;
    use crate::mapping::Mapping;

    #[test]
    fn memory_is_mapped_only_where_it_is() {
        let memory: Arc<dyn HostMemory> = Arc::new(Mapping::pages(0x4000, 0).unwrap());
        let start = u64::try_from(memory.address().addr().get()).unwrap();
        for (offset, size) in [(0, 0x4000), (0x1000, 0x3000), (0x3fff, 1), (0x4000, 0)] {
            assert_eq!(address(memory.as_ref(), offset, size).unwrap(), start + offset);
        }
        for (offset, size) in
            [(0, 0x4001), (0x3fff, 2), (0x4000, 1), (0x4001, 0), (u64::MAX, 1), (u64::MAX, 2)]
        {
            assert_eq!(
                address(memory.as_ref(), offset, size).unwrap_err().kind(),
                io::ErrorKind::InvalidInput
            );
        }
    }

    #[test]
    fn a_file_that_is_not_of_vfio_refuses_every_request() {
        let null = File::open("/dev/null").unwrap();
        let mut message = Message::of::<[u32; 4]>(0);
        let refused = exchange(null.as_fd(), Request::DEVICE_GET_INFO, &mut message).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ENOTTY));
        assert!(has_iommu(null.as_fd(), 3).is_err() && reset(null.as_fd()).is_err());
        assert!(iova_ranges(null.as_fd(), 1).is_err());
    }

    #[test]
    fn numbers_are_those_of_the_kernel() {
        assert_eq!(Request::DEVICE_GET_INFO.number(), 0x3b6b);
        assert_eq!(Request::DEVICE_PCI_HOT_RESET.number(), 0x3b71);
    }
}
