//! The devices of a domain: its PCI tree, and what is behind it.

use std::io;
use std::path::Path;

use egm_config::{Architecture, Console, DeviceKind, Tap, VfioBackend};

use super::{Libvirt, Override, Xml, empty, text};
use crate::export::guest::{MemoryPiece, Placed, Source};
use crate::export::words;

const MIB: u64 = 1 << 20;
/// As in QEMU's own tree: expander bridges are counted down from here.
const LAST_BUS: usize = 254;

impl Libvirt<'_> {
    pub(super) fn devices(&mut self, xml: &mut Xml) -> io::Result<()> {
        self.window(xml)?;
        let guest = self.guest;
        let near = guest.devices.iter().filter(|placed| bridge(placed).is_some()).count();
        let mut bridges: usize = 0;
        for (index, placed) in guest.devices.iter().enumerate() {
            let port = match bridge(placed) {
                Some(node) => {
                    let after = near.saturating_sub(bridges).saturating_sub(1);
                    bridges = bridges.saturating_add(1);
                    let bus = LAST_BUS.saturating_sub(after.saturating_mul(2));
                    Some(self.expander(xml, node, bus, bridges)?)
                }
                None => None,
            };
            self.device(xml, index, placed, port)?;
            self.initiators(placed, index);
        }
        for memory in guest.memory.iter().filter(|memory| self.is_egm(memory)) {
            self.egm(xml, memory)?;
        }
        self.console(xml)?;
        empty(xml, "memballoon", &[("model", "none")])
    }

    /// Size of the 64-bit window: stock libvirt passes it to machines of x86 only.
    fn window(&mut self, xml: &mut Xml) -> io::Result<()> {
        let machine = &self.guest.machine;
        let Some(window) = machine.pcie.window64 else { return Ok(()) };
        if machine.arch == Architecture::Aarch64 && !self.options.nvidia {
            self.argument("-machine", format!("highmem-mmio-size={}", window.get()));
            return Ok(());
        }
        let kib = (window.get() >> 10).to_string();
        let root = [("type", "pci"), ("index", "0"), ("model", "pcie-root")];
        xml.create_element("controller")
            .with_attributes(root)
            .write_inner_content(|xml| text(xml, "pcihole64", &[("unit", "KiB")], &kib))
            .map(|_| ())
    }

    fn device(
        &mut self,
        xml: &mut Xml,
        index: usize,
        device: &Placed,
        port: Option<usize>,
    ) -> io::Result<()> {
        let alias = format!("ua-{}", device.id);
        match &device.kind {
            DeviceKind::VirtioBlk { path, read_only } => disk(xml, index, &alias, path, *read_only),
            DeviceKind::VirtioNet { tap: Tap::Descriptors(_), .. } => {
                let id = &device.id;
                self.notes.push(format!(
                    "{id} is left out: libvirt opens taps by their names; write one in \"tap\""
                ));
                Ok(())
            }
            DeviceKind::VirtioNet { tap: Tap::Name(tap), mac, queue_pairs, vhost } => {
                let interface = xml.create_element("interface").with_attribute(("type", "ethernet"));
                interface.write_inner_content(|xml| {
                    empty(xml, "mac", &[("address", &egm_config::mac_text(*mac))])?;
                    empty(xml, "target", &[("dev", tap), ("managed", "no")])?;
                    empty(xml, "model", &[("type", "virtio")])?;
                    let driver = if vhost.unwrap_or(false) { "vhost" } else { "qemu" };
                    empty(xml, "driver", &[("name", driver), ("queues", &queue_pairs.to_string())])?;
                    empty(xml, "alias", &[("name", &alias)])
                })?;
                Ok(())
            }
            DeviceKind::VirtioVsock { cid, socket: None } => {
                let vsock = xml.create_element("vsock").with_attribute(("model", "virtio"));
                let cid = cid.to_string();
                vsock.write_inner_content(|xml| empty(xml, "cid", &[("auto", "no"), ("address", &cid)]))?;
                Ok(())
            }
            DeviceKind::VirtioVsock { socket: Some(_), .. } => {
                let id = &device.id;
                self.notes.push(format!(
                    "{id} is left out: QEMU has no vsock of its own; leave \"socket\" out for the kernel's"
                ));
                Ok(())
            }
            DeviceKind::VirtioRng => {
                let rng = xml.create_element("rng").with_attribute(("model", "virtio"));
                rng.write_inner_content(|xml| {
                    text(xml, "backend", &[("model", "random")], "/dev/urandom")?;
                    empty(xml, "alias", &[("name", &alias)])
                })?;
                Ok(())
            }
            DeviceKind::Vfio { .. } => self.function(xml, device, &alias, port),
            DeviceKind::Egm { .. } => {
                self.server(device, &alias, &self.guest.socket(&device.id));
                Ok(())
            }
            DeviceKind::VfioUser { socket } => {
                self.server(device, &alias, socket);
                Ok(())
            }
        }
    }

    /// A device of the server at `socket`.
    fn server(&mut self, device: &Placed, alias: &str, socket: &Path) {
        let socket = words::text(socket);
        let json = serde_json::json!({
            "driver": "vfio-user-pci", "id": alias, "socket": { "type": "unix", "path": socket },
        });
        self.argument("-device", json.to_string());
        self.notes.push(format!(
            "{}: libvirt has no element for vfio-user; QEMU has it in 10.1 and later, and the user of QEMU connects to {socket}",
            device.id
        ));
    }

    fn function(
        &mut self,
        xml: &mut Xml,
        device: &Placed,
        alias: &str,
        port: Option<usize>,
    ) -> io::Result<()> {
        let DeviceKind::Vfio { function, backend, clique, .. } = device.kind else { return Ok(()) };
        let [segment, bus, slot, number] = [
            format!("{:#06x}", function.segment()),
            format!("{:#04x}", function.bus()),
            format!("{:#04x}", function.device()),
            format!("{:#x}", function.function()),
        ];
        let host = [("domain", segment.as_str()), ("bus", &bus), ("slot", &slot), ("function", &number)];
        let nodes = self.nodeset(device).filter(|_| self.options.nvidia);
        let hostdev = xml.create_element("hostdev").with_attributes([
            ("mode", "subsystem"),
            ("type", "pci"),
            ("managed", "no"),
        ]);
        hostdev.write_inner_content(|xml| {
            if backend == VfioBackend::Iommufd && self.options.nvidia {
                empty(xml, "driver", &[("iommufd", "yes")])?;
            } else {
                empty(xml, "driver", &[("name", "vfio")])?;
            }
            xml.create_element("source").write_inner_content(|xml| empty(xml, "address", &host))?;
            empty(xml, "alias", &[("name", alias)])?;
            empty(xml, "rom", &[("bar", "off")])?;
            if let Some(nodes) = &nodes {
                empty(xml, "acpi", &[("nodeset", nodes)])?;
            }
            let Some(port) = port else { return Ok(()) };
            let bus = format!("{port:#04x}");
            let at =
                [("type", "pci"), ("domain", "0x0000"), ("bus", &bus), ("slot", "0x00"), ("function", "0x0")];
            empty(xml, "address", &at)
        })?;
        if let Some(clique) = words::clique(clique) {
            let (alias, property) = (alias.to_owned(), "x-nv-gpudirect-clique");
            self.overrides.push(Override { alias, property, value: clique.into() });
        }
        if backend == VfioBackend::Iommufd && !self.options.nvidia {
            self.notes.push(format!(
                "{}: iommufd is left out, the schema of libvirt 11 has no word for it",
                device.id
            ));
        }
        Ok(())
    }

    /// `2-9`: the nodes of a coherent GPU.
    fn nodeset(&self, device: &Placed) -> Option<String> {
        let index = self.guest.devices.iter().position(|placed| placed.id == device.id);
        let nodes =
            self.guest.nodes.iter().filter(|node| node.initiator.is_some() && node.initiator == index);
        let nodes: egm_address::CpuSet = nodes.map(|node| node.id).collect();
        (!nodes.is_empty()).then(|| nodes.to_string())
    }

    /// Stock libvirt has cells without memory, but no element that makes them a device's.
    fn initiators(&mut self, placed: &Placed, index: usize) {
        if self.options.nvidia {
            return;
        }
        let alias = format!("ua-{}", placed.id);
        let nodes = self.guest.nodes.iter().filter(|node| node.initiator == Some(index));
        for (count, node) in nodes.enumerate() {
            let node = node.id;
            let object = format!("acpi-generic-initiator,id=gi-{alias}-{count},pci-dev={alias},node={node}");
            self.argument("-object", object);
        }
        if let (Some(_), Some(node)) = (placed.initiators, placed.near) {
            self.notes.push(format!(
                "{}: its driver does not learn that node {node} is EGM; --nvidia is for NVIDIA's builds of libvirt and QEMU",
                placed.id
            ));
        }
    }

    /// One element for each GPU, which NVIDIA's libvirt adds up: to the cell's size, so the last has the rest.
    fn egm(&self, xml: &mut Xml, memory: &MemoryPiece) -> io::Result<()> {
        let Source::File { path, .. } = &memory.source else { return Ok(()) };
        let gpus: Vec<&Placed> = self
            .guest
            .devices
            .iter()
            .filter(|placed| placed.near == Some(memory.node) && placed.initiators.is_some())
            .collect();
        let count = u64::try_from(gpus.len()).unwrap_or(u64::MAX).max(1);
        let share = memory.size / MIB / count;
        for (index, placed) in gpus.iter().enumerate() {
            let last = index.saturating_add(1) == gpus.len();
            let rest = if last { (memory.size / MIB) % count } else { 0 };
            let element =
                xml.create_element("memory").with_attributes([("model", "egm"), ("access", "shared")]);
            element.write_inner_content(|xml| {
                xml.create_element("source").write_inner_content(|xml| text(xml, "path", &[], path))?;
                let target = xml.create_element("target");
                target.write_inner_content(|xml| {
                    text(xml, "size", &[("unit", "MiB")], &share.saturating_add(rest).to_string())?;
                    text(xml, "node", &[], &memory.node.to_string())?;
                    text(xml, "pciDev", &[], &format!("ua-{}", placed.id))
                })?;
                Ok(())
            })?;
        }
        Ok(())
    }

    /// A host bridge of `node` at bus `bus`, the `count`th, and a root port; the index of the latter.
    fn expander(&mut self, xml: &mut Xml, node: u32, bus: usize, count: usize) -> io::Result<usize> {
        // Bridges of libvirt belong to cells only.
        let is_cell = self.guest.nodes.iter().any(|other| other.id == node && self.is_cell(other));
        let index = count.saturating_mul(2).saturating_sub(1);
        let port = index.saturating_add(1);
        let [index_text, port_text, bus] = [index, port, bus].map(|n| n.to_string());
        let bridge = [("type", "pci"), ("index", index_text.as_str()), ("model", "pcie-expander-bus")];
        xml.create_element("controller").with_attributes(bridge).write_inner_content(|xml| {
            let target = xml.create_element("target").with_attribute(("busNr", bus.as_str()));
            if is_cell {
                target.write_inner_content(|xml| text(xml, "node", &[], &node.to_string()))?;
            } else {
                target.write_empty()?;
            }
            Ok(())
        })?;
        if !is_cell {
            let alias = format!("pci.{index}");
            self.overrides.push(Override { alias, property: "numa_node", value: node });
        }
        let root = [("type", "pci"), ("index", port_text.as_str()), ("model", "pcie-root-port")];
        xml.create_element("controller").with_attributes(root).write_inner_content(|xml| {
            let bus = format!("{index:#04x}");
            let at =
                [("type", "pci"), ("domain", "0x0000"), ("bus", &bus), ("slot", "0x00"), ("function", "0x0")];
            empty(xml, "address", &at)
        })?;
        Ok(port)
    }

    fn console(&mut self, xml: &mut Xml) -> io::Result<()> {
        let (kind, source): (_, Vec<(&str, &str)>) = match &self.guest.machine.console {
            Console::Pty => ("pty", Vec::new()),
            Console::Stdio => {
                self.notes.push("the console is a pseudo-terminal: virsh console".to_owned());
                ("pty", Vec::new())
            }
            Console::Null => ("null", Vec::new()),
            Console::File { path } => ("file", vec![("path", words::text(path)), ("append", "on")]),
            Console::Socket { path } => ("unix", vec![("mode", "bind"), ("path", words::text(path))]),
        };
        let serial = xml.create_element("serial").with_attribute(("type", kind));
        serial.write_inner_content(|xml| {
            if !source.is_empty() {
                empty(xml, "source", &source)?;
            }
            empty(xml, "target", &[("port", "0")])
        })?;
        Ok(())
    }
}

/// The node of the bridge that a device gets. Devices of arguments get none: libvirt would give the bridge's port, which
/// it takes for empty, to another device.
fn bridge(placed: &Placed) -> Option<u32> {
    placed.near.filter(|_| matches!(placed.kind, DeviceKind::Vfio { .. }))
}

/// The letters at the end of a target's name only have to differ.
fn disk(xml: &mut Xml, index: usize, alias: &str, path: &Path, read_only: bool) -> io::Result<()> {
    let path = words::text(path);
    let (kind, source) = if path.starts_with("/dev/") { ("block", "dev") } else { ("file", "file") };
    let disk = xml.create_element("disk").with_attributes([("type", kind), ("device", "disk")]);
    disk.write_inner_content(|xml| {
        empty(xml, "driver", &[("name", "qemu"), ("type", "raw")])?;
        empty(xml, "source", &[(source, path)])?;
        empty(xml, "target", &[("dev", &format!("vd{}", letters(index))), ("bus", "virtio")])?;
        if read_only {
            empty(xml, "readonly", &[])?;
        }
        empty(xml, "alias", &[("name", alias)])
    })?;
    Ok(())
}

/// `a`, …, `z`, `aa`, …: as kernels count disks.
fn letters(index: usize) -> String {
    let mut letters = Vec::new();
    let mut left = Some(index);
    while let Some(number) = left {
        letters.push(b'a' + u8::try_from(number % 26).unwrap_or(0));
        left = (number / 26).checked_sub(1);
    }
    letters.iter().rev().map(|letter| char::from(*letter)).collect()
}
