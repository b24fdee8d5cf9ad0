//! Content of both forms, as text.

use egm_address::{Gpa, Guest, Span};
use egm_report::show::{Style, counted, size};
use egm_vfio::topology::Acs;

use crate::config::{DeviceKind, PageSize};
use crate::facts::Facts;
use crate::plan::render::names::host_function;
use crate::plan::{
    Allocation, AssignedPlan, BackingPlan, BarKind, BarPlan, BridgePlan, ExpanderPlan, FunctionPlan,
    FunctionRole, GPU_NODES, GroupPlan, HostPages, Interface, MemoryKind, Plan, WindowKind,
};

/// Kind of a range or a device, which decides its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tone {
    Ram,
    Egm,
    Pci,
    System,
    Free,
}

impl Tone {
    /// Name of its class in the page.
    pub(super) const fn class(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::Egm => "egm",
            Self::Pci => "pci",
            Self::System => "system",
            Self::Free => "free",
        }
    }

    /// How it stands out in a terminal.
    pub(super) const fn style(self) -> Style {
        match self {
            Self::Ram => Style::Blue,
            Self::Egm => Style::Green,
            Self::Pci => Style::Cyan,
            Self::System => Style::Yellow,
            Self::Free => Style::Faint,
        }
    }
}

/// A line of the memory map.
pub(super) struct Block {
    pub(super) span: Span<Guest>,
    pub(super) tone: Tone,
    pub(super) what: String,
    pub(super) detail: String,
}

/// The whole guest address space, ascending, without a gap: an unused range is a block of its own.
pub(super) fn blocks(plan: &Plan) -> Vec<Block> {
    let memory = plan.memory.iter().map(|m| {
        let (tone, name) = match m.kind {
            MemoryKind::Ram => (Tone::Ram, "RAM"),
            MemoryKind::Egm => (Tone::Egm, "EGM"),
        };
        let backing = plan.backings.get(m.backing).map_or("?", |backing| backing.id.as_str());
        let detail = format!("{backing}+{:#x}", m.offset);
        Block { span: m.span, tone, what: format!("{name}, node {}", m.node), detail }
    });
    let windows = plan.windows.iter().map(|w| {
        let tone = match w.kind {
            WindowKind::PciMemory32 | WindowKind::PciMemory64 | WindowKind::Ecam => Tone::Pci,
            WindowKind::Firmware
            | WindowKind::OptionRoms
            | WindowKind::Interrupts
            | WindowKind::Device
            | WindowKind::Reserved => Tone::System,
        };
        let detail = match w.kind {
            WindowKind::Firmware | WindowKind::OptionRoms => "reserved",
            WindowKind::PciMemory32 => "BARs that are not prefetchable",
            WindowKind::PciMemory64 => "64-bit prefetchable BARs",
            WindowKind::Ecam => "ECAM, 1 MiB a bus",
            WindowKind::Interrupts => "interrupt controller",
            WindowKind::Device => "registers",
            WindowKind::Reserved => "kept free",
        };
        Block { span: w.span, tone, what: w.label.clone(), detail: detail.to_owned() }
    });
    let mut used: Vec<Block> = memory.chain(windows).collect();
    used.sort_by_key(|block| block.span);
    let mut all = Vec::new();
    let mut from = Gpa::new(0);
    for block in used {
        all.extend(Span::between(from, block.span.start()).map(free));
        from = block.span.end();
        all.push(block);
    }
    let limit = Gpa::new(1u64.checked_shl(plan.address_bits.into()).unwrap_or(u64::MAX));
    all.extend(Span::between(from, limit).map(free));
    all
}

fn free(span: Span<Guest>) -> Block {
    Block { span, tone: Tone::Free, what: "free".to_owned(), detail: String::new() }
}

/// An address with the digits that the guest's address bits need.
pub(super) fn address(plan: &Plan, address: Gpa) -> String {
    // One digit more where the end of the last address needs it.
    let width = usize::from(plan.address_bits / 4).saturating_add(3);
    format!("{:#0width$x}", address.get())
}

/// The machine in a few words, each a fact of its own.
pub(super) fn summary(plan: &Plan) -> Vec<String> {
    let bytes = |kind| plan.memory.iter().filter(move |m| m.kind == kind).map(|m| m.span.size()).sum::<u64>();
    let devices: u64 =
        plan.backings.iter().filter(|backing| backing.device).map(|backing| backing.size).sum();
    let egm = bytes(MemoryKind::Egm).saturating_add(devices);
    let most = |field: fn(&crate::plan::VcpuPlan) -> u32| {
        plan.vcpus.iter().map(field).max().map_or(0, |most| most.saturating_add(1))
    };
    let vcpus = counted(plan.vcpus.len() as u64, "vCPU");
    let topology = match (most(|v| v.socket), most(|v| v.core), most(|v| v.thread)) {
        (1, 1, 1) => vcpus,
        (sockets, cores, threads) => format!("{vcpus} ({sockets} × {cores} × {threads})"),
    };
    let ordinary: u64 = plan.backings.iter().map(|backing| backing.size).sum::<u64>().saturating_sub(egm);
    let mut facts = vec![crate::arch::layout_of(plan.arch).name.to_owned(), topology];
    facts.push(format!("{} of memory", size(ordinary)));
    if egm > 0 {
        facts.push(format!("{} of EGM", size(egm)));
    }
    facts.push(counted(plan.nodes.len() as u64, "node"));
    facts.push(format!("{} address bits", plan.address_bits));
    facts
}

/// Where a backing's memory comes from.
pub(super) fn backing(backing: &BackingPlan) -> String {
    let source = match (&backing.region, backing.page_size) {
        _ if backing.guest_memfd => "guest_memfd of the machine itself, 4 KiB pages".to_owned(),
        (Some(region), _) => match backing.hpa {
            Some(hpa) => format!("host region {region} at {hpa}"),
            None => format!("host region {region} from {:#x}", backing.offset),
        },
        (None, PageSize::Auto | PageSize::Size4K) => backing.pages.as_ref().map_or_else(String::new, pages),
        (None, PageSize::Size2M) => "hugetlb pages of 2 MiB".to_owned(),
        (None, PageSize::Size1G) => "hugetlb pages of 1 GiB".to_owned(),
    };
    let node = backing.host_nodes.as_ref().map(|nodes| format!("host node {nodes}"));
    let touched = backing.prefault.then(|| "touched at start".to_owned());
    let device = backing.device.then(|| "behind a BAR".to_owned());
    [Some(source), node, touched, device].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Host pages that are not of a hugetlb pool.
fn pages(pages: &HostPages) -> String {
    let of = match pages.allocation {
        Allocation::Memfd => "a memfd",
        Allocation::HugeFile => "a file on an own tmpfs",
        Allocation::Private => "private memory",
    };
    let why = pages.why_not_larger.as_ref().map_or_else(String::new, |why| format!(": {why}"));
    format!("{of} in {} pages{why}", size(pages.size.get()))
}

/// A function in words, without its address.
pub(super) fn function(function: &FunctionPlan, facts: &Facts) -> String {
    match &function.role {
        FunctionRole::HostBridge => "host bridge".to_owned(),
        FunctionRole::RootPort { slot, bridge } => format!("root port, slot {slot}, {}", buses(bridge)),
        FunctionRole::SwitchUpstream { bridge } => format!("switch, {}", buses(bridge)),
        FunctionRole::SwitchDownstream { slot, bridge } => {
            format!("switch port, slot {slot}, {}", buses(bridge))
        }
        FunctionRole::Endpoint { device, .. } => format!("{}: {}", device.id, kind(&device.kind, facts)),
    }
}

fn buses(bridge: &BridgePlan) -> String {
    let BridgePlan { secondary, subordinate, .. } = bridge;
    if secondary == subordinate {
        format!("bus {secondary:02x}")
    } else {
        format!("buses {secondary:02x}-{subordinate:02x}")
    }
}

/// Names of what is switched on, as `lspci` has them.
fn bits(acs: Acs) -> String {
    const NAMES: [&str; 7] =
        ["SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans"];
    let on = (0..).zip(NAMES).filter(|(bit, _)| acs.control & (1u8 << bit) != 0);
    let on: Vec<&str> = on.map(|(_, name)| name).collect();
    if on.is_empty() { "nothing kept apart".to_owned() } else { on.join(" ") }
}

fn kind(kind: &DeviceKind, facts: &Facts) -> String {
    match kind {
        DeviceKind::VirtioBlk { path, read_only } => {
            format!("virtio-blk {}{}", path.display(), if *read_only { ", read-only" } else { "" })
        }
        DeviceKind::VirtioNet { tap, queue_pairs, .. } => {
            format!("virtio-net {tap}, {}", counted((*queue_pairs).into(), "queue pair"))
        }
        DeviceKind::VirtioVsock { cid, .. } => format!("virtio-vsock, context id {cid}"),
        DeviceKind::VirtioRng => "virtio-rng".to_owned(),
        DeviceKind::Vfio { function, .. } => host_function(facts, *function),
        DeviceKind::VfioUser { socket } => format!("vfio-user {}", socket.display()),
        DeviceKind::Egm { slice, .. } => format!("EGM slice egm{slice}"),
    }
}

/// Resources of a function: windows of a port, BARs and vectors of a device; a label, a place and a size each.
pub(super) fn holdings(function: &FunctionPlan) -> Vec<(String, Option<Span<Guest>>)> {
    let mut all: Vec<(String, Option<Span<Guest>>)> = Vec::new();
    if let Some(&BridgePlan { window32, window64, acs, .. }) = function.role.bridge() {
        all.extend(window32.map(|span| ("32-bit window".to_owned(), Some(span))));
        all.extend(window64.map(|span| ("64-bit window".to_owned(), Some(span))));
        all.extend(acs.map(|acs| (format!("ACS as on the host: {}", bits(acs)), None)));
    }
    let bar = |bar: &BarPlan| {
        let kind = match bar.kind {
            BarKind::Memory32 => "32-bit",
            BarKind::Memory64 => "64-bit",
            BarKind::Memory64Prefetchable => "64-bit prefetchable",
        };
        (format!("BAR {}, {kind}", bar.index), Some(bar.span))
    };
    all.extend(function.bars.iter().map(bar));
    if function.msix_vectors > 0 {
        all.push((counted(function.msix_vectors.into(), "MSI-X vector"), None));
    }
    if let FunctionRole::Endpoint { assigned: Some(assigned), .. } = &function.role {
        all.push((decided(assigned), None));
    }
    all
}

/// A function and what is behind it.
pub(super) struct Branch<'a> {
    pub(super) function: &'a FunctionPlan,
    pub(super) behind: Vec<Self>,
}

/// Each host bridge in words, and the functions on its bus with what is behind them.
pub(super) fn trees(plan: &Plan) -> Vec<(String, String, Vec<Branch<'_>>)> {
    let first = ("0000:00:00.0".to_owned(), "host bridge".to_owned(), on_bus(plan, 0));
    let expander = |expander: &ExpanderPlan| {
        let bus = expander.bridge.secondary;
        let words = format!("host bridge near node {}, {}", expander.node, buses(&expander.bridge));
        (format!("0000:{bus:02x}"), words, on_bus(plan, bus))
    };
    std::iter::once(first).chain(plan.expanders.iter().map(expander)).collect()
}

/// Buses behind a bridge are above its own, so this ends for every plan.
fn on_bus<'a>(plan: &'a Plan, bus: u8) -> Vec<Branch<'a>> {
    let here = plan.pci.iter().filter(|f| f.address.bus() == bus && f.role != FunctionRole::HostBridge);
    let branch = |function: &'a FunctionPlan| {
        let bridge = function.role.bridge().filter(|bridge| bridge.secondary > bus);
        Branch { function, behind: bridge.map_or_else(Vec::new, |bridge| on_bus(plan, bridge.secondary)) }
    };
    here.map(branch).collect()
}

/// How host functions are opened, a line each.
pub(super) fn passthrough(plan: &Plan) -> Vec<(String, String)> {
    let Some(assigned) = &plan.passthrough else { return Vec::new() };
    let name = match assigned.interface {
        Interface::Legacy => "legacy",
        Interface::Iommufd => "iommufd",
    };
    let mut rows = vec![
        (name.to_owned(), assigned.why.clone()),
        ("pinned".to_owned(), format!("{}, counted against the memlock limit", size(assigned.pinned))),
    ];
    let group = |group: &GroupPlan| {
        let functions: Vec<String> = group.functions.iter().map(ToString::to_string).collect();
        (format!("IOMMU group {}", group.id), format!("given as a whole: {}", functions.join(", ")))
    };
    // The others stand beside their functions.
    rows.extend(assigned.groups.iter().filter(|group| group.functions.len() > 1).map(group));
    rows
}

/// The decisions for a host function, as text.
fn decided(assigned: &AssignedPlan) -> String {
    let node = assigned.node.map(|node| format!("near node {node}"));
    let clique = assigned.clique.map(|clique| format!("P2P clique {clique}"));
    let p2p = (!assigned.p2p).then(|| "BARs not reached by others".to_owned());
    let partner = assigned.partner.map(|partner| format!("Data Direct pair with {partner}"));
    let memory = assigned.memory.as_ref().map(|memory| {
        let (first, bars) = (memory.first_node, memory.bars.iter().map(u8::to_string).collect::<Vec<_>>());
        let last = first.saturating_add(GPU_NODES.saturating_sub(1));
        format!("memory in BAR {}, of nodes {first} to {last}", bars.join(" and "))
    });
    let group =
        assigned.group.map_or_else(|| "no IOMMU group".to_owned(), |group| format!("IOMMU group {group}"));
    [Some(group), node, clique, p2p, partner, memory].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Pinned vCPUs, neighbours with the same host CPUs together: `0-3`, `8-11`.
pub(super) fn pinning(plan: &Plan) -> Vec<(String, String)> {
    let mut groups: Vec<(u32, u32, String)> = Vec::new();
    for vcpu in &plan.vcpus {
        let Some(cpus) = vcpu.host_cpus.as_ref().map(ToString::to_string) else { continue };
        match groups.last_mut() {
            Some((_, last, same)) if *same == cpus && last.checked_add(1) == Some(vcpu.index) => {
                *last = vcpu.index;
            }
            _ => groups.push((vcpu.index, vcpu.index, cpus)),
        }
    }
    let name = |first, last| if first == last { format!("{first}") } else { format!("{first}-{last}") };
    groups.into_iter().map(|(first, last, cpus)| (name(first, last), cpus)).collect()
}

/// Interrupt lines and I/O ports, a line each.
pub(super) fn lines_and_ports(plan: &Plan) -> Vec<(String, String)> {
    let lines = plan.lines.iter().map(|line| (line.owner.clone(), format!("interrupt line {}", line.gsi)));
    let ports = plan.ports.iter().map(|port| {
        let last = port.first.saturating_add(port.count.saturating_sub(1));
        let range = if last == port.first {
            format!("port {:#x}", port.first)
        } else {
            format!("ports {:#x}-{last:#x}", port.first)
        };
        (port.owner.clone(), range)
    });
    lines.chain(ports).collect()
}
