//! Plan plus resources make a machine; the machine runs until there is an [`ExitReason`].
//!
//! ```text
//!            build()             run()                    first reason
//!  Resources ───────► Machine ───────► vCPU threads ═══╗
//!                                      event loop  ════╬══► stop vCPUs ► finish devices ► Ended
//!                                      signals     ════╝     (no guest     (disks are
//!                                                             I/O after)    durable, or named)
//! ```

mod assigned;
mod board;
mod build;
mod bus;
mod error;
mod exit;
mod finish;
mod pl011;
mod platform;
mod poison;
mod serial;
mod signals;
mod tree;
mod vcpu;

use std::sync::{Arc, Mutex};

pub use build::build;
pub use bus::{Bus, BusDevice, Overlap};
pub use error::BuildError;
use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
pub(crate) use exit::ExitLatch;
pub use exit::ExitReason;
pub use finish::Unfinished;
pub use tree::TreeError;

use crate::hotplug;
use crate::kvm::Vm;
use crate::lock::lock;
use crate::memory::GuestRam;
use crate::program;

/// A part of the event loop.
type Subscriber = Arc<Mutex<dyn MutEventSubscriber + Send>>;

/// A machine that has not started. Fields are dropped in this order: vCPUs and devices use what comes after them.
pub struct Machine {
    events: EventManager<Subscriber>,
    vcpus: Vec<vcpu::Vcpu>,
    shared: Arc<vcpu::Shared>,
    devices: Vec<finish::RunningDevice>,
    hotplug: Option<hotplug::Running>,
    poison: Arc<Mutex<poison::Poison>>,
    subscribers: Vec<Subscriber>,
    _vm: Vm,
    ram: GuestRam,
}

/// How a machine ended.
#[derive(Debug)]
pub struct Ended {
    /// The reason.
    pub reason: ExitReason,
    /// Devices that could not make the guest's writes durable.
    pub unfinished: Vec<Unfinished>,
    /// Mistakes and failures that the devices counted, in words; `None` when there was none.
    pub counted: Option<String>,
}

impl Machine {
    /// Handle for hot plug; a machine with neither hot-plug ports nor host functions has none.
    pub fn hotplug(&self) -> Option<hotplug::Handle> {
        self.hotplug.as_ref().map(|running| running.handle.clone())
    }

    /// Runs the guest to its end. On every way out the vCPUs have stopped, and each device has made durable what
    /// it promised or is named.
    pub fn run(mut self) -> Ended {
        let exit = Arc::clone(&self.shared.exit);
        for subscriber in &self.subscribers {
            self.events.add_subscriber(Arc::clone(subscriber));
        }
        let mut running = Vec::with_capacity(self.vcpus.len());
        let started = vcpu::prepare_kicks().and_then(|()| {
            self.vcpus.into_iter().try_for_each(|vcpu| {
                running.push(vcpu.start(Arc::clone(&self.shared))?);
                Ok(())
            })
        });
        program::forget_start(); // not earlier: the guest's first instruction does not wait for it
        exit.set(started.err().unwrap_or_else(|| serve(&mut self.events, &self.shared, &running)));
        running.into_iter().for_each(vcpu::RunningVcpu::stop);
        // Before anything else ends: they write to memory by themselves.
        let functions = self.hotplug.as_mut().map(hotplug::Running::end).unwrap_or_default();
        lock(&self.poison).hear();
        let unfinished = finish::finish(&self.devices, &mut self.events, &exit);
        let counted = finish::counted(&self.devices, functions);
        if !unfinished.is_empty() {
            // Storage that answers later still writes to guest memory, which must stay mapped until the process ends.
            std::mem::forget((self.devices, self.ram));
        }
        Ended { reason: exit.reason().cloned().unwrap_or(ExitReason::PoweredOff), unfinished, counted }
    }
}

fn serve(
    events: &mut EventManager<Subscriber>,
    shared: &vcpu::Shared,
    running: &[vcpu::RunningVcpu],
) -> ExitReason {
    loop {
        if let Some(reason) = shared.exit.reason() {
            return reason.clone();
        }
        match events.run() {
            Ok(_) => {
                for (index, vcpu) in (0..).zip(running) {
                    vcpu.interrupt_until(|| !shared.checks.wait_for(index));
                }
            }
            Err(event_manager::Error::Epoll(error)) if error.errno() == libc::EINTR => {}
            Err(error) => return ExitReason::Internal(format!("the event loop stopped: {error}")),
        }
    }
}

/// Lets the event loop turn when the machine ends.
struct Wake(Arc<ExitLatch>);

impl MutEventSubscriber for Wake {
    fn process(&mut self, _events: Events, ops: &mut EventOps<'_>) {
        let _ = ops.remove(Events::empty(self.0.wake()));
    }
    fn init(&mut self, ops: &mut EventOps<'_>) {
        let _ = ops.add(Events::new(self.0.wake(), EventSet::IN));
    }
}
