//! The PCI tree: root ports, expander bridges for devices of a node, and what is behind them.

use std::path::Path;

use egm_config::{Architecture, DeviceKind, Tap};

use super::{NVIDIA_BUILD, Qemu, id, value};
use crate::export::guest::Placed;
use crate::export::words::{self, text};

/// Buses are counted down from here for expander bridges, two for each: its own and the one behind its root port.
/// The firmware counts up from 0 for all other buses.
const LAST_BUS: usize = 254;

impl Qemu<'_> {
    pub(super) fn devices(&mut self) {
        if self.guest.iommufd() {
            self.command.option("-object", "iommufd,id=iommufd0");
            self.notes.push(
                "iommufd pins memory with struct page only: with /dev/egmN it needs a patched kernel, or \"backend\": \"legacy\""
                    .to_owned(),
            );
        }
        let near = self.guest.devices.iter().filter(|placed| placed.near.is_some()).count();
        let mut bridges: usize = 0;
        for (index, placed) in self.guest.devices.iter().enumerate() {
            let bus = match placed.near {
                Some(node) => {
                    // Those before count up to the last, so that none reaches into the next one's buses.
                    let after = near.saturating_sub(bridges).saturating_sub(1);
                    bridges = bridges.saturating_add(1);
                    let bus = LAST_BUS.saturating_sub(after.saturating_mul(2));
                    self.expander(&placed.id, node, bus)
                }
                None => "pcie.0".to_owned(),
            };
            let bus = if placed.root_port || placed.near.is_some() {
                self.root_port(&placed.id, &bus, index.saturating_add(1))
            } else {
                bus
            };
            self.device(placed, &bus);
            self.initiators(placed);
        }
    }

    /// A separate host bridge with `node` as its `_PXM`: the driver of a GPU compares it with its EGM's.
    fn expander(&mut self, id: &str, node: u32, bus: usize) -> String {
        let name = format!("pxb-{id}");
        self.command
            .option("-device", format!("pxb-pcie,id={name},bus=pcie.0,bus_nr={bus},numa_node={node}"));
        name
    }

    fn root_port(&mut self, id: &str, bus: &str, slot: usize) -> String {
        let name = format!("port-{id}");
        self.command
            .option("-device", format!("pcie-root-port,id={name},bus={bus},chassis={slot},slot={slot}"));
        name
    }

    fn device(&mut self, device: &Placed, bus: &str) {
        let id = &id(&device.id);
        let at = format!("id={id},bus={bus}");
        let option = match &device.kind {
            DeviceKind::VirtioBlk { path, read_only } => {
                let read_only = if *read_only { ",readonly=on" } else { "" };
                let drive = format!("if=none,id=drive-{id},format=raw,file={}{read_only}", value(text(path)));
                self.command.option("-drive", drive);
                format!("virtio-blk-pci,{at},drive=drive-{id}")
            }
            DeviceKind::VirtioNet { tap, mac, queue_pairs, vhost } => {
                let queues = if *queue_pairs > 1 { format!(",queues={queue_pairs}") } else { String::new() };
                let vhost = if vhost.unwrap_or(false) { ",vhost=on" } else { "" };
                let tap = match tap {
                    Tap::Name(name) => format!("ifname={},script=no,downscript=no{queues}", value(name)),
                    Tap::Descriptors(numbers) if numbers.len() == 1 => {
                        format!("fd={}", words::descriptors(numbers, ""))
                    }
                    Tap::Descriptors(numbers) => format!("fds={}", words::descriptors(numbers, ":")),
                };
                let netdev = format!("tap,id=net-{id},{tap}{vhost}");
                self.command.option("-netdev", netdev);
                let mac = egm_config::mac_text(*mac);
                let vectors = u32::from(*queue_pairs).saturating_mul(2).saturating_add(2);
                let many = if *queue_pairs > 1 { format!(",mq=on,vectors={vectors}") } else { String::new() };
                format!("virtio-net-pci,{at},netdev=net-{id},mac={mac}{many}")
            }
            DeviceKind::VirtioVsock { cid, socket: None } => format!("vhost-vsock-pci,{at},guest-cid={cid}"),
            DeviceKind::VirtioVsock { socket: Some(_), .. } => {
                self.notes.push(format!(
                    "{id} is left out: QEMU has no vsock of its own; leave \"socket\" out for the kernel's"
                ));
                return;
            }
            DeviceKind::VirtioRng => format!("virtio-rng-pci,{at}"),
            DeviceKind::Vfio { function, clique, .. } => {
                let clique = words::clique(*clique)
                    .map_or_else(String::new, |n| format!(",x-nv-gpudirect-clique={n}"));
                let iommufd = if self.guest.iommufd() { ",iommufd=iommufd0" } else { "" };
                format!("vfio-pci,host={function},{at},rombar=0{clique}{iommufd}")
            }
            DeviceKind::Egm { .. } => self.server(id, bus, &self.guest.socket(&device.id)),
            DeviceKind::VfioUser { socket } => self.server(id, bus, socket),
        };
        self.command.option("-device", option);
    }

    /// A device of the server at `socket`.
    fn server(&mut self, id: &str, bus: &str, socket: &Path) -> String {
        self.notes.push(format!("{id}: vfio-user-pci is in QEMU 10.1 and later"));
        serde_json::json!({
            "driver": "vfio-user-pci", "id": id, "bus": bus,
            "socket": { "type": "unix", "path": text(socket) },
        })
        .to_string()
    }

    /// The nodes in which a coherent GPU's driver brings up its memory, and the words by which it finds its EGM.
    fn initiators(&mut self, placed: &Placed) {
        let Some(index) = self.guest.devices.iter().position(|other| other.id == placed.id) else {
            return;
        };
        let id = &id(&placed.id);
        let nodes = self.guest.nodes.iter().filter(|node| node.initiator == Some(index));
        for (count, node) in nodes.enumerate() {
            let node = node.id;
            let object = format!("acpi-generic-initiator,id=gi-{id}-{count},pci-dev={id},node={node}");
            self.command.option("-object", object);
        }
        let Some(node) = placed.near.filter(|_| placed.initiators.is_some()) else { return };
        if self.options.nvidia {
            let object = format!("acpi-egm-memory,id=egm-{id},pci-dev={id},node={node}");
            self.command.option("-object", object);
        } else {
            self.notes.push(format!(
                "{id}: its driver does not learn that node {node} is EGM, for stock QEMU writes no nvidia,egm-* \
                 properties: the node is memory without a link to the GPU; --nvidia is for {NVIDIA_BUILD}"
            ));
        }
        if self.guest.machine.arch == Architecture::Aarch64 {
            self.notes.push(format!(
                "{id}: no vSMMU is written, so the guest cannot use ATS or PASID; NVIDIA's samples have one for each host bridge"
            ));
        }
    }
}
