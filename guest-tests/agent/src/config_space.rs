//! Capabilities in a function's configuration space.

/// Where the header points to the first capability (PCI 3.0, 6.7).
const FIRST: usize = 0x34;
/// Capabilities lie behind the header.
const HEADER: usize = 0x40;
/// Most capabilities of 4 bytes that fit in 256 bytes behind the header: a longer chain is a loop.
const MOST: usize = 48;

/// Id of a capability whose vendor says what it is.
pub(crate) const VENDOR_SPECIFIC: u8 = 0x09;
/// Id of the PCI Express capability.
pub(crate) const PCI_EXPRESS: u8 = 0x10;
/// Id of the MSI-X capability.
pub(crate) const MSIX: u8 = 0x11;

/// Offset of the first capability `id`; `None` without it, also when the chain leaves the space or loops.
pub(crate) fn capability(config: &[u8], id: u8) -> Option<usize> {
    capabilities(config, id).next()
}

/// Offsets of all capabilities `id`, up to where the chain ends, leaves the space or loops.
pub(crate) fn capabilities(config: &[u8], id: u8) -> impl Iterator<Item = usize> + '_ {
    // The lowest two bits are reserved.
    let place = |at: usize| config.get(at).map(|next| usize::from(*next & !3)).filter(|at| *at >= HEADER);
    std::iter::successors(place(FIRST), move |at| place(at + 1))
        .take(MOST)
        .filter(move |at| config.get(*at) == Some(&id))
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

/// Where the MSI-X table is; `None` without the capability.
pub(crate) fn msix_table(config: &[u8]) -> Option<MsixTable> {
    let at = capability(config, MSIX)?;
    let control = u16::from_le_bytes(config.get(at + 2..at + 4)?.try_into().ok()?);
    let place = u32::from_le_bytes(config.get(at + 4..at + 8)?.try_into().ok()?);
    let [low, ..] = place.to_le_bytes();
    Some(MsixTable { bar: low & 7, offset: place & !7, entries: (control & 0x7ff) + 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_msix_table_is_where_its_capability_says() {
        let mut config = [0u8; 256];
        config[FIRST] = 0x50;
        config[0x50..0x58].copy_from_slice(&[MSIX, 0, 0x02, 0x80, 0x04, 0x20, 0, 0]);
        assert_eq!(msix_table(&config), Some(MsixTable { bar: 4, offset: 0x2000, entries: 3 }));
        assert_eq!(msix_table(&config[..0x54]), None);
        assert_eq!(msix_table(&[0; 64]), None);
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
        assert_eq!(capabilities(&config, 0x09).count(), MOST / 2);
    }
}
