//! The nodes of a machine, by the bindings of the kernel's Documentation/devicetree.

use egm_address::{Guest, Span};
use vm_fdt::FdtWriter;

use crate::arch::aarch64::layout::{FIRST_SHARED, OTHER_TIMERS, PERFORMANCE, PHYSICAL_TIMER, VIRTUAL_TIMER};
use crate::firmware::bridges::{BUS, Ecam, HostBridge, ecam};
use crate::firmware::{FirmwareError, Gic, device, memory_of_nodes};
use crate::plan::{NodePlan, Plan};

/// Handles by which nodes name each other.
const GIC: u32 = 1;
const ITS: u32 = 2;
const CLOCK: u32 = 3;
/// Interrupt cells (arm,gic-v3): shared or private, number, level and active high.
const SHARED: u32 = 0;
const PRIVATE: u32 = 1;
const LEVEL_HIGH: u32 = 4;
/// First number of those that are private.
const FIRST_PRIVATE: u32 = 16;
/// Input of a PL011; nothing here depends on it.
const CLOCK_HERTZ: u32 = 24_000_000;

type Written = Result<(), FirmwareError>;

/// Writes properties and nodes of the root, except `/chosen`, into the open node.
pub(super) fn write(tree: &mut FdtWriter, plan: &Plan) -> Written {
    tree.property_string("compatible", "linux,dummy-virt")?;
    tree.property_u32("interrupt-parent", GIC)?;
    memory(tree, plan)?;
    processors(tree, plan)?;
    distances(tree, plan)?;
    interrupts(tree, &Gic::of(plan)?)?;
    platform(tree, plan)?;
    let Ecam { span: config_space, last_bus } = ecam(plan)?;
    for (domain, bridge) in (0..).zip(HostBridge::all(plan, last_bus)) {
        host_bridge(tree, plan, &bridge, config_space, domain)?;
    }
    Ok(())
}

/// Path of the serial port.
pub(super) fn console(plan: &Plan) -> Option<String> {
    device(plan, "serial").ok().map(|span| format!("/{}", named("serial", span)))
}

fn named(name: &str, span: Span<Guest>) -> String {
    format!("{name}@{:x}", span.start().get())
}

fn node(
    tree: &mut FdtWriter,
    name: &str,
    compatible: &[&str],
    inside: impl FnOnce(&mut FdtWriter) -> Written,
) -> Written {
    let node = tree.begin_node(name)?;
    if !compatible.is_empty() {
        let list = compatible.iter().map(|&name| name.to_owned()).collect();
        tree.property_string_list("compatible", list)?;
    }
    inside(tree)?;
    Ok(tree.end_node(node)?)
}

fn registers(tree: &mut FdtWriter, spans: &[Span<Guest>]) -> Written {
    let cells: Vec<u64> = spans.iter().flat_map(|span| [span.start().get(), span.size()]).collect();
    Ok(tree.property_array_u64("reg", &cells)?)
}

/// Retired pages are in no node, so that the guest's kernel has no such memory. The firmware window is RAM here: the
/// kernel itself reserves the memory of the tree.
fn memory(tree: &mut FdtWriter, plan: &Plan) -> Written {
    for piece in memory_of_nodes(plan) {
        node(tree, &named("memory", piece.span), &[], |tree| {
            tree.property_string("device_type", "memory")?;
            tree.property_u32("numa-node-id", piece.node)?;
            registers(tree, &[piece.span])
        })?;
    }
    Ok(())
}

fn processors(tree: &mut FdtWriter, plan: &Plan) -> Written {
    node(tree, "cpus", &[], |tree| {
        tree.property_u32("#address-cells", 1)?;
        tree.property_u32("#size-cells", 0)?;
        for vcpu in &plan.vcpus {
            node(tree, &format!("cpu@{:x}", vcpu.hardware_id), &["arm,armv8"], |tree| {
                tree.property_string("device_type", "cpu")?;
                tree.property_u32("reg", vcpu.hardware_id)?;
                tree.property_string("enable-method", "psci")?;
                Ok(tree.property_u32("numa-node-id", vcpu.node)?)
            })?;
        }
        Ok(())
    })?;
    node(tree, "psci", &["arm,psci-1.0", "arm,psci-0.2"], |tree| Ok(tree.property_string("method", "hvc")?))?;
    let [secure, hypervisor] = OTHER_TIMERS;
    node(tree, "timer", &["arm,armv8-timer"], |tree| {
        tree.property_null("always-on")?;
        let all = [secure, PHYSICAL_TIMER, VIRTUAL_TIMER, hypervisor];
        let cells: Vec<u32> = all.into_iter().flat_map(private).collect();
        Ok(tree.property_array_u32("interrupts", &cells)?)
    })?;
    node(tree, "pmu", &["arm,armv8-pmuv3"], |tree| {
        Ok(tree.property_array_u32("interrupts", &private(PERFORMANCE))?)
    })
}

const fn private(interrupt: u32) -> [u32; 3] {
    [PRIVATE, interrupt.saturating_sub(FIRST_PRIVATE), LEVEL_HIGH]
}

const fn shared(interrupt: u32) -> [u32; 3] {
    [SHARED, interrupt.saturating_sub(FIRST_SHARED), LEVEL_HIGH]
}

/// Distances between nodes that the tree has: those that a GPU's driver would bring memory to are not among them.
fn distances(tree: &mut FdtWriter, plan: &Plan) -> Written {
    let known = |(_, node): &(usize, &NodePlan)| node.initiator.is_none();
    let nodes: Vec<(usize, &NodePlan)> = plan.nodes.iter().enumerate().filter(known).collect();
    let mut cells = Vec::new();
    for (row, from) in &nodes {
        for (column, to) in &nodes {
            let distance = plan.distances.get(*row).and_then(|row| row.get(*column));
            let distance = distance.ok_or(FirmwareError::Distance { from: from.id, to: to.id })?;
            cells.extend([from.id, to.id, u32::from(*distance)]);
        }
    }
    node(tree, "distance-map", &["numa-distance-map-v1"], |tree| {
        Ok(tree.property_array_u32("distance-matrix", &cells)?)
    })
}

fn interrupts(tree: &mut FdtWriter, gic: &Gic) -> Written {
    node(tree, &named("interrupt-controller", gic.distributor), &["arm,gic-v3"], |tree| {
        tree.property_null("interrupt-controller")?;
        tree.property_u32("#interrupt-cells", 3)?;
        tree.property_u32("#address-cells", 2)?;
        tree.property_u32("#size-cells", 2)?;
        tree.property_null("ranges")?;
        registers(tree, &[gic.distributor, gic.redistributors])?;
        tree.property_phandle(GIC)?;
        node(tree, &named("msi-controller", gic.its), &["arm,gic-v3-its"], |tree| {
            tree.property_null("msi-controller")?;
            tree.property_u32("#msi-cells", 1)?;
            registers(tree, &[gic.its])?;
            Ok(tree.property_phandle(ITS)?)
        })
    })
}

fn platform(tree: &mut FdtWriter, plan: &Plan) -> Written {
    node(tree, "clock", &["fixed-clock"], |tree| {
        tree.property_u32("#clock-cells", 0)?;
        tree.property_u32("clock-frequency", CLOCK_HERTZ)?;
        Ok(tree.property_phandle(CLOCK)?)
    })?;
    if let (Ok(span), Some(line)) = (device(plan, "serial"), plan.line("serial")) {
        node(tree, &named("serial", span), &["arm,pl011", "arm,primecell"], |tree| {
            registers(tree, &[span])?;
            tree.property_array_u32("interrupts", &shared(line))?;
            tree.property_array_u32("clocks", &[CLOCK, CLOCK])?;
            Ok(tree.property_string_list("clock-names", vec!["uartclk".to_owned(), "apb_pclk".to_owned()])?)
        })?;
    }
    if let Ok(span) = device(plan, "clock") {
        node(tree, &named("rtc", span), &["arm,pl031", "arm,primecell"], |tree| {
            registers(tree, &[span])?;
            tree.property_u32("clocks", CLOCK)?;
            Ok(tree.property_string("clock-names", "apb_pclk")?)
        })?;
    }
    if let Ok(span) = device(plan, "pvpanic") {
        node(tree, &named("pvpanic", span), &["qemu,pvpanic-mmio"], |tree| registers(tree, &[span]))?;
    }
    Ok(())
}

/// A generic host bridge: each has its part of configuration space, and a domain of its own, as Linux wants.
fn host_bridge(
    tree: &mut FdtWriter,
    plan: &Plan,
    bridge: &HostBridge,
    config_space: Span<Guest>,
    domain: u32,
) -> Written {
    let (first, last) = bridge.buses;
    let offset = u64::from(first).saturating_mul(BUS);
    let size = (u64::from(last.saturating_sub(first)).saturating_add(1)).saturating_mul(BUS);
    let part = config_space.start().checked_add(offset).and_then(|start| Span::new(start, size).ok());
    let part = part.ok_or(FirmwareError::Memory(config_space))?;
    node(tree, &named("pcie", part), &["pci-host-ecam-generic"], |tree| {
        tree.property_string("device_type", "pci")?;
        tree.property_u32("#address-cells", 3)?;
        tree.property_u32("#size-cells", 2)?;
        tree.property_u32("#interrupt-cells", 1)?;
        registers(tree, &[part])?;
        tree.property_array_u32("bus-range", &[first.into(), last.into()])?;
        tree.property_u32("linux,pci-domain", domain)?;
        tree.property_array_u32("ranges", &ranges(bridge))?;
        tree.property_null("dma-coherent")?;
        tree.property_array_u32("msi-map", &[0, ITS, 0, 0x1_0000])?;
        if let Some(near) = bridge.near {
            tree.property_u32("numa-node-id", near)?;
        }
        let pins = bridge.pins(plan).into_iter().flat_map(|(root, line)| {
            let [kind, number, flags] = shared(line);
            let unit = u32::from(root.device) << 11;
            // The controller's own address has two cells, which it does not use.
            [unit, 0, 0, u32::from(root.pin) + 1, GIC, 0, 0, kind, number, flags]
        });
        let pins: Vec<u32> = pins.collect();
        if !pins.is_empty() {
            tree.property_array_u32("interrupt-map-mask", &[0xf800, 0, 0, 7])?;
            tree.property_array_u32("interrupt-map", &pins)?;
        }
        Ok(())
    })
}

/// Address on the bus (space and 64 bits), address, size, of each window (PCI Bus Binding 2.2.1.1).
fn ranges(bridge: &HostBridge) -> Vec<u32> {
    const MEMORY32: u32 = 0x0200_0000;
    const MEMORY64_PREFETCHABLE: u32 = 0x4300_0000;
    let halves = |value: u64| {
        let [a, b, c, d, e, f, g, h] = value.to_be_bytes();
        [u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes([e, f, g, h])]
    };
    let range = |window: &crate::firmware::bridges::BridgeWindow| {
        let space = if window.prefetchable { MEMORY64_PREFETCHABLE } else { MEMORY32 };
        let (at, size) = (halves(window.span.start().get()), halves(window.span.size()));
        [space, at[0], at[1], at[0], at[1], size[0], size[1]]
    };
    bridge.windows.iter().flat_map(range).collect()
}
