//! The structures that a kernel finds at its entry: zero page, PVH start info, GDT, page tables.

use egm_address::{Gpa, Guest, Span};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use linux_loader::loader::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryMmap};

use super::boot_layout::{COMMAND_LINE, GDT, PAGE_TABLES, START_INFO, ZERO_PAGE};
use crate::arch::boot::BootError;
use crate::plan::{Plan, WindowKind};

/// Boot loaders without a registered number (boot.rst, `type_of_loader`).
const LOADER_UNDEFINED: u8 = 0xff;
const HEADER_MAGIC: u32 = 0x5372_6448;
const BOOT_FLAG: u16 = 0xaa55;
const START_MAGIC: u32 = 0x336e_c578;
const PAGE: u64 = 0x1000;
/// Entry that refers to a table: present, writable.
const TABLE_FLAGS: u64 = 0b11;
/// Present, writable, 2 MiB page.
const LARGE_PAGE_FLAGS: u64 = 0b1000_0011;

/// Segment descriptors that the boot protocols ask for, as they lie in guest memory at [`GDT`].
/// Linux 64-bit (boot.rst, "64-bit boot protocol"): __BOOT_CS at 0x10, __BOOT_DS at 0x18, flat.
const GDT_TABLE: [u64; 4] = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];
/// PVH: a flat 32-bit code segment instead.
const GDT_TABLE_PVH: [u64; 4] = [0, 0, 0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff];

/// Inputs of the structures.
pub(super) struct Tables<'a> {
    pub(super) plan: &'a Plan,
    pub(super) memory: &'a GuestMemoryMmap,
    pub(super) rsdp: Gpa,
    pub(super) initramfs: Option<Span<Guest>>,
    pub(super) command_line_size: u32,
}

impl Tables<'_> {
    /// Zero page, GDT and page tables of the Linux 64-bit protocol; `header` is a bzImage's own.
    pub(super) fn linux64(&self, header: Option<setup_header>) -> Result<(), BootError> {
        let made_up = setup_header {
            header: HEADER_MAGIC,
            boot_flag: BOOT_FLAG,
            kernel_alignment: 0x100_0000,
            ..Default::default()
        };
        let mut params = boot_params { hdr: header.unwrap_or(made_up), ..Default::default() };
        params.hdr.type_of_loader = LOADER_UNDEFINED;
        params.hdr.cmd_line_ptr = low32(COMMAND_LINE.get());
        params.hdr.cmdline_size = self.command_line_size;
        if let Some(initramfs) = self.initramfs {
            params.hdr.ramdisk_image = low32(initramfs.start().get());
            params.hdr.ramdisk_size = low32(initramfs.size());
        }
        params.acpi_rsdp_addr = self.rsdp.get();
        let map = memory_map(self.plan);
        for (slot, (span, kind)) in params.e820_table.iter_mut().zip(&map) {
            let cut = if egm_address::fault!("ram-map-a-page-short") { PAGE } else { 0 };
            let size = span.size().saturating_sub(cut);
            *slot = boot_e820_entry { addr: span.start().get(), size, r#type: *kind as u32 };
            params.e820_entries = params.e820_entries.saturating_add(1);
        }
        if map.len() > params.e820_table.len() {
            return Err(BootError::Pieces { pieces: map.len(), most: params.e820_table.len() });
        }
        self.write(ZERO_PAGE, params)?;
        self.write(GDT, GDT_TABLE)?;
        self.page_tables()
    }

    /// Start info, memory map and module list of the PVH protocol.
    pub(super) fn pvh(&self) -> Result<(), BootError> {
        let modules = START_INFO.get().saturating_add(0x40);
        let map_at = START_INFO.get().saturating_add(0x80);
        let map = memory_map(self.plan);
        if let Some(initramfs) = self.initramfs {
            let module = hvm_modlist_entry {
                paddr: initramfs.start().get(),
                size: initramfs.size(),
                ..Default::default()
            };
            self.write(Gpa::new(modules), module)?;
        }
        for (at, (span, kind)) in (map_at..).step_by(24).zip(&map) {
            let entry = hvm_memmap_table_entry {
                addr: span.start().get(),
                size: span.size(),
                type_: *kind as u32,
                ..Default::default()
            };
            self.write(Gpa::new(at), entry)?;
        }
        let info = hvm_start_info {
            magic: START_MAGIC,
            version: 1,
            nr_modules: u32::from(self.initramfs.is_some()),
            modlist_paddr: modules,
            cmdline_paddr: COMMAND_LINE.get(),
            rsdp_paddr: self.rsdp.get(),
            memmap_paddr: map_at,
            memmap_entries: u32::try_from(map.len()).unwrap_or(u32::MAX),
            ..Default::default()
        };
        self.write(START_INFO, info)?;
        self.write(GDT, GDT_TABLE_PVH)
    }

    /// Four GiB of identity mapping in 2 MiB pages: the kernel, its parameters and the initramfs lie there.
    fn page_tables(&self) -> Result<(), BootError> {
        let pml4 = PAGE_TABLES.get();
        let pdpt = pml4.saturating_add(PAGE);
        let directory = |i: u64| pdpt.saturating_add(PAGE).saturating_add(i.saturating_mul(PAGE));
        self.write(PAGE_TABLES, pdpt | TABLE_FLAGS)?;
        for i in 0..4u64 {
            self.write(Gpa::new(pdpt.saturating_add(i.saturating_mul(8))), directory(i) | TABLE_FLAGS)?;
            let pages = (i.saturating_mul(512)..).take(512);
            let entries: Vec<u8> =
                pages.flat_map(|page| (page << 21 | LARGE_PAGE_FLAGS).to_le_bytes()).collect();
            let at = directory(i);
            self.memory.write_slice(&entries, GuestAddress(at)).map_err(|_| BootError::Memory { at })?;
        }
        Ok(())
    }

    fn write<T: ByteValued>(&self, at: Gpa, value: T) -> Result<(), BootError> {
        self.memory.write_obj(value, GuestAddress(at.get())).map_err(|_| BootError::Memory { at: at.get() })
    }
}

/// The RAM that these point to lies below 4 GiB.
fn low32(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// The memory map of the boot protocols: RAM, and reserved windows.
fn memory_map(plan: &Plan) -> Vec<(Span<Guest>, MapKind)> {
    let ram = plan.memory.iter().map(|m| (m.span, MapKind::Ram));
    let reserved = plan
        .windows
        .iter()
        .filter(|w| {
            matches!(
                w.kind,
                WindowKind::Firmware | WindowKind::OptionRoms | WindowKind::Ecam | WindowKind::Reserved
            )
        })
        .map(|w| (w.span, MapKind::Reserved));
    let mut map: Vec<_> = ram.chain(reserved).collect();
    map.sort_unstable_by_key(|(span, _)| *span);
    map
}

/// Type of a memory map entry, with the number that both protocols use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum MapKind {
    Ram = 1,
    Reserved = 2,
}
