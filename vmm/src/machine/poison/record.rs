//! The format that reports bad memory to a guest: a status block (ACPI 6.5, clause 18.3.2.7.1) with a section for each
//! page (UEFI 2.10, appendix N.2.5). Pure.

use egm_address::Gpa;

use crate::firmware::ERROR_SECTIONS;

/// Bytes that a section names.
pub(super) const PAGE: u64 = 4096;
/// Sections in a block of 4 KiB, at most.
pub(super) const MOST: usize = ERROR_SECTIONS as usize;

const HEADER: usize = 20;
const ENTRY: usize = 72;
const SECTION: usize = 80;
/// Severity, of block and section: the guest can go on without the memory.
const RECOVERABLE: u32 = 0;
/// Section type of platform memory: A5BC1114-6F64-4EDE-B863-3E83ED7C83B1.
const MEMORY: [u8; 16] =
    [0x14, 0x11, 0xbc, 0xa5, 0x64, 0x6f, 0xde, 0x4e, 0xb8, 0x63, 0x3e, 0x83, 0xed, 0x7c, 0x83, 0xb1];
const REVISION: u16 = 0x300;
/// Fields of the section that hold something: address, mask, type.
const VALID: u64 = 1 << 1 | 1 << 2 | 1 << 14;
/// Memory error type: multi-bit ECC.
const TYPE: u8 = 3;

/// A status block for `pages`, of which the first [`MOST`] count.
pub(super) fn block(pages: &[Gpa]) -> Vec<u8> {
    let pages = pages.get(..MOST).unwrap_or(pages);
    let count = u32::try_from(pages.len()).unwrap_or(0);
    let mut block = Vec::with_capacity(HEADER + pages.len() * (ENTRY + SECTION));
    // Uncorrectable errors, one or several, and how many sections.
    let several = if count > 1 { 1 << 2 } else { 0 };
    let data = u32::try_from(pages.len() * (ENTRY + SECTION)).unwrap_or(0);
    for field in [1 | several | count << 4, 0, 0, data, RECOVERABLE] {
        block.extend(field.to_le_bytes());
    }
    for page in pages {
        entry(&mut block, *page);
    }
    block
}

/// A data entry and the section in it.
fn entry(block: &mut Vec<u8>, page: Gpa) {
    let end = block.len() + ENTRY;
    block.extend(MEMORY);
    block.extend(RECOVERABLE.to_le_bytes());
    block.extend(REVISION.to_le_bytes());
    block.extend([0, 0]); // no unit, text or time stamp; flags
    block.extend(u32::try_from(SECTION).unwrap_or(0).to_le_bytes());
    block.resize(end, 0);
    let end = end + SECTION;
    for field in [VALID, 0, page.get(), !(PAGE - 1)] {
        block.extend(field.to_le_bytes());
    }
    block.resize(end, 0);
    let kind = block.len() - (SECTION - 72);
    if let Some(byte) = block.get_mut(kind) {
        *byte = TYPE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(bytes: &[u8], at: usize, size: usize) -> u64 {
        bytes[at..at + size].iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte))
    }

    #[test]
    fn a_block_has_a_recoverable_memory_section_for_each_page() {
        let block = block(&[Gpa::new(0x1_2345_6000), Gpa::new(0x1_2345_7000)]);
        assert_eq!(number(&block, 0, 4), 1 | 1 << 2 | 2 << 4, "uncorrectable, several, two");
        assert_eq!((number(&block, 12, 4), number(&block, 16, 4)), (2 * 152, 0));
        assert_eq!(block.len(), 20 + 2 * 152);
        for (at, page) in [(20, 0x1_2345_6000), (172, 0x1_2345_7000)] {
            assert_eq!((number(&block, at, 4), number(&block, at + 8, 1)), (0xa5bc_1114, 0xb8));
            assert_eq!((number(&block, at + 16, 4), number(&block, at + 20, 2)), (0, 0x300));
            assert_eq!(number(&block, at + 24, 4), 80);
            let section = at + 72;
            assert_eq!(number(&block, section, 8) & 2, 2, "the address counts");
            assert_eq!((number(&block, section + 16, 8), number(&block, section + 72, 1)), (page, 3));
        }
    }

    #[test]
    fn a_block_is_never_larger_than_its_place() {
        let pages: Vec<_> = (0..64).map(|page| Gpa::new(page * PAGE)).collect();
        let block = block(&pages);
        assert!(block.len() <= 4096, "{:#x}", block.len());
        assert_eq!(number(&block, 0, 4) >> 4, MOST as u64);
    }
}
