//! DSDT: devices and methods in ACPI's byte code (ACPI 6.5, clauses 5.2.11.1 and 20).
//!
//! ```text
//! \_S5            power off (x86): SLP_TYP 5 into the sleep control register
//! \_SB.C000 …     processors; on Arm \_SB.P000 … their sockets
//! \_SB.ECAM       keeps configuration space: Linux trusts MCFG only when a motherboard device has it
//! \_SB.PCI0       the host bridge; .S08 … its root ports, named by device and function
//! \_SB.PC15 …     expanders, named by bus
//! \_SB.COM1       serial console
//! \_SB.PEVT       panic notifier
//! \_SB.CLCK       clock (Arm)
//! \_SB.ERRD       announces bad memory (Arm)
//! \_SB.PWRB       power button
//! \_SB.GED0       the event device that notifies both
//! ```

mod bridge;
mod clock;
mod events;
mod platform;

use std::collections::BTreeSet;

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Device, EISAName, Memory32Fixed, Name, Package, ResourceTemplate,
    Scope, ZERO,
};
use acpi_tables::{Aml, AmlSink};
use egm_address::{Guest, Span};

use super::table;
use crate::config::Architecture;
use crate::firmware::bridges::{Ecam, HostBridge, ecam};
use crate::firmware::{FirmwareError, SLEEP_TYPE_S5};
use crate::plan::Plan;

/// From revision 2 on integers have 64 bits.
const REVISION: u8 = 2;

pub(super) fn dsdt(plan: &Plan) -> Result<Vec<u8>, FirmwareError> {
    let mut devices = Vec::new();
    for (position, vcpu) in plan.vcpus.iter().enumerate() {
        processor(&mut devices, position, vcpu.index);
    }
    if plan.arch == Architecture::Aarch64 {
        let sockets: BTreeSet<u32> = plan.vcpus.iter().map(|vcpu| vcpu.socket).collect();
        sockets.into_iter().for_each(|socket| package(&mut devices, socket));
    }
    let Ecam { span: config_space, last_bus } = ecam(plan)?;
    motherboard(&mut devices, config_space);
    HostBridge::all(plan, last_bus).iter().for_each(|bridge| bridge::write(&mut devices, plan, bridge));
    platform::write(&mut devices, plan)?;
    let mut body = Vec::new();
    // Without such a register power goes off by a call of firmware.
    if plan.port("sleep").is_some() {
        let off: [&dyn Aml; 4] = [&SLEEP_TYPE_S5, &ZERO, &ZERO, &ZERO];
        Name::new("\\_S5_".into(), &Package::new(off.to_vec())).to_aml_bytes(&mut body);
    }
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

/// A processor container (clause 8.4.2.1), tied to PPTT by its UID.
fn package(sink: &mut dyn AmlSink, socket: u32) {
    let name = format!("P{socket:03X}");
    Device::new(
        name.as_str().into(),
        vec![&Name::new("_HID".into(), &"ACPI0010"), &Name::new("_UID".into(), &socket)],
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

/// A memory range that a bridge forwards or a device has.
fn memory(cacheable: AddressSpaceCacheable, span: Span<Guest>) -> AddressSpace<u64> {
    AddressSpace::new_memory(cacheable, true, span.start().get(), span.last().get(), None)
}
