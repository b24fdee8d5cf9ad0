//! Device trees, which an arm64 kernel is started with (Documentation/arch/arm64/booting.rst).
//!
//! [`stub`] has nothing but `/chosen`: where the EFI structures are that lead to the ACPI tables, in the form of the
//! kernel's own EFI stub. Any other node, and Linux does not look for ACPI. [`full`] describes the machine itself, for
//! kernels without ACPI.

mod machine;

use egm_address::{Guest, Span};
use vm_fdt::FdtWriter;

use super::{Efi, FirmwareError, Image};
use crate::plan::Plan;

/// Bytes from one entry of [`Efi::memory_map`] to the next (UEFI 2.10, 7.2.3: 40 and room to grow).
pub(crate) const DESCRIPTOR_SIZE: u32 = 48;
/// Version of the same entries (UEFI 2.10, 7.2.3, `EFI_MEMORY_DESCRIPTOR_VERSION`).
const DESCRIPTOR_VERSION: u32 = 1;
/// Secure boot is off: `efi_secureboot_mode_disabled`, include/linux/efi.h.
const SECURE_BOOT_DISABLED: u32 = 2;

/// Data that a boot loader gives to a kernel.
#[derive(Debug, Clone)]
pub struct Chosen<'a> {
    /// Kernel command line, without a NUL.
    pub command_line: &'a str,
    /// Guest addresses of the initial RAM disk, if there is one.
    pub initrd: Option<Span<Guest>>,
    /// Randomness for the kernel's own address, new for each start.
    pub kaslr_seed: u64,
    /// Randomness for its random numbers, new for each start.
    pub rng_seed: [u8; 64],
}

/// The tree of a guest with the ACPI tables of `image`; it goes to an 8-byte boundary.
///
/// # Errors
/// [`FirmwareError::NoEfi`] for the tables of another architecture, [`FirmwareError::Tree`] for a command line with a NUL.
pub fn stub(image: &Image, chosen: &Chosen<'_>) -> Result<Vec<u8>, FirmwareError> {
    let efi = image.efi.as_ref().ok_or(FirmwareError::NoEfi)?;
    let mut tree = FdtWriter::new()?;
    let root = tree.begin_node("")?;
    tree.property_u32("#address-cells", 2)?;
    tree.property_u32("#size-cells", 2)?;
    write_chosen(&mut tree, chosen, ChosenTarget::Efi(efi))?;
    tree.end_node(root)?;
    Ok(tree.finish()?)
}

/// The tree of a guest without ACPI tables; it goes to an 8-byte boundary.
///
/// It has no generic initiators and no figures of memory: device trees cannot express them.
///
/// # Errors
/// [`FirmwareError::Window`] for a plan without a window that the machine needs, [`FirmwareError::Tree`] for a command line
/// with a NUL.
pub fn full(plan: &Plan, chosen: &Chosen<'_>) -> Result<Vec<u8>, FirmwareError> {
    let mut tree = FdtWriter::new()?;
    let root = tree.begin_node("")?;
    tree.property_u32("#address-cells", 2)?;
    tree.property_u32("#size-cells", 2)?;
    machine::write(&mut tree, plan)?;
    write_chosen(&mut tree, chosen, ChosenTarget::Machine { console: machine::console(plan) })?;
    tree.end_node(root)?;
    Ok(tree.finish()?)
}

/// What `/chosen` leads a kernel to: EFI structures, or the rest of the tree.
enum ChosenTarget<'a> {
    Efi(&'a Efi),
    Machine { console: Option<String> },
}

fn write_chosen(
    tree: &mut FdtWriter,
    chosen: &Chosen<'_>,
    target: ChosenTarget<'_>,
) -> Result<(), FirmwareError> {
    let node = tree.begin_node("chosen")?;
    tree.property_string("bootargs", chosen.command_line)?;
    if let Some(initrd) = chosen.initrd {
        tree.property_u64("linux,initrd-start", initrd.start().get())?;
        tree.property_u64("linux,initrd-end", initrd.end().get())?;
    }
    tree.property_u64("kaslr-seed", chosen.kaslr_seed)?;
    tree.property("rng-seed", &chosen.rng_seed)?;
    match target {
        ChosenTarget::Efi(efi) => {
            let map_size = u32::try_from(efi.memory_map.size()).unwrap_or(u32::MAX);
            tree.property_u64("linux,uefi-system-table", efi.system_table.get())?;
            tree.property_u64("linux,uefi-mmap-start", efi.memory_map.start().get())?;
            tree.property_u32("linux,uefi-mmap-size", map_size)?;
            tree.property_u32("linux,uefi-mmap-desc-size", DESCRIPTOR_SIZE)?;
            tree.property_u32("linux,uefi-mmap-desc-ver", DESCRIPTOR_VERSION)?;
            tree.property_u32("linux,uefi-secure-boot", SECURE_BOOT_DISABLED)?;
        }
        ChosenTarget::Machine { console } => {
            if let Some(console) = console {
                tree.property_string("stdout-path", &console)?;
            }
            tree.property_u32("linux,pci-probe-only", 1)?; // BARs stay where the plan put them
        }
    }
    tree.end_node(node)?;
    Ok(())
}
