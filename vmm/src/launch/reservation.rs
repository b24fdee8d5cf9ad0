//! What a machine has of the host, from before it is opened until after it has ended.

use egm_device::ledger::GpuLease;
use egm_device::progress::Bars;

use super::Confined;
use crate::error::{Chain, Report};
use crate::facts::Facts;
use crate::plan::Plan;
use crate::reserve::{self, Leases};

/// Slices and GPUs of a machine. Drop releases the GPUs, then scrubs and returns the slices.
#[derive(Debug)]
pub(crate) struct Reservation {
    /// The host as the plan was made for it.
    facts: Facts,
    leases: Leases,
    gpus: Option<GpuLease>,
}

impl Reservation {
    pub(super) fn new(facts: Facts, leases: Leases) -> Self {
        Self { facts, leases, gpus: None }
    }

    pub(super) fn facts(&self) -> &Facts {
        &self.facts
    }

    pub(super) fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Claims the GPUs of `plan` that reach a region, for a machine of the trust domain `domain`. The claims of a machine
    /// without the ledger's files end with its process.
    ///
    /// # Errors
    /// [`reserve::ReserveError`].
    pub(super) fn claim_gpus(
        &mut self,
        plan: &Plan,
        domain: Option<&str>,
        confined: &Confined,
    ) -> Result<(), Box<dyn Report>> {
        self.gpus = reserve::claim_gpus(plan, domain)?;
        if !confined.keeps_ledger() {
            self.gpus.take().map(|gpus| gpus.leave(confined.uid())).transpose()?;
        }
        Ok(())
    }

    /// Leaves the slices to the keeper of `confined`, if it has one, and drops the privileges that the machine's user lacks.
    ///
    /// # Errors
    /// The keeper has ended, or the kernel refuses.
    pub(super) fn enter(&self, confined: &Confined) -> Result<(), Box<dyn Report>> {
        if confined.has_keeper() {
            confined.hand_over(&self.leases)?;
            self.leases.leave_own();
            self.leases.close_locks()?;
        }
        confined.drop_privileges()
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        drop(self.gpus.take()); // before the slices: what a GPU may still write is not recorded clean
        let bars = Bars::default();
        let late = self.leases.return_all(&|slice, step| bars.report(slice, step));
        drop(bars);
        late.iter().for_each(|error| tracing::warn!("{}", Chain(error)));
    }
}
