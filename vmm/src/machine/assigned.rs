//! Assigns host functions to the guest.

use std::sync::Arc;

use egm_address::PciAddress;
use egm_vfio::backend::Backend;
use egm_vfio::variant::clique::Clique;

use crate::error::Chain;
use crate::hotplug::New;
use crate::kvm::{Routes, SlotTable};
use crate::passthrough::{AssignedFunction, Connections, HostEvents, InterruptLine, PassthroughError, Peers};
use crate::plan::BarPlan;

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
        Ok(New { function, host_events, member: None })
    }
}
