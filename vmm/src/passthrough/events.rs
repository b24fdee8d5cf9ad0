//! What the host says of a passed function while the guest has it: a line for the operator.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use egm_vfio::backend::{Backend, BackendError, InterruptKind, RegionIndex};
use event_manager::{EventOps, EventSet, Events as Ready, MutEventSubscriber};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::descriptor::borrowed;

/// The part of the event loop that hears of one function. Each of its two events is told once: a device that reports
/// errors does so many times, and the kernel asks for a function every few seconds.
pub struct Events {
    backend: Arc<dyn Backend>,
    id: String,
    heard: Vec<(InterruptKind, EventFd)>,
    gone: Box<dyn Fn() + Send>,
}

impl Events {
    /// Listens to `backend`, the device `id` of the configuration; some backends have nothing to say. `gone` is called when
    /// the function is there no more.
    ///
    /// # Errors
    /// Descriptors ran out, or the backend refused.
    pub fn new(id: &str, backend: Arc<dyn Backend>, gone: impl Fn() + Send + 'static) -> io::Result<Self> {
        let mut heard = Vec::new();
        for kind in [InterruptKind::Error, InterruptKind::Request] {
            if backend.interrupts(kind).count > 0 {
                let event = EventFd::new(EFD_NONBLOCK)?;
                backend.connect(kind, 0, &[Some(borrowed(&event))]).map_err(io::Error::other)?;
                heard.push((kind, event));
            }
        }
        Ok(Self { backend, id: id.to_owned(), heard, gone: Box::new(gone) })
    }

    /// What the event with this descriptor means, if it is one of ours.
    fn meaning(&self, fd: i32) -> Option<String> {
        let (kind, event) = self.heard.iter().find(|(_, event)| event.as_raw_fd() == fd)?;
        let _ = event.read();
        let (id, function) = (&self.id, self.backend.name());
        if let (InterruptKind::Error, Some(why)) = (kind, self.lost()) {
            (self.gone)();
            return Some(format!(
                "device \"{id}\": {why}: the guest reads ones there and runs on; the device is back in the next start of \
                 this machine"
            ));
        }
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

impl Events {
    /// Why the function is there no more, if so.
    fn lost(&self) -> Option<BackendError> {
        let asked = self.backend.read(RegionIndex::Config, 0, &mut [0; 2]);
        asked.err().filter(|error| matches!(error, BackendError::Gone { .. }))
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
    use std::sync::atomic::{AtomicBool, Ordering};

    use egm_vfio::fake::FakeFunction;

    use super::*;

    #[test]
    fn what_the_host_says_is_told_with_the_device_and_what_it_means() {
        let fake = Arc::new(
            FakeFunction::default()
                .with_interrupts(InterruptKind::Error, 1)
                .with_interrupts(InterruptKind::Request, 1),
        );
        let events = Events::new("gpu0", Arc::clone(&fake) as _, || unreachable!()).unwrap();
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
    fn a_function_that_is_gone_is_told_with_what_becomes_of_the_guest() {
        let fake = Arc::new(FakeFunction::default().with_interrupts(InterruptKind::Error, 1));
        let told = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&told);
        let gone = move || tell.store(true, Ordering::Relaxed);
        let events = Events::new("gpu0", Arc::clone(&fake) as _, gone).unwrap();
        assert!(fake.fire(InterruptKind::Error, 0));
        fake.remove();
        let line = events.meaning(events.heard[0].1.as_raw_fd()).unwrap();
        assert!(line.contains("fake function is gone") && line.contains("runs on"), "{line}");
        assert!(told.load(Ordering::Relaxed));
    }

    #[test]
    fn a_backend_that_has_nothing_to_say_is_not_asked() {
        let fake = Arc::new(FakeFunction::default());
        assert!(Events::new("gpu0", Arc::clone(&fake) as _, || {}).unwrap().heard.is_empty());
        assert!(fake.take_calls().is_empty());
    }
}
