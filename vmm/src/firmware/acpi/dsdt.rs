//! DSDT: devices and methods in ACPI's byte code (ACPI 6.5, clauses 5.2.11.1 and 20).
//!
//! ```text
//! \_S5            power off: SLP_TYP 5 into the sleep control register
//! \_SB.C000 …     processors
//! \_SB.ECAM       keeps configuration space: Linux believes MCFG only when a motherboard device has it
//! \_SB.PCI0       the host bridge; .S08 … its root ports, named by device and function
//! \_SB.PC15 …     expanders, named by bus
//! \_SB.COM1       serial console
//! \_SB.PEVT       panic notifier
//! ```

use std::collections::BTreeMap;

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, And, Arg, BufferData, CreateDWordField, Device, EISAName, Else,
    Equal, GreaterEqual, IO, If, Interrupt, Local, Memory32Fixed, Method, Name, NotEqual, ONE, Or, Package,
    Path, ResourceTemplate, Return, Scope, Store, Uuid, ZERO,
};
use acpi_tables::{Aml, AmlSink};
use egm_address::{Guest, Span, SpanSet};

use super::mcfg::ecam;
use super::table;
use crate::firmware::{FirmwareError, ports};
use crate::machine::SLEEP_TYPE_S5;
use crate::plan::{BridgePlan, FunctionPlan, FunctionRole, MemoryKind, Plan, RootPin, WindowKind};

/// From revision 2 on integers have 64 bits.
const REVISION: u8 = 2;
/// Registers of a 16550.
const SERIAL_PORTS: u8 = 8;
/// `_OSC` control bits that the OS gets when it asks: native hot plug, PME, capability structure
/// (PCI Firmware 3.3, table 4-6). Not SHPC, AER and LTR, which no port has.
const OSC_GRANTED: u32 = 1 << 0 | 1 << 2 | 1 << 4;

/// The table.
pub(super) fn dsdt(plan: &Plan) -> Result<Vec<u8>, FirmwareError> {
    let mut devices = Vec::new();
    for (position, vcpu) in plan.vcpus.iter().enumerate() {
        processor(&mut devices, position, vcpu.index);
    }
    let (config_space, last_bus) = ecam(plan)?;
    motherboard(&mut devices, config_space);
    HostBridge::all(plan, last_bus).iter().for_each(|bridge| bridge.write(&mut devices, plan));
    if let Some(gsi) = plan.line("serial") {
        serial(&mut devices, ports(plan, "serial", SERIAL_PORTS)?, gsi);
    }
    if plan.port("pvpanic").is_some() {
        panic_notifier(&mut devices, ports(plan, "pvpanic", 1)?);
    }
    let off: [&dyn Aml; 4] = [&SLEEP_TYPE_S5, &ZERO, &ZERO, &ZERO];
    let mut body = Vec::new();
    Name::new("\\_S5_".into(), &Package::new(off.to_vec())).to_aml_bytes(&mut body);
    body.extend(Scope::raw("\\_SB_".into(), devices));
    Ok(table(*b"DSDT", REVISION, &body))
}

/// A processor (clause 8.4), tied to MADT by its UID. The name has three digits: there are fewer than 4096.
fn processor(sink: &mut dyn AmlSink, position: usize, uid: u32) {
    let name = format!("C{position:03X}");
    Device::new(
        name.as_str().into(),
        vec![&Name::new("_HID".into(), &"ACPI0007"), &Name::new("_UID".into(), &uid)],
    )
    .to_aml_bytes(sink);
}

/// Linux ignores MCFG unless a PNP0C02 device, or the memory map, reserves its range (PCI Firmware 3.3,
/// clause 4.1.2, note 2).
fn motherboard(sink: &mut dyn AmlSink, span: Span<Guest>) {
    let low = u32::try_from(span.start().get()).ok().zip(u32::try_from(span.size()).ok());
    let low = low.filter(|_| span.last().get() <= u64::from(u32::MAX));
    let range: Box<dyn Aml> = match low {
        Some((base, length)) => Box::new(Memory32Fixed::new(true, base, length)),
        None => Box::new(memory(AddressSpaceCacheable::NotCacheable, span)),
    };
    Device::new(
        "ECAM".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0C02")),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![range.as_ref()])),
        ],
    )
    .to_aml_bytes(sink);
}

/// What one host bridge has of the machine's buses and windows.
struct HostBridge {
    name: String,
    buses: (u8, u8),
    near: Option<u32>,
    windows: Vec<(AddressSpaceCacheable, Span<Guest>)>,
}

impl HostBridge {
    /// That of bus 0, then the expanders. The last has the buses that are left, the first what no expander has of the
    /// windows. Devices get the node of their host bridge, and without one Linux says that performance will be reduced;
    /// emulated devices have none, so the first is as good as any.
    fn all(plan: &Plan, last_bus: u8) -> Vec<Self> {
        let starts = plan.expanders.iter().map(|expander| expander.bridge.secondary);
        let starts: Vec<u8> = std::iter::once(0).chain(starts).collect();
        let end = |index: usize| starts.get(index).map_or(last_bus, |next| next.saturating_sub(1));
        let taken: SpanSet<Guest> =
            plan.expanders.iter().flat_map(|e| [e.bridge.window32, e.bridge.window64]).flatten().collect();
        let cacheable = |kind| match kind {
            WindowKind::PciMemory32 => Some(AddressSpaceCacheable::NotCacheable),
            WindowKind::PciMemory64 => Some(AddressSpaceCacheable::PreFetchable),
            _ => None,
        };
        let first = plan.windows.iter().filter_map(|w| Some((cacheable(w.kind)?, w.span)));
        let left = |(cacheable, span): (AddressSpaceCacheable, Span<Guest>)| {
            let left = SpanSet::from_iter([span]).minus(&taken);
            left.iter().map(|span| (cacheable, span)).collect::<Vec<_>>()
        };
        let mut all = vec![Self {
            name: "PCI0".to_owned(),
            buses: (0, end(1)),
            near: plan.nodes.first().map(|node| node.id),
            windows: first.flat_map(left).collect(),
        }];
        all.extend(plan.expanders.iter().zip(2..).map(|(expander, next)| {
            let BridgePlan { secondary, window32, window64, .. } = expander.bridge;
            let low = window32.map(|span| (AddressSpaceCacheable::NotCacheable, span));
            let high = window64.map(|span| (AddressSpaceCacheable::PreFetchable, span));
            Self {
                name: format!("PC{secondary:02X}"),
                buses: (secondary, end(next)),
                near: Some(expander.node),
                windows: low.into_iter().chain(high).collect(),
            }
        }));
        all
    }

    /// A PCI Express host bridge (PCI Firmware 3.3, clause 4). `_PRT` is there for host functions; ours send messages.
    fn write(&self, sink: &mut dyn AmlSink, plan: &Plan) {
        let (first, last) = self.buses;
        let buses = AddressSpace::new_bus_number(u16::from(first), u16::from(last));
        let windows: Vec<AddressSpace<u64>> =
            self.windows.iter().map(|(cacheable, span)| memory(*cacheable, *span)).collect();
        let mut resources: Vec<&dyn Aml> = vec![&buses];
        resources.extend(windows.iter().map(|w| -> &dyn Aml { w }));
        let root_ports: Vec<&FunctionPlan> = plan
            .pci
            .iter()
            .filter(|f| matches!(f.role, FunctionRole::RootPort { .. }) && f.address.bus() == first)
            .collect();
        let root_ports: Vec<Place<'_>> =
            root_ports.into_iter().map(|function| Place { plan, function }).collect();
        let identity: [Name; 6] = [
            Name::new("_HID".into(), &EISAName::new("PNP0A08")),
            Name::new("_CID".into(), &EISAName::new("PNP0A03")),
            Name::new("_SEG".into(), &ZERO),
            Name::new("_BBN".into(), &first),
            Name::new("_UID".into(), &first),
            Name::new("_CCA".into(), &ONE),
        ];
        let crs = Name::new("_CRS".into(), &ResourceTemplate::new(resources));
        let near = self.near.map(|node| Name::new("_PXM".into(), &node));
        let mut children: Vec<&dyn Aml> = identity.iter().chain(&near).map(|n| -> &dyn Aml { n }).collect();
        children.extend([&crs as &dyn Aml, &OperatingSystemCapabilities, &PreserveConfiguration]);
        let routing = PinRouting::of(plan, first);
        if !routing.0.is_empty() {
            children.push(&routing);
        }
        children.extend(root_ports.iter().map(|p| -> &dyn Aml { p }));
        Device::new(self.name.as_str().into(), children).to_aml_bytes(sink);
    }
}

/// A memory range that a bridge forwards or a device has.
fn memory(cacheable: AddressSpaceCacheable, span: Span<Guest>) -> AddressSpace<u64> {
    AddressSpace::new_memory(cacheable, true, span.start().get(), span.last().get(), None)
}

/// A port, tied to its function by `_ADR` (clause 6.1.1), with what is behind it that ACPI has something to say of; or such
/// a function.
struct Place<'a> {
    plan: &'a Plan,
    function: &'a FunctionPlan,
}

impl<'a> Place<'a> {
    /// The slice that the function's driver is to use, of a GPU near a node of such memory.
    fn slice(&self) -> Option<Slice> {
        let FunctionRole::Endpoint { passed: Some(passed), .. } = &self.function.role else { return None };
        let node = passed.memory.as_ref().and(passed.node)?;
        let memory = self.plan.memory.iter().find(|m| m.node == node && m.kind == MemoryKind::Egm)?;
        Some(Slice { node, span: memory.span })
    }

    /// Buses behind a bridge are above its own, so this ends whatever a plan says.
    fn behind(&self) -> impl Iterator<Item = Place<'a>> {
        let own = self.function.address.bus();
        let bus = self.function.role.bridge().map(|bridge| bridge.secondary).filter(|bus| *bus > own);
        let plan = self.plan;
        let here = plan.pci.iter().filter(move |f| Some(f.address.bus()) == bus);
        here.map(move |function| Place { plan, function }).filter(Self::says_something)
    }

    fn says_something(&self) -> bool {
        self.slice().is_some() || self.behind().next().is_some()
    }
}

impl Aml for Place<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let at = self.function.address;
        let name = format!("S{:02X}_", at.devfn());
        let address = Name::new("_ADR".into(), &(u32::from(at.device()) << 16 | u32::from(at.function())));
        let (slice, behind): (_, Vec<Place<'_>>) = (self.slice(), self.behind().collect());
        let mut children: Vec<&dyn Aml> = vec![&address];
        children.extend(slice.iter().map(|slice| -> &dyn Aml { slice }));
        children.extend(behind.iter().map(|place| -> &dyn Aml { place }));
        Device::new(name.as_str().into(), children).to_aml_bytes(sink);
    }
}

/// `_DSD` of a GPU with Extended GPU Memory: NVIDIA's driver wants all three properties, and the node to be the GPU's own
/// (open-gpu-kernel-modules, `nv_get_egm_info`). It counts from the base, so the slice is one span.
struct Slice {
    node: u32,
    span: Span<Guest>,
}

impl Aml for Slice {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let (base, size, node) = (self.span.start().get(), self.span.size(), u64::from(self.node));
        let properties: [(&str, &u64); 3] =
            [("nvidia,egm-base-pa", &base), ("nvidia,egm-size", &size), ("nvidia,egm-pxm", &node)];
        let pairs: Vec<Package> =
            properties.iter().map(|(name, value)| Package::new(vec![name, *value])).collect();
        let pairs = Package::new(pairs.iter().map(|pair| -> &dyn Aml { pair }).collect());
        let properties = Uuid::new("DAFFD814-6EBA-4D8C-8A91-BC9BBF4AA301");
        Name::new("_DSD".into(), &Package::new(vec![&properties, &pairs])).to_aml_bytes(sink);
    }
}

/// `_PRT` (clause 6.2.13): the line of each pin that a host function ends at. Linux takes such lines as level triggered.
struct PinRouting(BTreeMap<RootPin, u32>);

impl PinRouting {
    /// Those of the host bridge of `bus`.
    fn of(plan: &Plan, bus: u8) -> Self {
        let pin = |function: &FunctionPlan| {
            let FunctionRole::Endpoint { device, .. } = &function.role else { return None };
            let root = RootPin::of(&plan.pci, function.address);
            Some((root, plan.intx(&device.id)?)).filter(|_| root.bus == bus)
        };
        Self(plan.pci.iter().filter_map(pin).collect())
    }
}

impl Aml for PinRouting {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        const ALL_FUNCTIONS: u32 = 0xffff;
        let entries: Vec<_> = self
            .0
            .iter()
            .map(|(root, gsi)| (u32::from(root.device) << 16 | ALL_FUNCTIONS, root.pin, *gsi))
            .collect();
        let packages: Vec<Package> =
            entries.iter().map(|(address, pin, gsi)| Package::new(vec![address, pin, &ZERO, gsi])).collect();
        let all = packages.iter().map(|package| -> &dyn Aml { package }).collect();
        Name::new("_PRT".into(), &Package::new(all)).to_aml_bytes(sink);
    }
}

/// `_OSC` of a host bridge (PCI Firmware 3.3, clause 4.5): grants [`OSC_GRANTED`], masks the rest and says so.
struct OperatingSystemCapabilities;

impl Aml for OperatingSystemCapabilities {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        const UNKNOWN_UUID: u8 = 1 << 2;
        const UNKNOWN_REVISION: u8 = 1 << 3;
        const MASKED: u8 = 1 << 4;
        let status: Path = "CDW1".into();
        let control: Path = "CDW3".into();
        Method::new(
            "_OSC".into(),
            4,
            true, // it names fields, so it must not run twice at a time
            vec![
                &CreateDWordField::new(&status, &Arg(3), &ZERO),
                &If::new(
                    &Equal::new(&Arg(0), &Uuid::new("33DB4D5B-1FF7-401C-9657-7441C03DD766")),
                    vec![
                        &CreateDWordField::new(&control, &Arg(3), &8u8),
                        &Store::new(&Local(0), &control),
                        &And::new(&control, &control, &OSC_GRANTED),
                        &If::new(
                            &NotEqual::new(&Arg(1), &ONE),
                            vec![&Or::new(&status, &status, &UNKNOWN_REVISION)],
                        ),
                        &If::new(
                            &NotEqual::new(&Local(0), &control),
                            vec![&Or::new(&status, &status, &MASKED)],
                        ),
                    ],
                ),
                &Else::new(vec![&Or::new(&status, &status, &UNKNOWN_UUID)]),
                &Return::new(&Arg(3)),
            ],
        )
        .to_aml_bytes(sink);
    }
}

/// `_DSM` function 5 answers 0: the OS must preserve the BARs and windows that it finds, which are the plan's
/// (PCI Firmware 3.3, clause 4.6.5).
struct PreserveConfiguration;

impl Aml for PreserveConfiguration {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        const PRESERVE: u8 = 5;
        let functions = BufferData::new(vec![1 | 1 << PRESERVE]);
        let none = BufferData::new(vec![0]);
        Method::new(
            "_DSM".into(),
            4,
            false,
            vec![
                &If::new(
                    &Equal::new(&Arg(0), &Uuid::new("E5C937D0-3553-4D7A-9117-EA4D19C3434D")),
                    vec![&If::new(
                        &GreaterEqual::new(&Arg(1), &ONE),
                        vec![
                            &If::new(&Equal::new(&Arg(2), &ZERO), vec![&Return::new(&functions)]),
                            &If::new(&Equal::new(&Arg(2), &PRESERVE), vec![&Return::new(&ZERO)]),
                        ],
                    )],
                ),
                &Return::new(&none),
            ],
        )
        .to_aml_bytes(sink);
    }
}

/// A 16550 at ISA's place, edge triggered.
fn serial(sink: &mut dyn AmlSink, port: u16, gsi: u32) {
    Device::new(
        "COM1".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0501")),
            &Name::new("_UID".into(), &ZERO),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![
                    &IO::new(port, port, 1, SERIAL_PORTS),
                    &Interrupt::new(true, true, false, false, gsi),
                ]),
            ),
        ],
    )
    .to_aml_bytes(sink);
}

/// The panic notifier, under the name that Linux's driver knows.
fn panic_notifier(sink: &mut dyn AmlSink, port: u16) {
    const PRESENT_AND_WORKING: u8 = 0x0f;
    Device::new(
        "PEVT".into(),
        vec![
            &Name::new("_HID".into(), &"QEMU0001"),
            &Name::new("_STA".into(), &PRESENT_AND_WORKING),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&IO::new(port, port, 1, 1)])),
        ],
    )
    .to_aml_bytes(sink);
}
