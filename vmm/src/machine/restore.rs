//! A machine from a snapshot, before its first vCPU runs.
//!
//! The order: memory is there already; interrupt controllers, then vCPUs, which need them; then devices: interrupts of theirs that
//! wait find both; and last the PCI tree, which has their doorbells attached.

use super::saved::{MachineState, check_view};
use super::{Machine, MachineStep};
use crate::error::Chain;
use crate::kvm::KvmError;
use crate::lock::lock;
use crate::snapshot::{Mismatch, RestoreReason, ensure};

fn kvm(error: &KvmError) -> RestoreReason {
    RestoreReason::Kvm(Chain(error).to_string())
}

impl Machine {
    /// The machine in the state `saved`: its vCPUs wait until it is resumed.
    ///
    /// # Errors
    /// [`RestoreReason`].
    pub(crate) fn restored(mut self, saved: &MachineState) -> Result<Self, RestoreReason> {
        let parts = &self.snapshot;
        check_view(&saved.guest, &parts.plan)?;
        parts.check().map_err(|reason| Mismatch::new(format!("no snapshot has it: {reason}")))?;
        let count = self.vcpus.len();
        ensure(saved.vcpus.len() == count, || format!("{} vCPUs in place of {count}", saved.vcpus.len()))?;
        saved.controllers.restore(&self.vm, &parts.controllers).map_err(|error| kvm(&error))?;
        for (vcpu, state) in self.vcpus.iter().zip(&saved.vcpus) {
            state.restore(&vcpu.fd, &self.shared.states.interface).map_err(|error| kvm(&error))?;
        }
        self.shared.ports.restore(&saved.ports)?;
        self.shared.memory.restore(&saved.mmio)?;
        parts.root.restore(&saved.bridges)?;
        let devices = lock(&parts.devices);
        let count = devices.len();
        ensure(saved.devices.len() == count, || {
            format!("{} devices in place of {count}", saved.devices.len())
        })?;
        for kept in devices.iter() {
            let state = saved.devices.get(&kept.id);
            let state = state.ok_or_else(|| Mismatch::new(format!("it has no {}", kept.name)))?;
            kept.function.restore(state).map_err(|mismatch| mismatch.of(&kept.name))?;
        }
        drop(devices);
        parts.root.update();
        self.first_step = MachineStep::Restored;
        lock(&parts.origin.unplugged).clone_from(&saved.unplugged);
        self.shared.gate.close();
        let _ = self.shared.exit.wake().write(1); // the event loop reports the pause
        Ok(self)
    }
}
