//! FADT: fixed registers, of which a hardware-reduced x86 guest has three, and an Arm guest none (ACPI 6.5, clauses 5.2.9 and
//! 4.8.3.7).

use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use egm_address::Gpa;

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID, bytes};
use crate::config::Architecture;
use crate::firmware::{FirmwareError, RESET_VALUE, ports};
use crate::plan::Plan;

/// IAPC_BOOT_ARCH: do not look for VGA, nor for a CMOS clock. Bit 1 (8042) stays clear: there is none.
const BOOT_ARCH: u16 = 1 << 2 | 1 << 5;
/// ARM_BOOT_ARCH: processors start, and the machine stops, by PSCI, which is called by HVC.
const ARM_BOOT_ARCH: u16 = 1 << 0 | 1 << 1;
/// Linux prints it when it looks for a hypervisor by ACPI.
const HYPERVISOR: [u8; 8] = *b"EGMVMM\0\0";

/// The table; `dsdt` is where the guest sees the DSDT.
pub(super) fn fadt(plan: &Plan, dsdt: Gpa) -> Result<Vec<u8>, FirmwareError> {
    let mut table = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt.get())
        .preferred_pm_profile(PmProfile::EnterpriseServer)
        .flag(Flags::Headless)
        // Set means "not a fixed register", which is so: there are none.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::HwReducedAcpi);
    match plan.arch {
        Architecture::X86_64 => table = registers(table, plan)?,
        Architecture::Aarch64 => table.arm_boot_arch = ARM_BOOT_ARCH.into(),
    }
    table.hypervisor_vendor_identity = u64::from_le_bytes(HYPERVISOR).into();
    Ok(bytes(&table.finalize()))
}

fn registers(table: FADTBuilder, plan: &Plan) -> Result<FADTBuilder, FirmwareError> {
    let reset = ports(plan, "reset", 1)?;
    let sleep = ports(plan, "sleep", 2)?;
    let mut table = table.flag(Flags::Wbinvd).flag(Flags::FixRtc).flag(Flags::ResetRegSup);
    table.iapc_boot_arch = BOOT_ARCH.into();
    table.reset_reg = byte_port(reset);
    table.reset_value = RESET_VALUE;
    table.sleep_control_reg = byte_port(sleep);
    table.sleep_status_reg = byte_port(sleep.saturating_add(1)); // `ports` found two
    Ok(table)
}

fn byte_port(port: u16) -> GAS {
    GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(port))
}
