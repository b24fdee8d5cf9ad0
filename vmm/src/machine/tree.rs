//! The plan's PCI tree, with a device in front of each opened descriptor.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use egm_address::PciAddress;
use egm_vfio::backend::Backend;
use egm_vfio::kernel::KernelDomain;
use vm_memory::GuestMemoryMmap;

use super::Subscriber;
use super::assigned::{Assigner, GuestPlacement, Own};
use super::finish::RunningDevice;
use super::virtio::{Virtio, Wiring};
use crate::hotplug::{Occupant, Slot};
use crate::kvm::{KvmError, LevelLine, SlotTable, Vm};
use crate::passthrough::{InterruptLine, PassthroughError, Peers};
use crate::pci::msix::MsiRouter;
use crate::pci::{Bus, HostBridge, PciFunction, Port, PortConfig, PortKind, RootBus, RootComplex};
use crate::plan::{BridgePlan, FunctionPlan, FunctionRole, Plan};
use crate::resources::{AddressSpaces, OpenDevice, OpenedDevice};
use crate::virtio::TransportError;

/// Why the tree could not be built; but for `Device` and `Assigned`, a bug of egm-vmm.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum TreeError {
    #[error("cannot make device \"{id}\"")]
    Device {
        /// Id of the device.
        id: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot assign device \"{id}\"")]
    Assigned {
        /// Id of the device.
        id: String,
        #[source]
        source: PassthroughError,
    },
    /// Plan and device disagree.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// An endpoint of the plan without an opened device.
    #[error("the plan has an endpoint \"{id}\" that nothing was opened for")]
    Missing {
        /// Id of the device.
        id: String,
    },
}

/// The tree and what lives in it.
pub(super) struct Tree {
    pub(super) root: RootComplex,
    /// Virtio devices, which the event loop serves.
    pub(super) devices: Vec<RunningDevice>,
    pub(super) subscribers: Vec<Subscriber>,
    /// Hot-plug ports with what is in them.
    pub(super) hotplug_slots: Vec<Slot>,
    /// Host functions behind no such port.
    pub(super) fixed: Vec<Occupant>,
}

/// Parts of the machine that every device is connected to.
pub(super) struct Connections<'a> {
    plan: &'a Plan,
    pub(super) wiring: Wiring,
    pub(super) assigner: Assigner,
    /// Interrupt lines of pins, by the function.
    pub(super) lines: BTreeMap<PciAddress, LevelLine>,
    /// I/O address space of host functions, if they can be opened.
    pub(super) domain: Option<KernelDomain>,
    pub(super) vm: Vm,
}

impl<'a> Connections<'a> {
    /// `spaces` are the address spaces for the DMA of host functions.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(super) fn new(
        vm: &Vm,
        memory: GuestMemoryMmap,
        spaces: &AddressSpaces,
        plan: &'a Plan,
    ) -> Result<Self, KvmError> {
        let takes = |function: &&FunctionPlan| match &function.role {
            FunctionRole::Endpoint { device, .. } => device.kind.is_assigned(),
            _ => function.is_spare_port(&plan.pci),
        };
        let routes = vm.routes()?;
        let doorbell = Arc::new(vm.doorbells());
        let wiring = Wiring { routes: Arc::clone(&routes), doorbell, memory };
        let assigner = Assigner {
            routes,
            slots: Arc::clone(vm.slots()) as Arc<dyn SlotTable>,
            peers: Arc::new(Peers::new(spaces.domains())),
            has_peers: plan.pci.iter().filter(takes).count() > 1,
        };
        let lines = plan.intx_lines().map(|(function, gsi)| (function, vm.level_line(gsi)));
        let (lines, domain) = (lines.collect(), spaces.kernel());
        Ok(Self { plan, wiring, assigner, lines, domain, vm: vm.clone() })
    }
}

/// A device behind a port, or on bus 0.
enum Endpoint {
    Own(Arc<dyn PciFunction>),
    Assigned(Occupant),
}

type Endpoints = BTreeMap<PciAddress, Endpoint>;

/// Builds the tree. `opened` is in the order of the plan's endpoints.
pub(super) fn build(
    plan: &Plan,
    opened: Vec<OpenedDevice>,
    connections: &Connections<'_>,
) -> Result<Tree, TreeError> {
    let mut tree = Tree {
        root: RootComplex::default(),
        devices: Vec::new(),
        subscribers: Vec::new(),
        hotplug_slots: Vec::new(),
        fixed: Vec::new(),
    };
    let mut opened = opened.into_iter();
    let mut endpoints = BTreeMap::new();
    for function in &plan.pci {
        if let FunctionRole::Endpoint { device, .. } = &function.role {
            let found = opened.next().filter(|found| found.device.id == device.id);
            let found = found.ok_or_else(|| TreeError::Missing { id: device.id.clone() })?;
            endpoints.insert(function.address, tree.endpoint(function, found, connections)?);
        }
    }
    let root = tree.bus(0, &mut endpoints, connections)?;
    let expanders = plan.expanders.iter().map(|expander| expander.bridge.secondary);
    let expanders =
        expanders.map(|number| Ok(RootBus { number, bus: tree.bus(number, &mut endpoints, connections)? }));
    let expanders = expanders.collect::<Result<_, TreeError>>()?;
    tree.root = RootComplex::with_expanders(root, expanders);
    Ok(tree)
}

/// The occupant of `port` at the start, if it is a hot-plug port: one with a host function directly behind it, or with
/// nothing.
fn hot(plan: &Plan, port: &FunctionPlan, endpoints: &mut Endpoints) -> Option<Option<Occupant>> {
    let bus = port.role.bridge()?.secondary;
    let behind = PciAddress::new(0, bus, 0, 0).ok()?;
    match endpoints.remove(&behind) {
        Some(Endpoint::Assigned(occupant)) => Some(Some(occupant)),
        Some(own) => {
            endpoints.insert(behind, own);
            None
        }
        None => port.is_spare_port(&plan.pci).then_some(None),
    }
}

impl Tree {
    /// Bus `number` of the plan with what is behind its ports.
    fn bus(
        &mut self,
        number: u8,
        endpoints: &mut Endpoints,
        connections: &Connections<'_>,
    ) -> Result<Bus, TreeError> {
        let mut bus = Bus::default();
        for function in connections.plan.pci.iter().filter(|function| function.address.bus() == number) {
            let (address, devfn) = (function.address, function.address.devfn());
            let (kind, slot, bridge) = match &function.role {
                FunctionRole::RootPort { slot, bridge } => (PortKind::Root, *slot, bridge),
                FunctionRole::SwitchUpstream { bridge } => (PortKind::Upstream, 0, bridge),
                FunctionRole::SwitchDownstream { slot, bridge } => (PortKind::Downstream, *slot, bridge),
                FunctionRole::HostBridge => {
                    bus.add(devfn, Arc::new(HostBridge::default()));
                    continue;
                }
                FunctionRole::Endpoint { .. } => {
                    match endpoints.remove(&address) {
                        Some(Endpoint::Own(own)) => bus.add(devfn, own),
                        Some(Endpoint::Assigned(occupant)) => {
                            bus.add(devfn, Arc::clone(&occupant.new.function) as Arc<dyn PciFunction>);
                            self.fixed.push(occupant);
                        }
                        None => {}
                    }
                    continue;
                }
            };
            let config = PortConfig {
                kind,
                slot,
                primary: number,
                secondary: bridge.secondary,
                subordinate: bridge.subordinate,
                window32: bridge.window32,
                window64: bridge.window64,
                occupied: true,
                acs: bridge.acs,
            };
            if let Some(occupant) = hot(connections.plan, function, endpoints) {
                let router = connections.assigner.routes.of(address);
                let port = self.hot_port(&config, bridge, occupant, router)?;
                bus.add_port(devfn, port, Bus::default());
                continue;
            }
            // Bus numbers of a plan grow downwards; where they do not, this ends the recursion.
            let down = bridge.secondary > number;
            let behind =
                if down { self.bus(bridge.secondary, endpoints, connections)? } else { Bus::default() };
            let port = Port::new(&config).above(behind.ports());
            bus.add_port(devfn, Arc::new(port), behind);
        }
        Ok(bus)
    }

    /// A hot-plug port with `occupant` in its slot.
    fn hot_port(
        &mut self,
        config: &PortConfig,
        bridge: &BridgePlan,
        occupant: Option<Occupant>,
        router: Arc<dyn MsiRouter>,
    ) -> Result<Arc<Port>, TreeError> {
        let function = occupant.as_ref().map(|occupant| Arc::clone(&occupant.new.function));
        let port = Port::hot(config, function, router);
        let id = || format!("slot {}", config.slot);
        let port = Arc::new(port.map_err(|source| TreeError::Device { id: id(), source })?);
        self.hotplug_slots.push(Slot {
            port: Arc::clone(&port),
            number: config.slot,
            bridge: *bridge,
            occupant,
        });
        Ok(port)
    }

    fn endpoint(
        &mut self,
        plan: &FunctionPlan,
        OpenedDevice { device, opened }: OpenedDevice,
        connections: &Connections<'_>,
    ) -> Result<Endpoint, TreeError> {
        let id = device.id.as_str();
        let opened = match opened {
            OpenDevice::Assigned(backend) => return assigned(plan, id, backend, connections),
            OpenDevice::Slice(slice) => return assigned(plan, id, slice.backend, connections),
            opened => opened,
        };
        let error = |source| TreeError::Device { id: id.to_owned(), source };
        let made = Virtio::new(opened, &device).map_err(error)?;
        let Some(Virtio { device: virtio, subscriber }) = made else {
            return Err(TreeError::Missing { id: id.to_owned() });
        };
        let function = connections.wiring.function(plan, Arc::clone(&virtio)).map_err(error)??;
        self.subscribers.push(subscriber);
        self.devices.push(RunningDevice::new(&device, virtio, &function));
        Ok(Endpoint::Own(function))
    }
}

/// Assigns the host function or slice of `backend`, as the plan has decided.
fn assigned(
    plan: &FunctionPlan,
    id: &str,
    backend: Arc<dyn Backend>,
    connections: &Connections<'_>,
) -> Result<Endpoint, TreeError> {
    let decided = match &plan.role {
        FunctionRole::Endpoint { assigned, .. } => assigned.as_ref(),
        _ => None,
    };
    let line = connections.lines.get(&plan.address).cloned();
    let own = Own {
        line: line.map(|line| Box::new(line) as Box<dyn InterruptLine>),
        clique: decided.and_then(|assigned| assigned.clique),
        alone: decided.is_some_and(|assigned| !assigned.p2p),
        memory: decided
            .and_then(|assigned| assigned.memory.as_ref())
            .map_or_else(Vec::new, |m| m.bars.clone()),
    };
    let placement = GuestPlacement { id, address: plan.address, bars: &plan.bars };
    let new = connections.assigner.assign(placement, backend, own);
    let new = new.map_err(|source| TreeError::Assigned { id: id.to_owned(), source })?;
    Ok(Endpoint::Assigned(Occupant::new(id, new)))
}
