//! The vendor capability in configuration space, in place of ACPI: memory's size, position and near node. Pure.

/// "EGMD" in memory order: in the capability, and the first register.
pub(crate) const MAGIC: u32 = u32::from_le_bytes(*b"EGMD");
/// Of the layout of capability and registers.
pub(crate) const VERSION: u32 = 1;
/// Offset of the pointer to the first capability in the header (PCI 3.0, 6.7).
const FIRST: usize = 0x34;
/// Capabilities lie behind the header.
const HEADER: usize = 0x40;
/// Most capabilities of 4 bytes behind the header: a longer chain is a loop.
const MOST: usize = 48;
/// Id of a vendor-specific capability.
const VENDOR_SPECIFIC: u8 = 0x09;
/// Number for "no proximity domain".
const NO_DOMAIN: u32 = u32::MAX;

/// Facts that a function reports about its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Bytes, retired ones included.
    pub size: u64,
    /// Offset of the first one in the region of the host that it is a part of.
    pub base: u64,
    /// Bytes in a page: what mappings keep to.
    pub page: u64,
    /// Proximity domain, where the host's operator named one.
    pub pxm: Option<u32>,
}

impl Facts {
    pub(crate) fn new(size: u64, base: u64, page: u64, pxm: u32) -> Option<Self> {
        let pxm = (pxm != NO_DOMAIN).then_some(pxm);
        (size > 0 && page.is_power_of_two()).then_some(Self { size, base, page, pxm })
    }

    /// The capability in configuration space `config`; `None` for another device.
    #[must_use]
    pub fn of_config(config: &[u8]) -> Option<Self> {
        let mut at = usize::from(*config.get(FIRST)? & !3); // the lowest two bits are reserved
        for _ in 0..MOST {
            let [id, next] = *config.get(at..)?.first_chunk()?;
            if at < HEADER {
                return None;
            }
            if let Some(facts) =
                (id == VENDOR_SPECIFIC).then(|| Self::of_capability(config.get(at..)?)).flatten()
            {
                return Some(facts);
            }
            at = usize::from(next & !3);
        }
        None
    }

    fn of_capability(bytes: &[u8]) -> Option<Self> {
        let words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
        let words: Vec<u32> = words.take(8).collect();
        let [head, magic, bars_and_page, pxm, size_low, size_high, base_low, base_high] = *words.as_slice()
        else {
            return None;
        };
        let long = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        let [memory_bar, register_bar, page, _] = bars_and_page.to_le_bytes();
        let known = head >> 24 == VERSION && magic == MAGIC && (memory_bar, register_bar) == (2, 0);
        let page = known.then(|| 1_u64.checked_shl(page.into()))??;
        Self::new(long(size_low, size_high), long(base_low, base_high), page, pxm)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::config;

    #[test]
    fn facts_are_read_from_the_capability_behind_others() {
        let facts = Facts { size: 0x1_8000_0000, base: 0x40_0000, page: 0x1_0000, pxm: Some(4) };
        assert_eq!(Facts::of_config(&config(&facts)), Some(facts));
        let nowhere = Facts { pxm: None, ..facts };
        assert_eq!(Facts::of_config(&config(&nowhere)), Some(nowhere));
    }

    #[test]
    fn another_signature_layout_or_bar_is_another_device() {
        let good = config(&Facts { size: 0x1000, base: 0, page: 0x1000, pxm: None });
        for (at, byte) in [(0xa3, 2), (0xa4, 0), (0xa8, 4), (0xa9, 1), (0xaa, 64), (0xa0, 0x10), (0x34, 0)] {
            let mut other = good.clone();
            other[at] = byte;
            assert_eq!(Facts::of_config(&other), None, "byte {at:#x}");
        }
        assert_eq!(Facts::of_config(&good[..0xbf]), None);
        assert_eq!(Facts::of_config(&good[..64]), None, "all that a user without rights sees");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_to_an_end(mut config in prop::collection::vec(any::<u8>(), 0..256), vendor: bool) {
            if vendor {
                for (at, byte) in config.iter_mut().enumerate().filter(|(at, _)| at % 4 == 0 && *at >= 0x40) {
                    *byte = u8::try_from(0x09 + at % 8).unwrap_or(0);
                }
            }
            let facts = Facts::of_config(&config);
            prop_assert!(facts.is_none_or(|facts| facts.size > 0 && facts.page.is_power_of_two()));
        }
    }
}
