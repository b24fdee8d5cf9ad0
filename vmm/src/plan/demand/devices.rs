//! PCI resources that the devices need, and the windows that hold them.
//!
//! A device's BARs are one block in each window, and so are the devices of a switch ([`place`](super::place)): the block is
//! what the bridge above forwards. [`tree`](super::tree) places devices behind bridges.

use egm_address::{ByteSize, Gpa, Guest, PciAddress, Placer, Span, SpanSet, align_down, align_up};
use egm_device::device::registers;
use egm_vfio::host::{HostBar, HostBarKind};

use crate::config::{Device, DeviceKind, Spec};
use crate::facts::Facts;
use crate::plan::demand::near::guest_node;
use crate::plan::demand::regions::Source;
use crate::plan::demand::wanted::{Wanted, WantedBar};
use crate::plan::map::fixed;
use crate::plan::map::place::Blocks;
use crate::plan::map::space::{Space, Windows};
use crate::plan::units::{BRIDGE_UNIT, with_spare};
use crate::plan::{BarKind, PlanError};

/// Size of BAR 0 of a virtio function, its only one: configuration structures, then the MSI-X table and its pending
/// bits. What lies where inside is the function's own affair.
pub const VIRTIO_BAR_SIZE: u64 = 0x8000;

/// Least size of a memory BAR (PCI Express Base 7.5.1.2.1).
const LEAST_BAR: u64 = 16;
/// Configuration space of a bus (PCI Express Base 7.2.2).
const BUS_CONFIGURATION: u64 = 1 << 20;
/// A window around BARs at fixed addresses begins and ends at multiples of this.
const FIXED_UNIT: u64 = 1 << 30;

/// PCI resources that each device needs, in the order of the configuration.
pub(in crate::plan) fn wanted<'a>(
    spec: &'a Spec,
    facts: &'a Facts,
    sources: &[Source],
) -> Result<Vec<Wanted<'a>>, PlanError> {
    let mut assigned: Vec<(PciAddress, &str)> = Vec::new();
    for device in &spec.devices {
        let DeviceKind::Vfio { function, .. } = device.kind else { continue };
        if let Some((_, first)) = assigned.iter().find(|(other, _)| *other == function) {
            let (first, second) = ((*first).to_owned(), device.id.clone());
            return Err(PlanError::FunctionTwice { first, second, function });
        }
        assigned.push((function, &device.id));
    }
    spec.devices.iter().map(|device| wanted_by(device, spec, facts, sources)).collect()
}

fn wanted_by<'a>(
    device: &'a Device,
    spec: &Spec,
    facts: &'a Facts,
    sources: &[Source],
) -> Result<Wanted<'a>, PlanError> {
    let virtio = |queues: u16| Wanted {
        device,
        host: None,
        bars: vec![WantedBar {
            index: 0,
            kind: BarKind::Memory64Prefetchable,
            size: VIRTIO_BAR_SIZE,
            at: None,
            data_direct: false,
        }],
        msix_vectors: queues.saturating_add(1), // one for configuration changes
        node: None,
        partner: None,
    };
    match &device.kind {
        DeviceKind::VirtioBlk { .. } | DeviceKind::VirtioRng => Ok(virtio(1)),
        DeviceKind::VirtioNet { queue_pairs, .. } => {
            Ok(virtio(queue_pairs.saturating_mul(2).saturating_add(1)))
        }
        DeviceKind::VirtioVsock { .. } => Ok(virtio(3)),
        DeviceKind::Vfio { function, bars: places, .. } => {
            let host = facts.functions.iter().find(|host| host.address == *function);
            let unknown = || PlanError::UnknownFunction { device: device.id.clone(), function: *function };
            let host = host.ok_or_else(unknown)?;
            let mut bars = bars(device, &host.shown_bars())?;
            fixed::fix(device, places, &host.bars, &mut bars)?;
            let (msix_vectors, node) =
                (host.msix_vectors.unwrap_or(0), guest_node(spec, facts, sources, host));
            Ok(Wanted { device, host: Some(host), bars, msix_vectors, node, partner: None })
        }
        DeviceKind::VfioUser { socket } => {
            let server = facts.servers.iter().find(|server| server.socket == *socket);
            let bars = server.map_or(Ok(Vec::new()), |server| bars(device, &server.bars))?;
            let msix_vectors = server.map_or(0, |server| server.msix_vectors);
            Ok(Wanted { device, host: None, bars, msix_vectors, node: None, partner: None })
        }
        DeviceKind::Egm { slice, node } => {
            let slice = usize::try_from(*slice).ok().and_then(|slice| spec.egm.get(slice));
            let slice = slice.ok_or(PlanError::Internal("a device is of no slice"))?;
            let bar = |index, kind, size| HostBar { index, kind, size, start: 0 };
            let bars = bars(
                device,
                &[
                    bar(0, HostBarKind::Memory32, registers::SIZE.into()),
                    bar(2, HostBarKind::Memory64Prefetchable, slice.size.get()),
                ],
            )?;
            let msix_vectors = u16::try_from(registers::VECTORS).unwrap_or(u16::MAX);
            Ok(Wanted { device, host: None, bars, msix_vectors, node: Some(*node), partner: None })
        }
    }
}

/// The memory BARs of a host function as a guest sees them. Port BARs are left out: drivers of PCI Express devices must
/// do without (PCI Express Base 7.5.1.2.1).
pub(in crate::plan) fn bars(device: &Device, host: &[HostBar]) -> Result<Vec<WantedBar>, PlanError> {
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
        out.push(WantedBar { index, kind, size, at: None, data_direct: false });
    }
    Ok(out)
}

/// Chooses the windows; the 64-bit one has room for a quarter more than the BARs, and shrinks where that does not fit.
pub(in crate::plan) fn windows(
    spec: &Spec,
    high: &Blocks<'_>,
    buses: usize,
    space: &mut Space,
) -> Result<Windows, PlanError> {
    let ecam = configuration_space(high.wanted.len(), buses, space)?;
    let blocks = high.fixed()?;
    let memory64 = if blocks.is_empty() {
        free_window(spec, high, space)?
    } else {
        Some(around(spec, high, &blocks, space)?)
    };
    Ok(Windows { memory32: space.layout.pci32, memory64, ecam })
}

fn free_window(spec: &Spec, high: &Blocks<'_>, space: &mut Space) -> Result<Option<Span<Guest>>, PlanError> {
    let needed = high.needed()?;
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
    Ok(memory64)
}

/// A window around blocks that must be somewhere, with room for the others behind them, or else before.
fn around(
    spec: &Spec,
    high: &Blocks<'_>,
    blocks: &[(usize, Span<Guest>)],
    space: &Space,
) -> Result<Span<Guest>, PlanError> {
    fixed::check_fixed(high.wanted, space)?;
    let lowest = blocks.iter().map(|(_, span)| span.start().get()).min().unwrap_or(0);
    let highest = blocks.iter().map(|(_, span)| span.end().get()).max().unwrap_or(0);
    let needed = high.needed()?;
    let start = align_down(lowest, FIXED_UNIT).max(space.top.get());
    let spare = if needed > 0 { with_spare(needed) } else { 0 };
    let end = match spec.pcie.window64 {
        Some(size) => start.checked_add(size.get()),
        None => align_up(highest, FIXED_UNIT).map(|end| end.saturating_add(spare)),
    };
    let end = end.unwrap_or(u64::MAX).min(space.limit);
    let window = |start: u64| Span::between(Gpa::new(start), Gpa::new(end.max(start)));
    let holds = |window: &Span<Guest>| {
        let taken = blocks.iter().map(|(_, span)| *span).chain(space.blocked().iter()).collect();
        Placer::new(&SpanSet::from_iter([*window]), &taken).place_all(high.requests()).is_ok()
    };
    if end < highest {
        let (from, limit, bits) = (Gpa::new(start), space.limit, space.bits);
        let (size, configured) = (ByteSize::new(highest.saturating_sub(start)), spec.pcie.window64.is_some());
        return Err(PlanError::Window64 { size, from, limit, bits, configured });
    }
    let near = window(start).filter(holds);
    let all = || align_up(space.top.get(), BRIDGE_UNIT).and_then(window);
    near.or_else(all).ok_or(PlanError::Internal("a window around BARs is empty"))
}

/// No larger than the buses need: Linux looks for a host bridge at every place of each bus that the window has, and each
/// look leaves the guest twice (`pcibios_fixup_peer_bridges`; 16,000 exits, a quarter of all until init).
fn configuration_space(devices: usize, buses: usize, space: &mut Space) -> Result<Span<Guest>, PlanError> {
    let buses = u64::try_from(buses).unwrap_or(u64::MAX);
    let size = buses.checked_next_power_of_two().and_then(|buses| buses.checked_mul(BUS_CONFIGURATION));
    let size = size.ok_or(PlanError::Internal("there are more buses than numbers"))?;
    match space.layout.ecam {
        Some(most) if size <= most.size() => {
            Span::new(most.start(), size).map_err(|_| PlanError::Internal("configuration space has no place"))
        }
        Some(most) => Err(PlanError::Buses { devices, buses, max: most.size() / BUS_CONFIGURATION }),
        None => space.place_at_top(size, size).ok_or_else(|| PlanError::AddressSpace {
            what: "PCI configuration space".to_owned(),
            limit: space.limit,
            bits: space.bits,
            short_by: size,
            key: "memory.size",
        }),
    }
}
