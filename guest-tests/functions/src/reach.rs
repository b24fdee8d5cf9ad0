//! Memory that the engine reaches: the function's own, the client's windows, and on a Grace GPU an aperture on EGM.
//!
//! The aperture is the one that NVIDIA's open driver 595.45 programs. A page table entry for EGM is the page's physical
//! address minus the base in the guest's `_DSD` (`_memdescAllocEgmArray`), so an address here is an offset in the
//! memory of the socket. The hardware gets neither that base nor a limit
//! (`NV2080_CTRL_INTERNAL_HSHUB_EGM_CONFIG_PARAMS` has a peer id alone), and the access is no DMA that an IOMMU sees.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

use egm_vfio_wire::serve::{Place, Windows};

use crate::engine::{Memory, Way};
use crate::registers::{EGM, OWN};

/// Memory of a socket, from its first byte.
#[derive(Debug)]
pub(crate) struct Egm {
    /// The memory.
    pub(crate) file: File,
    /// Its size.
    pub(crate) bytes: u64,
}

/// All memory that the engine reaches.
#[derive(Debug)]
pub(crate) struct Reach {
    own: File,
    bytes: u64,
    /// Windows of the client.
    pub(crate) windows: Windows,
    /// Bus mastering: without it there is no DMA.
    pub(crate) master: bool,
    /// Memory behind the aperture, if the function has one.
    pub(crate) egm: Option<Egm>,
}

impl Reach {
    /// Reaches `bytes` of `own`, and nothing of a client.
    pub(crate) fn new(own: File, bytes: u64) -> Self {
        Self { own, bytes, windows: Windows::default(), master: false, egm: None }
    }

    /// The file behind `address`, and the bytes that are left from there.
    fn place(&self, address: u64, write: bool) -> Option<Place<'_>> {
        let (file, offset, bytes) = if address & OWN != 0 {
            (&self.own, address & !OWN, self.bytes)
        } else if address & EGM != 0 {
            let egm = self.egm.as_ref()?;
            (&egm.file, address & !EGM, egm.bytes)
        } else {
            return self.windows.place(address, write).filter(|_| self.master);
        };
        Some(Place { file: Some((file.as_fd(), offset)), left: bytes.checked_sub(offset)? })
    }

    fn file(&self, address: u64, write: bool) -> Option<(BorrowedFd<'_>, u64)> {
        self.place(address, write)?.file
    }
}

impl Memory for Reach {
    fn reach(&self, address: u64, write: bool) -> Option<(u64, Way)> {
        let place = self.place(address, write)?;
        Some((place.left, if place.file.is_some() { Way::File } else { Way::Client }))
    }

    fn read(&self, address: u64, data: &mut [u8]) -> bool {
        let length = data.len();
        self.file(address, false)
            .is_some_and(|(file, offset)| rustix::io::pread(file, data, offset) == Ok(length))
    }

    fn write(&self, address: u64, data: &[u8]) -> bool {
        self.file(address, true)
            .is_some_and(|(file, offset)| rustix::io::pwrite(file, data, offset) == Ok(data.len()))
    }
}
