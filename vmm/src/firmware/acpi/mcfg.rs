//! MCFG: where PCI Express configuration space is (PCI Firmware 3.3, clause 4.1.2).

use acpi_tables::mcfg::MCFG;

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID, bytes};
use crate::firmware::FirmwareError;
use crate::firmware::bridges::{Ecam, ecam};
use crate::plan::Plan;

/// The table: one segment.
pub(super) fn mcfg(plan: &Plan) -> Result<Vec<u8>, FirmwareError> {
    let Ecam { span, last_bus } = ecam(plan)?;
    let mut table = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.add_ecam(span.start().get(), 0, 0, last_bus);
    Ok(bytes(&table))
}
