//! The guest in memory: tables, kernel and initramfs.

use egm_address::Gpa;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::error::BuildError;
use super::poison::{ErrorBlock, Interrupt};
use crate::arch::boot::{BootError, BootFiles};
use crate::arch::native::boot::{self, Entry};
use crate::config::BootTables;
use crate::firmware::{self, Image};
use crate::kvm::Vm;
use crate::plan::{ERRORS, Plan};

/// A guest in memory.
pub(super) struct Loaded {
    pub(super) entry: Entry,
    /// For reports of bad memory: only ACPI's tables have one.
    pub(super) errors: Option<ErrorBlock>,
}

/// Puts tables, kernel and initramfs into memory, of which all that they do not write is zero. Without files, memory has the
/// guest of another machine of this plan.
pub(super) fn load_guest(
    plan: &Plan,
    vm: &Vm,
    memory: &GuestMemoryMmap,
    files: Option<&mut BootFiles>,
) -> Result<Loaded, BuildError> {
    let image = firmware::build(plan)?;
    let errors = errors(plan, vm, memory, &image);
    let Some(files) = files else { return Ok(Loaded { entry: Entry::UNLOADED, errors }) };
    let at = |gpa: Gpa| GuestAddress(gpa.get());
    memory
        .write_slice(&image.bytes, at(image.base))
        .map_err(|_| failed(plan, BootError::Memory { at: image.base.get() }))?;
    let entry = boot::load(plan, memory, files, &image).map_err(|error| failed(plan, error))?;
    Ok(Loaded { entry, errors })
}

/// The block of the tables `image` for reports of bad memory.
fn errors(plan: &Plan, vm: &Vm, memory: &GuestMemoryMmap, image: &Image) -> Option<ErrorBlock> {
    let (block, gsi) = image.errors.zip(acpi_line(plan, ERRORS))?;
    Some(ErrorBlock::new(memory.clone(), block.start(), pulse(vm, gsi)))
}

/// Puts them into memory again, after [`load_guest`] and the guest have written to it. Returns where the first vCPU begins.
pub(super) fn reload_guest(
    plan: &Plan,
    vm: &Vm,
    memory: &GuestMemoryMmap,
    files: &mut BootFiles,
) -> Result<Entry, BuildError> {
    boot::clear(plan, memory, files).map_err(|error| failed(plan, error))?;
    load_guest(plan, vm, memory, Some(files)).map(|loaded| loaded.entry)
}

fn failed(plan: &Plan, source: BootError) -> BuildError {
    let initramfs = plan.boot.initramfs.as_ref().filter(|_| source.is_about_initramfs());
    BuildError::Boot { file: initramfs.unwrap_or(&plan.boot.kernel).clone(), source }
}

/// The line of `owner`, a device that only ACPI's tables have.
pub(super) fn acpi_line(plan: &Plan, owner: &str) -> Option<u32> {
    plan.line(owner).filter(|_| plan.boot.tables == BootTables::Acpi)
}

/// Returns a function that makes an edge on line `gsi`, which the controller latches. It has all lines of a plan.
pub(super) fn pulse(vm: &Vm, gsi: u32) -> Interrupt {
    let line = vm.line(gsi);
    Box::new(move || [true, false].into_iter().for_each(|high| drop(line.set(high))))
}
