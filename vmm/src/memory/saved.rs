//! Guest memory in a file: its pieces one after another, with holes for pages of zeros.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::{GuestRam, MadeOf, Piece, Source};
use crate::snapshot::{MemoryPiece, Mismatch, PAGE, ensure};

/// Bytes that are copied at once.
const CHUNK: usize = 64 * PAGE;

/// The file with the memory of a machine that is restored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryImage<'a> {
    pub(crate) file: &'a File,
    pub(crate) pieces: &'a [MemoryPiece],
    /// Whether all of it is copied in before the guest runs. Otherwise private memory is read from the file as it is
    /// touched, and the file must stay as it is until the machine ends.
    pub(crate) copy: bool,
}

impl MemoryImage<'_> {
    /// Refuses the image of other pieces than `expected`.
    ///
    /// # Errors
    /// [`Mismatch`].
    pub(super) fn check(&self, expected: &[MemoryPiece]) -> Result<(), Mismatch> {
        ensure(self.pieces == expected, || "its memory lies at other guest addresses".to_owned())
    }

    /// Copies the image of `piece`, which begins at `start`, into memory that is zero.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn fill(&self, piece: &Piece, start: u64) -> io::Result<()> {
        let size = u64::try_from(piece.mapping.size()).unwrap_or(u64::MAX);
        let mut buffer = vec![0; CHUNK];
        for_data(self.file, start, size, |at, length| {
            for_chunks(at, length, &mut buffer, |at, buffer| {
                self.file.read_exact_at(buffer, start.saturating_add(at))?;
                runs(buffer).try_for_each(|run| {
                    let offset = word(at)?.saturating_add(run.start);
                    let data = buffer.get(run).unwrap_or_default();
                    piece.mapping.write(offset, data).map_err(io::Error::other)
                })
            })
        })
    }
}

impl GuestRam {
    /// Its pieces, in the order of a memory file.
    pub(crate) fn saved_pieces(&self) -> Vec<MemoryPiece> {
        let size = |piece: &Piece| u64::try_from(piece.mapping.size()).unwrap_or(u64::MAX);
        self.pieces.iter().map(|piece| MemoryPiece { gpa: piece.gpa.get(), size: size(piece) }).collect()
    }

    /// Writes it to `file`, which has holes in its place. Pages that nothing has touched stay so: those of a file are found
    /// by its holes, and private ones read as zeros.
    ///
    /// # Errors
    /// The file cannot be written, or the machine `ends`.
    pub(crate) fn save(&self, file: &File, ends: &dyn Fn() -> bool) -> io::Result<()> {
        let mut buffer = vec![0; CHUNK];
        let mut start = 0_u64;
        for (piece, MemoryPiece { size, .. }) in self.pieces.iter().zip(self.saved_pieces()) {
            let mut copy = |at, length| {
                for_chunks(at, length, &mut buffer, |at, buffer| {
                    if ends() {
                        return Err(io::Error::other("the machine ends"));
                    }
                    piece.mapping.read(word(at)?, buffer).map_err(io::Error::other)?;
                    runs(buffer).try_for_each(|run| {
                        let to =
                            start.saturating_add(at).saturating_add(u64::try_from(run.start).unwrap_or(0));
                        file.write_all_at(buffer.get(run).unwrap_or_default(), to)
                    })
                })
            };
            match (&piece.shared.source, piece.shared.made_of) {
                (Source::File(backing), MadeOf::Pages) => {
                    for_data(backing.file(), piece.shared.offset, size, copy)?;
                }
                _ => copy(0, size)?,
            }
            start = start.saturating_add(size);
        }
        Ok(())
    }
}

/// Calls `each` with offset and length, from `start` on, of each range of the `size` bytes from there that is no hole.
fn for_data(
    file: impl AsFd,
    start: u64,
    size: u64,
    mut each: impl FnMut(u64, u64) -> io::Result<()>,
) -> io::Result<()> {
    let end = start.saturating_add(size);
    let mut at = start;
    while at < end {
        let data = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(data) => data.min(end),
            Err(Errno::NXIO) => break,
            Err(Errno::INVAL | Errno::OPNOTSUPP) => at, // a file system without holes
            Err(error) => return Err(error.into()),
        };
        let hole = rustix::fs::seek(&file, SeekFrom::Hole(data)).map_or(end, |hole| hole.min(end));
        if data >= end || hole <= data {
            break;
        }
        // Whole pages, so that zeros around the data are part of none.
        let page = PAGE as u64;
        let from = data.saturating_sub(data.saturating_sub(start) % page);
        let until = hole.saturating_sub(start).next_multiple_of(page).saturating_add(start).min(end);
        each(from.saturating_sub(start), until.saturating_sub(from))?;
        at = until;
    }
    Ok(())
}

/// Calls `each` for the `length` bytes from `at`, with a part of `buffer` for each chunk.
fn for_chunks(
    at: u64,
    length: u64,
    buffer: &mut [u8],
    mut each: impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<()> {
    let end = at.saturating_add(length);
    let mut at = at;
    while at < end {
        let size = usize::try_from(end.saturating_sub(at)).unwrap_or(usize::MAX).min(buffer.len());
        each(at, buffer.get_mut(..size).unwrap_or_default())?;
        at = at.saturating_add(u64::try_from(size).unwrap_or(0));
    }
    Ok(())
}

/// Ranges of whole pages in `buffer` that are not all zero, neighbours together.
fn runs(buffer: &[u8]) -> impl Iterator<Item = std::ops::Range<usize>> {
    let is_zero = |page: &[u8]| page.iter().fold(0, |any, byte| any | byte) == 0;
    let pages: Vec<bool> = buffer.chunks(PAGE).map(|page| !is_zero(page)).collect();
    let (length, mut next) = (buffer.len(), 0);
    std::iter::from_fn(move || {
        let first = pages.iter().skip(next).position(|used| *used)?.saturating_add(next);
        let count = pages.iter().skip(first).take_while(|used| **used).count();
        next = first.saturating_add(count);
        Some(first.saturating_mul(PAGE)..next.saturating_mul(PAGE).min(length))
    })
}

fn word(at: u64) -> io::Result<usize> {
    usize::try_from(at).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn pages_of_zeros_are_no_run_and_neighbours_are_one() {
        let mut buffer = vec![0; 5 * PAGE + 7];
        for at in [0, PAGE + 3, 4 * PAGE, 5 * PAGE + 6] {
            buffer[at] = 1;
        }
        let runs: Vec<_> = runs(&buffer).collect();
        assert_eq!(runs, [0..2 * PAGE, 4 * PAGE..5 * PAGE + 7]);
    }

    #[test]
    fn only_data_of_a_sparse_file_is_visited_and_nothing_is_allocated() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&[1], 0x4_2001).unwrap();
        let blocks = file.metadata().unwrap().blocks();
        let mut seen = Vec::new();
        for_data(&file, 0x1000, 0xf_f000, |at, length| {
            seen.push((at, length));
            Ok(())
        })
        .unwrap();
        assert!(seen.iter().any(|(at, length)| (*at..at + length).contains(&0x4_1001)), "{seen:x?}");
        assert!(seen.iter().all(|(at, length)| at + length <= 0xf_f000), "{seen:x?}");
        let visited: u64 = seen.iter().map(|(_, length)| length).sum();
        assert!(visited <= 0x2_0000, "{seen:x?}: more than a block of a file system");
        assert_eq!(file.metadata().unwrap().blocks(), blocks);
    }
}
