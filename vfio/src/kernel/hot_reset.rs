//! Hot reset: the bus or slot of a function, and with it every function there.

use std::collections::BTreeSet;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd};

use egm_address::PciAddress;
use vfio_bindings::bindings::vfio;

use super::answer::{self, Dependent};
use super::device::{Hold, KernelFunction};
use super::message::Message;
use super::query::malformed;
use super::sys::{self, Request};
use crate::backend::{Backend, BackendError};

/// A function that a hot reset of another resets too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Affected {
    pub function: PciAddress,
    /// Whether this process holds it, or its group, in the same address space: only then can the reset be done.
    pub ours: bool,
}

impl KernelFunction {
    /// Functions that a hot reset affects, this one among them; ascending.
    ///
    /// # Errors
    /// [`BackendError`], also where neither bus nor slot can be reset.
    pub(crate) fn hot_reset_affects(&self) -> Result<Vec<Affected>, BackendError> {
        let (dependents, by_device) = self.dependents()?;
        let numbers: BTreeSet<u32> = dependents.iter().map(|dependent| dependent.id).collect();
        let groups: BTreeSet<u32> = match &self.hold {
            Hold::Group { group, .. } if !by_device => {
                group.held(&numbers).iter().map(|group| group.number()).collect()
            }
            _ => BTreeSet::new(),
        };
        let ours = |id: u32| {
            if by_device { id.cast_signed() != vfio::VFIO_PCI_DEVID_NOT_OWNED } else { groups.contains(&id) }
        };
        let affected = |Dependent { address, id }: Dependent| Affected { function: address, ours: ours(id) };
        let mut affected: Vec<_> = dependents.into_iter().map(affected).collect();
        affected.sort_by_key(|affected| affected.function);
        Ok(affected)
    }

    /// Resets the bus or slot of this function. `consent` names the other functions that may be reset with it.
    ///
    /// # Errors
    /// [`BackendError`]; nothing is reset when a function is affected that is not ours, or without consent.
    pub fn hot_reset(&self, consent: &[PciAddress]) -> Result<(), BackendError> {
        for Affected { function, ours } in self.hot_reset_affects()? {
            let rule = match (ours, function == self.address() || consent.contains(&function)) {
                (false, _) => "which this virtual machine does not have",
                (true, false) => "without consent",
                (true, true) => continue,
            };
            let why = io::Error::other(format!("it would reset {function} too, {rule}"));
            return Err(self.refused("hot reset")(why));
        }
        let groups = match &self.hold {
            // The kernel requires the descriptors of all affected groups, as proof.
            Hold::Group { group, .. } => {
                let (dependents, _) = self.dependents()?;
                group.held(&dependents.iter().map(|dependent| dependent.id).collect())
            }
            Hold::Attached(_) => Vec::new(), // iommufd checks ownership itself
        };
        let proofs: Vec<i32> = groups.iter().map(|group| group.proof().as_raw_fd()).collect();
        sys::exchange(self.file().as_fd(), Request::DEVICE_PCI_HOT_RESET, &mut request(&proofs))
            .map(drop)
            .map_err(self.refused("hot reset"))
    }

    fn dependents(&self) -> Result<(Vec<Dependent>, bool), BackendError> {
        let asked = self.ask();
        let refused = |error: io::Error| match error.raw_os_error() {
            // On the root complex, for instance: no bridge above it could reset its bus.
            Some(libc::ENODEV) => BackendError::Absent {
                function: self.name().to_owned(),
                what: "bus or slot that can be reset".to_owned(),
            },
            _ => self.refused("ask what a hot reset affects")(error),
        };
        asked.map_err(refused)
    }

    fn ask(&self) -> io::Result<(Vec<Dependent>, bool)> {
        type Info = vfio::vfio_pci_hot_reset_info;
        const ENTRY: usize = size_of::<vfio::vfio_pci_dependent_device>();
        let ask = |message: &mut Message| {
            sys::exchange(self.file().as_fd(), Request::DEVICE_GET_PCI_HOT_RESET_INFO, message)
        };
        let mut message = Message::of::<Info>(0);
        match ask(&mut message) {
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                let room = answer::dependent_count(&message).saturating_mul(ENTRY);
                message = Message::of::<Info>(room);
                ask(&mut message)?;
            }
            other => drop(other?),
        }
        answer::dependents(&message).ok_or_else(|| malformed("a hot reset"))
    }
}

fn request(proofs: &[i32]) -> Message {
    type Reset = vfio::vfio_pci_hot_reset;
    let mut message = Message::of::<Reset>(size_of_val(proofs))
        .with(offset_of!(Reset, count), u32::try_from(proofs.len()).unwrap_or(u32::MAX));
    for (place, proof) in (size_of::<Reset>()..).step_by(4).zip(proofs) {
        message = message.with(place, proof.cast_unsigned());
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_proves_every_group_by_its_descriptor() {
        let message = request(&[5, 7]);
        let words: Vec<_> = (0..5).map(|word| message.get(word * 4).unwrap()).collect();
        assert_eq!(words, [20, 0, 2, 5, 7]);
        assert_eq!(request(&[]).len(), 12);
    }
}
