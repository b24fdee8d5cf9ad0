//! What the host says of a passed function while the guest has it: a line for the operator.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use egm_vfio::backend::{Backend, InterruptKind};
use event_manager::{EventOps, EventSet, Events as Ready, MutEventSubscriber};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::descriptor::borrowed;

/// The part of the event loop that hears of one function. Each of its two events is told once: a device that reports
/// errors does so many times, and the kernel asks for a function every few seconds.
pub struct Events {
    backend: Arc<dyn Backend>,
    id: String,
    heard: Vec<(InterruptKind, EventFd)>,
}

impl Events {
    /// Listens to `backend`, the device `id` of the configuration; some backends have nothing to say.
    ///
    /// # Errors
    /// Descriptors ran out, or the backend refused.
    pub fn new(id: &str, backend: Arc<dyn Backend>) -> io::Result<Self> {
        let mut heard = Vec::new();
        for kind in [InterruptKind::Error, InterruptKind::Request] {
            if backend.interrupts(kind).count > 0 {
                let event = EventFd::new(EFD_NONBLOCK)?;
                backend.connect(kind, 0, &[Some(borrowed(&event))]).map_err(io::Error::other)?;
                heard.push((kind, event));
            }
        }
        Ok(Self { backend, id: id.to_owned(), heard })
    }

    /// What the event with this descriptor means, if it is one of ours.
    fn meaning(&self, fd: i32) -> Option<String> {
        let (kind, event) = self.heard.iter().find(|(_, event)| event.as_raw_fd() == fd)?;
        let _ = event.read();
        let (id, function) = (&self.id, self.backend.name());
        Some(match kind {
            InterruptKind::Error => format!(
                "device \"{id}\": {function} reported an error that it cannot correct: what the guest does with it may \
                 fail until it is reset; dmesg on the host says more"
            ),
            _ => format!(
                "device \"{id}\": the host wants {function} back, because its driver is being unbound or it is being \
                 removed: it waits until this machine ends"
            ),
        })
    }
}

impl MutEventSubscriber for Events {
    fn process(&mut self, events: Ready, ops: &mut EventOps<'_>) {
        if let Some(line) = self.meaning(events.fd()) {
            eprintln!("{line}");
            let _ = ops.remove(events);
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        for (_, event) in &self.heard {
            let _ = ops.add(Ready::new(event, EventSet::IN));
        }
    }
}

#[cfg(test)]
mod tests {
    use egm_vfio::fake::FakeFunction;

    use super::*;

    #[test]
    fn what_the_host_says_is_told_with_the_device_and_what_it_means() {
        let fake = Arc::new(
            FakeFunction::default()
                .with_interrupts(InterruptKind::Error, 1)
                .with_interrupts(InterruptKind::Request, 1),
        );
        let events = Events::new("gpu0", Arc::clone(&fake) as _).unwrap();
        for (kind, words) in
            [(InterruptKind::Error, "cannot correct"), (InterruptKind::Request, "wants fake function back")]
        {
            assert!(fake.fire(kind, 0));
            let ready = events.heard.iter().find(|(_, event)| event.read().is_ok());
            let line = events.meaning(ready.unwrap().1.as_raw_fd()).unwrap();
            assert!(line.contains("\"gpu0\"") && line.contains(words), "{line}");
        }
        assert_eq!(events.meaning(-1), None);
    }

    #[test]
    fn a_backend_that_has_nothing_to_say_is_not_asked() {
        let fake = Arc::new(FakeFunction::default());
        assert!(Events::new("gpu0", Arc::clone(&fake) as _).unwrap().heard.is_empty());
        assert!(fake.take_calls().is_empty());
    }
}
