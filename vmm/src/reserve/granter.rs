//! Slices for a machine that runs.

use std::sync::atomic::{AtomicU32, Ordering};

use egm_address::CpuSet;
use egm_device::owner::Owner;

use super::broker::Broker;
use super::error::ReserveError;
use super::leases::{Leases, Returned};
use crate::config::{DeviceKind, EgmSlice, Spec};
use crate::facts::{self, Facts, Scope};
use crate::plan::{self, BackingPlan};

/// Attempts to take a planned slice: another process may take it first. The error of the last attempt is final.
const ATTEMPTS: u32 = 4;

/// Memory that a running machine was granted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GrantedMemory {
    pub(crate) backing: BackingPlan,
    /// The host's processors near it, where known.
    pub(crate) near: Option<CpuSet>,
}

/// Grants slices to one machine while it runs. Its methods wait for scrubs.
pub(crate) struct Granter {
    spec: Spec,
    broker: Option<Broker>,
    leases: Leases,
    /// Number of the next slice. None is used twice: an id means one slice as long as the machine runs.
    next: AtomicU32,
}

impl Granter {
    /// Grants slices to the machine of `spec`, which has `leases`, by `broker` or else by the ledger.
    pub(crate) fn new(spec: Spec, broker: Option<Broker>, leases: Leases) -> Self {
        let next = AtomicU32::new(u32::try_from(spec.egm.len()).unwrap_or(u32::MAX));
        // Waits are for the start of a machine: the client of a request has a time limit.
        let broker = broker.map(|broker| Broker { wait: false, ..broker });
        Self { spec, broker, leases, next }
    }

    /// Takes the number of a new slice.
    pub(crate) fn number(&self) -> u32 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// The number that the next new slice would get.
    pub(crate) fn next_number(&self) -> u32 {
        self.next.load(Ordering::Relaxed)
    }

    /// Whether the guest has node `node`.
    pub(crate) fn has_node(&self, node: u32) -> bool {
        let ordinary = self.spec.memory.nodes.iter().map(|node| node.id);
        ordinary.chain(self.spec.nodes_of_slices().map(|slice| slice.node)).any(|id| id == node)
    }

    /// Where slice `id` would lie; `None` where a broker decides that.
    ///
    /// # Errors
    /// [`ReserveError`].
    pub(crate) fn plan(&self, id: &str, slice: &EgmSlice) -> Result<Option<BackingPlan>, ReserveError> {
        if self.broker.is_some() {
            return Ok(None);
        }
        let spec = self.spec_of(slice);
        Ok(Some(plan::of_slice(id, &spec, &self.facts(&spec)?)?))
    }

    /// Grants slice `id`, scrubbed, and adds it to the machine's leases.
    ///
    /// # Errors
    /// [`ReserveError`]; nothing stays granted.
    pub(crate) fn grant(&self, id: &str, slice: &EgmSlice) -> Result<GrantedMemory, ReserveError> {
        let granted = match &self.broker {
            Some(broker) => self.borrow(id, self.spec_of(slice), broker)?,
            None => self.take(id, &self.spec_of(slice))?,
        };
        self.leases.publish_one(&granted.backing);
        Ok(granted)
    }

    fn take(&self, id: &str, spec: &Spec) -> Result<GrantedMemory, ReserveError> {
        for attempt in 1..=ATTEMPTS {
            let facts = self.facts(spec)?;
            let backing = plan::of_slice(id, spec, &facts)?;
            match Leases::take(spec, std::slice::from_ref(&backing), &facts, &|_, _| ()) {
                Err(error) if error.is_lost_race() && attempt < ATTEMPTS => {}
                taken => {
                    self.leases.adopt(id, &taken?);
                    return Ok(GrantedMemory { near: backing.near(&facts), backing });
                }
            }
        }
        Err(ReserveError::Moved { attempts: ATTEMPTS })
    }

    fn borrow(&self, id: &str, mut spec: Spec, broker: &Broker) -> Result<GrantedMemory, ReserveError> {
        let named = |error| match error {
            ReserveError::Broker { source, .. } => ReserveError::Broker { id: id.to_owned(), source },
            other => other,
        };
        let granted = broker.borrow(&spec, &|_, _| ()).map_err(named)?;
        let mut facts = self.facts(&spec)?;
        let _ = granted.pin(&mut spec, &mut facts); // its notes name the slice by its place in a configuration
        let backing = plan::of_slice(id, &spec, &facts)?;
        self.leases.adopt(id, &granted.into_leases().map_err(named)?);
        Ok(GrantedMemory { near: backing.near(&facts), backing })
    }

    /// Returns slice `id`, which the machine does not use; `returned` is called with the outcome.
    pub(crate) fn return_one(&self, id: &str, returned: Returned) {
        self.leases.return_one(id, returned);
    }

    /// The machine with `slice` alone.
    fn spec_of(&self, slice: &EgmSlice) -> Spec {
        let mut spec = Spec { egm: vec![slice.clone()], ..self.spec.clone() };
        spec.devices.retain(|device| !matches!(device.kind, DeviceKind::Egm { .. }));
        spec
    }

    /// The host, as the plan of `spec` depends on it, without the machine's own claims on GPUs.
    fn facts(&self, spec: &Spec) -> Result<Facts, ReserveError> {
        let own = Owner::this(&spec.name).to_string();
        let mut facts = facts::of_host(&Scope::of(spec))?;
        facts.regions.iter_mut().for_each(|host| host.gpus.retain(|gpu| gpu.owner != own));
        Ok(facts)
    }
}
