//! Putting a kernel into guest memory: bzImage, or an ELF vmlinux with a PVH or a 64-bit entry.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use egm_address::{Gpa, Guest, Span, align_down};
use linux_loader::cmdline::Cmdline;
use linux_loader::loader::elf::PvhBootCapability;
use linux_loader::loader::{BzImage, Elf, KernelLoader, KernelLoaderResult, bootparam, load_cmdline};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::boot_layout::{COMMAND_LINE, KERNEL, START_INFO, ZERO_PAGE};
use super::boot_tables;
use super::image::{self, Format};
use crate::arch::boot::{BootError, BootFiles, Initramfs, InitramfsRange};
use crate::firmware::{Image, RESET_VALUE};
use crate::plan::Plan;

static ZEROS: [u8; 1 << 16] = [0; 1 << 16];
/// Longest command line that x86 Linux takes, terminating NUL included.
const COMMAND_LINE_SIZE: usize = 2048;

/// Start address and state of the first vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// Long mode, paging on, the zero page in RSI (Linux boot.rst, "64-bit boot protocol").
    Linux64 {
        /// First instruction of the kernel, for RIP.
        address: Gpa,
        /// Boot parameters (`struct boot_params`), for RSI.
        zero_page: Gpa,
    },
    /// 32-bit protected mode, paging off, the start info in EBX (Xen docs/misc/pvh.pandoc).
    Pvh {
        /// First instruction of the kernel, for EIP.
        address: Gpa,
        /// Start info (`hvm_start_info`), for EBX.
        start_info: Gpa,
    },
}

impl Entry {
    /// The entry of a machine without a kernel in memory: a reset loads it, and its state comes from elsewhere until then.
    pub const UNLOADED: Self = Self::Pvh { address: Gpa::new(0), start_info: Gpa::new(0) };
}

/// Loads kernel, initramfs, command line and boot tables of the plan; `tables` are in memory already.
///
/// # Errors
/// [`BootError`]; guest memory is then in no useful state.
pub fn load(
    plan: &Plan,
    memory: &GuestMemoryMmap,
    files: &mut BootFiles,
    tables: &Image,
) -> Result<Entry, BootError> {
    let low = low_ram(plan).ok_or(BootError::Memory { at: KERNEL.get() })?;
    let kernel = load_kernel(memory, &mut files.kernel, low.end())?;
    let needed = kernel_needs(&kernel);
    if needed > low.end().get() {
        return Err(BootError::TooLarge { needed, has: low.end().get() });
    }
    let end = low.end().get();
    let at = |size| Some(align_down(end.checked_sub(size)?, 4096));
    let place = |size| InitramfsRange { from: needed, end, at: at(size) };
    let initramfs = files.initramfs.as_mut().map(Initramfs::new).transpose()?;
    let initramfs = initramfs.map(|file| file.load(memory, place)).transpose()?;
    load_reset_vector(plan, memory)?;
    let command_line_size = load_command_line(memory, &plan.boot.cmdline)?;
    let tables = boot_tables::Tables { plan, memory, rsdp: tables.rsdp, initramfs, command_line_size };
    match (kernel.pvh_boot_cap, kernel.setup_header) {
        (PvhBootCapability::PvhEntryPresent(address), _) => {
            tables.pvh()?;
            Ok(Entry::Pvh { address: Gpa::new(address.0), start_info: START_INFO })
        }
        (_, header) => {
            let entry = kernel.kernel_load.0.saturating_add(if header.is_some() { 0x200 } else { 0 });
            tables.linux64(header)?;
            Ok(Entry::Linux64 { address: Gpa::new(entry), zero_page: ZERO_PAGE })
        }
    }
}

/// Clears what an earlier [`load`] and the guest have left where a kernel and its boot data expect zeros: below 640 KiB,
/// and between the parts of the kernel's file and behind them.
///
/// # Errors
/// [`BootError`], as [`load`].
pub fn clear(plan: &Plan, memory: &GuestMemoryMmap, files: &mut BootFiles) -> Result<(), BootError> {
    let low = low_ram(plan).ok_or(BootError::Memory { at: KERNEL.get() })?;
    // Only the loader finds the end.
    let kernel = load_kernel(memory, &mut files.kernel, low.end())?;
    let first = plan.memory.first().map_or(0..0, |memory| memory.span.start().get()..memory.span.end().get());
    for range in [first.start..first.end.min(KERNEL.get()), KERNEL.get()..kernel.kernel_end] {
        for at in range.clone().step_by(ZEROS.len()) {
            let size = usize::try_from(range.end.saturating_sub(at)).unwrap_or(usize::MAX).min(ZEROS.len());
            let zeros = ZEROS.get(..size).unwrap_or_default();
            memory.write_slice(zeros, GuestAddress(at)).map_err(|_| BootError::Memory { at })?;
        }
    }
    Ok(())
}

/// The RAM that the kernel is put into: the span with the address 1 MiB.
fn low_ram(plan: &Plan) -> Option<Span<Guest>> {
    plan.memory.iter().map(|m| m.span).find(|span| span.contains(KERNEL))
}

/// The format of the kernel in `file`, judged by its header.
///
/// # Errors
/// [`BootError`], for a file that nothing here starts.
pub fn kernel_format(file: &mut File) -> Result<Format, BootError> {
    inspect(file).map(|kernel| kernel.format)
}

/// A kernel that is not loaded yet.
struct Unloaded {
    format: Format,
    /// Bytes of the file.
    size: u64,
}

fn inspect(file: &mut File) -> Result<Unloaded, BootError> {
    let mut head = Vec::new();
    let size = file.seek(SeekFrom::End(0)).map_err(BootError::ReadKernel)?;
    file.seek(SeekFrom::Start(0)).map_err(BootError::ReadKernel)?;
    Read::by_ref(file).take(image::SIZE).read_to_end(&mut head).map_err(BootError::ReadKernel)?;
    Ok(Unloaded { format: image::check(&head, size)?, size })
}

fn load_kernel(memory: &GuestMemoryMmap, file: &mut File, end: Gpa) -> Result<KernelLoaderResult, BootError> {
    let Unloaded { format, size } = inspect(file)?;
    let at = GuestAddress(KERNEL.get());
    if format == Format::Elf {
        return Elf::load(memory, None, file, Some(at)).map_err(BootError::Load);
    }
    BzImage::load(memory, Some(at), file, Some(at)).map_err(|error| match KERNEL.get().saturating_add(size) {
        // The header is good, so there was no room for the rest.
        needed if needed > end.get() => BootError::TooLarge { needed, has: end.get() },
        _ => BootError::Load(error),
    })
}

/// One past the last byte that the kernel uses before it knows the memory map.
fn kernel_needs(kernel: &KernelLoaderResult) -> u64 {
    let unpacked = kernel.setup_header.map_or(0, |header: bootparam::setup_header| {
        let (preferred, size) = (header.pref_address, u64::from(header.init_size));
        preferred.max(KERNEL.get()).saturating_add(size)
    });
    kernel.kernel_end.max(unpacked)
}

/// Where real mode jumps to when software asks a BIOS for a reset (F000:FFF0).
const RESET_VECTOR: Gpa = Gpa::new(0xf_fff0);

/// The instructions there: write `value` to `port`, then halt for ever.
fn reset_vector(port: u16, value: u8) -> [u8; 9] {
    let [low, high] = port.to_le_bytes();
    [0xba, low, high, 0xb0, value, 0xee, 0xf4, 0xeb, 0xfd] // mov dx, port; mov al, value; out dx, al; hlt; jmp -3
}

/// Linux on hardware-reduced ACPI assumes EFI and asks it to reset; without EFI it asks the BIOS, in real mode.
/// There is no BIOS, so the instructions at its reset vector write the reset register.
fn load_reset_vector(plan: &Plan, memory: &GuestMemoryMmap) -> Result<(), BootError> {
    let Some(port) = plan.port("reset") else { return Ok(()) };
    memory
        .write_slice(&reset_vector(port, RESET_VALUE), GuestAddress(RESET_VECTOR.get()))
        .map_err(|_| BootError::Memory { at: RESET_VECTOR.get() })
}

fn load_command_line(memory: &GuestMemoryMmap, text: &str) -> Result<u32, BootError> {
    let mut line = Cmdline::new(COMMAND_LINE_SIZE).map_err(|_| BootError::CommandLine)?;
    line.insert_str(text).map_err(|_| BootError::CommandLine)?;
    load_cmdline(memory, GuestAddress(COMMAND_LINE.get()), &line).map_err(|_| BootError::CommandLine)?;
    u32::try_from(text.len()).map_err(|_| BootError::CommandLine)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firmware::RESET_VECTOR_SIZE;

    #[test]
    fn the_reset_vector_fits_between_the_tables_and_one_mebibyte() {
        let code = reset_vector(0x604, RESET_VALUE);
        assert_eq!(code[..6], [0xba, 0x04, 0x06, 0xb0, 1, 0xee]);
        assert!(u64::try_from(code.len()).unwrap() <= RESET_VECTOR_SIZE);
        assert_eq!(RESET_VECTOR.get() + RESET_VECTOR_SIZE, KERNEL.get());
    }
}
