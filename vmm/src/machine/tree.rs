//! The plan's PCI tree, with a device in front of each opened descriptor.

use std::io;
use std::sync::{Arc, Mutex};

use event_manager::MutEventSubscriber;
use vm_memory::GuestMemoryMmap;

use super::Subscriber;
use super::finish::Kept;
use crate::config::{Device, DeviceKind};
use crate::kvm::Vm;
use crate::pci::msix::{MsiRouter, Msix};
use crate::pci::{HostBridge, PciFunction, RootComplex, RootPort, RootPortConfig};
use crate::plan::{FunctionPlan, FunctionRole, Plan};
use crate::resources::OpenDevice;
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
    pub(super) subscribers: Vec<Subscriber>,
}

/// What every device is connected to.
pub(super) struct Connections {
    router: Arc<dyn MsiRouter>,
    bell: Arc<dyn DoorBell>,
    memory: GuestMemoryMmap,
}

impl Connections {
    pub(super) fn new(vm: &Vm, memory: GuestMemoryMmap) -> Self {
        Self { router: Arc::new(vm.routes()), bell: Arc::new(vm.doorbells()), memory }
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
    connections: &Connections,
) -> Result<Tree, TreeError> {
    let mut tree = Tree { root: RootComplex::default(), devices: Vec::new(), subscribers: Vec::new() };
    let mut opened = opened.into_iter();
    let mut endpoints = Vec::new();
    for function in &plan.pci {
        if let FunctionRole::Endpoint { device, .. } = &function.role {
            let found = opened.next().filter(|(of, _)| of.id == device.id);
            let (device, resource) = found.ok_or_else(|| TreeError::Missing { id: device.id.clone() })?;
            endpoints.push((function.address, tree.endpoint(function, &device, resource, connections)?));
        }
    }
    for function in &plan.pci {
        let devfn = function.address.devfn();
        let on_bus = |bus: u8| {
            let here = endpoints.iter().filter(move |(address, _)| address.bus() == bus);
            here.map(|(address, endpoint)| (address.devfn(), Arc::clone(endpoint)))
        };
        match &function.role {
            FunctionRole::HostBridge => tree.root.add(devfn, Arc::new(HostBridge::default())),
            FunctionRole::RootPort { slot, bridge } => {
                let behind: Vec<_> = on_bus(bridge.secondary).collect();
                let port = RootPortConfig {
                    slot: *slot,
                    secondary: bridge.secondary,
                    window32: bridge.window32,
                    window64: bridge.window64,
                    occupied: !behind.is_empty(),
                };
                tree.root.add_port(devfn, Arc::new(RootPort::new(&port)), behind);
            }
            FunctionRole::SwitchUpstream { .. } | FunctionRole::SwitchDownstream { .. } => {}
            FunctionRole::Endpoint { .. } => {}
        }
    }
    for (address, endpoint) in endpoints.into_iter().filter(|(address, _)| address.bus() == 0) {
        tree.root.add(address.devfn(), endpoint);
    }
    tree.root.update();
    Ok(tree)
}

impl Tree {
    fn endpoint(
        &mut self,
        plan: &FunctionPlan,
        device: &Device,
        resource: OpenDevice,
        connections: &Connections,
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
