//! Slices that are PCI functions: the device of `egm-device serve`, in this process.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use egm_address::CpuSet;
use egm_device::Backing;
use egm_device::device::config::Id;
use egm_device::device::core::Facts;
use egm_device::device::{BadBytes, Function, ScrubEnd, Setup, in_region, in_slice};
use egm_device::scrub::{Cause, ScrubError};
use egm_vfio::backend::Backend;
use egm_vfio::local::{LocalFunction, MadeBy};
use egm_vfio::mapping::MadeOf;

use crate::error::{Blame, Chain, Remedy, Report};
use crate::facts::Facts as Host;
use crate::kvm::Vm;
use crate::memory::{MemoryError, bytes};
use crate::plan::{BackingPlan, Plan};
use crate::reserve::{Leases, Taken};

/// A slice as a function.
pub struct OpenSlice {
    /// For reports about its memory.
    pub function: Function,
    /// For the guest: the function as a device of this process.
    pub backend: Arc<dyn Backend>,
}

/// Why a slice is no device.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum SliceError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("cannot make a descriptor")]
    Descriptor(#[from] io::Error),
    /// The plan has none.
    #[error("the plan has no memory for it")]
    Missing,
}

impl Report for SliceError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Memory(error) => error.remedy(),
            Self::Descriptor(_) => Blame::Host.help("raise the limit of open files: ulimit -n 65536"),
            Self::Missing => Blame::Internal.into(),
        }
    }
}

/// Where the slices of a plan come from.
pub(super) struct Slices<'a> {
    pub(super) plan: &'a Plan,
    pub(super) host: &'a Host,
    pub(super) leases: &'a Leases,
    pub(super) vm: &'a Vm,
}

impl Slices<'_> {
    /// The function of device `id`, also the id of its backing; `node` is the guest's node near it.
    ///
    /// # Errors
    /// [`SliceError`].
    pub(super) fn open(&self, id: &str, node: u32) -> Result<OpenSlice, SliceError> {
        let backing = self.plan.backings.iter().find(|backing| backing.id == id);
        let backing = backing.ok_or(SliceError::Missing)?;
        let near = backing.near(self.host);
        open_slice(SliceParts { backing, leases: self.leases, node, near }, self.vm)
    }
}

/// A slice that becomes a function.
pub(crate) struct SliceParts<'a> {
    pub(crate) backing: &'a BackingPlan,
    /// They have the slice of the backing, unless it is memory of the machine itself.
    pub(crate) leases: &'a Leases,
    /// The guest's node near it.
    pub(crate) node: u32,
    /// The host's processors near it, where known.
    pub(crate) near: Option<CpuSet>,
}

/// The function of a slice in the machine of `vm`.
///
/// # Errors
/// [`SliceError`].
pub(crate) fn open_slice(
    SliceParts { backing: plan, leases, node, near }: SliceParts<'_>,
    vm: &Vm,
) -> Result<OpenSlice, SliceError> {
    let (id, backing) = (plan.id.as_str(), bytes(plan, leases, vm, near.clone())?);
    let lease = leases.get(id);
    let facts = Facts {
        size: backing.size(),
        base: plan.offset,
        page: lease.as_ref().map_or_else(|| backing.page_size(), |taken| taken.region().page_size.get()),
        pxm: Some(node),
        scrub_at_reset: false,
        msix: true,
    };
    let retired = lease.as_ref().map(|taken| in_slice(taken.slice(), taken.region().retired.spans()));
    let (bad, scrubbed, retired) = (bad(id, lease), scrubbed(id), retired.unwrap_or_default());
    let setup = Setup { id: Id::default(), facts, retired, bad, scrubbed, near };
    let function = Function::new(setup, backing.as_ref())?;
    let name = format!("EGM slice {id}");
    let local = LocalFunction::new(name, function.connect(), made_by(plan, backing.as_ref())?)?;
    Ok(OpenSlice { function, backend: Arc::new(local) })
}

/// Keeps bytes that were found bad from later owners.
fn bad(id: &str, lease: Option<Arc<Taken>>) -> Box<BadBytes> {
    let id = id.to_owned();
    Box::new(move |bad| {
        let taken = lease.as_ref().map(|taken| taken.retire(&in_region(taken.slice(), bad)));
        if let Some(Err(error)) = taken {
            tracing::warn!("bad pages of \"{id}\" are not kept from later owners: {}", Chain(error.as_ref()));
        }
    })
}

/// Reports a slice that does not keep the zeroes of a scrub.
fn scrubbed(id: &str) -> Box<ScrubEnd> {
    let id = id.to_owned();
    Box::new(move |end| {
        if let Err(ScrubError { cause: cause @ Cause::NotZero { .. }, .. }) = end {
            tracing::warn!("cannot scrub slice \"{id}\": {cause}");
        }
    })
}

/// Kind of memory that the mapped BAR is for other devices.
fn made_by(plan: &BackingPlan, backing: &dyn Backing) -> io::Result<MadeBy> {
    Ok(match backing.file().metadata()?.is_file() {
        _ if backing.is_invisible() => |_: OwnedFd, _: u64| MadeOf::Invisible,
        _ if plan.guest_memfd => MadeOf::GuestMemfd,
        true => MadeOf::File,
        false => |_: OwnedFd, _: u64| MadeOf::Pages,
    })
}
