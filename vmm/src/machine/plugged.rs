//! Makes devices that are plugged in while the guest runs.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use egm_address::PciAddress;
use egm_device::region::RegionKind;
use egm_vfio::backend::{Backend, BackendError};
use egm_vfio::dma::Piece;
use egm_vfio::host;
use egm_vfio::kernel::{KernelDomain, KernelFunction};

use super::assigned::{Assigner, GuestPlacement, Own};
use super::finish::RunningDevice;
use super::slices::SliceLists;
use super::virtio::{Running, Virtio, Wiring};
use crate::config::{Clique, Device, DeviceKind};
use crate::error::Chain;
use crate::hotplug::{Candidate, HotplugError, Maker, Member, New, PlugMemory};
use crate::kvm::{LevelLine, Vm};
use crate::memory::GuestRam;
use crate::passthrough::InterruptLine;
use crate::plan::{
    self, Allocation, BackingPlan, BridgePlan, DeviceRegisters, FunctionPlan, FunctionRole, Plan,
};
use crate::reserve::{GrantedMemory, Servers, reached};
use crate::resources::{
    DeviceError, OpenSlice, SliceParts, left_behind, open_slice, open_virtio, pieces, share,
};

/// Plans and opens devices, and connects them to the machine.
pub(super) struct DeviceMaker {
    pub(super) assigner: Assigner,
    /// I/O address space of host functions, if they can be opened.
    pub(super) domain: Option<KernelDomain>,
    pub(super) wiring: Wiring,
    pub(super) running: Running,
    pub(super) memory: ServedMemory,
    /// Interrupt lines, by the address in the guest.
    pub(super) lines: BTreeMap<PciAddress, LevelLine>,
    pub(super) vm: Vm,
    pub(super) lists: SliceLists,
    /// The capability that KVM lacks to map slices of EGM devices as cached.
    pub(super) lacks_caching: Option<u32>,
}

/// The guest's memory, as vfio-user servers that are plugged in get it.
pub(super) struct ServedMemory {
    pieces: Vec<Piece>,
    /// Why servers get none.
    refusal: Option<Unshareable>,
}

/// Memory that no server gets while the guest runs.
#[derive(Clone)]
enum Unshareable {
    /// A slice of this region: the region's file can be that of other slices, too, or closed by now.
    Region(String),
    /// This backing is no sealed file: a server could shrink it.
    Unsealed(String),
}

impl Unshareable {
    fn of(backing: &BackingPlan) -> Option<Self> {
        let is_sealed = backing.pages.as_ref().is_some_and(|pages| pages.allocation == Allocation::Memfd);
        match &backing.region {
            _ if backing.device => None,
            Some(region) => Some(Self::Region(region.clone())),
            None if is_sealed => None,
            None => Some(Self::Unsealed(backing.id.clone())),
        }
    }

    fn error(self, id: &str) -> HotplugError {
        let id = id.to_owned();
        match self {
            Self::Region(region) => HotplugError::SliceMemory { id, region },
            Self::Unsealed(backing) => HotplugError::Unsealed { id, backing },
        }
    }
}

impl ServedMemory {
    pub(super) fn new(plan: &Plan, ram: &GuestRam) -> Self {
        let refusal = plan.backings.iter().find_map(Unshareable::of);
        // Descriptors of closed files are not even looked at.
        let pieces = if refusal.is_none() { pieces(plan, ram) } else { Vec::new() };
        Self { pieces, refusal }
    }
}

impl Maker for DeviceMaker {
    fn plan(
        &self,
        device: &Device,
        slice: Option<&PlugMemory>,
        bridges: &[BridgePlan],
    ) -> Result<Candidate, HotplugError> {
        let mut servers = Servers::default();
        let registers = match &device.kind {
            DeviceKind::Vfio { function, .. } => Some(self.registers(*function)?),
            DeviceKind::Egm { .. } => slice.map(|slice| plan::slice_registers(slice.size)),
            DeviceKind::VfioUser { socket } => {
                if let Some(refusal) = self.memory.refusal.clone() {
                    return Err(refusal.error(&device.id));
                }
                servers.connect(socket)?;
                servers
                    .facts()
                    .pop()
                    .map(|server| DeviceRegisters { bars: server.bars, msix_vectors: server.msix_vectors })
            }
            _ => None,
        };
        let mut refused = HotplugError::NoSlot { id: device.id.clone(), slots: bridges.len() };
        for (index, bridge) in bridges.iter().enumerate() {
            match plan::plug(device, registers.as_ref(), bridge) {
                Ok(function) => {
                    let memory = slice.and_then(|slice| slice.granted.clone());
                    return Ok(Candidate { bridge: index, function, servers, memory });
                }
                Err(error) => refused = error.into(),
            }
        }
        Err(refused)
    }

    fn make(&self, candidate: Candidate) -> Result<New, HotplugError> {
        let Candidate { function: plan, servers, memory, .. } = candidate;
        let FunctionRole::Endpoint { device, .. } = &plan.role else { return Err(HotplugError::NoPorts) };
        let made = match &device.kind {
            DeviceKind::Vfio { function, clique, p2p, .. } => {
                let clique = match *clique {
                    Clique::Number(number) => Some(number),
                    Clique::Auto | Clique::Off => None,
                };
                let own = Own { line: self.line(&plan), clique, alone: !p2p, ..Own::default() };
                self.assign(&plan, &device.id, *function, own)
            }
            DeviceKind::VfioUser { socket } => self.serve(&plan, &device.id, socket, servers),
            DeviceKind::Egm { node, .. } => self.slice(&plan, *node, *memory.ok_or(HotplugError::Ungranted)?),
            _ => self.join(&plan, device),
        };
        if made.is_ok() && matches!(device.kind, DeviceKind::Vfio { .. } | DeviceKind::Egm { .. }) {
            self.record(&device.id);
        }
        made
    }
}

impl DeviceMaker {
    /// The registers of the host function at `function`, if a running machine can take it.
    fn registers(&self, function: PciAddress) -> Result<DeviceRegisters, HotplugError> {
        if self.domain.is_none() {
            return Err(HotplugError::Unprepared);
        }
        let host = host::function(Path::new("/"), function)?;
        if !host.memory.is_empty() {
            return Err(HotplugError::Coherent { function });
        }
        match reached(function)?.first() {
            Some(region) => Err(HotplugError::Exclusive { function, region: region.name.clone() }),
            None => {
                Ok(DeviceRegisters { bars: host.shown_bars(), msix_vectors: host.msix_vectors.unwrap_or(0) })
            }
        }
    }

    /// Records in the ledger, after a plug of `id`, which VFIO devices reach the machine's slices.
    fn record(&self, id: &str) {
        let recorded = self.lists.leases.record_process(rustix::process::geteuid().as_raw());
        if let Err(error) = recorded {
            tracing::warn!(
                "cannot record which devices reach slices after the plug of \"{id}\": {}",
                Chain(&error)
            );
        }
    }

    /// The interrupt line of the pin of a function.
    fn line(&self, plan: &FunctionPlan) -> Option<Box<dyn InterruptLine>> {
        let line = self.lines.get(&plan.address)?.clone();
        Some(Box::new(line))
    }

    fn assign(
        &self,
        plan: &FunctionPlan,
        id: &str,
        function: PciAddress,
        own: Own,
    ) -> Result<New, HotplugError> {
        let domain = self.domain.as_ref().ok_or(HotplugError::Unprepared)?;
        let backend: Arc<dyn Backend> = Arc::new(KernelFunction::open(function, domain)?);
        fresh(id, function, backend.as_ref())?;
        let placement = GuestPlacement { id, address: plan.address, bars: &plan.bars };
        Ok(self.assigner.assign(placement, backend, own)?)
    }

    /// The device of the one of `servers` at `socket`. It reaches all of the guest's memory.
    fn serve(
        &self,
        plan: &FunctionPlan,
        id: &str,
        socket: &Path,
        servers: Servers,
    ) -> Result<New, HotplugError> {
        let missing = DeviceError::NotConnected { socket: socket.to_owned() };
        let missing = HotplugError::Device { id: id.to_owned(), source: missing };
        let backend = servers.function(socket).ok_or(missing)?;
        share(&servers, &self.memory.pieces)?;
        if backend.can_reset() {
            backend.reset()?;
        }
        let placement = GuestPlacement { id, address: plan.address, bars: &plan.bars };
        let own = Own { line: self.line(plan), ..Own::default() };
        let new = self.assigner.assign(placement, backend, own)?;
        Ok(New { member: Some(Box::new(Connected { _servers: servers })), ..new })
    }

    /// The device of a slice near the guest's node `node`. The leases have it, unless it is memory of the machine itself.
    fn slice(&self, plan: &FunctionPlan, node: u32, memory: GrantedMemory) -> Result<New, HotplugError> {
        let GrantedMemory { backing, near } = memory;
        let (id, leases) = (backing.id.as_str(), &self.lists.leases);
        let is_egm =
            leases.get(id).is_some_and(|taken| matches!(taken.region().kind, RegionKind::Egm { .. }));
        if let Some(capability) = self.lacks_caching.filter(|_| is_egm) {
            return Err(HotplugError::NotCacheable { id: id.to_owned(), capability });
        }
        let OpenSlice { function, backend } =
            open_slice(SliceParts { backing: &backing, leases, node, near }, &self.vm)?;
        let placement = GuestPlacement { id, address: plan.address, bars: &plan.bars };
        let new = self.assigner.assign(placement, backend, Own::default())?;
        let listed = self.lists.add(id, &function, &new.function);
        Ok(New { member: Some(Box::new(listed)), ..new })
    }

    fn join(&self, plan: &FunctionPlan, device: &Device) -> Result<New, HotplugError> {
        let failed = |source| HotplugError::Device { id: device.id.clone(), source };
        let unmade = |source| HotplugError::Make { id: device.id.clone(), source };
        let opened = open_virtio(&device.kind, None).map_err(failed)?;
        let made = Virtio::new(opened, device).map_err(unmade)?;
        let Virtio { device: virtio, subscriber } = made.ok_or_else(|| failed(DeviceError::NotVirtio))?;
        let function = self.wiring.function(plan, Arc::clone(&virtio)).map_err(unmade)?;
        let function = function.map_err(|error| unmade(io::Error::other(error)))?;
        let kept = RunningDevice::new(device, virtio, &function);
        let joined = self.running.join(kept, subscriber);
        Ok(New { function, host_events: None, member: Some(Box::new(joined)) })
    }
}

/// The connection of a device to its server, which ends with this value.
struct Connected {
    _servers: Servers,
}

impl Member for Connected {
    fn has_left(&mut self) -> bool {
        true
    }

    fn take_loss(&mut self) -> Option<io::Error> {
        None
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

#[cfg(test)]
mod tests {
    use egm_address::ByteSize;

    use super::*;
    use crate::config::PageSize;
    use crate::plan::HostPages;

    fn backing(region: Option<&str>, device: bool, allocation: Option<Allocation>) -> BackingPlan {
        let pages = |allocation| HostPages { allocation, size: ByteSize::new(4096), why_not_larger: None };
        BackingPlan {
            id: "node0".to_owned(),
            region: region.map(str::to_owned),
            guest_memfd: false,
            device,
            offset: 0,
            hpa: None,
            size: 1 << 30,
            page_size: PageSize::Auto,
            pages: allocation.map(pages),
            host_nodes: None,
            prefault: false,
        }
    }

    #[test]
    fn servers_get_sealed_files_of_this_machine_alone() {
        let refused =
            |backing: &BackingPlan| Unshareable::of(backing).map(|refusal| refusal.error("card").to_string());
        assert_eq!(refused(&backing(None, false, Some(Allocation::Memfd))), None);
        assert_eq!(refused(&backing(Some("egm4"), true, None)), None, "a BAR, which servers do not get");
        let slice = refused(&backing(Some("egm4"), false, None)).unwrap();
        assert!(slice.contains("slices of region \"egm4\""), "{slice}");
        for allocation in [Some(Allocation::HugeFile), Some(Allocation::Private), None] {
            let unsealed = refused(&backing(None, false, allocation)).unwrap();
            assert!(unsealed.contains("as a sealed file, and \"node0\" is none"), "{unsealed}");
        }
    }
}
