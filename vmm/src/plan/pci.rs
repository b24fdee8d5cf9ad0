//! PCI functions, their BARs, and the windows that hold them.
//!
//! ```text
//!  00:00.0 host bridge
//!  00:01.0 root port ── 01:00.0 first device that asks for a port
//!  00:02.0 root port ── 02:00.0 second
//!  00:03.0 first device that does not, …
//! ```
//! The BARs of one device are placed as one block, largest first: all of them are powers of two, so nothing is lost
//! between them, and the block is what a root port forwards.

use egm_address::{ByteSize, Gpa, Guest, PciAddress, PlaceError, Placer, Request, Span, SpanSet, align_up};
use egm_vfio::host::{HostBar, HostBarKind};

use crate::config::{Device, DeviceKind, Spec};
use crate::facts::Facts;
use crate::plan::space::Space;
use crate::plan::{BarKind, BarPlan, BridgePlan, FunctionPlan, FunctionRole, PlanError};

/// Size of BAR 0 of a virtio function, its only one: configuration structures, then the MSI-X table and its pending
/// bits. What lies where inside is the function's own affair.
pub const VIRTIO_BAR_SIZE: u64 = 0x8000;

/// Least window of a bridge and its unit (PCI-to-PCI Bridge 1.2, 3.2.5.8).
const BRIDGE_UNIT: u64 = 1 << 20;
/// A BAR never shares a host page with another: it can then be mapped into the guest.
const PAGE: u64 = 4 << 10;
/// Least size of a memory BAR (PCI Express Base 7.5.1.2.1).
const LEAST_BAR: u64 = 16;
/// Configuration space of a bus (PCI Express Base 7.2.2).
const BUS_CONFIGURATION: u64 = 1 << 20;
/// What the 64-bit window has when neither BARs nor the configuration ask for more: room for hot-plug.
const LEAST_WINDOW64: u64 = 64 << 30;
/// Places on a bus.
const BUS_PLACES: usize = 32;

/// Where PCI memory and configuration space are.
pub(super) struct Windows {
    pub(super) memory32: Span<Guest>,
    pub(super) memory64: Option<Span<Guest>>,
    pub(super) ecam: Span<Guest>,
}

/// A device of the configuration and what it needs.
pub(super) struct Wanted<'a> {
    device: &'a Device,
    bars: Vec<WantedBar>,
    msix_vectors: u16,
}

#[derive(Clone, Copy)]
struct WantedBar {
    index: u8,
    kind: BarKind,
    size: u64,
}

impl BarKind {
    /// Whether it lies in the 64-bit window.
    const fn is_high(self) -> bool {
        matches!(self, Self::Memory64Prefetchable)
    }

    /// Whether it takes two registers.
    const fn is_wide(self) -> bool {
        matches!(self, Self::Memory64 | Self::Memory64Prefetchable)
    }
}

/// What each device needs, in the order of the configuration.
pub(super) fn wanted<'a>(spec: &'a Spec, facts: &Facts) -> Result<Vec<Wanted<'a>>, PlanError> {
    let mut passed: Vec<(PciAddress, &str)> = Vec::new();
    for device in &spec.devices {
        let DeviceKind::Vfio { function, .. } = device.kind else { continue };
        if let Some((_, first)) = passed.iter().find(|(other, _)| *other == function) {
            let (first, second) = ((*first).to_owned(), device.id.clone());
            return Err(PlanError::FunctionTwice { first, second, function });
        }
        passed.push((function, &device.id));
    }
    spec.devices.iter().map(|device| wanted_by(device, facts)).collect()
}

fn wanted_by<'a>(device: &'a Device, facts: &Facts) -> Result<Wanted<'a>, PlanError> {
    let virtio = |queues: u16| Wanted {
        device,
        bars: vec![WantedBar { index: 0, kind: BarKind::Memory64Prefetchable, size: VIRTIO_BAR_SIZE }],
        msix_vectors: queues.saturating_add(1), // one for configuration changes
    };
    match &device.kind {
        DeviceKind::VirtioBlk { .. } | DeviceKind::VirtioRng => Ok(virtio(1)),
        DeviceKind::VirtioNet { queue_pairs, .. } => {
            Ok(virtio(queue_pairs.saturating_mul(2).saturating_add(1)))
        }
        DeviceKind::VirtioVsock { .. } => Ok(virtio(3)),
        DeviceKind::Vfio { function, .. } => {
            let host = facts.functions.iter().find(|host| host.address == *function);
            let unknown = || PlanError::UnknownFunction { device: device.id.clone(), function: *function };
            let host = host.ok_or_else(unknown)?;
            Ok(Wanted {
                device,
                bars: bars(device, &host.bars)?,
                msix_vectors: host.msix_vectors.unwrap_or(0),
            })
        }
        DeviceKind::VfioUser { socket } => {
            let server = facts.servers.iter().find(|server| server.socket == *socket);
            let unknown = || PlanError::UnknownServer { device: device.id.clone(), socket: socket.clone() };
            let server = server.ok_or_else(unknown)?;
            Ok(Wanted { device, bars: bars(device, &server.bars)?, msix_vectors: server.msix_vectors })
        }
    }
}

/// The memory BARs of a host function as a guest sees them. Port BARs are left out: drivers of PCI Express devices must
/// do without (PCI Express Base 7.5.1.2.1).
fn bars(device: &Device, host: &[HostBar]) -> Result<Vec<WantedBar>, PlanError> {
    let mut registers = [false; 6];
    let mut out = Vec::new();
    for bar in host {
        let HostBar { index, size, .. } = *bar;
        let wrong = |why| PlanError::Bar { device: device.id.clone(), index, size, why };
        let kind = match bar.kind {
            HostBarKind::Ports => continue,
            HostBarKind::Memory32 | HostBarKind::Memory32Prefetchable => BarKind::Memory32,
            HostBarKind::Memory64 => BarKind::Memory64,
            HostBarKind::Memory64Prefetchable => BarKind::Memory64Prefetchable,
        };
        let last = usize::from(index) + usize::from(kind.is_wide());
        let taken = registers.get_mut(usize::from(index)..=last);
        let taken = taken.ok_or_else(|| wrong("registers are numbered 0 to 5, a 64-bit one takes two"))?;
        if taken.contains(&true) {
            return Err(wrong("another BAR has its register"));
        }
        taken.fill(true);
        let power = size.max(LEAST_BAR).checked_next_power_of_two();
        let size = power.ok_or_else(|| wrong("it has no next power of two in 64 bits"))?;
        out.push(WantedBar { index, kind, size });
    }
    Ok(out)
}

/// The BARs of one device in one window, as one block.
struct Block {
    /// Each BAR and its offset in the block.
    bars: Vec<(WantedBar, u64)>,
    size: u64,
    align: u64,
}

impl Wanted<'_> {
    /// `None` when the device has no BAR there.
    fn block(&self, high: bool) -> Result<Option<Block>, PlanError> {
        let mut bars: Vec<WantedBar> =
            self.bars.iter().copied().filter(|b| b.kind.is_high() == high).collect();
        bars.sort_by_key(|bar| (std::cmp::Reverse(bar.size), bar.index));
        let Some(largest) = bars.first().copied() else { return Ok(None) };
        let unit = if self.device.root_port { BRIDGE_UNIT } else { PAGE };
        let too_large = || PlanError::Bar {
            device: self.device.id.clone(),
            index: largest.index,
            size: largest.size,
            why: "the device's BARs together exceed 64 bits",
        };
        let mut block = Block { bars: Vec::new(), size: 0, align: largest.size.max(unit) };
        for bar in bars {
            block.bars.push((bar, block.size));
            block.size = block.size.checked_add(bar.size.max(PAGE)).ok_or_else(too_large)?;
        }
        block.size = align_up(block.size, unit).ok_or_else(too_large)?;
        Ok(Some(block))
    }

    fn request(&self, tag: usize, high: bool) -> Result<Option<Request<usize>>, PlanError> {
        Ok(self.block(high)?.map(|block| Request { tag, size: block.size, align: block.align }))
    }
}

fn requests(wanted: &[Wanted<'_>], high: bool) -> Result<Vec<Request<usize>>, PlanError> {
    wanted.iter().enumerate().filter_map(|(i, w)| w.request(i, high).transpose()).collect()
}

/// Bytes from the start of a window to the end of its last block, were the window large enough.
fn needed64(wanted: &[Wanted<'_>]) -> Result<u64, PlanError> {
    let whole = Span::new(Gpa::new(0), u64::MAX).into_iter().collect();
    let placed = Placer::new(&whole, &SpanSet::default()).place_all(requests(wanted, true)?);
    let placed = placed.map_err(|error| no_place(wanted, error, "64-bit", &whole, None))?;
    Ok(placed.iter().map(|placement| placement.span.end().get()).max().unwrap_or(0))
}

/// Chooses the windows; the 64-bit one has room for a quarter more than the BARs, and shrinks where that does not fit.
pub(super) fn windows(spec: &Spec, wanted: &[Wanted<'_>], space: &mut Space) -> Result<Windows, PlanError> {
    let ecam = configuration_space(wanted, space)?;
    let needed = needed64(wanted)?;
    let least = needed.max(BRIDGE_UNIT).checked_next_power_of_two().unwrap_or(u64::MAX);
    let mut size = match spec.pcie.window64 {
        Some(size) => size.get(),
        None => with_spare(needed),
    };
    let from = space.top;
    let memory64 = loop {
        let align = size.checked_next_power_of_two();
        let span = align.and_then(|align| space.place_at_top(size, align));
        if span.is_some() || spec.pcie.window64.is_some() || size <= least {
            break span;
        }
        size /= 2;
    };
    let configured = spec.pcie.window64.is_some();
    if memory64.is_none() && (configured || needed > 0) {
        let (size, limit, bits) = (ByteSize::new(size), space.limit, space.bits);
        return Err(PlanError::Window64 { size, from, limit, bits, configured });
    }
    Ok(Windows { memory32: space.layout.pci32, memory64, ecam })
}

/// No larger than the buses need: Linux looks for a host bridge at every place of each bus that the window has, and each
/// look leaves the guest twice (`pcibios_fixup_peer_bridges`; 16,000 exits, a quarter of all until init).
fn configuration_space(wanted: &[Wanted<'_>], space: &mut Space) -> Result<Span<Guest>, PlanError> {
    let ports = wanted.iter().filter(|wanted| wanted.device.root_port).count();
    let buses = u64::try_from(ports.saturating_add(1)).unwrap_or(u64::MAX);
    let size = buses.checked_next_power_of_two().and_then(|buses| buses.checked_mul(BUS_CONFIGURATION));
    let size = size.ok_or(PlanError::Internal("there are more buses than numbers"))?;
    match space.layout.ecam {
        Some(most) if size <= most.size() => {
            Span::new(most.start(), size).map_err(|_| PlanError::Internal("configuration space has no place"))
        }
        Some(_) => Err(PlanError::Bus0 { devices: wanted.len(), max: BUS_PLACES - 1 }),
        None => space.place_at_top(size, size).ok_or_else(|| PlanError::AddressSpace {
            what: "PCI configuration space".to_owned(),
            limit: space.limit,
            bits: space.bits,
            short_by: size,
            key: "memory.size",
        }),
    }
}

fn with_spare(needed: u64) -> u64 {
    let roomy = needed.saturating_add(needed / 4).checked_next_power_of_two();
    roomy.unwrap_or(1 << 63).max(LEAST_WINDOW64)
}

/// Every function, by address.
pub(super) fn functions(
    wanted: &[Wanted<'_>],
    windows: &Windows,
    space: &Space,
) -> Result<Vec<FunctionPlan>, PlanError> {
    if wanted.len() >= BUS_PLACES {
        return Err(PlanError::Bus0 { devices: wanted.len(), max: BUS_PLACES - 1 });
    }
    let low = Some(windows.memory32);
    let low = place(wanted, low, false, space)?;
    let high = place(wanted, windows.memory64, true, space)?;
    let mut all = vec![function(0, 0, FunctionRole::HostBridge)?];
    let (behind, direct): (Vec<usize>, Vec<usize>) =
        (0..wanted.len()).partition(|&i| wanted.get(i).is_some_and(|w| w.device.root_port));
    for (slot, i) in (1u8..).zip(behind.iter().chain(&direct)) {
        let (Some(wanted), Some(low), Some(high)) = (wanted.get(*i), low.get(*i), high.get(*i)) else {
            return Err(PlanError::Internal("a device has no placement"));
        };
        let role = FunctionRole::Endpoint { device: wanted.device.clone(), passed: None };
        let bus = if wanted.device.root_port { slot } else { 0 };
        if wanted.device.root_port {
            let (window32, window64) = (low.window, high.window);
            let bridge = BridgePlan { secondary: slot, subordinate: slot, window32, window64 };
            let port = FunctionRole::RootPort { slot: slot.into(), bridge };
            all.push(function(0, slot, port)?);
        }
        let mut endpoint = function(bus, if bus == 0 { slot } else { 0 }, role)?;
        endpoint.bars = low.bars.iter().chain(&high.bars).cloned().collect();
        endpoint.bars.sort_by_key(|bar| bar.index);
        endpoint.msix_vectors = wanted.msix_vectors;
        all.push(endpoint);
    }
    all.sort_by_key(|function| function.address);
    Ok(all)
}

fn function(bus: u8, device: u8, role: FunctionRole) -> Result<FunctionPlan, PlanError> {
    let address = PciAddress::new(0, bus, device, 0);
    let address = address.map_err(|_| PlanError::Internal("a bus has more than 32 places"))?;
    Ok(FunctionPlan { address, role, bars: Vec::new(), msix_vectors: 0 })
}

/// What one device got in one window.
#[derive(Default, Clone)]
struct Placed {
    window: Option<Span<Guest>>,
    bars: Vec<BarPlan>,
}

/// Places every device's BARs of one kind; the result has an entry for each device.
fn place(
    wanted: &[Wanted<'_>],
    window: Option<Span<Guest>>,
    high: bool,
    space: &Space,
) -> Result<Vec<Placed>, PlanError> {
    let mut out = vec![Placed::default(); wanted.len()];
    let window: SpanSet<Guest> = window.into_iter().collect();
    let suggested = if high { Some(ByteSize::new(with_spare(needed64(wanted)?))) } else { None };
    let name = if high { "64-bit" } else { "32-bit" };
    let placed = Placer::new(&window, &space.blocked()).place_all(requests(wanted, high)?);
    for placement in placed.map_err(|error| no_place(wanted, error, name, &window, suggested))? {
        let (Some(slot), Some(wanted)) = (out.get_mut(placement.tag), wanted.get(placement.tag)) else {
            return Err(PlanError::Internal("a placement is of no device"));
        };
        let Some(block) = wanted.block(high)? else { continue };
        slot.window = Some(placement.span);
        for (bar, offset) in block.bars {
            let start = placement.span.start().checked_add(offset);
            let span = start.and_then(|start| Span::new(start, bar.size).ok());
            let span = span.ok_or(PlanError::Internal("a BAR lies outside its block"))?;
            slot.bars.push(BarPlan { index: bar.index, kind: bar.kind, span });
        }
    }
    Ok(out)
}

fn no_place(
    wanted: &[Wanted<'_>],
    error: PlaceError<usize>,
    window: &'static str,
    spans: &SpanSet<Guest>,
    suggested: Option<ByteSize>,
) -> PlanError {
    let PlaceError { tag, size, align, largest, short_by } = error;
    let device = wanted.get(tag).map_or_else(String::new, |wanted| wanted.device.id.clone());
    match spans.iter().next() {
        Some(span) => PlanError::Window {
            device,
            window,
            span,
            source: PlaceError { tag: (), size, align, largest, short_by },
            suggested,
        },
        None => PlanError::Internal("a device needs a window that was not placed"),
    }
}
