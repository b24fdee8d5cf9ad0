//! `VFIO_DEVICE_SET_IRQS`: which descriptor a vector writes.

use std::collections::BTreeMap;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_SET_ACTION_MASK as MASK, VFIO_IRQ_SET_ACTION_TRIGGER as TRIGGER,
    VFIO_IRQ_SET_ACTION_UNMASK as UNMASK, VFIO_IRQ_SET_DATA_EVENTFD as EVENTFD,
    VFIO_IRQ_SET_DATA_NONE as NONE, vfio_irq_set as IrqSet,
};

use super::message::Message;
use super::sys::{self, Request};
use crate::backend::{InterruptKind, Interrupts};

/// Connected interrupts of one function.
#[derive(Debug, Default)]
pub(super) struct Connected {
    /// Kinds that are enabled, and for those that cannot grow the descriptors of their vectors.
    kinds: BTreeMap<InterruptKind, Vec<Option<OwnedFd>>>,
}

fn request(kind: InterruptKind, flags: u32, first: u32, count: usize, data: &[i32]) -> Message {
    let mut message = Message::of::<IrqSet>(size_of_val(data))
        .with(offset_of!(IrqSet, flags), flags)
        .with(offset_of!(IrqSet, index), kind.number())
        .with(offset_of!(IrqSet, start), first)
        .with(offset_of!(IrqSet, count), u32::try_from(count).unwrap_or(u32::MAX));
    for (place, descriptor) in (size_of::<IrqSet>()..).step_by(4).zip(data) {
        message = message.with(place, descriptor.cast_unsigned());
    }
    message
}

/// Request to connect vectors from `first` on to these descriptors; `None` disconnects a vector.
fn triggers(kind: InterruptKind, first: u32, files: &[Option<BorrowedFd<'_>>]) -> Message {
    let numbers: Vec<i32> = files.iter().map(|file| file.map_or(-1, |file| file.as_raw_fd())).collect();
    request(kind, EVENTFD | TRIGGER, first, numbers.len(), &numbers)
}

impl Connected {
    /// Connects vectors of `kind`, which has the capabilities `interrupts`, from `first` on.
    ///
    /// A kind that cannot grow while it is enabled is disabled, and enabled again with all its vectors: the kernel
    /// allocates them once. Interrupts in between are lost, so callers connect such a kind as a whole if they can.
    pub(super) fn connect(
        &mut self,
        function: BorrowedFd<'_>,
        kind: InterruptKind,
        interrupts: Interrupts,
        first: u32,
        files: &[Option<BorrowedFd<'_>>],
    ) -> io::Result<()> {
        let send = |mut message| sys::exchange(function, Request::DEVICE_SET_IRQS, &mut message).map(drop);
        if interrupts.dynamic || interrupts.count == 1 {
            send(triggers(kind, first, files))?;
            self.kinds.entry(kind).or_default();
            return Ok(());
        }
        let had = self.kinds.get(&kind).map_or(0, Vec::len);
        let kept = self.keep(kind, first, files)?;
        let all: Vec<_> = kept.iter().map(|file| file.as_ref().map(AsFd::as_fd)).collect();
        if had == all.len() {
            return send(triggers(kind, first, files));
        }
        if had > 0 {
            send(request(kind, NONE | TRIGGER, 0, 0, &[]))?;
        }
        let enabled = send(triggers(kind, 0, &all));
        if enabled.is_err() {
            self.kinds.remove(&kind);
        }
        enabled
    }

    /// Copies of the descriptors, with those from before.
    fn keep(
        &mut self,
        kind: InterruptKind,
        first: u32,
        files: &[Option<BorrowedFd<'_>>],
    ) -> io::Result<&[Option<OwnedFd>]> {
        let copy = |file: &Option<BorrowedFd<'_>>| file.map(|file| file.try_clone_to_owned()).transpose();
        let copies: Vec<_> = files.iter().map(copy).collect::<io::Result<_>>()?;
        let first = usize::try_from(first).map_err(io::Error::other)?;
        let kept = self.kinds.entry(kind).or_default();
        if kept.len() < first.saturating_add(copies.len()) {
            kept.resize_with(first.saturating_add(copies.len()), || None);
        }
        for (place, copy) in kept.iter_mut().skip(first).zip(copies) {
            *place = copy;
        }
        Ok(kept)
    }

    /// Disables `kind`, if it is enabled.
    pub(super) fn disable(&mut self, function: BorrowedFd<'_>, kind: InterruptKind) -> io::Result<()> {
        if !self.kinds.contains_key(&kind) {
            return Ok(());
        }
        let mut message = request(kind, NONE | TRIGGER, 0, 0, &[]);
        sys::exchange(function, Request::DEVICE_SET_IRQS, &mut message)?;
        self.kinds.remove(&kind);
        Ok(())
    }
}

/// A write to `resample` unmasks INTx.
pub(super) fn connect_resample(function: BorrowedFd<'_>, resample: BorrowedFd<'_>) -> io::Result<()> {
    let mut message = request(InterruptKind::Intx, EVENTFD | UNMASK, 0, 1, &[resample.as_raw_fd()]);
    sys::exchange(function, Request::DEVICE_SET_IRQS, &mut message).map(drop)
}

/// Masks or unmasks INTx.
pub(super) fn mask_intx(function: BorrowedFd<'_>, masked: bool) -> io::Result<()> {
    let action = if masked { MASK } else { UNMASK };
    let mut message = request(InterruptKind::Intx, NONE | action, 0, 1, &[]);
    sys::exchange(function, Request::DEVICE_SET_IRQS, &mut message).map(drop)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_request_has_a_descriptor_for_every_vector_and_minus_one_for_none() {
        let null = File::open("/dev/null").unwrap();
        let message = triggers(InterruptKind::Msix, 3, &[None, Some(null.as_fd())]);
        let words: Vec<_> = (0..7).map(|word| message.get(word * 4).unwrap()).collect();
        let descriptor = null.as_raw_fd().cast_unsigned();
        assert_eq!(words, [28, EVENTFD | TRIGGER, 2, 3, 2, u32::MAX, descriptor]);
        assert_eq!(request(InterruptKind::Intx, NONE | TRIGGER, 0, 0, &[]).len(), 20);
    }

    #[test]
    fn what_cannot_grow_is_remembered_as_a_whole() {
        let null = File::open("/dev/null").unwrap();
        let mut connected = Connected::default();
        connected.keep(InterruptKind::Msi, 1, &[Some(null.as_fd())]).unwrap();
        let kept = connected.keep(InterruptKind::Msi, 3, &[Some(null.as_fd()), None]).unwrap();
        let there: Vec<_> = kept.iter().map(Option::is_some).collect();
        assert_eq!(there, [false, true, false, true, false]);
    }

    #[test]
    fn what_is_not_enabled_is_disabled_without_asking_the_kernel() {
        let null = File::open("/dev/null").unwrap();
        Connected::default().disable(null.as_fd(), InterruptKind::Msix).unwrap();
    }
}
