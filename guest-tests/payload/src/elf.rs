//! An ELF file of one segment, the form of a kernel for boot loaders.

/// Entry protocol of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// 32-bit protected mode without paging, by a note (Xen docs/misc/pvh.pandoc).
    Pvh,
    /// 64-bit mode, by the header (Linux boot.rst, "64-bit boot protocol").
    Linux64,
}

const HEADER: u64 = 64;
const PROGRAM_HEADER: u64 = 56;
const NOTE: u64 = 24;
const LOAD_OFFSET: u64 = 0x1000;

/// `code`, loaded at `base` and entered at its first byte.
pub(crate) fn elf(entry: Entry, base: u32, code: &[u8]) -> Vec<u8> {
    let segments: u16 = if entry == Entry::Pvh { 2 } else { 1 };
    let note_offset = HEADER + PROGRAM_HEADER * u64::from(segments);
    let size = u64::try_from(code.len()).unwrap();

    let mut file = b"\x7fELF\x02\x01\x01".to_vec(); // 64-bit, little endian, version 1
    file.resize(16, 0);
    halves(&mut file, &[2, 62]); // executable, x86-64
    words(&mut file, &[1]);
    longs(&mut file, &[base.into(), HEADER, 0]); // entry, program headers, no sections
    words(&mut file, &[0]);
    halves(&mut file, &[64, 56, segments, 64, 0, 0]);

    words(&mut file, &[1, 7]); // PT_LOAD, read write execute
    longs(&mut file, &[LOAD_OFFSET, base.into(), base.into(), size, size, 0x1000]);
    if entry == Entry::Pvh {
        words(&mut file, &[4, 4]); // PT_NOTE, read
        longs(&mut file, &[note_offset, 0, 0, NOTE, NOTE, 4]);
        words(&mut file, &[4, 8, 18]); // sizes of name and value, XEN_ELFNOTE_PHYS32_ENTRY
        file.extend(b"Xen\0");
        longs(&mut file, &[base.into()]);
    }
    file.resize(usize::try_from(LOAD_OFFSET).unwrap(), 0);
    file.extend(code);
    file
}

fn halves(file: &mut Vec<u8>, values: &[u16]) {
    values.iter().for_each(|value| file.extend(value.to_le_bytes()));
}
fn words(file: &mut Vec<u8>, values: &[u32]) {
    values.iter().for_each(|value| file.extend(value.to_le_bytes()));
}
fn longs(file: &mut Vec<u8>, values: &[u64]) {
    values.iter().for_each(|value| file.extend(value.to_le_bytes()));
}
