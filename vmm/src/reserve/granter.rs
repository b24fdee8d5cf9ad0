//! Slices for a machine that runs.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use egm_address::CpuSet;
use egm_device::owner::Owner;

use super::broker::Broker;
use super::error::ReserveError;
use super::leases::{ATTEMPTS, Leases};
use super::returns::Return;
use crate::config::{DeviceKind, EgmSlice, Spec};
use crate::error::Chain;
use crate::facts::{self, Facts, Scope};
use crate::plan::{self, BackingPlan};

/// Memory that a running machine was granted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GrantedMemory {
    pub(crate) backing: BackingPlan,
    /// The host's processors near it, where known.
    pub(crate) near: Option<CpuSet>,
}

/// Grants slices to one machine while it runs. [`grant`](Self::grant) waits for the scrub.
pub(crate) struct Granter {
    spec: Spec,
    broker: Option<Broker>,
    leases: Leases,
    /// Whether a request for a slice is being carried out.
    is_busy: AtomicBool,
    /// Number of the next slice. This process uses none twice: an id means one slice.
    next: AtomicU32,
}

impl Granter {
    /// Grants slices to the machine of `spec`, which has `leases`, by `broker` or else by the ledger.
    pub(crate) fn new(spec: Spec, broker: Option<Broker>, leases: Leases) -> Self {
        let next = AtomicU32::new(u32::try_from(spec.egm.len()).unwrap_or(u32::MAX));
        // Waits are for the start of a machine: the client of a request has a time limit.
        let broker = broker.map(|broker| Broker { wait: false, ..broker });
        Self { spec, broker, leases, is_busy: AtomicBool::new(false), next }
    }

    /// Reserves it for one request, until [`release`](Self::release); false while another has it. A port that is free for one
    /// request is so for one only.
    pub(crate) fn acquire(&self) -> bool {
        !self.is_busy.swap(true, Ordering::Acquire)
    }

    pub(crate) fn release(&self) {
        self.is_busy.store(false, Ordering::Release);
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
        let mut attempt = 1;
        loop {
            let facts = self.facts(spec)?;
            let backing = plan::of_slice(id, spec, &facts)?;
            match Leases::take(spec, std::slice::from_ref(&backing), &facts, &|_, _| ()) {
                Err(error) if error.is_lost_race() && attempt < ATTEMPTS => attempt += 1,
                taken => {
                    self.leases.adopt(id, &taken?);
                    return Ok(GrantedMemory { near: backing.near(&facts), backing });
                }
            }
        }
    }

    fn borrow(&self, id: &str, mut spec: Spec, broker: &Broker) -> Result<GrantedMemory, ReserveError> {
        let named = |error| match error {
            ReserveError::Broker { source, .. } => ReserveError::Broker { id: id.to_owned(), source },
            other => other,
        };
        let mut facts = self.facts(&spec)?;
        let granted = broker.borrow(&spec, &|_, _| ()).map_err(named)?;
        let _ = granted.pin(&mut spec, &mut facts); // its notes name the slice by its place in a configuration
        match plan::of_slice(id, &spec, &facts) {
            Ok(backing) => {
                self.leases.adopt(id, &granted.into_leases().map_err(named)?);
                Ok(GrantedMemory { near: backing.near(&facts), backing })
            }
            Err(error) => {
                granted.return_all().map_err(named)?;
                Err(error.into())
            }
        }
    }

    /// Returns slice `id`, which no device became.
    pub(crate) fn return_unused(&self, id: &str) {
        let report = |outcome: Result<Return, ReserveError>| {
            if let Err(error) = outcome {
                tracing::warn!("{}", Chain(&error));
            }
        };
        self.leases.return_one(id, Box::new(report));
    }

    /// The machine with `slice` alone.
    fn spec_of(&self, slice: &EgmSlice) -> Spec {
        let mut spec = Spec { egm: vec![slice.clone()], ..self.spec.clone() };
        spec.devices.retain(|device| !matches!(device.kind, DeviceKind::Egm { .. }));
        spec
    }

    /// The host, as the plan of `spec` depends on it, without the machine's own claims on GPUs: they would refuse its own slice.
    fn facts(&self, spec: &Spec) -> Result<Facts, ReserveError> {
        let own = Owner::this(&spec.name).to_string();
        let mut facts = facts::of_host(&Scope::of(spec))?;
        facts.regions.iter_mut().for_each(|host| host.gpus.retain(|gpu| gpu.owner != own));
        Ok(facts)
    }
}
