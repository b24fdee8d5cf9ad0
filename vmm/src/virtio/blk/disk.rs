//! A disk: an open file, and the only way to name bytes of it.

use std::fs::{self, File, FileType};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::sync::Arc;

use egm_report::show;

use crate::error::{Blame, Remedy, Report};

/// Bytes of a sector, the unit of the protocol whatever the disk's own (virtio 1.3 §5.2.5.2).
pub(crate) const SECTOR: u64 = 512;
/// File systems with reads that usually wait for no other machine and no other process, unlike those of NFS and FUSE.
const LOCAL_FILE_SYSTEMS: [&str; 5] = ["btrfs", "ext4", "overlay", "tmpfs", "xfs"];

/// Why a file cannot be a disk. The caller that opened it adds its path.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum DiskError {
    /// A directory, a pipe, …
    #[error("a disk must be a regular file or a block device")]
    Kind,
    /// Smaller than one sector, or than the size that the guest knows.
    #[error("the disk has {}, and needs {} at least", show::size(*bytes), show::size(*least))]
    TooSmall { bytes: u64, least: u64 },
    /// An image of another format.
    #[error("a disk is a raw image, and the file begins as a {format} image does")]
    Format { format: &'static str },
    /// The size is unknown.
    #[error("cannot find the size of the disk")]
    Size(#[source] io::Error),
}

impl Report for DiskError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::TooSmall { least, .. } => {
                let size = (*least).max(1 << 30); // ">": at least
                Blame::Configuration.help(format!("make it larger: truncate -s '>{size}' FILE"))
            }
            Self::Kind => Blame::Configuration.help("set \"path\" to a raw disk image or a block device"),
            Self::Format { .. } => Blame::Configuration
                .help("convert it, and set \"path\" to the result: qemu-img convert -O raw FILE DISK"),
            Self::Size(_) => Blame::Host.into(),
        }
    }
}

/// An open raw disk, in sectors of 512 bytes.
#[derive(Debug)]
pub struct Disk {
    file: Arc<File>,
    sectors: u64,
    read_only: bool,
}

impl Disk {
    /// Takes over `file`, opened for reading, and for writing unless `read_only`. Bytes after the last whole sector
    /// are not part of the disk. Its format is read on local file systems only: elsewhere a read that hangs would hold up
    /// the launch.
    ///
    /// # Errors
    /// [`DiskError`] when the file is not a disk.
    pub fn new(mut file: File, read_only: bool) -> Result<Self, DiskError> {
        if !Self::can_be(file.metadata().map_err(DiskError::Size)?.file_type()) {
            return Err(DiskError::Kind);
        }
        let sectors = sectors_of(&mut file, 1)?;
        let mut head = [0; FORMAT_HEAD];
        // A disk that cannot be read at all is the guest's to report.
        if is_local(&file) && file.read_exact_at(&mut head, 0).is_ok() {
            check_format(&head)?;
        }
        Ok(Self { file: Arc::new(file), sectors, read_only })
    }

    /// The disk of `sectors` that the execution before this one had: its format is the guest's now, and its size is the one that
    /// the guest knows.
    ///
    /// # Errors
    /// [`DiskError::TooSmall`] where `file` has fewer by now.
    pub(crate) fn kept(mut file: File, read_only: bool, sectors: u64) -> Result<Self, DiskError> {
        sectors_of(&mut file, sectors)?;
        Ok(Self { file: Arc::new(file), sectors, read_only })
    }

    /// Whether a file of this type has sectors.
    pub(crate) fn can_be(kind: FileType) -> bool {
        kind.is_file() || kind.is_block_device()
    }

    pub(super) fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Size in sectors, at least 1.
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Whether writes are refused.
    pub fn read_only(&self) -> bool {
        self.read_only
    }
}

/// Whole sectors of `file`: `least`, or more.
fn sectors_of(file: &mut File, least: u64) -> Result<u64, DiskError> {
    let bytes = file.seek(SeekFrom::End(0)).map_err(DiskError::Size)?; // a block device's metadata has no size
    match bytes / SECTOR {
        sectors if sectors >= least => Ok(sectors),
        _ => Err(DiskError::TooSmall { bytes, least: least.saturating_mul(SECTOR) }),
    }
}

/// Whether a read of `file` waits for no other machine or process. The kernel's tables answer: a file system that hangs
/// does not answer statfs(2) either.
fn is_local(file: &File) -> bool {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()));
    let (Ok(info), Ok(mounts)) = (info, fs::read("/proc/self/mountinfo")) else { return false };
    file_system(&info, &String::from_utf8_lossy(&mounts))
        .is_some_and(|name| LOCAL_FILE_SYSTEMS.contains(&name))
}

/// Name of the file system of an open file, by its `fdinfo` and the table of mounts (proc_pid_fdinfo(5),
/// proc_pid_mountinfo(5)); `None` for a file outside the table, as a memfd is.
fn file_system<'a>(fdinfo: &str, mountinfo: &'a str) -> Option<&'a str> {
    let id = fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim();
    let mount = mountinfo.lines().find(|line| line.split(' ').next() == Some(id))?;
    let (_, after) = mount.split_once(" - ")?;
    after.split(' ').next()
}

/// Bytes from the start of a file by which [`check_format`] knows its format.
const FORMAT_HEAD: usize = 8;

/// Refuses a file that begins with `head`, as images of other formats than raw do: a guest would see that format's tables,
/// and overwrite them.
///
/// # Errors
/// [`DiskError::Format`].
fn check_format(head: &[u8]) -> Result<(), DiskError> {
    match head {
        [b'Q', b'F', b'I', 0xfb, ..] => Err(DiskError::Format { format: "qcow2" }),
        [b'K', b'D', b'M', b'V', ..] => Err(DiskError::Format { format: "VMDK" }),
        _ if head.starts_with(b"vhdxfile") => Err(DiskError::Format { format: "VHDX" }),
        _ => Ok(()),
    }
}

/// Bytes that are on the disk, as a guest named them: whole sectors, at least one, all below the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DiskSpan {
    offset: u64,
    length: u64,
}

impl DiskSpan {
    /// `bytes` from `sector` on, on a disk of `sectors`; `None` when that is not on the disk.
    pub(super) fn new(sectors: u64, sector: u64, bytes: u64) -> Option<Self> {
        let end = sector.checked_add(bytes / SECTOR)?;
        let ends = end <= sectors || egm_address::fault!("disk-end-ignored");
        let valid = bytes != 0 && bytes.is_multiple_of(SECTOR) && ends;
        valid.then_some(Self { offset: sector.checked_mul(SECTOR)?, length: bytes })
    }

    pub(super) fn offset(self) -> u64 {
        self.offset
    }

    /// Bytes, a positive multiple of [`SECTOR`].
    pub(super) fn length(self) -> u64 {
        self.length
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(bytes: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        file
    }

    #[test]
    fn a_disk_has_whole_sectors_and_at_least_one() {
        assert_eq!(Disk::new(file(512), false).unwrap().sectors(), 1);
        assert_eq!(Disk::new(file(2047), false).unwrap().sectors(), 3);
        for bytes in [0, 511] {
            let error = Disk::new(file(bytes), false).unwrap_err();
            assert!(matches!(error, DiskError::TooSmall { bytes: b, least: 512 } if b == bytes));
            assert_eq!(error.blame(), Blame::Configuration);
        }
    }

    #[test]
    fn an_image_of_another_format_is_refused() {
        for (head, expected) in
            [(&b"QFI\xfb\0\0\0\x03"[..], "qcow2"), (b"KDMV", "VMDK"), (b"vhdxfile", "VHDX")]
        {
            let error = check_format(head).unwrap_err();
            assert!(matches!(error, DiskError::Format { format } if format == expected), "{error}");
            assert_eq!(error.blame(), Blame::Configuration);
        }
        for head in [&b""[..], b"QFI", &[0; FORMAT_HEAD]] {
            check_format(head).unwrap();
        }
    }

    #[test]
    fn what_has_no_sectors_is_refused() {
        for path in ["/", "/dev/null"] {
            assert!(matches!(Disk::new(File::open(path).unwrap(), true), Err(DiskError::Kind)));
        }
    }

    proptest! {
        #[test]
        fn a_span_is_whole_sectors_below_the_end(
            sectors in 1u64..1 << 40, sector in any::<u64>(), near in 0u64..64, bytes in 0u64..0x10_0000
        ) {
            for sector in [sector, sectors.saturating_sub(near), near] {
                let inside = bytes != 0 && bytes % SECTOR == 0
                    && u128::from(sector) * 512 + u128::from(bytes) <= u128::from(sectors) * 512;
                let span = DiskSpan::new(sectors, sector, bytes);
                prop_assert_eq!(span.is_some(), inside);
                if let Some(span) = span {
                    prop_assert_eq!((span.offset(), span.length()), (sector * 512, bytes));
                }
            }
        }
    }
}
