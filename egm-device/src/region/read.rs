//! Reading untrusted files: every length has a limit, and no file can block or stop the reader.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::{io, str};

use crate::bounded;

/// Maximum size of a text in bytes: `/proc/iomem` of a large host has some 100 KiB.
const LIMIT: u64 = 4 << 20;

/// Maximum number of entries of a folder.
const ENTRIES: usize = 1 << 16;

/// The bytes of a file of at most [`LIMIT`] bytes. A pipe in its place reads as empty instead of blocking.
///
/// # Errors
/// The kernel's, or `InvalidData` for a longer file.
pub(super) fn bytes(path: &Path) -> io::Result<Vec<u8>> {
    all(open(path)?)
}

/// Opens a file for [`all`], without waiting for the other end of a pipe.
pub(super) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
}

/// The bytes of an open file, at most [`LIMIT`].
pub(super) fn all(file: File) -> io::Result<Vec<u8>> {
    bounded::read(file, LIMIT)
}

/// The text of a file, without white space around it.
///
/// # Errors
/// As [`bytes`], and `InvalidData` for text that is not UTF-8.
pub(super) fn text(path: &Path) -> io::Result<String> {
    let bytes = bytes(path)?;
    let text = str::from_utf8(&bytes).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "not text"))?;
    Ok(text.trim().to_owned())
}

/// The number in a file: decimal, or hexadecimal after `0x`. `None` when there is no such file or number.
pub(crate) fn number(path: &Path) -> Option<u64> {
    parse_number(&text(path).ok()?)
}

/// A number as the kernel prints it: decimal, or hexadecimal after `0x`.
pub(crate) fn parse_number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Names in a folder, sorted; a missing folder has none.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().take(ENTRIES);
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// The node in a `numa_node` file; -1 stands for an unknown one.
pub(super) fn node(path: &Path) -> Option<u32> {
    text(path).ok()?.parse().ok()
}
