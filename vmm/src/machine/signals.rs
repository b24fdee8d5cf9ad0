//! SIGTERM, SIGINT and SIGHUP end the machine in order; one more ends the wait for disks. SIGPWR is its power button.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

use super::exit::{ExitLatch, ExitReason};
use super::poison::Interrupt;

const HANDLED: [i32; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGPWR];

/// The signals that the machine handles until this is dropped; then they do nothing.
pub(super) struct Signals {
    exit: Arc<ExitLatch>,
    /// Interrupts the guest when its power button is pressed, where its tables have one.
    button: Option<Interrupt>,
    /// Handlers write to one socket for all signals. (A signalfd would need them blocked in every thread.)
    received: SignalDelivery<UnixStream, SignalOnly>,
}

impl Signals {
    pub(super) fn new(exit: Arc<ExitLatch>, button: Option<Interrupt>) -> io::Result<Self> {
        let (read, write) = UnixStream::pair()?;
        let received = SignalDelivery::with_pipe(read, write, SignalOnly, HANDLED)?;
        Ok(Self { exit, button, received })
    }

    fn receive(&self, signal: i32) {
        if signal == libc::SIGPWR {
            return Self::press(self.button.as_ref());
        }
        self.exit.request(ExitReason::Signal(signal));
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
    fn process(&mut self, _events: Events, _ops: &mut EventOps<'_>) {
        self.received.pending().for_each(|signal| self.receive(signal));
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        let _ = ops.add(Events::new(self.received.get_read(), EventSet::IN));
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
            assert_eq!(events.run_with_timeout(60_000).unwrap(), 1, "the signal is received");
            assert_eq!((pressed.load(Ordering::Relaxed), exit.is_set()), (presses, false));
        }
    }
}
