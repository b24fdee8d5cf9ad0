//! SPCR: the console, for a kernel without one in its command line (Microsoft's specification, revision 2).

use acpi_tables::AmlSink;
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};

use super::{bytes, reserved, table};
use crate::firmware::{FirmwareError, device};
use crate::plan::Plan;

const REVISION: u8 = 2;
/// Interface types of Microsoft's debug port table 2: Arm PL011.
const PL011: u8 = 3;
/// Bit 3 of interrupt types: an Arm GIC.
const GIC: u8 = 1 << 3;
const BAUD_115200: u8 = 7;
const ANSI: u8 = 3;

/// The table, of a plan with a PL011; `None` without a serial port.
pub(super) fn spcr(plan: &Plan) -> Result<Option<Vec<u8>>, FirmwareError> {
    let Some(gsi) = plan.line("serial") else { return Ok(None) };
    let base = device(plan, "serial")?.start().get();
    let mut body = Vec::new();
    body.vec(&[PL011, 0, 0, 0]);
    body.vec(&bytes(&GAS::new(AddressSpace::SystemMemory, 32, 0, AccessSize::DwordAccess, base)));
    body.vec(&[GIC, 0]);
    body.dword(gsi);
    // No parity, one stop bit, no flow control; language 0.
    body.vec(&[BAUD_115200, 0, 1, 0, ANSI, 0]);
    body.vec(&[0xff; 4]); // no PCI function
    reserved(&mut body, 12);
    Ok(Some(table(*b"SPCR", REVISION, &body)))
}
