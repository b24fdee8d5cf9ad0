//! Checks of a guest's disk image after the VMM has ended.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of a block, as the agent writes them.
const BLOCK: usize = 4096;
/// Text that the agent's check `virtio_blk` writes to the last block.
pub(crate) const SIGNATURE: &str = "egm-lab-was-here";
/// Prefix of the line in which the agent's check `disk_busy` announces a flushed block.
const BUSY: &str = "egm-busy ";

/// Data that must be on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Proof {
    /// [`SIGNATURE`] in the last block.
    Signature,
    /// The last block that the guest announced as flushed.
    LastFlushed,
}

/// The number in a console line that announces a flushed block.
pub(crate) fn announced(line: &str) -> Option<u64> {
    line.strip_prefix(BUSY)?.trim().parse().ok()
}

/// Writes `text` to the last block of the disk in `path`, padded with zeros: where a guest leaves its [`SIGNATURE`].
pub(crate) fn sign(path: &Path, text: &str) -> io::Result<()> {
    let disk = File::options().write(true).open(path)?;
    let blocks = disk.metadata()?.len() / BLOCK as u64;
    let last = blocks.checked_sub(1).ok_or(io::ErrorKind::InvalidInput)?;
    disk.write_all_at(&padded(text), last * BLOCK as u64)
}

/// A block that begins with `text`; its other bytes are zero.
fn padded(text: &str) -> Vec<u8> {
    let mut block = vec![0; BLOCK];
    block.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
    block
}

/// The reason if `proof` is not on the disk in `path`; `last` is the last announced block.
pub(crate) fn fault(proof: Proof, path: &Path, last: Option<u64>) -> Option<String> {
    let expected = match (proof, last) {
        (Proof::Signature, _) => padded(SIGNATURE),
        (Proof::LastFlushed, Some(number)) => number.to_le_bytes().repeat(BLOCK / 8),
        (Proof::LastFlushed, None) => return Some("the guest announced no block".into()),
    };
    let found = File::open(path).and_then(|disk| {
        let blocks = disk.metadata()?.len() / BLOCK as u64;
        let index = match proof {
            Proof::Signature => blocks.saturating_sub(1),
            Proof::LastFlushed => last.unwrap_or(0).checked_rem(blocks).unwrap_or(0),
        };
        let mut block = vec![0; BLOCK];
        disk.read_exact_at(&mut block, index * BLOCK as u64)?;
        Ok((index, block))
    });
    match found {
        Ok((_, block)) if block == expected => None,
        Ok((index, _)) => Some(format!("block {index:#x} of {} is not what the guest wrote", path.display())),
        Err(error) => Some(format!("cannot read {}: {error}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> tempfile::NamedTempFile {
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(4 * BLOCK as u64).unwrap();
        disk
    }

    #[test]
    fn only_whole_announcements_count() {
        assert_eq!(announced("egm-busy 12"), Some(12));
        for line in ["egm-busy", "egm-busy x", "[1.0] egm-busy 3", ""] {
            assert_eq!(announced(line), None, "{line}");
        }
    }

    #[test]
    fn a_flushed_block_is_found_where_its_number_wraps_to() {
        let disk = disk();
        assert!(fault(Proof::LastFlushed, disk.path(), Some(6)).is_some());
        disk.as_file().write_all_at(&6_u64.to_le_bytes().repeat(BLOCK / 8), 2 * BLOCK as u64).unwrap();
        assert_eq!(fault(Proof::LastFlushed, disk.path(), Some(6)), None);
        assert!(fault(Proof::LastFlushed, disk.path(), None).is_some());
    }

    #[test]
    fn the_signature_is_looked_for_in_the_last_block() {
        let disk = disk();
        disk.as_file().write_all_at(SIGNATURE.as_bytes(), 0).unwrap();
        assert!(fault(Proof::Signature, disk.path(), None).is_some());
        disk.as_file().write_all_at(SIGNATURE.as_bytes(), 3 * BLOCK as u64).unwrap();
        assert_eq!(fault(Proof::Signature, disk.path(), None), None);
        for (text, is_found) in [("another text", false), (SIGNATURE, true)] {
            sign(disk.path(), text).unwrap();
            assert_eq!(fault(Proof::Signature, disk.path(), None).is_none(), is_found, "{text}");
        }
    }
}
