//! The header of an arm64 kernel, `Image` (Linux Documentation/arch/arm64/booting.rst, "Call the kernel image"). Kernels
//! with an EFI stub have it too.

use crate::arch::boot::BootError;

/// Bytes of the header.
pub const SIZE: usize = 64;
const MAGIC: &[u8; 4] = b"ARM\x64";
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// An EFI program that unpacks a kernel (Linux include/linux/pe.h, `LINUX_PE_MAGIC`; drivers/firmware/efi/libstub/zboot-header.S).
const ZBOOT: &[u8; 4] = b"zimg";

/// Fields of a kernel's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Bytes between a 2 MiB boundary and its start.
    pub text_offset: u64,
    /// Bytes from its start that the kernel uses, its data that are not in the file too.
    pub size: u64,
}

/// Reads the header.
///
/// # Errors
/// [`BootError`], for what nothing here starts.
pub fn parse(header: &[u8; SIZE]) -> Result<Header, BootError> {
    let number = |at: usize| {
        let bytes = header.get(at..).and_then(|rest| rest.first_chunk());
        bytes.copied().map_or(0, u64::from_le_bytes)
    };
    let (low, magic) = (|at| number(at) & 0xffff_ffff, |at: usize| header.get(at..at.saturating_add(4)));
    if header.starts_with(&GZIP) {
        return Err(BootError::Compressed { how: "gzip", command: "zcat KERNEL > Image".to_owned() });
    }
    if magic(4) == Some(ZBOOT) {
        return Err(zboot(header, low(8), low(12)));
    }
    let first = || header.first_chunk().copied().unwrap_or_default();
    if magic(56) != Some(MAGIC) {
        return Err(BootError::NotAKernel { magic: first() });
    }
    let (text_offset, size, flags) = (number(8), number(16), number(24));
    // Without a size it is a kernel from before 2014, with bit 0 a big-endian one.
    if size == 0 || flags & 1 != 0 {
        return Err(BootError::NotAKernel { magic: first() });
    }
    Ok(Header { text_offset, size })
}

/// The kernel is a piece of the file, packed in a format that a name, ended by NUL, gives.
fn zboot(header: &[u8; SIZE], offset: u64, size: u64) -> BootError {
    let name = header.get(24..).unwrap_or_default();
    let (how, unpack) = match name {
        [b'z', b's', b't', b'd', ..] => ("EFI zboot, zstd", "zstd -d"),
        [b'g', b'z', b'i', b'p', ..] => ("EFI zboot, gzip", "zcat"),
        [b'x', b'z', ..] => ("EFI zboot, xz", "xz -d"),
        _ => ("EFI zboot", "unpack"),
    };
    let skip = offset.saturating_add(1);
    BootError::Compressed {
        how,
        command: format!("tail -c +{skip} KERNEL | head -c {size} | {unpack} > Image"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Header of Debian's 6.12 arm64 kernel, but for its code.
    fn debian() -> [u8; SIZE] {
        let mut header = [0; SIZE];
        header[..2].copy_from_slice(b"MZ");
        header[16..24].copy_from_slice(&0x2a0_0000u64.to_le_bytes());
        header[24..32].copy_from_slice(&0xau64.to_le_bytes());
        header[56..60].copy_from_slice(MAGIC);
        header
    }

    fn message(header: [u8; SIZE]) -> String {
        parse(&header).unwrap_err().to_string()
    }

    #[test]
    fn a_kernel_states_how_much_memory_it_uses_from_its_start() {
        assert_eq!(parse(&debian()).unwrap(), Header { text_offset: 0, size: 0x2a0_0000 });
    }

    #[test]
    fn a_packed_kernel_is_refused_with_the_command_that_unpacks_it() {
        use crate::error::Report;
        let mut packed = [0; SIZE];
        packed[..8].copy_from_slice(b"MZ\0\0zimg");
        packed[8..16].copy_from_slice(&[0x10, 0x50, 0, 0, 0, 0, 0x20, 0]);
        packed[24..28].copy_from_slice(b"zstd");
        let error = parse(&packed).unwrap_err();
        assert!(error.to_string().contains("EFI zboot, zstd"), "{error}");
        let help = error.help().unwrap();
        assert!(help.ends_with("tail -c +20497 KERNEL | head -c 2097152 | zstd -d > Image"), "{help}");
        let mut packed = [0; SIZE];
        packed[..2].copy_from_slice(&GZIP);
        assert!(message(packed).contains("compressed (gzip)"));
    }

    #[test]
    fn what_is_no_kernel_of_this_kind_is_refused() {
        let no_size = 16..24;
        for (bytes, value) in [(56..57, b'X'), (24..25, 0xb), (no_size, 0)] {
            let mut header = debian();
            header[bytes.clone()].fill(value);
            assert!(matches!(parse(&header), Err(BootError::NotAKernel { .. })), "bytes {bytes:?}");
        }
    }
}
