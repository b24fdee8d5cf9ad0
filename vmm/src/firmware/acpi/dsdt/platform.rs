//! Devices that are not on PCI: at I/O ports on x86, at windows of the same name on Arm.

use acpi_tables::aml::{Device, EISAName, IO, Interrupt, Memory32Fixed, Name, ResourceTemplate, ZERO};
use acpi_tables::{Aml, AmlSink};
use egm_address::{Guest, Span};

use super::{clock, events};
use crate::config::Architecture;
use crate::firmware::{FirmwareError, device, ports, window_error};
use crate::plan::Plan;

/// Registers of a 16550.
const SERIAL_PORTS: u8 = 8;
/// `_STA`: there, enabled, shown, working.
const PRESENT_AND_WORKING: u8 = 0x0f;

/// Those that the plan has.
pub(super) fn write(sink: &mut dyn AmlSink, plan: &Plan) -> Result<(), FirmwareError> {
    if let Some(gsi) = plan.line("serial") {
        serial(sink, plan, gsi)?;
    }
    if plan.port("pvpanic").is_some() || device(plan, "pvpanic").is_ok() {
        panic_notifier(sink, registers(plan, "pvpanic", 1)?.as_ref());
    }
    if let Ok(span) = device(plan, "clock") {
        clock::write(sink, span);
    }
    events::write(sink, plan);
    Ok(())
}

/// Where a device is: a window of its name, or `count` ports.
fn registers(plan: &Plan, owner: &'static str, count: u8) -> Result<Box<dyn Aml>, FirmwareError> {
    match device(plan, owner) {
        Ok(span) => Ok(Box::new(fixed(owner, span)?)),
        Err(_) => {
            let port = ports(plan, owner, count)?;
            Ok(Box::new(IO::new(port, port, 1, count)))
        }
    }
}

fn fixed(owner: &'static str, span: Span<Guest>) -> Result<Memory32Fixed, FirmwareError> {
    let place = u32::try_from(span.start().get()).ok().zip(u32::try_from(span.size()).ok());
    let below = |(base, size)| Memory32Fixed::new(true, base, size);
    place.map(below).ok_or_else(|| window_error(Some(span), owner, "it has to lie below 4 GiB"))
}

/// A 16550 at ISA's place, edge triggered; or a PL011.
fn serial(sink: &mut dyn AmlSink, plan: &Plan, gsi: u32) -> Result<(), FirmwareError> {
    let (hid, edge): (Box<dyn Aml>, bool) = match plan.arch {
        Architecture::X86_64 => (Box::new(EISAName::new("PNP0501")), true),
        Architecture::Aarch64 => (Box::new("ARMH0011"), false),
    };
    let registers = registers(plan, "serial", SERIAL_PORTS)?;
    let interrupt = Interrupt::new(true, edge, false, false, gsi);
    let resources = ResourceTemplate::new(vec![registers.as_ref(), &interrupt]);
    Device::new(
        "COM1".into(),
        vec![
            &Name::new("_HID".into(), hid.as_ref()),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("_CRS".into(), &resources),
        ],
    )
    .to_aml_bytes(sink);
    Ok(())
}

/// The panic notifier, under the name that Linux's driver knows.
fn panic_notifier(sink: &mut dyn AmlSink, registers: &dyn Aml) {
    Device::new(
        "PEVT".into(),
        vec![
            &Name::new("_HID".into(), &"QEMU0001"),
            &Name::new("_STA".into(), &PRESENT_AND_WORKING),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![registers])),
        ],
    )
    .to_aml_bytes(sink);
}
