//! EFI firmware's part in an arm64 boot (UEFI 2.10), as Linux's own EFI stub passes it on: the system table, its
//! configuration tables, the memory map. ACPI on arm64 begins here. There are no runtime services.
//!
//! ```text
//! /chosen ─┬─► system table ──► configuration tables ─┬─► RSDP, SMBIOS 3
//!          │                                          ├─► RT properties: no call is answered
//!          │                                          └─► MEMRESERVE: where Linux keeps what a kexec must not use
//!          └─► memory map
//! ```

use acpi_tables::aml::Uuid;
use acpi_tables::{Aml, AmlSink};
use egm_address::{Gpa, Guest, Span, SpanSet};

use super::buffer::WindowBuffer;
use super::tree::DESCRIPTOR_SIZE;
use super::{Efi, FirmwareError};
use crate::arch::aarch64::layout::{LAYOUT, MOST_REGIONS};
use crate::plan::Plan;

/// Largest page of a guest: it rounds the edges of the memory map outwards to its own, so they are multiples of this.
pub(super) const PAGE: u64 = LAYOUT.page;
/// Unit of the memory map (7.2.3).
const EFI_PAGE: u64 = 4 << 10;
const SYSTEM_TABLE: &[u8; 8] = b"IBI SYST";
/// Linux prints it as v2.7.
const REVISION: u32 = 2 << 16 | 70;
const SYSTEM_TABLE_SIZE: u32 = 120;
/// Linux maps so many bytes of the vendor's name.
const VENDOR_SIZE: usize = 200;
const VENDOR: &str = "egm-vmm";

const CONVENTIONAL: u32 = 7;
const ACPI_RECLAIM: u32 = 9;
/// `EFI_MEMORY_WB`: without it the memory is mapped as a device's.
const WRITE_BACK: u64 = 8;

/// Tables of other modules that the configuration tables lead to.
pub(super) struct Tables {
    pub(super) rsdp: Gpa,
    pub(super) smbios: Gpa,
}

/// Writes everything; `firmware` is the window of `buffer`.
pub(super) fn place(
    plan: &Plan,
    buffer: &mut WindowBuffer,
    firmware: Span<Guest>,
    tables: Tables,
) -> Result<Efi, FirmwareError> {
    let mut vendor: Vec<u8> = VENDOR.encode_utf16().flat_map(u16::to_le_bytes).collect();
    vendor.resize(VENDOR_SIZE, 0);
    let vendor = buffer.place(&vendor);
    // Version 1, 8 bytes, no service supported (4.6.2).
    let runtime = buffer.place(&[1, 0, 8, 0, 0, 0, 0, 0]);
    // `struct linux_efi_memreserve` without entries: size, count, next.
    let reserve = buffer.place(&[0; 16]);
    let list = [
        ("8868E871-E4F1-11D3-BC22-0080C73C8881", tables.rsdp),
        ("F2FD1544-9794-4A2C-992E-E5BBCF20E394", tables.smbios),
        ("EB66918A-7EEF-402A-842E-931D21C38AE9", runtime),
        ("888EB0C6-8EDE-4FF5-A8F0-9AEE5CB977C2", reserve),
    ];
    let mut configuration = Vec::new();
    for (guid, address) in list {
        configuration.extend(guid_bytes(guid));
        configuration.qword(address.get());
    }
    let configuration = buffer.place(&configuration);

    let mut table = Vec::new();
    table.extend(SYSTEM_TABLE);
    table.dword(REVISION);
    table.dword(SYSTEM_TABLE_SIZE);
    table.qword(0); // checksum: not checked; reserved
    table.qword(vendor.get());
    table.extend([0; 8 + 48 + 16]); // firmware revision, consoles, runtime and boot services
    table.qword(u64::try_from(list.len()).unwrap_or(u64::MAX));
    table.qword(configuration.get());
    let system_table = buffer.place(&table);

    let map = memory_map(plan, firmware)?;
    let start = buffer.place(&map);
    let size = u64::try_from(map.len()).unwrap_or(u64::MAX);
    let memory_map = Span::new(start, size).map_err(|_| FirmwareError::Memory(firmware))?;
    Ok(Efi { system_table, memory_map })
}

/// The firmware window, then RAM. Absent ranges are no memory to the kernel: devices' registers, and retired pages.
fn memory_map(plan: &Plan, firmware: Span<Guest>) -> Result<Vec<u8>, FirmwareError> {
    let ram: SpanSet<Guest> = plan.memory.iter().map(|memory| memory.span).collect();
    let regions = ram.iter().count();
    if regions > MOST_REGIONS {
        return Err(FirmwareError::MemoryMap { regions });
    }
    let mut map = Vec::new();
    descriptor(&mut map, ACPI_RECLAIM, firmware)?;
    ram.iter().try_for_each(|span| descriptor(&mut map, CONVENTIONAL, span))?;
    Ok(map)
}

/// Appends an `EFI_MEMORY_DESCRIPTOR` (7.2.3), padded to [`DESCRIPTOR_SIZE`].
fn descriptor(map: &mut Vec<u8>, kind: u32, span: Span<Guest>) -> Result<(), FirmwareError> {
    if !span.start().is_aligned(PAGE) || !span.size().is_multiple_of(PAGE) {
        return Err(FirmwareError::Memory(span));
    }
    let end = map.len().saturating_add(DESCRIPTOR_SIZE.try_into().unwrap_or(usize::MAX));
    map.dword(kind);
    map.dword(0);
    map.qword(span.start().get());
    map.qword(0); // virtual address: not yet
    map.qword(span.size() / EFI_PAGE);
    map.qword(WRITE_BACK);
    map.resize(end, 0);
    Ok(())
}

/// The first three fields of a GUID are little-endian, in EFI as in ACPI.
fn guid_bytes(guid: &str) -> [u8; 16] {
    let mut aml = Vec::new();
    Uuid::new(guid).to_aml_bytes(&mut aml);
    // A buffer object: its last 16 bytes are the GUID.
    aml.last_chunk().copied().unwrap_or_default()
}
