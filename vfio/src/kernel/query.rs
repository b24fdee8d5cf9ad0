//! What the kernel reports of an open function.

use std::io;
use std::mem::offset_of;
use std::os::fd::BorrowedFd;

use vfio_bindings::bindings::vfio;

use super::answer::{self, Placed, RegionInfo};
use super::message::Message;
use super::sys::{self, Request};
use crate::backend::{InterruptKind, Interrupts};

/// Number of queried regions of vfio-pci: BARs, ROM and configuration are 0 to 7; VGA (8) is not queried.
pub(super) const REGIONS: u32 = 8;
/// Action of the error for a function that does not report its kind.
pub(super) const IDENTIFY: &str = "identify";
/// Kinds of interrupts, by number.
pub(super) const INTERRUPTS: [InterruptKind; 5] = [
    InterruptKind::Intx,
    InterruptKind::Msi,
    InterruptKind::Msix,
    InterruptKind::Error,
    InterruptKind::Request,
];

/// Whether the function can be reset by itself; an error if it is not a PCI function.
pub(super) fn can_reset(function: BorrowedFd<'_>) -> io::Result<bool> {
    type Info = vfio::vfio_device_info;
    let mut answer = Message::of::<Info>(0);
    sys::exchange(function, Request::DEVICE_GET_INFO, &mut answer)?;
    let flags = answer.get(offset_of!(Info, flags)).unwrap_or(0);
    if flags & vfio::VFIO_DEVICE_FLAGS_PCI == 0 {
        return Err(not_pci());
    }
    Ok(flags & vfio::VFIO_DEVICE_FLAGS_RESET != 0)
}

/// Error for a function of another kind.
pub(super) fn not_pci() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it is not a PCI function")
}

/// The regions of a function, by number.
pub(super) fn regions(function: BorrowedFd<'_>) -> io::Result<Vec<Placed>> {
    (0..REGIONS).map(|index| Ok(region(function, index)?.placed(page()))).collect()
}

/// Page size of this host, in bytes.
pub(super) fn page() -> u64 {
    u64::try_from(rustix::param::page_size()).unwrap_or(4096)
}

/// Queries region `index` of a function.
pub(super) fn region(function: BorrowedFd<'_>, index: u32) -> io::Result<RegionInfo> {
    let question =
        Message::of::<vfio::vfio_region_info>(0).with(offset_of!(vfio::vfio_region_info, index), index);
    let answer = sys::exchange_all(function, Request::DEVICE_GET_REGION_INFO, question)?;
    RegionInfo::read(&answer).ok_or_else(|| malformed("a region"))
}

/// The interrupts of a function, in the order of [`INTERRUPTS`].
pub(super) fn interrupts(function: BorrowedFd<'_>) -> io::Result<Vec<Interrupts>> {
    let interrupts = |kind: InterruptKind| {
        let mut message =
            Message::of::<vfio::vfio_irq_info>(0).with(offset_of!(vfio::vfio_irq_info, index), kind.number());
        match sys::exchange(function, Request::DEVICE_GET_IRQ_INFO, &mut message) {
            // A conventional PCI function has no error interrupt: the kernel returns EINVAL for it.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(Interrupts::default()),
            Err(error) => Err(error),
            Ok(_) => answer::interrupts(&message).ok_or_else(|| malformed("an interrupt")),
        }
    };
    INTERRUPTS.into_iter().map(interrupts).collect()
}

pub(super) fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the kernel's answer about {what} ends too early"))
}
