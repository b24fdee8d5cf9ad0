//! Slices with a device of their own: when the device of earlier owners may be revoked.
//!
//! The ledger's own lock on a slice excludes every living owner, so any other device of its bytes is from an owner that
//! ended without a return. While a process keeps that device locked it is in use. A client can drop its lock, which the
//! broker placed on the client's description: it then loses the memory, and no byte of a later owner reaches it.
#![forbid(unsafe_code)]

use std::io;
use std::path::Path;

use egm_address::{Address, Host, Span};

use super::record::InRecordSpace;
use super::{LedgerError, claim};
use crate::backing::dax::{DaxDevice, DaxRegion, failed, offset_of, span_of, window};
use crate::backing::{Backing, BackingError, DaxError};
use crate::free::{Evidence, Hold};
use crate::region::{Region, Slice};

fn parent(region: &Region) -> Result<DaxRegion, BackingError> {
    DaxRegion::of(region, Path::new("/")).map_err(|source| failed(region, source))
}

fn span(region: &Region, slice: &Slice) -> Result<Span<Host>, BackingError> {
    span_of(region, slice).ok_or_else(|| BackingError::NoBase { region: region.name.clone() })
}

/// Locks the device of a slice for the description of `backing`; false where another description has a lock. Revocation
/// keeps a later owner safe: the lock only spares a process that uses the memory although its owner was killed.
pub(crate) fn lock(backing: &dyn Backing) -> Result<bool, LedgerError> {
    claim::lock(backing.file(), whole(backing)?).map_err(lock_error)
}

/// Releases the lock of [`lock`].
pub(crate) fn unlock(backing: &dyn Backing) -> Result<(), LedgerError> {
    claim::unlock(backing.file(), whole(backing)?).map_err(lock_error)
}

fn whole(backing: &dyn Backing) -> Result<Span<InRecordSpace>, LedgerError> {
    let whole = Span::new(Address::new(backing.offset()), backing.size());
    whole.map_err(|_| lock_error(io::ErrorKind::InvalidInput.into()))
}

fn lock_error(source: io::Error) -> LedgerError {
    LedgerError::Lock { path: "the memory".into(), source }
}

/// Whether a process has a device of `slice` locked. A failed query counts as locked.
pub(super) fn is_in_use(region: &Region, slice: &Slice) -> bool {
    let is_locked = || -> Result<bool, BackingError> {
        let (parent, span) = (parent(region)?, span(region, slice)?);
        let left = parent.overlapping(span).map_err(|source| failed(region, source))?;
        let locked = left.iter().map(|child| is_locked(&parent, child)).collect::<Result<Vec<_>, _>>();
        Ok(locked.map_err(|source| failed(region, source))?.contains(&true))
    };
    is_locked().unwrap_or(true)
}

/// Removes every device that has bytes of `slice`.
///
/// # Errors
/// [`BackingError::InUse`] for a device that a process still locks or that has pinned memory.
pub(super) fn revoke(region: &Region, slice: &Slice) -> Result<(), BackingError> {
    let (parent, span) = (parent(region)?, span(region, slice)?);
    for child in parent.overlapping(span).map_err(|source| failed(region, source))? {
        let in_use = || {
            let bytes = child.span.and_then(|of| offset_of(region, of));
            let evidence = Evidence::of(Hold::Description).to_vec();
            bytes.map(|bytes| BackingError::InUse { evidence, region: region.name.clone(), bytes })
        };
        if is_locked(&parent, &child).map_err(|source| failed(region, source))? {
            return Err(in_use().unwrap_or_else(|| BackingError::NoBase { region: region.name.clone() }));
        }
        parent.remove(&child).map_err(|source| match in_use() {
            Some(in_use) if source.is_timeout() => in_use,
            _ => failed(region, source),
        })?;
    }
    Ok(())
}

/// The device that has exactly the bytes of `slice`, if it can be opened.
pub(super) fn reopen(region: &Region, slice: &Slice) -> Result<Option<Box<dyn Backing>>, BackingError> {
    let (parent, span) = (parent(region)?, span(region, slice)?);
    let children = parent.overlapping(span).map_err(|source| failed(region, source))?;
    let exact = children.iter().find(|child| child.span == Some(span) && DaxRegion::is_bound(child));
    exact.map(|child| window(region, slice, &parent, child)).transpose()
}

/// Removes the devices of `slice`, of which this process had the only descriptor.
pub(super) fn release(region: &Region, slice: &Slice) {
    // The next grant of these bytes repeats a failed removal, and reports the failure.
    drop(revoke(region, slice));
}

/// Whether any description has a lock on the device.
fn is_locked(parent: &DaxRegion, child: &DaxDevice) -> Result<bool, DaxError> {
    let Some(of) = child.span.filter(|_| DaxRegion::is_bound(child)) else { return Ok(false) };
    let file = parent.open(child)?;
    let whole = Span::<InRecordSpace>::new(Address::new(0), of.size()).ok();
    // A failed query counts as locked.
    Ok(whole.is_none_or(|whole| claim::held(&file, whole).map_or(true, |held| !held.is_empty())))
}
