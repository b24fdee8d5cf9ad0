//! Events that the host reports of an assigned function while the guest has it.

use std::io;
use std::os::fd::BorrowedFd;

use egm_vfio::backend::{Backend, InterruptKind};
use vmm_sys_util::eventfd::EventFd;

use crate::eventfd::{self, borrowed};

/// Listens to one function. Each of its two events is reported once: a device that reports errors does so many times,
/// and the kernel requests a function back every few seconds.
pub(crate) struct HostEvents(Vec<(InterruptKind, EventFd)>);

impl HostEvents {
    /// Listens to `backend`; some have no events.
    ///
    /// # Errors
    /// Descriptors ran out, or the backend refused.
    pub(crate) fn new(backend: &dyn Backend) -> io::Result<Self> {
        let mut host_events = Vec::new();
        for kind in [InterruptKind::Error, InterruptKind::Request] {
            if backend.interrupts(kind).count > 0 {
                let event = eventfd::new()?;
                backend.connect(kind, 0, &[Some(borrowed(&event))]).map_err(io::Error::other)?;
                host_events.push((kind, event));
            }
        }
        Ok(Self(host_events))
    }

    /// Descriptors that become readable when an event is pending.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|(_, event)| borrowed(event))
    }

    /// Events since the last call of this.
    pub(crate) fn take(&mut self) -> Vec<InterruptKind> {
        self.0.extract_if(.., |(_, event)| event.read().is_ok()).map(|(kind, _)| kind).collect()
    }
}

#[cfg(test)]
mod tests {
    use egm_vfio::fake::FakeFunction;

    use super::*;

    #[test]
    fn each_event_of_the_host_is_handled_once() {
        let fake = FakeFunction::default()
            .with_interrupts(InterruptKind::Error, 1)
            .with_interrupts(InterruptKind::Request, 1);
        let mut host_events = HostEvents::new(&fake).unwrap();
        assert!(host_events.take().is_empty());
        assert!(fake.fire(InterruptKind::Request, 0));
        assert_eq!(host_events.take(), [InterruptKind::Request]);
        assert!(fake.fire(InterruptKind::Request, 0) && fake.fire(InterruptKind::Error, 0));
        assert_eq!((host_events.take(), host_events.descriptors().count()), (vec![InterruptKind::Error], 0));
    }

    #[test]
    fn a_backend_without_events_is_not_asked() {
        let fake = FakeFunction::default();
        assert_eq!(HostEvents::new(&fake).unwrap().descriptors().count(), 0);
        assert!(fake.take_calls().is_empty());
    }
}
