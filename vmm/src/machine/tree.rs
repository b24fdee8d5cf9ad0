//! The plan's PCI tree, with a device in front of each opened descriptor.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use egm_address::PciAddress;
use egm_vfio::backend::Backend;
use egm_vfio::variant::clique::Clique;
use event_manager::MutEventSubscriber;
use vm_memory::GuestMemoryMmap;

use super::Subscriber;
use super::finish::{Kept, KeptFunction};
use crate::config::{Device, DeviceKind};
use crate::error::Chain;
use crate::kvm::{SlotTable, Vm};
use crate::passthrough::{self, Events, Line, PassedFunction, PassthroughError, Peers};
use crate::pci::msix::{MsiRouter, Msix};
use crate::pci::{Bus, HostBridge, PciFunction, Port, PortConfig, PortKind, RootComplex};
use crate::plan::{BridgePlan, FunctionPlan, FunctionRole, Plan};
use crate::resources::{AddressSpaces, OpenDevice};
use crate::virtio::blk::Block;
use crate::virtio::net::Net;
use crate::virtio::rng::Rng;
use crate::virtio::{DoorBell, TransportError, VirtioDevice, VirtioPci};

/// Why the tree could not be built; all are faults of ours but the lack of descriptors.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// Descriptors ran out.
    #[error("cannot make device \"{id}\"")]
    Device {
        /// Which.
        id: String,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// A host function.
    #[error("cannot pass device \"{id}\"")]
    Passed {
        /// Which.
        id: String,
        /// The reason.
        #[source]
        source: PassthroughError,
    },
    /// Plan and device disagree.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The plan has an endpoint that nothing was opened for.
    #[error("the plan has an endpoint \"{id}\" that nothing was opened for")]
    Missing {
        /// Which.
        id: String,
    },
}

/// The tree and what lives in it.
pub(super) struct Tree {
    pub(super) root: RootComplex,
    pub(super) devices: Vec<Kept>,
    pub(super) passed: Vec<KeptFunction>,
    pub(super) subscribers: Vec<Subscriber>,
}

/// What every device is connected to.
pub(super) struct Connections<'a> {
    vm: &'a Vm,
    router: Arc<dyn MsiRouter>,
    bell: Arc<dyn DoorBell>,
    memory: GuestMemoryMmap,
    peers: Arc<Peers>,
    plan: &'a Plan,
    /// Whether there is more than one host function.
    has_peers: bool,
}

impl<'a> Connections<'a> {
    /// `spaces` are where the DMA of host functions goes.
    pub(super) fn new(vm: &'a Vm, memory: GuestMemoryMmap, spaces: &AddressSpaces, plan: &'a Plan) -> Self {
        let peers = Arc::new(Peers::new(spaces.domains()));
        let is_passed = |function: &&FunctionPlan| matches!(&function.role, FunctionRole::Endpoint { device, .. } if device.kind.is_passed());
        let has_peers = plan.pci.iter().filter(is_passed).count() > 1;
        Self {
            vm,
            router: Arc::new(vm.routes()),
            bell: Arc::new(vm.doorbells()),
            memory,
            peers,
            plan,
            has_peers,
        }
    }

    fn transport(
        &self,
        plan: &FunctionPlan,
        id: &str,
        device: Arc<Mutex<dyn VirtioDevice>>,
    ) -> Result<Arc<VirtioPci>, TreeError> {
        let msix = Msix::new(plan.msix_vectors, Arc::clone(&self.router))
            .map_err(|source| TreeError::Device { id: id.to_owned(), source })?;
        Ok(Arc::new(VirtioPci::new(
            device,
            plan,
            Arc::new(msix),
            self.memory.clone(),
            Arc::clone(&self.bell),
        )?))
    }
}

/// Builds the tree. `opened` is in the order of the plan's endpoints.
pub(super) fn build(
    plan: &Plan,
    opened: Vec<(Device, OpenDevice)>,
    connections: &Connections<'_>,
) -> Result<Tree, TreeError> {
    let root = RootComplex::default();
    let mut tree = Tree { root, devices: Vec::new(), passed: Vec::new(), subscribers: Vec::new() };
    let mut opened = opened.into_iter();
    let mut endpoints = BTreeMap::new();
    for function in &plan.pci {
        if let FunctionRole::Endpoint { device, .. } = &function.role {
            let found = opened.next().filter(|(of, _)| of.id == device.id);
            let (device, resource) = found.ok_or_else(|| TreeError::Missing { id: device.id.clone() })?;
            endpoints.insert(function.address, tree.endpoint(function, &device, resource, connections)?);
        }
    }
    let expanders = plan.expanders.iter().map(|expander| expander.bridge.secondary);
    let expanders = expanders.map(|number| (number, bus(plan, number, &endpoints))).collect();
    tree.root = RootComplex::with_expanders(bus(plan, 0, &endpoints), expanders);
    Ok(tree)
}

/// Bus `number` of the plan with what is behind its ports.
fn bus(plan: &Plan, number: u8, endpoints: &BTreeMap<PciAddress, Arc<dyn PciFunction>>) -> Bus {
    let mut bus = Bus::default();
    for function in plan.pci.iter().filter(|function| function.address.bus() == number) {
        let devfn = function.address.devfn();
        let mut port = |kind, slot, bridge: &BridgePlan| {
            // A plan numbers buses downwards; one that does not has nothing behind such a port.
            let behind = if bridge.secondary > number {
                self::bus(plan, bridge.secondary, endpoints)
            } else {
                Bus::default()
            };
            let config = PortConfig {
                kind,
                slot,
                primary: number,
                secondary: bridge.secondary,
                subordinate: bridge.subordinate,
                window32: bridge.window32,
                window64: bridge.window64,
                occupied: !behind.is_empty(),
                acs: bridge.acs,
            };
            bus.add_port(devfn, Arc::new(Port::new(&config)), behind);
        };
        match &function.role {
            FunctionRole::RootPort { slot, bridge } => port(PortKind::Root, *slot, bridge),
            FunctionRole::SwitchUpstream { bridge } => port(PortKind::Upstream, 0, bridge),
            FunctionRole::SwitchDownstream { slot, bridge } => port(PortKind::Downstream, *slot, bridge),
            FunctionRole::HostBridge => bus.add(devfn, Arc::new(HostBridge::default())),
            FunctionRole::Endpoint { .. } => {
                if let Some(endpoint) = endpoints.get(&function.address) {
                    bus.add(devfn, Arc::clone(endpoint));
                }
            }
        }
    }
    bus
}

impl Tree {
    fn endpoint(
        &mut self,
        plan: &FunctionPlan,
        device: &Device,
        resource: OpenDevice,
        connections: &Connections<'_>,
    ) -> Result<Arc<dyn PciFunction>, TreeError> {
        let id = device.id.as_str();
        let error = |source| TreeError::Device { id: id.to_owned(), source };
        let virtio = match (resource, &device.kind) {
            (OpenDevice::Block(disk), _) => self.subscribe(Block::new(disk, id).map_err(error)?),
            (OpenDevice::Net { taps, backend }, DeviceKind::VirtioNet { mac, .. }) => {
                self.subscribe(Net::new(*mac, taps, backend).map_err(error)?)
            }
            (OpenDevice::Vsock(vsock), _) => self.subscribe(*vsock),
            (OpenDevice::Rng, _) => self.subscribe(Rng::new().map_err(error)?),
            (OpenDevice::Passed(backend), _) => return self.passed(plan, id, backend, connections),
            (OpenDevice::Net { .. }, _) => return Err(TreeError::Missing { id: id.to_owned() }),
        };
        let function = connections.transport(plan, id, Arc::clone(&virtio))?;
        self.devices.push(Kept {
            id: id.to_owned(),
            name: name(device),
            device: virtio,
            function: Arc::clone(&function),
        });
        Ok(function)
    }

    /// A host function, reset, with its BARs where the other functions find them.
    fn passed(
        &mut self,
        plan: &FunctionPlan,
        id: &str,
        backend: Arc<dyn Backend>,
        connections: &Connections<'_>,
    ) -> Result<Arc<dyn PciFunction>, TreeError> {
        let gsi = connections.plan.intx(id);
        let passed = match &plan.role {
            FunctionRole::Endpoint { passed, .. } => passed.as_ref(),
            _ => None,
        };
        let clique = passed.and_then(|passed| Clique::new(passed.clique?));
        let to = passthrough::Connections {
            router: Arc::clone(&connections.router),
            line: gsi.map(|gsi| Box::new(connections.vm.level_line(gsi)) as Box<dyn Line>),
            slots: Arc::clone(connections.vm.slots()) as Arc<dyn SlotTable>,
            peers: Arc::clone(&connections.peers),
            reachable: connections.has_peers && passed.is_none_or(|passed| passed.p2p),
        };
        let added = clique.map(Clique::capability).into_iter().collect();
        let function = PassedFunction::new(Arc::clone(&backend), &plan.bars, added, to)
            .map_err(|source| TreeError::Passed { id: id.to_owned(), source })?;
        if let Err(error) = function.lend(&plan.bars) {
            eprintln!("note: device \"{id}\": {}", Chain(&error));
        }
        let lost = Arc::clone(&function);
        let events = Events::new(id, backend, move || lost.lose());
        let events = events.map_err(|source| TreeError::Device { id: id.to_owned(), source })?;
        self.subscribers.push(Arc::new(Mutex::new(events)));
        self.passed.push(KeptFunction { id: id.to_owned(), function: Arc::clone(&function) });
        Ok(function)
    }

    /// One device, known to the event loop.
    fn subscribe<D: VirtioDevice + MutEventSubscriber + 'static>(
        &mut self,
        device: D,
    ) -> Arc<Mutex<dyn VirtioDevice>> {
        let device = Arc::new(Mutex::new(device));
        self.subscribers.push(Arc::clone(&device) as Subscriber);
        device
    }
}

/// What an operator knows the device by.
fn name(device: &Device) -> String {
    match &device.kind {
        DeviceKind::VirtioBlk { path, .. } => format!("disk \"{}\" ({})", device.id, path.display()),
        _ => format!("device \"{}\"", device.id),
    }
}
