//! cloud-hypervisor's command line, after the grammar of its `option_parser` and the keys of its `vmm/src/config.rs`.
//!
//! A value is in double quotes where it has a comma, a bracket or a space, and a double quote has no escape.

use std::path::Path;

use egm_address::CpuSet;
use egm_config::{Architecture, Console, DeviceKind, Tap};

use super::command::Command;
use super::guest::{Guest, MemoryPiece, NumaNode, Placed, Source};
use super::words::{self, text};
use super::{Export, ExportError, Output};

/// Makes cloud-hypervisor's command line.
pub(super) fn export(guest: &Guest) -> Result<Export, ExportError> {
    let mut this = Exporter { guest, command: Command::new("cloud-hypervisor"), notes: guest.notes.clone() };
    this.boot()?;
    this.cpus();
    this.memory()?;
    this.numa();
    this.devices()?;
    this.unsaid();
    Ok(Export { output: Output::Command(this.command), notes: this.notes })
}

struct Exporter<'a> {
    guest: &'a Guest,
    command: Command,
    notes: Vec<String>,
}

/// `text` as a value in a list of keys and values.
fn value(text: &str) -> Result<String, ExportError> {
    if text.contains('"') {
        return Err(ExportError::Quote { text: text.to_owned() });
    }
    let plain = !text.is_empty() && !text.contains([',', '[', ']', ' ']);
    Ok(if plain { text.to_owned() } else { format!("\"{text}\"") })
}

/// `cpus` as the value of an option: `[0-3,8]`.
fn list(cpus: &CpuSet) -> String {
    format!("[{cpus}]")
}

impl Exporter<'_> {
    fn boot(&mut self) -> Result<(), ExportError> {
        let machine = &self.guest.machine;
        // These are whole arguments, not lists.
        self.command.option("--kernel", text(&machine.boot.kernel));
        if let Some(initramfs) = &machine.boot.initramfs {
            self.command.option("--initramfs", text(initramfs));
        }
        if !machine.boot.cmdline.is_empty() {
            self.command.option("--cmdline", &machine.boot.cmdline);
        }
        let serial = match &machine.console {
            Console::Stdio => "tty".to_owned(),
            Console::Pty => "pty".to_owned(),
            Console::Null => "null".to_owned(),
            Console::File { path } => format!("file={}", value(text(path))?),
            Console::Socket { path } => format!("socket={}", value(text(path))?),
        };
        self.command.option("--serial", serial);
        self.command.option("--console", "off");
        Ok(())
    }

    fn cpus(&mut self) {
        let cpus = &self.guest.machine.cpus;
        let (threads, cores, sockets) = (cpus.threads, cpus.cores, cpus.sockets);
        let pinned = cpus.affinity.iter().enumerate();
        let pinned: Vec<String> = pinned.map(|(vcpu, cpus)| format!("{vcpu}@{}", list(cpus))).collect();
        let affinity =
            if pinned.is_empty() { String::new() } else { format!(",affinity=[{}]", pinned.join(",")) };
        let topology = format!("{threads}:{cores}:1:{sockets}");
        self.command.option("--cpus", format!("boot={},topology={topology}{affinity}", cpus.count));
    }

    fn memory(&mut self) -> Result<(), ExportError> {
        self.command.option("--memory", "size=0");
        let zones = self.guest.memory.iter().map(|memory| self.zone(memory)).collect::<Result<_, _>>()?;
        self.command.options("--memory-zone", zones);
        for memory in &self.guest.memory {
            let Source::Own { host_nodes: Some(nodes), .. } = &memory.source else { continue };
            if nodes.len() > 1 {
                self.notes.push(format!(
                    "{}: host nodes {nodes} are left out, cloud-hypervisor binds a zone to one node",
                    memory.id
                ));
            }
        }
        Ok(())
    }

    fn zone(&self, memory: &MemoryPiece) -> Result<String, ExportError> {
        let MemoryPiece { id, size, source, .. } = memory;
        let zone = match source {
            Source::Own { page_size, host_nodes, prefault } => {
                let pages = page_size.hugetlb();
                let pages =
                    pages.map_or_else(String::new, |page| format!(",hugepages=on,hugepage_size={page}"));
                let node = host_nodes.as_ref().filter(|nodes| nodes.len() == 1);
                let node = node.map_or_else(String::new, |node| format!(",host_numa_node={node}"));
                let prefault = if *prefault { ",prefault=on" } else { "" };
                format!("{pages}{node}{prefault}")
            }
            Source::File { path, offset: 0, .. } => format!(",file={}", value(path)?),
            Source::File { path, offset, .. } => {
                return Err(ExportError::Offset { id: id.clone(), path: path.clone(), offset: *offset });
            }
        };
        Ok(format!("id={id},size={}M,shared=on{zone}", size >> 20))
    }

    fn numa(&mut self) {
        let mut nodes = Vec::new();
        for (index, node) in self.guest.nodes.iter().enumerate() {
            let distances = self.guest.distances.iter().flat_map(|rows| rows.get(index)).flatten();
            let others = self.guest.nodes.iter().zip(distances).filter(|(to, _)| to.id != node.id);
            let distances: Vec<String> =
                others.map(|(to, distance)| format!("{}@{distance}", to.id)).collect();
            let distances = if distances.is_empty() {
                String::new()
            } else {
                format!(",distances=[{}]", distances.join(","))
            };
            nodes.push(format!("guest_numa_id={}{}{distances}", node.id, self.node(node)));
        }
        self.command.options("--numa", nodes);
        if self.guest.nodes.iter().any(|node| !node.access.is_empty()) {
            self.notes.push("\"access\" is left out: cloud-hypervisor writes no HMAT".to_owned());
        }
    }

    fn node(&self, node: &NumaNode) -> String {
        if let Some(placed) = node.initiator.and_then(|index| self.guest.devices.get(index)) {
            return format!(",device_id={}", placed.id);
        }
        let cpus = if node.cpus.is_empty() { String::new() } else { format!(",cpus={}", list(&node.cpus)) };
        let zone = node.memory.and_then(|index| self.guest.memory.get(index));
        let zone = zone.map_or_else(String::new, |zone| format!(",memory_zones=[{}]", zone.id));
        let segment = self.segment(Some(node.id));
        let segment = segment.map_or_else(String::new, |segment| format!(",pci_segments=[{segment}]"));
        format!("{cpus}{zone}{segment}")
    }

    /// The nodes that have a PCI segment of their own, with the node as its `_PXM`; segment 0 has all other devices.
    fn segments(&self) -> Vec<u32> {
        let mut near: Vec<u32> = self.guest.devices.iter().filter_map(|placed| placed.near).collect();
        near.sort_unstable();
        near.dedup();
        near
    }

    fn segment(&self, node: Option<u32>) -> Option<usize> {
        let segments = self.segments();
        segments.iter().position(|near| Some(*near) == node).map(|index| index.saturating_add(1))
    }

    fn devices(&mut self) -> Result<(), ExportError> {
        let mut platform = Vec::new();
        let segments = self.segments().len();
        if segments > 0 {
            platform.push(format!("num_pci_segments={}", segments.saturating_add(1)));
        }
        if self.guest.iommufd() {
            platform.push("iommufd=on,vfio_p2p_dma=off".to_owned());
            self.notes.push(
                "iommufd is in cloud-hypervisor 52 and later, and pins memory with struct page only: with /dev/egmN it \
                 needs a patched kernel, or \"backend\": \"legacy\"; vfio_p2p_dma=off keeps BARs out, which kernels before \
                 6.19 refuse"
                    .to_owned(),
            );
        }
        if !platform.is_empty() {
            self.command.option("--platform", platform.join(","));
        }
        for placed in &self.guest.devices {
            self.device(placed)?;
        }
        Ok(())
    }

    fn device(&mut self, placed: &Placed) -> Result<(), ExportError> {
        let id = &placed.id;
        let segment = self.segment(placed.near);
        let at = segment.map_or_else(String::new, |segment| format!(",pci_segment={segment}"));
        match &placed.kind {
            DeviceKind::VirtioBlk { path, read_only } => {
                let read_only = if *read_only { ",readonly=on" } else { "" };
                let disk = format!("path={},id={id},image_type=raw{read_only}", value(text(path))?);
                self.command.option("--disk", disk);
            }
            DeviceKind::VirtioNet { tap, mac, queue_pairs, .. } => {
                let mac = egm_config::mac_text(*mac);
                // A queue for each direction.
                let queues = u32::from(*queue_pairs).saturating_mul(2);
                let tap = match tap {
                    Tap::Name(name) => format!("tap={}", value(name)?),
                    Tap::Descriptors(numbers) => format!("fd=[{}]", words::descriptors(numbers, ",")),
                };
                let net = format!("{tap},id={id},num_queues={queues},mac={mac}");
                self.command.option("--net", net);
            }
            DeviceKind::VirtioVsock { cid, socket: Some(socket) } => {
                self.command.option("--vsock", format!("cid={cid},socket={},id={id}", value(text(socket))?));
            }
            DeviceKind::VirtioVsock { socket: None, .. } => self.notes.push(format!(
                "{id} is left out: cloud-hypervisor serves vsock by a Unix socket; write \"socket\""
            )),
            DeviceKind::VirtioRng => {
                // Every machine of cloud-hypervisor has one.
                self.command.option("--rng", format!("src=/dev/urandom,id={id}"));
            }
            DeviceKind::Vfio { function, clique, .. } => {
                let clique = words::clique(*clique)
                    .map_or_else(String::new, |n| format!(",x_nv_gpudirect_clique={n}"));
                let path = format!("/sys/bus/pci/devices/{function}/");
                self.command.option("--device", format!("path={path},id={id}{at}{clique}"));
                if placed.initiators.is_some() {
                    self.notes.push(no_egm(id));
                }
            }
            DeviceKind::Egm { .. } => self.server(id, &at, &self.guest.socket(id))?,
            DeviceKind::VfioUser { socket } => self.server(id, &at, socket)?,
        }
        Ok(())
    }

    /// A device of the server at `socket`.
    fn server(&mut self, id: &str, at: &str, socket: &Path) -> Result<(), ExportError> {
        self.command.option("--user-device", format!("socket={},id={id}{at}", value(text(socket))?));
        self.notes.push(format!(
            "{id}: only the processors reach its memory, for cloud-hypervisor maps no BAR of a --user-device for the DMA of \
             other devices"
        ));
        Ok(())
    }

    fn unsaid(&mut self) {
        let machine = &self.guest.machine;
        if self.guest.devices.iter().any(|placed| placed.root_port) {
            self.notes
                .push("\"root_port\" is left out: cloud-hypervisor has one flat bus a segment".to_owned());
        }
        if machine.pcie.window64.is_some() {
            self.notes.push(
                "pcie.window64 is left out: cloud-hypervisor gives BARs all of the address space above its memory"
                    .to_owned(),
            );
        }
        if machine.arch == Architecture::Aarch64 {
            self.notes.push(
                "with --kernel an Arm guest has a device tree and no ACPI: for nodes of GPUs boot its firmware \
                 (--firmware CLOUDHV_EFI.fd) from a disk"
                    .to_owned(),
            );
        }
    }
}

fn no_egm(id: &str) -> String {
    format!(
        "{id}: its driver does not learn where EGM is, for cloud-hypervisor writes no nvidia,egm-* properties: the node is \
         memory without a link to the GPU; naming one device in eight nodes was read in its source, not tried"
    )
}
