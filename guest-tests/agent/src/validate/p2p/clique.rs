//! NVIDIA's capability by which a VMM announces which GPUs may reach each other over PCI (qemu-devel, "Specification for
//! Turing and later GPU PCI config space", 2023-06): vendor specific, 8 bytes, "P2P", then the clique. Pure.

/// Where the header points to the first capability (PCI 3.0, 6.7).
const FIRST: usize = 0x34;
/// Capabilities lie behind the header.
const HEADER: usize = 0x40;
/// Most capabilities of 4 bytes behind the header: a longer chain is a loop.
const MOST: usize = 48;
/// Id of a capability whose vendor says what it is.
const VENDOR_SPECIFIC: u8 = 0x09;

/// The clique that configuration space names; `None` without the capability, or when this user is not shown it.
pub(super) fn of_config(config: &[u8]) -> Option<u8> {
    let mut at = usize::from(*config.get(FIRST)? & !3); // the lowest two bits are reserved
    for _ in 0..MOST {
        if at < HEADER {
            return None;
        }
        let bytes = config.get(at..at.checked_add(8)?)?;
        if let [VENDOR_SPECIFIC, _, 8, b'P', b'2', b'P', word, _] = bytes
            && word & 7 == 0
        {
            return Some(word >> 3 & 0xf);
        }
        at = usize::from(bytes.get(1)? & !3);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(capability: [u8; 8]) -> Vec<u8> {
        let mut config = vec![0; 256];
        config[FIRST] = 0x40;
        config[0x40..0x42].copy_from_slice(&[0x05, 0xd4]);
        config[0xd4..0xdc].copy_from_slice(&capability);
        config
    }

    #[test]
    fn a_clique_is_found_behind_other_capabilities() {
        assert_eq!(of_config(&config([9, 0, 8, b'P', b'2', b'P', 5 << 3, 0])), Some(5));
        assert_eq!(of_config(&config([9, 0, 8, b'P', b'2', b'P', 0, 0])), Some(0));
    }

    #[test]
    fn another_capability_version_or_a_loop_is_no_clique() {
        assert_eq!(of_config(&config([9, 0, 8, b'P', b'2', b'P', 1, 0])), None, "version 1");
        assert_eq!(of_config(&config([9, 0, 12, b'P', b'2', b'P', 8, 0])), None);
        assert_eq!(of_config(&config([9, 0xd4, 8, b'B', b'T', b'S', 8, 0])), None, "a loop");
        assert_eq!(of_config(&config([9, 0, 8, b'P', b'2', b'P', 8, 0])[..64]), None);
        assert_eq!(of_config(&[]), None);
    }
}
