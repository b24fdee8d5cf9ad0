//! The bit for virtual machines in the firmware's SMBIOS tables.

/// Most structures that are walked.
const MOST: usize = 4096;
/// Offset of "BIOS characteristics extension byte 2" in structure type 0 (SMBIOS 3.x, 7.1).
const EXTENSION_2: usize = 0x13;
/// Its bit 4: "the SMBIOS table describes a virtual machine" (7.1.2.2).
const VIRTUAL_MACHINE: u8 = 1 << 4;

/// Whether structure type 0 marks this as a virtual machine; `None` without a structure that has the byte.
pub(crate) fn virtual_machine(table: &[u8]) -> Option<bool> {
    let mut rest = table;
    for _ in 0..MOST {
        let (kind, length) = (*rest.first()?, usize::from(*rest.get(1)?));
        let structure = rest.get(..length).filter(|_| length >= 4)?;
        if kind == 0 {
            return structure.get(EXTENSION_2).map(|byte| byte & VIRTUAL_MACHINE != 0);
        }
        // Strings follow, the last one closed by two zeros.
        let strings = rest.get(length..)?;
        let end = strings.windows(2).position(|pair| pair == [0, 0])?;
        rest = strings.get(end + 2..)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn structure(kind: u8, length: u8, byte: u8) -> Vec<u8> {
        let mut bytes = vec![0; usize::from(length)];
        bytes[..2].copy_from_slice(&[kind, length]);
        if let Some(place) = bytes.get_mut(EXTENSION_2) {
            *place = byte;
        }
        bytes.extend_from_slice(b"text\0\0");
        bytes
    }

    #[test]
    fn the_bit_is_found_behind_other_structures() {
        for (byte, said) in [(0x1c, true), (0x0c, false)] {
            let table = [structure(1, 27, 0), structure(0, 26, byte)].concat();
            assert_eq!(virtual_machine(&table), Some(said));
        }
    }

    #[test]
    fn a_table_without_it_or_cut_off_states_nothing() {
        assert_eq!(virtual_machine(&structure(0, 0x12, 0)), None, "an old structure");
        assert_eq!(virtual_machine(&structure(0, 26, 0x10)[..20]), None);
        assert_eq!(virtual_machine(&[1, 0, 0, 0, 0, 0]), None, "a length that leads nowhere");
    }

    proptest! {
        #[test]
        fn any_bytes_are_walked(bytes: Vec<u8>) {
            let _ = virtual_machine(&bytes);
        }
    }
}
