//! Capabilities in a function's configuration space.

/// Where the header points to the first capability (PCI 3.0, 6.7).
const FIRST: usize = 0x34;
/// Capabilities lie behind the header.
const HEADER: usize = 0x40;
/// Most capabilities of 4 bytes that fit in 256 bytes behind the header: a longer chain is a loop.
const MOST: usize = 48;

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

#[cfg(test)]
mod tests {
    use super::*;

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
