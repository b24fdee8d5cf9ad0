//! SIGTERM, SIGINT and SIGHUP end the machine in order; one more ends the wait for disks. SIGPWR is its power button.

use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use signal_hook::SigId;

use super::exit::{ExitLatch, ExitReason};
use super::poison::Interrupt;

/// The signals that the machine handles until this is dropped; then they do nothing.
pub(super) struct Signals {
    exit: Arc<ExitLatch>,
    /// Interrupts the guest when its power button is pressed, where its tables have one.
    button: Option<Interrupt>,
    heard: Vec<Heard>,
}

/// A signal, and the pipe that its handler writes.
struct Heard {
    signal: i32,
    pipe: UnixStream,
    handler: SigId,
}

impl Heard {
    fn new(signal: i32) -> io::Result<Self> {
        let (pipe, theirs) = UnixStream::pair()?;
        pipe.set_nonblocking(true)?;
        let handler = signal_hook::low_level::pipe::register(signal, theirs)?;
        Ok(Self { signal, pipe, handler })
    }
}

impl Drop for Heard {
    fn drop(&mut self) {
        signal_hook::low_level::unregister(self.handler); // which has the other end of the pipe
    }
}

impl Signals {
    pub(super) fn new(exit: Arc<ExitLatch>, button: Option<Interrupt>) -> io::Result<Self> {
        let heard = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGPWR].into_iter().map(Heard::new);
        Ok(Self { exit, button, heard: heard.collect::<io::Result<_>>()? })
    }

    fn press(button: Option<&Interrupt>) {
        match button {
            Some(_) if egm_address::fault!("power-button-lost") => {}
            Some(interrupt) => interrupt(),
            None => tracing::info!(
                "SIGPWR presses the power button, which only ACPI's tables have: this guest has a device tree; SIGTERM ends it"
            ),
        }
    }
}

impl MutEventSubscriber for Signals {
    fn process(&mut self, events: Events, _ops: &mut EventOps<'_>) {
        for Heard { signal, pipe, .. } in &mut self.heard {
            if pipe.as_raw_fd() == events.fd() && pipe.read(&mut [0; 16]).is_ok() {
                if *signal == libc::SIGPWR {
                    Self::press(self.button.as_ref());
                    continue;
                }
                if self.exit.is_set() {
                    self.exit.hurry();
                }
                self.exit.set(ExitReason::Signal(*signal));
            }
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        for heard in &self.heard {
            let _ = ops.add(Events::new(&heard.pipe, EventSet::IN));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU32, Ordering};

    use event_manager::{EventManager, SubscriberOps};

    use super::*;

    #[test]
    fn a_power_signal_presses_the_button_and_ends_nothing_with_or_without_one() {
        let pressed = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&pressed);
        let button: Interrupt = Box::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        for (button, presses) in [(Some(button), 1), (None, 1)] {
            let exit = ExitLatch::new().unwrap();
            let mut events = EventManager::new().unwrap();
            events.add_subscriber(Arc::new(Mutex::new(Signals::new(Arc::clone(&exit), button).unwrap())));
            signal_hook::low_level::raise(libc::SIGPWR).unwrap();
            assert_eq!(events.run_with_timeout(60_000).unwrap(), 1, "the signal is heard");
            assert_eq!((pressed.load(Ordering::Relaxed), exit.is_set()), (presses, false));
        }
    }
}
