//! The files of a snapshot, and what `snapshot.json` has about the others.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::hex;

/// Version of all the files; a reader refuses others.
pub(crate) const FORMAT: u32 = 1;
/// Written last: a folder without it has no snapshot.
pub(crate) const MANIFEST: &str = "snapshot.json";
/// Configuration of the machine.
pub(crate) const MACHINE: &str = "machine.json";
/// State of all but the memory.
pub(crate) const STATE: &str = "state.json";
/// Memory of the guest, its pieces one after another, and a page with [`mark`].
pub(crate) const MEMORY: &str = "memory";
/// The unit of the memory file: zero pages are holes.
pub(crate) const PAGE: usize = 4096;

/// The part of a manifest that each format has.
#[derive(Debug, Deserialize)]
pub(super) struct Version {
    pub(super) format: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    pub(crate) format: u32,
    /// Version of the program that wrote it.
    pub(crate) version: String,
    /// The guest's instruction set, as Rust names it.
    pub(crate) architecture: String,
    /// Random number of the snapshot, which the memory file ends with.
    #[serde(with = "hex")]
    pub(crate) id: Vec<u8>,
    #[serde(with = "hex")]
    pub(crate) machine: Vec<u8>,
    #[serde(with = "hex")]
    pub(crate) state: Vec<u8>,
    /// Pieces of guest memory, in the order of the memory file.
    pub(crate) memory: Vec<MemoryPiece>,
}

/// A contiguous piece of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MemoryPiece {
    /// Guest address of its first byte.
    pub(crate) gpa: u64,
    pub(crate) size: u64,
}

pub(crate) fn digest(bytes: &[u8]) -> Vec<u8> {
    Sha256::digest(bytes).to_vec()
}

/// The last page of the memory file of snapshot `id`: it shows that the file is complete and belongs to the others.
pub(crate) fn mark(id: &[u8]) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    let text = format!("egm-vmm memory {}\n", hex::text(id));
    page.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
    page
}

/// Bytes of `pieces` together; `None` for more than a file can have.
pub(crate) fn total(pieces: &[MemoryPiece]) -> Option<u64> {
    let total = pieces.iter().try_fold(0_u64, |sum, piece| sum.checked_add(piece.size));
    total.filter(|total| i64::try_from(*total).is_ok_and(|total| total < i64::MAX >> 1))
}
