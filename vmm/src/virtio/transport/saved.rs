//! A virtio function in a snapshot.
//!
//! The order of a restored function follows from what each step needs: configuration space, which decides where the BAR
//! and whether MSI-X is open; vectors; registers, which name vectors; the device, which starts with both; and last a kick
//! of each queue, because a kick that no device had seen is not saved.

use std::io;

use virtio_queue::QueueT;

use super::core::Core;
use super::{Activation, Interrupt, VirtioPci};
use crate::lock::lock;
use crate::snapshot::{Mismatch, ensure};
use crate::virtio::ActivateError;
use crate::virtio::saved::{DeviceState, FunctionState, QueuePosition};

/// Bytes of the device configuration space that are compared: all that our devices have.
const COMPARED: usize = 64;

impl VirtioPci {
    /// Whether vhost workers serve its queues.
    pub(crate) fn uses_vhost(&self) -> bool {
        lock(&self.device).uses_vhost()
    }

    /// Stops its vhost workers until [`Self::resume_vhost`].
    ///
    /// # Errors
    /// Their positions cannot be read; they have stopped anyway.
    pub(crate) fn stop_vhost(&self) -> io::Result<()> {
        lock(&self.device).stop_vhost()
    }

    /// Starts the stopped vhost workers again, and kicks their queues for what the driver has offered meanwhile. A device of which one
    /// cannot start needs a reset by its driver.
    pub(crate) fn resume_vhost(&self) {
        if egm_address::fault!("vhost-stays-stopped") || !self.uses_vhost() {
            return;
        }
        let mut registers = self.registers();
        if let Err(error) = lock(&self.device).resume_vhost() {
            tracing::error!("{}: {error}: {}", self.name, error.source);
            registers.core.needs_reset();
            drop(registers);
            self.interrupt.config(); // §2.1.2: a driver learns of it by a configuration change
        }
        self.kicks.iter().for_each(|kick| drop(kick.write(1))); // full is as good as written
    }

    /// Whether a request of the guest is with the host, or a reset is not over: the event loop goes on with both.
    pub(crate) fn is_busy(&self) -> bool {
        let mut registers = self.registers();
        self.settle(&mut registers.core);
        registers.core.is_resetting() || lock(&self.device).is_busy()
    }

    /// Its state, while it is not busy and neither a vCPU nor the event loop runs.
    pub(crate) fn saved(&self) -> FunctionState {
        let registers = self.registers();
        let device = lock(&self.device);
        let mut device_config = vec![0; COMPARED];
        device.config_read(0, &mut device_config);
        FunctionState {
            config: registers.config.saved(),
            msix: self.interrupt.msix().saved(),
            registers: registers.core.saved(),
            interrupt_status: self.interrupt.isr(),
            generation: self.interrupt.generation(),
            device_config,
            device: device.saved().filter(|_| registers.core.is_live()),
        }
    }

    /// Takes the state of a function like this one, before a vCPU runs. The root complex then updates what decodes where.
    ///
    /// # Errors
    /// [`Mismatch`].
    pub(crate) fn restore(&self, saved: &FunctionState) -> Result<(), Mismatch> {
        let mut registers = self.registers();
        let mut device_config = vec![0; COMPARED];
        lock(&self.device).config_read(0, &mut device_config);
        ensure(saved.device_config == device_config, || {
            "its configuration changed, for instance the size of a disk".to_owned()
        })?;
        registers.config.restore(&saved.config)?;
        registers.core.restore(&saved.registers)?;
        registers.msix_control = self.layout.msix_control(&registers.config);
        let (enabled, masked) = registers.msix_control;
        self.interrupt.msix().restore(&saved.msix, enabled, masked)?;
        self.interrupt.restore(saved.interrupt_status, saved.generation);
        let core = &registers.core;
        self.interrupt.set_config(core.config_vector());
        for (index, queue) in (0..).zip(core.queues()) {
            self.interrupt.set_queue(index, queue.vector);
        }
        ensure(core.is_live() == saved.device.is_some(), || {
            format!("its status {:#x} contradicts the state of its device", saved.registers.status)
        })?;
        if let Some(device) = &saved.device {
            self.start_again(core, device)?;
            // An interrupt that was on its way when the vCPUs were saved is sent again; a driver finds nothing new otherwise.
            (0..).zip(core.queues()).filter(|(_, queue)| queue.enabled).for_each(|(index, _)| {
                self.interrupt.queue(index);
            });
        }
        self.kicks.iter().for_each(|kick| drop(kick.write(1)));
        Ok(())
    }

    /// Activates the device where another one stopped.
    fn start_again(&self, core: &Core, saved: &DeviceState) -> Result<(), Mismatch> {
        let (features, count) = (core.features(), core.queues().len());
        let positions = &saved.queues;
        ensure(positions.len() == count, || format!("{} queues in place of {count}", positions.len()))?;
        let queues = core.queues().iter().zip(positions).map(|(state, position)| {
            let mut queue = self.queue(state, features)?;
            if let (Some(queue), Some(QueuePosition { available, used })) = (&mut queue, position) {
                queue.set_next_avail(*available);
                queue.set_next_used(*used);
            }
            Some(queue)
        });
        let queues = queues.collect::<Option<Vec<_>>>();
        let queues = queues.ok_or_else(|| Mismatch::new("a queue lies outside of guest memory"))?;
        let interrupt = std::sync::Arc::clone(&self.interrupt) as std::sync::Arc<dyn Interrupt>;
        let activation = Activation { memory: self.memory.clone(), queues, features, interrupt };
        let mut device = lock(&self.device);
        // Its vhost workers start when nothing can fail any more: the program before could not have them back otherwise.
        let held = device.stop_vhost().map_err(|source| ActivateError { what: "vhost", source });
        let started = held.and_then(|()| device.activate(activation)).and_then(|()| device.restored(saved));
        started.map_err(|error| Mismatch::new(format!("{error}: {}", error.source)))
    }
}
