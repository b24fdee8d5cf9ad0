//! Assigns host functions to the guest: at the start, and at hot plug.

use std::path::Path;
use std::sync::Arc;

use egm_address::PciAddress;
use egm_vfio::backend::{Backend, BackendError};
use egm_vfio::host;
use egm_vfio::kernel::{KernelDomain, KernelFunction};
use egm_vfio::variant::clique::Clique;

use crate::config::{BarPlacements, Device, DeviceKind, VfioBackend};
use crate::error::Chain;
use crate::hotplug::{HotplugError, Maker, New, NewFunction};
use crate::kvm::{Routes, SlotTable};
use crate::passthrough::{AssignedFunction, Connections, HostEvents, InterruptLine, PassthroughError, Peers};
use crate::plan::{self, BarPlan, BridgePlan};
use crate::reserve::reached;
use crate::resources::left_behind;

/// Parts of the machine that every host function is connected to.
#[derive(Clone)]
pub(super) struct Assigner {
    pub(super) routes: Arc<Routes>,
    pub(super) slots: Arc<dyn SlotTable>,
    pub(super) peers: Arc<Peers>,
    /// Whether the machine has, or can get, more than one function.
    pub(super) has_peers: bool,
}

/// Properties of one function.
#[derive(Default)]
pub(super) struct Own {
    pub(super) line: Option<Box<dyn InterruptLine>>,
    pub(super) clique: Option<u8>,
    /// Whether other functions cannot reach its BARs.
    pub(super) alone: bool,
    /// BARs that are memory.
    pub(super) memory: Vec<u8>,
}

/// A function's name, and where the guest finds it.
#[derive(Clone, Copy)]
pub(super) struct GuestPlacement<'a> {
    pub(super) id: &'a str,
    pub(super) address: PciAddress,
    pub(super) bars: &'a [BarPlan],
}

impl Assigner {
    /// Makes the device of `placement` from `backend`, which was reset; other functions reach its BARs if allowed.
    pub(super) fn assign(
        &self,
        placement: GuestPlacement<'_>,
        backend: Arc<dyn Backend>,
        own: Own,
    ) -> Result<New, PassthroughError> {
        let GuestPlacement { id, address, bars } = placement;
        let to = Connections {
            router: self.routes.of(address),
            line: own.line,
            slots: Arc::clone(&self.slots),
            peers: Arc::clone(&self.peers),
            reachable: self.has_peers && !own.alone,
            memory: own.memory,
        };
        let added = own.clique.and_then(Clique::new).map(Clique::capability).into_iter().collect();
        // Before others reach its BARs: a later failure would leave those mappings behind.
        let host_events = Some(HostEvents::new(backend.as_ref())?);
        let function = AssignedFunction::new(backend, bars, added, to)?;
        match function.trapped_parts() {
            0 => {}
            left_out => tracing::info!(
                "device \"{id}\": {left_out} parts of its BARs are reached by exits, which is slow: it has too many to map"
            ),
        }
        match function.share_bars(bars) {
            Err(error @ PassthroughError::Unreachable { .. }) => {
                tracing::info!("device \"{id}\": {}", Chain(&error));
            }
            shared => shared?,
        }
        Ok(New { function, host_events })
    }

    /// Returns a function that opens hot-plugged functions of the host, in `domain`.
    pub(super) fn maker(self, domain: Option<KernelDomain>) -> Maker {
        Box::new(move |id, new, bridges| {
            let domain = domain.as_ref().ok_or(HotplugError::Unprepared)?;
            self.make(domain, id, new, bridges)
        })
    }

    fn make(
        &self,
        domain: &KernelDomain,
        id: &str,
        new: &NewFunction,
        bridges: &[BridgePlan],
    ) -> Result<(usize, New), HotplugError> {
        let NewFunction { function, clique, .. } = *new;
        let host = host::function(Path::new("/"), function)?;
        if !host.memory.is_empty() {
            return Err(HotplugError::Coherent { function });
        }
        if let Some(region) = reached(function)?.first() {
            return Err(HotplugError::Exclusive { function, region: region.name.clone() });
        }
        let device = device(id, function);
        let mut refused = HotplugError::NoSlot { id: id.to_owned(), slots: bridges.len() };
        let mut fits = bridges.iter().enumerate().filter_map(|(index, bridge)| {
            let bars = plan::plug(&device, &host, bridge);
            bars.map_err(|error| refused = error.into()).ok().map(|bars| (index, bars))
        });
        let found = fits.next();
        drop(fits);
        let Some((chosen, bars)) = found else { return Err(refused) };
        let address = bridges.get(chosen).and_then(BridgePlan::only_device).unwrap_or(function);
        let placement = GuestPlacement { id, address, bars: &bars };
        let backend: Arc<dyn Backend> = Arc::new(KernelFunction::open(function, domain)?);
        fresh(id, function, backend.as_ref())?;
        let own = Own { clique, ..Own::default() };
        Ok((chosen, self.assign(placement, backend, own)?))
    }
}

/// Resets an unused function: by itself, or else with its bus. A failure of the latter is only logged.
fn fresh(id: &str, address: PciAddress, backend: &dyn Backend) -> Result<(), BackendError> {
    if backend.can_reset() {
        return backend.reset();
    }
    if let Err(error) = backend.reset_with(&[address]) {
        tracing::info!("{}", left_behind(id, backend.name(), &error));
    }
    Ok(())
}

fn device(id: &str, function: PciAddress) -> Device {
    let (backend, clique, bars) = (VfioBackend::Auto, crate::config::Clique::Auto, BarPlacements::Guest);
    let kind = DeviceKind::Vfio { function, backend, clique, bars, p2p: true };
    Device { id: id.to_owned(), root_port: true, kind }
}
