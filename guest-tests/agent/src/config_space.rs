//! Capabilities in a function's configuration space.

use std::ops::Range;

/// Offset of the pointer to the first capability in the header (PCI 3.0, 6.7).
const FIRST: usize = 0x34;
/// Capabilities lie behind the header.
const HEADER: usize = 0x40;
/// Most capabilities of 4 bytes that fit in 256 bytes behind the header: a longer chain is a loop.
const MOST: usize = 48;

/// Id of a vendor-specific capability.
pub(crate) const VENDOR_SPECIFIC: u8 = 0x09;
/// Id of the MSI capability.
const MSI: u8 = 0x05;
/// Id of the PCI Express capability.
pub(crate) const PCI_EXPRESS: u8 = 0x10;
/// Id of the MSI-X capability.
pub(crate) const MSIX: u8 = 0x11;

/// Offset of the first capability `id`; `None` without it, also when the chain leaves the space or loops.
pub(crate) fn capability(config: &[u8], id: u8) -> Option<usize> {
    let mut at = usize::from(*config.get(FIRST)? & !3); // the lowest two bits are reserved
    for _ in 0..MOST {
        match config.get(at..at + 2)? {
            _ if at < HEADER => return None,
            [found, _] if *found == id => return Some(at),
            [_, next] => at = usize::from(*next & !3),
            _ => return None,
        }
    }
    None
}

/// Offsets of all capabilities `id`, in the order of the chain.
pub(crate) fn capabilities(config: &[u8], id: u8) -> Vec<usize> {
    let mut found = Vec::new();
    let Some(first) = config.get(FIRST) else { return found };
    let mut at = usize::from(*first & !3);
    for _ in 0..MOST {
        match config.get(at..at + 2) {
            Some([is, next]) if at >= HEADER => {
                if *is == id {
                    found.push(at);
                }
                at = usize::from(*next & !3);
            }
            _ => break,
        }
    }
    found
}

/// The clique of GPUs in which each may reach the others over PCI, as a VMM announces it (qemu-devel, "Specification
/// for Turing and later GPU PCI config space", 2023-06): vendor specific, 8 bytes, "P2P", version 0, then the clique, 0
/// to 15. `None` without the capability, or when this user may not read it.
pub(crate) fn clique(config: &[u8]) -> Option<u8> {
    let clique = |at: usize| match config.get(at..at.checked_add(8)?)? {
        [VENDOR_SPECIFIC, _, 8, b'P', b'2', b'P', word, _] if word & 7 == 0 => Some(word >> 3 & 15),
        _ => None,
    };
    capabilities(config, VENDOR_SPECIFIC).into_iter().find_map(clique)
}

/// Offset of the first extended capability `id` (PCI Express 6.0, 7.6.3); `None` without it, or where only the first 256
/// bytes can be read.
pub(crate) fn extended(config: &[u8], id: u16) -> Option<usize> {
    const FIRST_EXTENDED: usize = 0x100;
    const MOST_EXTENDED: usize = 960; // of 4 bytes in 4096 behind the first 256
    let mut at = FIRST_EXTENDED;
    for _ in 0..MOST_EXTENDED {
        let header = u32::from_le_bytes(config.get(at..at + 4)?.try_into().ok()?);
        let (is, next) = (u16::try_from(header & 0xffff).ok()?, usize::try_from(header >> 20).ok()? & !3);
        match (is, next) {
            (is, _) if is == id && header != 0 => return Some(at),
            (_, next) if next < FIRST_EXTENDED => return None,
            (_, next) => at = next,
        }
    }
    None
}

/// The MSI-X table: the BAR it lies in, its offset there and its entries of 16 bytes (PCI 3.0, 6.8.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MsixTable {
    /// Number of the BAR.
    pub(crate) bar: u8,
    /// Bytes from its start.
    pub(crate) offset: u32,
    /// Entries, 1 to 2048.
    pub(crate) entries: u16,
}

/// Place of the MSI-X table; `None` without the capability.
pub(crate) fn msix_table(config: &[u8]) -> Option<MsixTable> {
    let at = capability(config, MSIX)?;
    let control = u16::from_le_bytes(config.get(at + 2..at + 4)?.try_into().ok()?);
    let place = u32::from_le_bytes(config.get(at + 4..at + 8)?.try_into().ok()?);
    let [low, ..] = place.to_le_bytes();
    Some(MsixTable { bar: low & 7, offset: place & !7, entries: (control & 0x7ff) + 1 })
}

/// Bytes of MSI's message: its address, the upper half of that where there is one, and in the last word the data (PCI
/// 3.0, 6.8.1); `None` without the capability.
pub(crate) fn msi_message(config: &[u8]) -> Option<Range<usize>> {
    const WIDE: u8 = 1 << 7;
    let at = capability(config, MSI)?;
    let words = if config.get(at + 2)? & WIDE == 0 { 2 } else { 3 };
    Some(at + 4..at + 4 + 4 * words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_msix_table_is_where_its_capability_states() {
        let mut config = [0u8; 256];
        config[FIRST] = 0x50;
        config[0x50..0x58].copy_from_slice(&[MSIX, 0, 0x02, 0x80, 0x04, 0x20, 0, 0]);
        assert_eq!(msix_table(&config), Some(MsixTable { bar: 4, offset: 0x2000, entries: 3 }));
        assert_eq!(msix_table(&config[..0x54]), None);
        assert_eq!(msix_table(&[0; 64]), None);
    }

    #[test]
    fn the_message_of_msi_has_two_words_or_three() {
        let mut config = [0u8; 256];
        config[FIRST] = 0x50;
        config[0x50..0x54].copy_from_slice(&[MSI, 0, 0x06, 0]);
        assert_eq!(msi_message(&config), Some(0x54..0x5c));
        config[0x52] = 0x86;
        assert_eq!(msi_message(&config), Some(0x54..0x60));
        config[0x50] = MSIX;
        assert_eq!(msi_message(&config), None);
    }

    #[test]
    fn all_capabilities_of_one_id_are_found_and_a_loop_ends() {
        let mut config = [0u8; 256];
        config[FIRST] = 0x40;
        config[0x40..0x42].copy_from_slice(&[0x09, 0x50]);
        config[0x50..0x52].copy_from_slice(&[MSIX, 0x60]);
        config[0x60..0x62].copy_from_slice(&[0x09, 0]);
        assert_eq!(capabilities(&config, 0x09), [0x40, 0x60]);
        config[0x61] = 0x40;
        assert!(capabilities(&config, 0x09).len() <= MOST);
        assert!(capabilities(&config[..64], 0x09).is_empty() && capabilities(&[], 9).is_empty());
    }

    fn with_clique(capability: [u8; 8]) -> Vec<u8> {
        let mut config = vec![0; 256];
        config[FIRST] = 0x40;
        config[0x40..0x42].copy_from_slice(&[0x05, 0x60]);
        config[0x60..0x63].copy_from_slice(&[VENDOR_SPECIFIC, 0xd4, 0x14]);
        config[0xd4..0xdc].copy_from_slice(&capability);
        config
    }

    #[test]
    fn a_clique_is_found_behind_other_capabilities() {
        assert_eq!(clique(&with_clique([9, 0, 8, b'P', b'2', b'P', 5 << 3, 0])), Some(5));
        assert_eq!(clique(&with_clique([9, 0, 8, b'P', b'2', b'P', 0, 0])), Some(0));
    }

    #[test]
    fn another_capability_version_or_a_loop_is_no_clique() {
        assert_eq!(clique(&with_clique([9, 0, 8, b'P', b'2', b'P', 1, 0])), None, "version 1");
        assert_eq!(clique(&with_clique([9, 0, 12, b'P', b'2', b'P', 8, 0])), None);
        assert_eq!(clique(&with_clique([9, 0xd4, 8, b'B', b'T', b'S', 8, 0])), None, "a loop");
        assert_eq!(clique(&with_clique([9, 0, 8, b'P', b'2', b'P', 8, 0])[..0xd8]), None, "cut off");
        assert_eq!(clique(&[]), None);
    }

    #[test]
    fn an_extended_capability_is_found_and_a_loop_ends() {
        let mut config = vec![0u8; 4096];
        config[0x100..0x104].copy_from_slice(&0x1401_0001u32.to_le_bytes());
        config[0x140..0x144].copy_from_slice(&0x2001_000fu32.to_le_bytes());
        config[0x200..0x204].copy_from_slice(&0x1001_000du32.to_le_bytes());
        assert_eq!((extended(&config, 0x0f), extended(&config, 0x0d)), (Some(0x140), Some(0x200)));
        assert_eq!((extended(&config, 0x22), extended(&config[..256], 0x0f)), (None, None));
        assert_eq!(extended(&[0; 4096], 0), None);
    }

    #[test]
    fn a_capability_is_found_behind_others_and_a_loop_ends() {
        let mut config = [0u8; 256];
        config[FIRST] = 0x42;
        config[0x40..0x42].copy_from_slice(&[0x09, 0x50]);
        config[0x50..0x52].copy_from_slice(&[MSIX, 0]);
        assert_eq!(capability(&config, MSIX), Some(0x50));
        assert_eq!(capability(&config, PCI_EXPRESS), None);
        config[0x51] = 0x40;
        assert_eq!(capability(&config, PCI_EXPRESS), None);
        assert_eq!(capability(&config[..64], MSIX), None);
        assert_eq!(capability(&[], MSIX), None);
    }
}
