//! The parts of booting that all architectures share: the files, the initramfs, the errors.

use std::fs::File;
use std::io::{ErrorKind, Seek, SeekFrom};

use egm_address::{Gpa, Guest, Span};
use egm_report::show;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use super::native::{KERNELS, NO_KERNEL};
use crate::error::{Blame, Remedy, Report};
use crate::firmware::FirmwareError;

/// The files that are booted, opened.
#[derive(Debug)]
#[expect(missing_docs, reason = "the names of the fields are their documentation")]
pub struct BootFiles {
    pub kernel: File,
    pub initramfs: Option<File>,
}

/// Why a kernel or its initramfs cannot be put into memory.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum BootError {
    /// No format of this architecture, or damaged.
    #[error("the kernel is {NO_KERNEL} (its first bytes are {magic:02x?})")]
    NotAKernel {
        /// The first four bytes.
        magic: [u8; 4],
    },
    /// A kernel that something has to unpack first.
    #[error("the kernel is compressed ({how}), and nothing on this architecture unpacks it")]
    Compressed {
        how: &'static str,
        /// The command that unpacks it.
        command: String,
    },
    /// The loader refused it.
    #[error("the kernel is damaged or does not fit into guest memory: {0}")]
    Load(linux_loader::loader::Error), // no source: its text holds that of its sources
    /// Nothing, or only the beginning of a kernel.
    #[error("the kernel is empty or cut short: the file has {} of at least {}", show::size(*has), show::size(*needs))]
    Truncated {
        /// Bytes of the file.
        has: u64,
        /// Bytes that its header requires.
        needs: u64,
    },
    /// The kernel's file could not be read.
    #[error("the kernel could not be read")]
    ReadKernel(#[source] std::io::Error),
    /// The initramfs's file could not be read, or became shorter meanwhile.
    #[error("the initramfs could not be read to its end at {}", show::size(*size))]
    ReadInitramfs {
        size: u64,
        #[source]
        source: std::io::Error,
    },
    /// A bzImage without a 64-bit entry.
    #[error(
        "the kernel has no 64-bit entry point (boot protocol {version:#x}): only 64-bit kernels run here"
    )]
    Not64Bit { version: u16 },
    /// The kernel unpacks itself, or has its data, beyond the RAM that it is put into: on x86 that below 4 GiB.
    #[error("the kernel needs {} of memory where it starts, and the guest has {} there", show::size(*needed), show::size(*has))]
    TooLarge {
        /// Bytes that it needs.
        needed: u64,
        /// Bytes of the RAM.
        has: u64,
    },
    /// The initramfs does not fit between kernel and end of RAM.
    #[error(
        "the initramfs of {} does not fit between the kernel's end at {from:#x} and {end:#x}: {} too few",
        show::size(*size), show::size(*short_by)
    )]
    Initramfs {
        size: u64,
        /// Lowest address it may have.
        from: u64,
        /// Highest address it may end at.
        end: u64,
        short_by: u64,
    },
    /// An initramfs without content.
    #[error("the initramfs is empty")]
    EmptyInitramfs,
    /// The command line is too long or has bytes that it must not have.
    #[error("the kernel command line is longer than 2047 bytes or not ASCII")]
    CommandLine,
    /// The boot parameters have no room for so many pieces of memory.
    #[error(
        "the guest's memory map has {pieces} entries; the boot parameters of a bzImage hold {most} at most"
    )]
    Pieces {
        pieces: usize,
        /// Entries of the boot parameters.
        most: usize,
    },
    /// A tree that describes the whole machine may be too large.
    #[error("the device tree has {size:#x} bytes, more than the {room:#x} of its place")]
    Tree {
        size: u64,
        /// Bytes reserved for it.
        room: u64,
    },
    /// The description of the machine could not be written.
    #[error("cannot describe the machine to the kernel")]
    Firmware(#[from] FirmwareError),
    /// The host gave no seed for the guest's random numbers.
    #[error("cannot get random numbers for the guest")]
    Random(#[source] std::io::Error),
    /// Guest memory is not where the boot protocol needs it: our own bug.
    #[error("guest memory at {at:#x} cannot be written")]
    Memory { at: u64 },
}

impl BootError {
    /// Whether it is about the initramfs, and not about the kernel.
    pub fn is_about_initramfs(&self) -> bool {
        matches!(self, Self::Initramfs { .. } | Self::EmptyInitramfs | Self::ReadInitramfs { .. })
    }
}

impl Report for BootError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Initramfs { .. } => {
                Blame::Configuration.help("raise \"memory\".\"size\", or use a smaller initramfs")
            }
            Self::EmptyInitramfs | Self::ReadInitramfs { .. } => {
                Blame::Configuration.help("set \"boot\".\"initramfs\" to a cpio archive, or leave it out")
            }
            Self::TooLarge { .. } => Blame::Configuration.help("raise \"memory\".\"size\""),
            Self::CommandLine => {
                Blame::Configuration.help("shorten \"boot\".\"cmdline\", and write ASCII only")
            }
            Self::Pieces { .. } => Blame::Configuration
                .help("set \"boot\".\"kernel\" to a vmlinux with a PVH entry, or use fewer \"egm\" slices"),
            Self::Tree { .. } => Blame::Configuration
                .help("use fewer vCPUs or \"egm\" slices, or set \"boot\".\"tables\" to \"acpi\""),
            Self::Compressed { command, .. } => Blame::Configuration
                .help(format!("unpack it, and set \"boot\".\"kernel\" to the result: {command}")),
            Self::Load(_) => Blame::Configuration
                .help(format!("set \"boot\".\"kernel\" to {KERNELS}, or raise \"memory\".\"size\"")),
            Self::NotAKernel { .. }
            | Self::Truncated { .. }
            | Self::ReadKernel(_)
            | Self::Not64Bit { .. } => {
                Blame::Configuration.help(format!("set \"boot\".\"kernel\" to {KERNELS}"))
            }
            Self::Firmware(error) => error.remedy(),
            Self::Memory { .. } => Blame::Internal.into(),
            Self::Random(_) => Blame::Host.into(),
        }
    }
}

/// Bytes of the initramfs in `file`.
///
/// # Errors
/// [`BootError`] for an empty file, and one that cannot be read.
pub fn initramfs_size(file: &mut File) -> Result<u64, BootError> {
    Initramfs::new(file).map(|initramfs| initramfs.size)
}

/// Bytes from the start of a file by which [`archive_format`] knows its format.
pub const ARCHIVE_HEAD: u64 = 6;

/// The format of an initramfs that begins with `head`; `None` if Linux unpacks no such file (lib/decompress.c,
/// init/initramfs.c).
pub fn archive_format(head: &[u8]) -> Option<&'static str> {
    ARCHIVES.iter().find(|archive| head.starts_with(archive.magic)).map(|archive| archive.format)
}

/// A format of an initramfs.
struct Archive {
    magic: &'static [u8],
    format: &'static str,
}

const ARCHIVES: [Archive; 8] = [
    Archive { magic: b"07070", format: "cpio" },
    Archive { magic: &[0x1f, 0x8b], format: "gzip" },
    Archive { magic: &[0x28, 0xb5, 0x2f, 0xfd], format: "zstd" },
    Archive { magic: &[0xfd, b'7', b'z', b'X', b'Z', 0], format: "xz" },
    Archive { magic: &[0x02, 0x21, 0x4c, 0x18], format: "lz4" },
    Archive { magic: &[0x5d, 0, 0], format: "lzma" },
    Archive { magic: &[0x89, b'L', b'Z', b'O'], format: "lzo" },
    Archive { magic: b"BZh", format: "bzip2" },
];

/// Where an initramfs may lie, and where it begins if it fits.
pub(super) struct InitramfsRange {
    pub(super) from: u64,
    pub(super) end: u64,
    pub(super) at: Option<u64>,
}

/// An initramfs that is not read yet.
pub(super) struct Initramfs<'a> {
    file: &'a mut File,
    size: u64,
}

impl<'a> Initramfs<'a> {
    pub(super) fn new(file: &'a mut File) -> Result<Self, BootError> {
        let unread = |source| BootError::ReadInitramfs { size: 0, source };
        let size = file.seek(SeekFrom::End(0)).map_err(unread)?;
        file.seek(SeekFrom::Start(0)).map_err(unread)?;
        if size == 0 { Err(BootError::EmptyInitramfs) } else { Ok(Self { file, size }) }
    }

    /// Reads it into memory, where `place` puts an initramfs of its size.
    pub(super) fn load(
        self,
        memory: &GuestMemoryMmap,
        place: impl FnOnce(u64) -> InitramfsRange,
    ) -> Result<Span<Guest>, BootError> {
        let Self { file, size } = self;
        let InitramfsRange { from, end, at } = place(size);
        let short_by = size.saturating_sub(end.saturating_sub(from));
        let short = || BootError::Initramfs { size, from, end, short_by };
        let span = at.and_then(|start| Span::new(Gpa::new(start), size).ok());
        let fits = |span: &Span<Guest>| span.start().get() >= from && span.end().get() <= end;
        let span = span.filter(fits).ok_or_else(short)?;
        let length = usize::try_from(size).map_err(|_| short())?;
        let (at, unread) = (span.start().get(), |source| BootError::ReadInitramfs { size, source });
        memory.read_exact_volatile_from(GuestAddress(at), file, length).map_err(|error| match error {
            GuestMemoryError::IOError(source) => unread(source),
            GuestMemoryError::PartialBuffer { .. } => unread(ErrorKind::UnexpectedEof.into()),
            _ => BootError::Memory { at },
        })?;
        Ok(span)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_are_known_by_their_first_bytes() {
        assert_eq!(archive_format(b"070701"), Some("cpio"));
        assert_eq!(archive_format(&[0x28, 0xb5, 0x2f, 0xfd, 4, 0]), Some("zstd"));
        assert_eq!([archive_format(b""), archive_format(b"#!/bin")], [None, None]);
        let longest = ARCHIVES.iter().map(|archive| archive.magic.len()).max();
        assert_eq!(longest.and_then(|bytes| u64::try_from(bytes).ok()), Some(ARCHIVE_HEAD));
    }
}
