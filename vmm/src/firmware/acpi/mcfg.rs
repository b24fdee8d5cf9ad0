//! MCFG: where PCI Express configuration space is (PCI Firmware 3.3, clause 4.1.2).

use acpi_tables::mcfg::MCFG;
use egm_address::{Guest, Span};

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID, bytes};
use crate::firmware::{FirmwareError, window, window_error};
use crate::plan::{Plan, WindowKind};

/// The table: one segment.
pub(super) fn mcfg(plan: &Plan) -> Result<Vec<u8>, FirmwareError> {
    let (span, last_bus) = ecam(plan)?;
    let mut table = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.add_ecam(span.start().get(), 0, 0, last_bus);
    Ok(bytes(&table))
}

/// The window and its last bus.
pub(super) fn ecam(plan: &Plan) -> Result<(Span<Guest>, u8), FirmwareError> {
    const RULE: &str = "it has to be 1 to 256 MiB on a 1 MiB boundary";
    let fits = |s: Span<Guest>| s.size().is_multiple_of(1 << 20) && s.start().is_aligned(1 << 20);
    let span = window(plan, WindowKind::Ecam, "ECAM", RULE, fits)?;
    let buses = u8::try_from((span.size() >> 20).saturating_sub(1));
    buses.map(|last| (span, last)).map_err(|_| window_error(Some(span), "ECAM", RULE))
}
