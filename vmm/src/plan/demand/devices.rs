//! PCI resources that each device needs: BARs, vectors, and the guest node that it is near to.

use egm_address::{Gpa, PciAddress};
use egm_device::device::registers;
use egm_vfio::host::{HostBar, HostBarKind, HostFunction};

use crate::config::{BarPlacement, BarPlacements, Device, DeviceKind, FixedBar, Spec};
use crate::facts::Facts;
use crate::plan::demand::near::guest_node;
use crate::plan::demand::regions::Source;
use crate::plan::{AssignedRule, BarKind, PlanError};

/// Size of BAR 0 of a virtio function, its only one: configuration structures, then the MSI-X table and its pending
/// bits. What lies where inside is the function's own affair.
const VIRTIO_BAR_SIZE: u64 = 0x8000;

/// A BAR never shares a host page with another: it can then be mapped into the guest.
pub(in crate::plan) const PAGE: u64 = 4 << 10;
/// Least size of a memory BAR (PCI Express Base 7.5.1.2.1).
const LEAST_BAR: u64 = 16;

/// A device of the configuration and what it needs.
pub(in crate::plan) struct DeviceDemand<'a> {
    pub(in crate::plan) device: &'a Device,
    /// The host function that it is.
    pub(in crate::plan) host: Option<&'a HostFunction>,
    pub(in crate::plan) bars: Vec<BarDemand>,
    pub(in crate::plan) msix_vectors: u16,
    /// The guest node that a host function is near to.
    pub(in crate::plan) node: Option<u32>,
    /// The other host function of a Data Direct pair.
    pub(in crate::plan) partner: Option<PciAddress>,
}

/// Base address registers and MSI-X vectors of a device that another process or the host makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceRegisters {
    /// The registers, as a driver finds them.
    pub bars: Vec<HostBar>,
    /// MSI-X vectors; 0 when it has none.
    pub msix_vectors: u16,
}

#[derive(Clone, Copy)]
pub(in crate::plan) struct BarDemand {
    pub(in crate::plan) index: u8,
    pub(in crate::plan) kind: BarKind,
    pub(in crate::plan) size: u64,
    /// Where it must be.
    pub(in crate::plan) at: Option<Gpa>,
    /// Whether that is for Data Direct, not for the configuration.
    pub(in crate::plan) data_direct: bool,
}

/// Needs of all devices, in the order of the configuration.
pub(super) fn of<'a>(
    spec: &'a Spec,
    facts: &'a Facts,
    sources: &[Source],
) -> Result<Vec<DeviceDemand<'a>>, PlanError> {
    check_functions(&spec.devices)?;
    spec.devices.iter().map(|device| DeviceDemand::new(device, spec, facts, sources)).collect()
}

/// Refuses a host function that is two devices.
fn check_functions(devices: &[Device]) -> Result<(), PlanError> {
    let mut assigned: Vec<(PciAddress, &str)> = Vec::new();
    for device in devices {
        let DeviceKind::Vfio { function, .. } = device.kind else { continue };
        if let Some((_, first)) = assigned.iter().find(|(other, _)| *other == function) {
            let (first, second) = ((*first).to_owned(), device.id.clone());
            return Err(PlanError::FunctionTwice { first, second, function });
        }
        assigned.push((function, &device.id));
    }
    Ok(())
}

impl<'a> DeviceDemand<'a> {
    fn new(device: &'a Device, spec: &Spec, facts: &'a Facts, sources: &[Source]) -> Result<Self, PlanError> {
        let own = Self { device, host: None, bars: Vec::new(), msix_vectors: 0, node: None, partner: None };
        match &device.kind {
            DeviceKind::VirtioBlk { .. }
            | DeviceKind::VirtioNet { .. }
            | DeviceKind::VirtioVsock { .. }
            | DeviceKind::VirtioRng => Ok(own.virtio()),
            DeviceKind::Vfio { function, bars: places, .. } => {
                let host = facts.functions.iter().find(|host| host.address == *function);
                let unknown =
                    || PlanError::UnknownFunction { device: device.id.clone(), function: *function };
                let host = host.ok_or_else(unknown)?;
                let mut bars = bars(device, &host.shown_bars())?;
                fix(device, places, &host.bars, &mut bars)?;
                let (msix_vectors, node) =
                    (host.msix_vectors.unwrap_or(0), guest_node(spec, facts, sources, host));
                Ok(Self { host: Some(host), bars, msix_vectors, node, ..own })
            }
            DeviceKind::VfioUser { socket } => {
                let server = facts.servers.iter().find(|server| server.socket == *socket);
                let bars = server.map_or(Ok(Vec::new()), |server| bars(device, &server.bars))?;
                let msix_vectors = server.map_or(0, |server| server.msix_vectors);
                Ok(Self { bars, msix_vectors, ..own })
            }
            DeviceKind::Egm { slice, node } => {
                let slice = usize::try_from(*slice).ok().and_then(|slice| spec.egm.get(slice));
                let slice = slice.ok_or(PlanError::Internal("a device is of no slice"))?;
                let DeviceRegisters { bars: own_bars, msix_vectors } = slice_registers(slice.size.get());
                Ok(Self { bars: bars(device, &own_bars)?, msix_vectors, node: Some(*node), ..own })
            }
        }
    }

    /// Whether it is a host function with BARs that the configuration lets others reach.
    pub(in crate::plan) fn allows_p2p(&self) -> bool {
        matches!(self.device.kind, DeviceKind::Vfio { p2p: true, .. })
    }

    /// Needs of a device that a running machine gets, with the registers that it is made of unless it is a virtio device.
    pub(in crate::plan) fn plugged(
        device: &'a Device,
        registers: Option<&DeviceRegisters>,
    ) -> Result<Self, PlanError> {
        let own = Self { device, host: None, bars: Vec::new(), msix_vectors: 0, node: None, partner: None };
        let Some(registers) = registers else { return Ok(own.virtio()) };
        Ok(Self { bars: bars(device, &registers.bars)?, msix_vectors: registers.msix_vectors, ..own })
    }

    /// A virtio function.
    fn virtio(self) -> Self {
        let queues = match &self.device.kind {
            DeviceKind::VirtioNet { queue_pairs, .. } => queue_pairs.saturating_mul(2).saturating_add(1),
            DeviceKind::VirtioVsock { .. } => 3,
            _ => 1,
        };
        let bar = BarDemand {
            index: 0,
            kind: BarKind::Memory64Prefetchable,
            size: VIRTIO_BAR_SIZE,
            at: None,
            data_direct: false,
        };
        let msix_vectors = queues.saturating_add(1); // one for configuration changes
        Self { bars: vec![bar], msix_vectors, ..self }
    }
}

/// Registers of a slice of `size` bytes that is a function; the last one has its memory.
pub(crate) fn slice_registers(size: u64) -> DeviceRegisters {
    let bar = |index, kind, size| HostBar { index, kind, size, start: 0 };
    let own = bar(0, HostBarKind::Memory32, registers::SIZE.into());
    DeviceRegisters {
        bars: vec![own, bar(2, HostBarKind::Memory64Prefetchable, size)],
        msix_vectors: u16::try_from(registers::VECTORS).unwrap_or(u16::MAX),
    }
}

/// The memory BARs of a host function as a guest sees them. Port BARs are left out: drivers of PCI Express devices must
/// do without (PCI Express Base 7.5.1.2.1).
fn bars(device: &Device, host: &[HostBar]) -> Result<Vec<BarDemand>, PlanError> {
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
        out.push(BarDemand { index, kind, size, at: None, data_direct: false });
    }
    Ok(out)
}

/// Sets the addresses in `bars` that the configuration fixes.
fn fix(
    device: &Device,
    places: &BarPlacements,
    host: &[HostBar],
    bars: &mut [BarDemand],
) -> Result<(), PlanError> {
    let start = |index: u8| host.iter().find(|bar| bar.index == index).map_or(0, |bar| bar.start);
    let high = |bar: &BarDemand| bar.kind == BarKind::Memory64Prefetchable;
    let all: Vec<FixedBar> = match places {
        BarPlacements::Guest => Vec::new(),
        BarPlacements::Host => {
            let high = bars.iter().filter(|bar| high(bar));
            high.map(|bar| FixedBar { index: bar.index, place: BarPlacement::Host }).collect()
        }
        BarPlacements::Each(places) => places.clone(),
    };
    for FixedBar { index, place } in all {
        let wrong = |why| PlanError::from(AssignedRule::FixedBar { device: device.id.clone(), index, why });
        let bar = bars.iter_mut().find(|bar| bar.index == index);
        let bar = bar.ok_or_else(|| wrong("the function has no such memory BAR"))?;
        if !high(bar) {
            return Err(wrong(
                "it is not 64-bit prefetchable, and only such BARs have a window of their own",
            ));
        }
        let at = match place {
            BarPlacement::At(at) => at,
            BarPlacement::Host if start(index) == 0 => return Err(wrong("the host gave it no address")),
            BarPlacement::Host => Gpa::new(start(index)),
        };
        if !at.is_aligned(bar.size.max(PAGE)) {
            return Err(wrong("its address is not a multiple of its size"));
        }
        bar.at = Some(at);
    }
    Ok(())
}
