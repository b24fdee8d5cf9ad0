//! From 32-bit protected mode to 64-bit mode with an identity map of 2 MiB pages (Intel SDM 3A, 10.8.5).

use crate::code::Code;

/// Page tables: fresh RAM, so entries that are not written are not present.
const TABLES: u32 = 0x40_0000;
const PRESENT_WRITABLE: u32 = 3;
const LARGE: u32 = 1 << 7;

/// One past the highest byte that the page tables for `gibibytes` take.
pub fn tables_end(gibibytes: u32) -> u32 {
    TABLES + 0x1000 * (2 + gibibytes)
}

/// Maps the first `gibibytes` of guest memory, 512 at most, and goes on in 64-bit mode.
pub fn enter(code: &mut Code, gibibytes: u32) {
    assert!((1..=512).contains(&gibibytes));
    let (directory_pointers, directories) = (TABLES + 0x1000, TABLES + 0x2000);
    write(code, TABLES, directory_pointers | PRESENT_WRITABLE);
    for index in 0..gibibytes {
        write(code, directory_pointers + 8 * index, (directories + 0x1000 * index) | PRESENT_WRITABLE);
    }
    // eax and ecx are the two halves of an entry, ebx is its place.
    code.mov_eax(PRESENT_WRITABLE | LARGE);
    code.mov_ecx(0);
    code.at(directories.into());
    code.mov_edi(512 * gibibytes);
    let next = code.here();
    code.raw(&[0x89, 0x03]); // mov [ebx], eax
    code.raw(&[0x89, 0x4b, 0x04]); // mov [ebx + 4], ecx
    code.raw(&[0x05]).dword(1 << 21); // add eax
    code.raw(&[0x83, 0xd1, 0x00]); // adc ecx, 0
    code.raw(&[0x83, 0xc3, 0x08]); // add ebx, 8
    code.count_down(next);

    code.mov_eax(TABLES);
    code.raw(&[0x0f, 0x22, 0xd8]); // mov cr3, eax
    code.raw(&[0x0f, 0x20, 0xe0, 0x83, 0xc8, 0x20, 0x0f, 0x22, 0xe0]); // cr4 |= PAE
    code.mov_ecx(0xc000_0080); // EFER
    code.raw(&[0x0f, 0x32, 0x0d]).dword(1 << 8).raw(&[0x0f, 0x30]); // rdmsr; or eax, LME; wrmsr
    let (pointer, start) = (code.label(), code.label());
    code.raw_address(&[0x0f, 0x01, 0x15], pointer); // lgdt
    code.raw(&[0x0f, 0x20, 0xc0, 0x0d]).dword(1 << 31).raw(&[0x0f, 0x22, 0xc0]); // cr0 |= PG
    code.raw_address(&[0xea], start).raw(&[0x08, 0x00]); // jmp 8:start

    let table = code.here();
    for descriptor in [0_u64, 0x00af_9a00_0000_ffff, 0x00cf_9200_0000_ffff] {
        code.raw(&descriptor.to_le_bytes()); // none; 64-bit code; data
    }
    code.place(pointer);
    code.raw_address(&[23, 0], table); // limit, base

    code.place(start);
    code.enter_long_mode();
    code.mov_eax(0x10);
    code.raw(&[0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0]); // mov ds, es, ss
}

/// `mov dword [address], value`; only in 32-bit mode.
fn write(code: &mut Code, address: u32, value: u32) {
    code.raw(&[0xc7, 0x05]).dword(address).dword(value);
}
