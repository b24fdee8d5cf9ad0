//! The header of an x86-64 kernel: a bzImage (Linux Documentation/arch/x86/boot.rst, "The Real-Mode Kernel Header"), or an
//! ELF file (System V ABI, "ELF Header").

use std::fmt;

use crate::arch::boot::BootError;

/// Bytes from the start of a file that hold the header of either format.
pub const SIZE: u64 = 0x238;
/// Bytes of an ELF header; a shorter file is no kernel of either format.
const SMALLEST_KERNEL: u64 = 64;
const ELF: [u8; 4] = *b"\x7fELF";
/// `e_ident` after the magic number: 64-bit, little endian.
const ELF_64_LITTLE: [u8; 2] = [2, 1];
/// `e_machine` of x86-64 (`EM_X86_64`).
const ELF_X86_64: u16 = 62;
/// The first boot protocol with `xloadflags`.
const XLOADFLAGS: u16 = 0x20c;

/// Format of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// An ELF file for x86-64, such as a vmlinux.
    Elf,
    /// A bzImage with a 64-bit entry point (boot.rst, `xloadflags` bit 0).
    BzImage,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Elf => "ELF",
            Self::BzImage => "bzImage",
        })
    }
}

/// The format of a kernel in a file of `size` bytes that begins with `head`, up to [`SIZE`] of them.
///
/// # Errors
/// [`BootError`], for a file that nothing here starts.
pub fn check(head: &[u8], size: u64) -> Result<Format, BootError> {
    if size < SMALLEST_KERNEL {
        return Err(BootError::Truncated { has: size, needs: SMALLEST_KERNEL });
    }
    let magic: [u8; 4] = bytes(head, 0);
    let is_kernel = if magic == ELF { is_elf(head) } else { is_bzimage(head) };
    match is_kernel {
        false => Err(BootError::NotAKernel { magic }),
        true if magic == ELF => Ok(Format::Elf),
        true => check_bzimage(head, size),
    }
}

fn is_elf(head: &[u8]) -> bool {
    bytes::<2>(head, 4) == ELF_64_LITTLE && u16::from_le_bytes(bytes(head, 18)) == ELF_X86_64
}

/// `header`, `version`, and the flag LOADED_HIGH of `loadflags`.
fn is_bzimage(head: &[u8]) -> bool {
    let [loadflags] = bytes::<1>(head, 0x211);
    bytes::<4>(head, 0x202) == *b"HdrS" && version(head) >= 0x200 && loadflags & 1 != 0
}

fn version(head: &[u8]) -> u16 {
    u16::from_le_bytes(bytes(head, 0x206))
}

fn check_bzimage(head: &[u8], size: u64) -> Result<Format, BootError> {
    let needs = bzimage_size(head);
    if size < needs {
        return Err(BootError::Truncated { has: size, needs });
    }
    let version = version(head);
    let [xloadflags] = bytes::<1>(head, 0x236);
    if version < XLOADFLAGS || xloadflags & 1 == 0 {
        return Err(BootError::Not64Bit { version });
    }
    Ok(Format::BzImage)
}

/// Bytes of a bzImage (`setup_sects`, `syssize`); signatures may follow. The loader reads as much as there is: without this
/// check half a kernel would start.
fn bzimage_size(head: &[u8]) -> u64 {
    let [setup_sects] = bytes::<1>(head, 0x1f1);
    let sectors = if setup_sects == 0 { 4 } else { u64::from(setup_sects) };
    let setup = sectors.saturating_add(1).saturating_mul(512);
    setup.saturating_add(u64::from(u32::from_le_bytes(bytes(head, 0x1f4))).saturating_mul(16))
}

/// The bytes from `at` on; zeros where the file is shorter.
fn bytes<const COUNT: usize>(head: &[u8], at: usize) -> [u8; COUNT] {
    head.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; COUNT])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bzimage() -> Vec<u8> {
        let mut head = vec![0; 0x238];
        head[0x1f1] = 1;
        head[0x1f4] = 64; // syssize: 1 KiB
        head[0x202..0x206].copy_from_slice(b"HdrS");
        head[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
        (head[0x211], head[0x236]) = (1, 1);
        head
    }

    fn elf() -> Vec<u8> {
        let mut head = b"\x7fELF\x02\x01\x01".to_vec();
        head.resize(64, 0);
        head[18] = 62;
        head
    }

    #[test]
    fn whole_64_bit_kernels_are_known_by_their_format() {
        assert_eq!(check(&bzimage(), 2048).unwrap(), Format::BzImage);
        assert_eq!(check(&elf(), 64).unwrap(), Format::Elf);
    }

    #[test]
    fn a_kernel_that_is_cut_short_or_has_no_64_bit_entry_is_refused() {
        assert!(matches!(check(&bzimage(), 2047), Err(BootError::Truncated { has: 2047, needs: 2048 })));
        assert!(matches!(check(b"", 0), Err(BootError::Truncated { has: 0, needs: 64 })));
        for (at, value) in [(0x236, 0), (0x206, 0x0b)] {
            let mut head = bzimage();
            head[at] = value;
            assert!(matches!(check(&head, 2048), Err(BootError::Not64Bit { .. })), "{at:#x}");
        }
    }

    #[test]
    fn a_kernel_of_another_architecture_is_refused() {
        for (at, value) in [(4, 1), (5, 2), (18, 183)] {
            let mut head = elf();
            head[at] = value;
            assert!(matches!(check(&head, 64), Err(BootError::NotAKernel { .. })), "{at}");
        }
        let mut arm64 = vec![0; 64];
        arm64[56..60].copy_from_slice(b"ARM\x64");
        assert!(matches!(check(&arm64, 1 << 20), Err(BootError::NotAKernel { .. })));
        let mut zimage = bzimage();
        zimage[0x211] = 0;
        assert!(matches!(check(&zimage, 2048), Err(BootError::NotAKernel { .. })));
    }
}
