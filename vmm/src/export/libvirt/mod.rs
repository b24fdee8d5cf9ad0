//! XML of a libvirt domain that QEMU runs.
//!
//! Stock libvirt names the files behind NUMA cells itself, and knows neither vfio-user nor EGM: what it has no element for
//! is an argument of QEMU (`qemu:commandline`). NVIDIA's build has elements for it.

mod devices;

use std::io;

use egm_config::{Architecture, PageSize};
use quick_xml::Writer;
use quick_xml::events::BytesText;

use super::figures::figures;
use super::guest::{Guest, MemoryPiece, NumaNode, Source};
use super::{Export, ExportError, Options, Output, qemu, words};

const MIB: u64 = 1 << 20;
const NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";
/// libvirt's list of the device nodes that QEMU may open.
const DEVICE_ACL: &str = "cgroup_device_acl in /etc/libvirt/qemu.conf";

type Xml = Writer<Vec<u8>>;

/// The domain that libvirt defines.
pub(super) fn export(guest: &Guest, options: &Options) -> Result<Export, ExportError> {
    let mut libvirt =
        Libvirt { guest, options, arguments: Vec::new(), overrides: Vec::new(), notes: guest.notes.clone() };
    let mut others = guest.nodes.iter().skip_while(|node| libvirt.is_cell(node));
    if let Some(node) = others.find(|node| libvirt.is_cell(node) || !node.cpus.is_empty()) {
        return Err(ExportError::Cell { node: node.id });
    }
    let mut xml = Writer::new_with_indent(Vec::new(), b' ', 2);
    xml.create_element("domain")
        .with_attributes([("type", "kvm"), ("xmlns:qemu", NAMESPACE)])
        .write_inner_content(|xml| libvirt.domain(xml))?;
    let mut text = String::from_utf8_lossy(&xml.into_inner()).into_owned();
    text.push('\n');
    Ok(Export { output: Output::Xml(text), notes: libvirt.notes })
}

struct Libvirt<'a> {
    guest: &'a Guest,
    options: &'a Options,
    /// Arguments of QEMU for which libvirt has no element.
    arguments: Vec<String>,
    overrides: Vec<Override>,
    notes: Vec<String>,
}

/// A property of a device that libvirt has no word for.
struct Override {
    /// Alias of the device.
    alias: String,
    property: &'static str,
    value: u32,
}

/// An element with text in it.
fn text(xml: &mut Xml, name: &str, attributes: &[(&str, &str)], content: &str) -> io::Result<()> {
    let element = xml.create_element(name).with_attributes(attributes.iter().copied());
    element.write_text_content(BytesText::new(content)).map(|_| ())
}

fn empty(xml: &mut Xml, name: &str, attributes: &[(&str, &str)]) -> io::Result<()> {
    xml.create_element(name).with_attributes(attributes.iter().copied()).write_empty().map(|_| ())
}

impl Libvirt<'_> {
    fn domain(&mut self, xml: &mut Xml) -> io::Result<()> {
        text(xml, "name", &[], &self.guest.machine.name)?;
        self.memory(xml)?;
        let cpus = &self.guest.machine.cpus;
        text(xml, "vcpu", &[("placement", "static")], &cpus.count.to_string())?;
        self.pinning(xml)?;
        let arm = self.is_arm();
        // Without a path libvirt finds the host's own.
        let firmware = (arm && self.options.firmware.is_none()).then_some(("firmware", "efi"));
        let os = xml.create_element("os").with_attributes(firmware);
        os.write_inner_content(|xml| self.os(xml))?;
        xml.create_element("features").write_inner_content(|xml| {
            empty(xml, "acpi", &[])?;
            if arm { empty(xml, "gic", &[("version", "3")]) } else { Ok(()) }
        })?;
        let cpu = xml.create_element("cpu").with_attribute(("mode", "host-passthrough"));
        cpu.write_inner_content(|xml| self.cpu(xml))?;
        self.other_nodes();
        xml.create_element("devices").write_inner_content(|xml| self.devices(xml))?;
        self.beyond(xml)
    }

    /// Adds QEMU's arguments and overrides, which are outside libvirt's own elements.
    fn beyond(&mut self, xml: &mut Xml) -> io::Result<()> {
        if !self.arguments.is_empty() {
            let arguments = std::mem::take(&mut self.arguments);
            xml.create_element("qemu:commandline").write_inner_content(|xml| {
                arguments.iter().try_for_each(|argument| empty(xml, "qemu:arg", &[("value", argument)]))
            })?;
        }
        if !self.overrides.is_empty() {
            let overrides = std::mem::take(&mut self.overrides);
            xml.create_element("qemu:override")
                .write_inner_content(|xml| overrides.iter().try_for_each(|device| overridden(xml, device)))?;
        }
        Ok(())
    }

    fn is_arm(&self) -> bool {
        self.guest.machine.arch == Architecture::Aarch64
    }

    fn argument(&mut self, option: &str, value: String) {
        self.arguments.extend([option.to_owned(), value]);
    }

    /// Whether a node is a cell: stock libvirt gives QEMU memory for each, and QEMU takes none of no size.
    fn is_cell(&self, node: &NumaNode) -> bool {
        let memory = node.memory.and_then(|index| self.guest.memory.get(index));
        self.options.nvidia || memory.is_some_and(|memory| !self.is_dimm(memory))
    }

    /// Nodes that are no cells, and what is known of them.
    fn other_nodes(&mut self) {
        let guest = self.guest;
        let others: Vec<&NumaNode> = guest.nodes.iter().filter(|node| !self.is_cell(node)).collect();
        if others.is_empty() {
            return;
        }
        let other = |node: &NumaNode| others.iter().any(|other| other.id == node.id);
        let nodes = others.iter().map(|node| format!("node,nodeid={}", node.id));
        for numa in nodes.chain(qemu::distances(guest, other)) {
            self.argument("-numa", numa);
        }
        let figures = qemu::figure_options(guest);
        if !figures.is_empty() {
            self.argument("-machine", "hmat=on".to_owned());
        }
        for numa in figures {
            self.argument("-numa", numa);
        }
    }

    /// Memory that stock libvirt cannot put behind a cell is a DIMM of the node.
    fn is_dimm(&self, memory: &MemoryPiece) -> bool {
        matches!(memory.source, Source::File { .. }) && !self.is_egm(memory)
    }

    /// Memory that NVIDIA's libvirt has an element for.
    fn is_egm(&self, memory: &MemoryPiece) -> bool {
        let file = matches!(memory.source, Source::File { .. });
        let near = |placed: &crate::export::guest::Placed| {
            placed.near == Some(memory.node) && placed.initiators.is_some()
        };
        file && self.options.nvidia && self.guest.devices.iter().any(near)
    }

    fn memory(&mut self, xml: &mut Xml) -> io::Result<()> {
        let guest = self.guest;
        let bytes =
            |of: &dyn Fn(&&MemoryPiece) -> bool| guest.memory.iter().filter(of).map(|m| m.size).sum::<u64>();
        let dimms: Vec<&MemoryPiece> = guest.memory.iter().filter(|memory| self.is_dimm(memory)).collect();
        let unit = ("unit", "MiB");
        text(xml, "memory", &[unit], &(bytes(&|memory| !self.is_dimm(memory)) / MIB).to_string())?;
        if !dimms.is_empty() {
            let slots = dimms.len().to_string();
            let all = (guest.size() / MIB).to_string();
            text(xml, "maxMemory", &[("slots", &slots), unit], &all)?;
        }
        for memory in &dimms {
            let id = &memory.id;
            self.argument("-object", qemu::backend(memory));
            self.argument("-device", format!("pc-dimm,id=dimm-{id},memdev={id},node={}", memory.node));
            self.notes.push(format!(
                "{id} is a DIMM of node {}, for libvirt puts no device of your choice behind a cell: the guest's kernel \
                 brings it online as hot-plugged memory (memhp_default_state=online_movable)",
                memory.node
            ));
        }
        for memory in &guest.memory {
            let Source::File { path, .. } = &memory.source else { continue };
            self.notes.push(format!(
                "{}: QEMU may open {path} when it is in {DEVICE_ACL} and the user of QEMU may read and write it",
                memory.id
            ));
        }
        xml.create_element("memoryBacking").write_inner_content(|xml| self.backing(xml)).map(|_| ())
    }

    fn backing(&self, xml: &mut Xml) -> io::Result<()> {
        let guest = self.guest;
        let pages = |memory: &MemoryPiece| match &memory.source {
            Source::Own { page_size, .. } => page_size.hugetlb().map(|_| (*page_size, memory.node)),
            Source::File { .. } => None,
        };
        let pages: Vec<(PageSize, u32)> = guest.memory.iter().filter_map(pages).collect();
        if !pages.is_empty() {
            xml.create_element("hugepages").write_inner_content(|xml| {
                pages.iter().try_for_each(|(page, node)| {
                    let size = (page.bytes() >> 20).to_string();
                    empty(xml, "page", &[("size", &size), ("unit", "MiB"), ("nodeset", &node.to_string())])
                })
            })?;
        }
        let egm = guest.memory.iter().any(|memory| self.is_egm(memory));
        empty(xml, "source", &[("type", if egm { "file" } else { "memfd" })])?;
        empty(xml, "access", &[("mode", "shared")])?;
        let immediate = egm || guest.machine.memory.prefault;
        if immediate { empty(xml, "allocation", &[("mode", "immediate")]) } else { Ok(()) }
    }

    fn pinning(&self, xml: &mut Xml) -> io::Result<()> {
        let affinity = &self.guest.machine.cpus.affinity;
        if !affinity.is_empty() {
            xml.create_element("cputune").write_inner_content(|xml| {
                affinity.iter().enumerate().try_for_each(|(vcpu, cpus)| {
                    let (vcpu, cpus) = (vcpu.to_string(), cpus.to_string());
                    empty(xml, "vcpupin", &[("vcpu", &vcpu), ("cpuset", &cpus)])
                })
            })?;
        }
        let bound = self.guest.memory.iter().filter_map(|memory| match &memory.source {
            Source::Own { host_nodes: Some(nodes), .. } => Some((memory.node.to_string(), nodes.to_string())),
            _ => None,
        });
        let bound: Vec<(String, String)> = bound.collect();
        if !bound.is_empty() {
            xml.create_element("numatune").write_inner_content(|xml| {
                bound.iter().try_for_each(|(cell, nodes)| {
                    empty(xml, "memnode", &[("cellid", cell), ("mode", "strict"), ("nodeset", nodes)])
                })
            })?;
        }
        Ok(())
    }

    fn os(&self, xml: &mut Xml) -> io::Result<()> {
        let (arch, machine) = match self.guest.machine.arch {
            Architecture::X86_64 => ("x86_64", "q35"),
            Architecture::Aarch64 => ("aarch64", "virt"),
        };
        text(xml, "type", &[("arch", arch), ("machine", machine)], "hvm")?;
        if let (true, Some(firmware)) = (self.is_arm(), &self.options.firmware) {
            text(xml, "loader", &[("readonly", "yes"), ("type", "pflash"), ("stateless", "yes")], firmware)?;
        }
        let boot = &self.guest.machine.boot;
        text(xml, "kernel", &[], words::text(&boot.kernel))?;
        if let Some(initramfs) = &boot.initramfs {
            text(xml, "initrd", &[], words::text(initramfs))?;
        }
        if boot.cmdline.is_empty() { Ok(()) } else { text(xml, "cmdline", &[], &boot.cmdline) }
    }

    fn cpu(&self, xml: &mut Xml) -> io::Result<()> {
        let cpus = &self.guest.machine.cpus;
        let [sockets, cores, threads] = [cpus.sockets, cpus.cores, cpus.threads].map(|n| n.to_string());
        let topology = [("sockets", sockets.as_str()), ("cores", &cores), ("threads", &threads)];
        empty(xml, "topology", &topology)?;
        xml.create_element("numa").write_inner_content(|xml| self.cells(xml)).map(|_| ())
    }

    fn cells(&self, xml: &mut Xml) -> io::Result<()> {
        let cells: Vec<bool> = self.guest.nodes.iter().map(|node| self.is_cell(node)).collect();
        let all = cells.iter().all(|cell| *cell);
        for (index, node) in self.guest.nodes.iter().enumerate().filter(|(_, node)| self.is_cell(node)) {
            let memory = node.memory.and_then(|index| self.guest.memory.get(index));
            let size = memory.filter(|memory| !self.is_dimm(memory)).map_or(0, |memory| memory.size / MIB);
            let (id, size, cpus) = (node.id.to_string(), size.to_string(), node.cpus.to_string());
            let mut attributes = vec![("id", id.as_str())];
            if !cpus.is_empty() {
                attributes.push(("cpus", &cpus));
            }
            attributes.extend([("memory", size.as_str()), ("unit", "MiB")]);
            let distances = self.guest.distances.as_ref().and_then(|rows| rows.get(index));
            let cell = xml.create_element("cell").with_attributes(attributes);
            match distances {
                None => cell.write_empty()?,
                Some(row) => cell.write_inner_content(|xml| {
                    let to = self.guest.nodes.iter().zip(row).zip(&cells);
                    siblings(xml, to.filter(|(_, cell)| **cell).map(|(to, _)| to))
                })?,
            };
        }
        let figures = figures(self.guest);
        if figures.is_empty() || !all {
            return Ok(());
        }
        xml.create_element("interconnects").write_inner_content(|xml| {
            for figure in &figures {
                let (from, target) = (figure.from.to_string(), figure.target.to_string());
                let pair = [("initiator", from.as_str()), ("target", &target), ("type", "access")];
                let latency = figure.latency.to_string();
                empty(xml, "latency", &[&pair[..], &[("value", &latency)]].concat())?;
                let bandwidth = figure.bandwidth.to_string();
                empty(xml, "bandwidth", &[&pair[..], &[("value", &bandwidth), ("unit", "MiB")]].concat())?;
            }
            Ok(())
        })?;
        Ok(())
    }
}

fn overridden(xml: &mut Xml, Override { alias, property, value }: &Override) -> io::Result<()> {
    let device = xml.create_element("qemu:device").with_attribute(("alias", alias.as_str()));
    device.write_inner_content(|xml| {
        let value = value.to_string();
        let property = [("name", *property), ("type", "unsigned"), ("value", &value)];
        let frontend = xml.create_element("qemu:frontend");
        frontend.write_inner_content(|xml| empty(xml, "qemu:property", &property))?;
        Ok(())
    })?;
    Ok(())
}

fn siblings<'a>(xml: &mut Xml, mut to: impl Iterator<Item = (&'a NumaNode, &'a u8)>) -> io::Result<()> {
    xml.create_element("distances")
        .write_inner_content(|xml| {
            to.try_for_each(|(node, distance)| {
                empty(xml, "sibling", &[("id", &node.id.to_string()), ("value", &distance.to_string())])
            })
        })
        .map(|_| ())
}
