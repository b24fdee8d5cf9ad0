//! Host bridges and what is behind them.

use std::collections::BTreeMap;

use super::memory;
use crate::firmware::bridges::{BridgeWindow, HostBridge};
use crate::plan::{FunctionPlan, FunctionRole, MemoryKind, MemoryPlan, Plan, RootPin};
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, And, Arg, BufferData, CreateDWordField, Device, EISAName, Else,
    Equal, GreaterEqual, If, Local, Method, Name, NotEqual, ONE, Or, Package, Path, ResourceTemplate, Return,
    Store, Uuid, ZERO,
};
use acpi_tables::{Aml, AmlSink};

/// `_OSC` control bits that the OS gets when it asks: native hot plug, PME, capability structure
/// (PCI Firmware 3.3, table 4-6). Not SHPC, AER and LTR, which no port has.
const OSC_GRANTED: u32 = 1 << 0 | 1 << 2 | 1 << 4;

/// A PCI Express host bridge (PCI Firmware 3.3, clause 4). `_PRT` is there for host functions; ours send messages.
pub(super) fn write(sink: &mut dyn AmlSink, plan: &Plan, bridge: &HostBridge) {
    let (first, last) = bridge.buses;
    let name = if first == 0 { "PCI0".to_owned() } else { format!("PC{first:02X}") };
    let buses = AddressSpace::new_bus_number(u16::from(first), u16::from(last));
    let window = |window: &BridgeWindow| {
        let cacheable = match window.prefetchable {
            true => AddressSpaceCacheable::PreFetchable,
            false => AddressSpaceCacheable::NotCacheable,
        };
        memory(cacheable, window.span)
    };
    let windows: Vec<AddressSpace<u64>> = bridge.windows.iter().map(window).collect();
    let mut resources: Vec<&dyn Aml> = vec![&buses];
    resources.extend(windows.iter().map(|w| -> &dyn Aml { w }));
    let is_port =
        |f: &&FunctionPlan| matches!(f.role, FunctionRole::RootPort { .. }) && f.address.bus() == first;
    let root_ports: Vec<PortTree<'_>> =
        plan.pci.iter().filter(is_port).map(|function| PortTree { plan, function }).collect();
    let identity: [Name; 6] = [
        Name::new("_HID".into(), &EISAName::new("PNP0A08")),
        Name::new("_CID".into(), &EISAName::new("PNP0A03")),
        Name::new("_SEG".into(), &ZERO),
        Name::new("_BBN".into(), &first),
        Name::new("_UID".into(), &first),
        Name::new("_CCA".into(), &ONE),
    ];
    let crs = Name::new("_CRS".into(), &ResourceTemplate::new(resources));
    let near = bridge.near.map(|node| Name::new("_PXM".into(), &node));
    let mut children: Vec<&dyn Aml> = identity.iter().chain(&near).map(|n| -> &dyn Aml { n }).collect();
    children.extend([&crs as &dyn Aml, &OperatingSystemCapabilities, &PreserveConfiguration]);
    let routing = PinRouting(bridge.pins(plan));
    if !routing.0.is_empty() {
        children.push(&routing);
    }
    children.extend(root_ports.iter().map(|p| -> &dyn Aml { p }));
    Device::new(name.as_str().into(), children).to_aml_bytes(sink);
}

/// A port, tied to its function by `_ADR` (clause 6.1.1), with the functions behind it that ACPI describes; or such a
/// function.
struct PortTree<'a> {
    plan: &'a Plan,
    function: &'a FunctionPlan,
}

impl<'a> PortTree<'a> {
    /// The slice that the function's driver is to use, if this is a GPU and the slice is in its node.
    fn slice(&self) -> Option<Slice> {
        let FunctionRole::Endpoint { assigned: Some(assigned), .. } = &self.function.role else {
            return None;
        };
        let (egm, node) = (assigned.memory.as_ref()?.egm?, assigned.node?);
        let is_it = |m: &&MemoryPlan| m.kind == MemoryKind::Egm && m.backing == egm && m.node == node;
        let memory = self.plan.memory.iter().find(is_it)?;
        // Bytes before and between pieces are retired or hold the guest's tables, and count all the same.
        let base = memory.span.start().get().checked_sub(memory.offset)?;
        Some(Slice { node, base, size: self.plan.backings.get(memory.backing)?.size })
    }

    /// Buses behind a bridge are above its own, so the recursion ends for any plan.
    fn behind(&self) -> impl Iterator<Item = PortTree<'a>> {
        let own = self.function.address.bus();
        let bus = self.function.role.bridge().map(|bridge| bridge.secondary).filter(|bus| *bus > own);
        let plan = self.plan;
        let here = plan.pci.iter().filter(move |f| Some(f.address.bus()) == bus);
        here.map(move |function| PortTree { plan, function }).filter(Self::leads_to_slice)
    }

    fn leads_to_slice(&self) -> bool {
        self.slice().is_some() || self.behind().next().is_some()
    }
}

impl Aml for PortTree<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let at = self.function.address;
        let name = format!("S{:02X}_", at.devfn());
        let address = Name::new("_ADR".into(), &(u32::from(at.device()) << 16 | u32::from(at.function())));
        let (slice, behind): (_, Vec<PortTree<'_>>) = (self.slice(), self.behind().collect());
        let mut children: Vec<&dyn Aml> = vec![&address];
        children.extend(slice.iter().map(|slice| -> &dyn Aml { slice }));
        children.extend(behind.iter().map(|place| -> &dyn Aml { place }));
        Device::new(name.as_str().into(), children).to_aml_bytes(sink);
    }
}

/// `_DSD` of a GPU with Extended GPU Memory: NVIDIA's driver requires all three properties, and the GPU's own node
/// (open-gpu-kernel-modules, `nv_get_egm_info`). It counts from the base, so the slice is one span.
struct Slice {
    node: u32,
    base: u64,
    size: u64,
}

impl Aml for Slice {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let node = u64::from(self.node);
        let base = self.base.saturating_add(if egm_address::fault!("dsd-base-off") { 4096 } else { 0 });
        let properties: [(&str, &u64); 3] =
            [("nvidia,egm-base-pa", &base), ("nvidia,egm-size", &self.size), ("nvidia,egm-pxm", &node)];
        let pairs: Vec<Package> =
            properties.iter().map(|(name, value)| Package::new(vec![name, *value])).collect();
        let pairs = Package::new(pairs.iter().map(|pair| -> &dyn Aml { pair }).collect());
        let properties = Uuid::new("DAFFD814-6EBA-4D8C-8A91-BC9BBF4AA301");
        Name::new("_DSD".into(), &Package::new(vec![&properties, &pairs])).to_aml_bytes(sink);
    }
}

/// `_PRT` (clause 6.2.13): the line of each pin that a host function ends at. Linux takes such lines as level triggered.
struct PinRouting(BTreeMap<RootPin, u32>);

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

/// `_OSC` of a host bridge (PCI Firmware 3.3, clause 4.5): grants [`OSC_GRANTED`], masks the rest and reports that.
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
