//! Functions that the host's kernel assigns: VFIO, with the legacy container or with iommufd.
//!
//! ```text
//!  device.rs     KernelFunction: regions, interrupts, reset of one function      (Backend)
//!  cdev.rs       a function of iommufd, by vfio-ioctls: open, bind, attach, describe, export, detach
//!  query.rs      what the kernel reports of an open function
//!  interrupts.rs which descriptor a vector writes
//!  hot_reset.rs  bus reset: the affected functions, and the reset itself
//!  container.rs  Container: groups and type1v2 maps, by address                  (Domain)
//!  iommufd.rs    Iommufd: cdevs and an I/O address space, by file where it can   (Domain)
//!  answer.rs     parser of the kernel's answers: pure
//!  error.rs      reasons why a function cannot be opened, and remedies
//!  message.rs    an ioctl's argument: pure
//!  sys.rs        the unsafe module: every ioctl
//! ```

pub mod container;
pub mod device;
pub mod error;
pub mod hot_reset;
pub mod iommufd;

mod answer;
mod cdev;
mod interrupts;
mod message;
mod query;
mod sys;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use egm_address::PciAddress;

use crate::backend::{Backend, RegionIndex};

pub use container::Container;
pub use device::KernelFunction;
pub use error::{Fault, Holder, OpenError};
pub use iommufd::Iommufd;

/// Reports a group's or function's descriptor to KVM (`KVM_DEV_VFIO_FILE_ADD` if `true`, `…_DEL` if not), so that KVM
/// keeps caches coherent where a device's DMA does not snoop.
pub type Track = Arc<dyn Fn(BorrowedFd<'_>, bool) -> io::Result<()> + Send + Sync>;

/// I/O address space that translates a function's DMA.
#[derive(Clone)]
pub enum KernelDomain {
    /// Container of VFIO groups with a type1v2 IOMMU.
    Legacy(Arc<Container>),
    /// I/O address space of iommufd, without groups.
    Iommufd(Arc<Iommufd>),
}

/// Number and size in bytes of each BAR region of the function at `address`, as its driver presents it. No sysfs file
/// has these sizes, so this opens the function and closes it again.
///
/// # Errors
/// [`OpenError`], for example if another process uses the function.
pub fn region_sizes(address: PciAddress) -> Result<Vec<(u8, u64)>, OpenError> {
    let domain = match Container::new(None) {
        Ok(container) => KernelDomain::Legacy(container),
        Err(_) => KernelDomain::Iommufd(Iommufd::new(None)?),
    };
    let function = KernelFunction::open(address, &domain)?;
    let size = |bar| (bar, function.region(RegionIndex::Bar(bar)).size);
    Ok((0..6).map(size).filter(|(_, size)| *size > 0).collect())
}

impl KernelDomain {
    /// Returns the address space as a trait object.
    pub fn domain(&self) -> Arc<dyn crate::dma::Domain> {
        match self {
            Self::Legacy(container) => Arc::<Container>::clone(container),
            Self::Iommufd(iommufd) => Arc::<Iommufd>::clone(iommufd),
        }
    }
}
