//! Tables of the platform: FADT (ACPI 6.5, 5.2.9), MCFG (PCI Firmware 3.3, 4.1.2), HEST (ACPI 6.5, 18.3.2), and whether the
//! DSDT is whole; its code is for Linux to run.

use super::{AcpiError, HEADER, table};

/// Fields of the FADT that checks compare with the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fadt {
    /// Bit 20 of the flags: there are no fixed registers.
    pub(crate) reduced: bool,
    /// `ARM_BOOT_ARCH`: bit 0 PSCI, bit 1 by HVC.
    pub(crate) arm_boot: u16,
    /// Address of the DSDT.
    pub(crate) dsdt: u64,
}

/// Reads a Fixed ACPI Description Table.
pub(crate) fn fadt(bytes: &[u8]) -> Result<Fadt, AcpiError> {
    const WHAT: &str = "fixed field";
    let table = table(bytes, "FACP")?;
    Ok(Fadt {
        reduced: table.u32(112, WHAT)? >> 20 & 1 == 1,
        arm_boot: table.u16(129, WHAT)?,
        dsdt: table.u64(140, WHAT)?,
    })
}

/// Configuration space of the buses of one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ecam {
    /// Address of the configuration space of bus 0, even if the segment has no bus 0.
    pub(crate) base: u64,
    pub(crate) segment: u16,
    /// First and last bus.
    pub(crate) buses: (u8, u8),
}

/// Reads a memory-mapped configuration table.
pub(crate) fn mcfg(bytes: &[u8]) -> Result<Vec<Ecam>, AcpiError> {
    const WHAT: &str = "configuration space";
    const ENTRY: usize = 16;
    let table = table(bytes, "MCFG")?;
    let read = |offset: usize| {
        let entry = table.part(offset, ENTRY, WHAT)?;
        let buses = (entry.u8(10, WHAT)?, entry.u8(11, WHAT)?);
        Ok(Ecam { base: entry.u64(0, WHAT)?, segment: entry.u16(8, WHAT)?, buses })
    };
    (HEADER + 8..table.0.len()).step_by(ENTRY).map(read).collect()
}

/// A generic hardware error source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ErrorSource {
    /// Whether it is enabled.
    pub(crate) enabled: bool,
    /// Address of the word in memory that holds the address of its error block.
    pub(crate) address: u64,
    /// Notification type: 7 is by an event device.
    pub(crate) notification: u8,
    /// Bytes of the error block.
    pub(crate) block: u32,
}

/// Reads a Hardware Error Source Table that has generic sources (type 9) only.
pub(crate) fn hest(bytes: &[u8]) -> Result<Vec<ErrorSource>, AcpiError> {
    const WHAT: &str = "error source";
    const ENTRY: usize = 64;
    const GENERIC: u16 = 9;
    const MEMORY: u8 = 0;
    let table = table(bytes, "HEST")?;
    let read = |index: usize| {
        let offset = index.saturating_mul(ENTRY).saturating_add(HEADER + 4);
        let entry = table.part(offset, ENTRY, WHAT)?;
        if (entry.u16(0, WHAT)?, entry.u8(20, WHAT)?) != (GENERIC, MEMORY) {
            return Err(table.outside(offset, "a source that is not generic or not in memory"));
        }
        Ok(ErrorSource {
            enabled: entry.u8(7, WHAT)? == 1,
            address: entry.u64(24, WHAT)?,
            notification: entry.u8(32, WHAT)?,
            block: entry.u32(60, WHAT)?,
        })
    };
    (0..table.size(HEADER, "number of sources")?).map(read).collect()
}

/// Bytes of a Differentiated System Description Table.
pub(crate) fn dsdt(bytes: &[u8]) -> Result<usize, AcpiError> {
    table(bytes, "DSDT").map(|table| table.0.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACP: &[u8] = include_bytes!("../../../../vmm/tests/golden-acpi/FACP");
    const HEST: &[u8] = include_bytes!("../../../../vmm/tests/golden-acpi/HEST");
    const MCFG: &[u8] = include_bytes!("../../../../vmm/tests/golden-acpi/MCFG");

    #[test]
    fn any_prefix_is_an_error_and_no_panic() {
        for size in 0..FACP.len() {
            assert!(fadt(&FACP[..size]).is_err());
        }
        for size in 0..HEST.len() {
            assert!(hest(&HEST[..size]).is_err());
        }
        for size in 0..MCFG.len() {
            assert!(mcfg(&MCFG[..size]).is_err());
        }
    }

    #[test]
    fn more_sources_than_the_table_has_leave_it() {
        let mut bytes = HEST.to_vec();
        bytes[36..40].copy_from_slice(&u32::MAX.to_le_bytes());
        let sum = bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        bytes[9] = bytes[9].wrapping_sub(sum);
        assert!(matches!(hest(&bytes), Err(AcpiError::Outside { what: "error source", .. })));
    }
}
