//! Claims that memory is bad, checked by reading it.
//!
//! A tenant reports bytes of its slice as bad, and a retired page stays out of use for ever: so a claim alone retires
//! nothing. Reads change nothing, so no holder has to release the memory first.
#![forbid(unsafe_code)]

use std::io;

use egm_address::{InRegion, Offset, Span, SpanSet, align_down, align_up};

use crate::backing::Backing;
use crate::mapping::{Mapping, MappingError, base_page};
use crate::poison;

/// Bytes that are read under one guard.
const PIECE: u64 = 2 << 20;

/// Result of reading claimed bytes, in whole pages.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ClaimCheck {
    /// Bytes that cannot be read.
    pub(crate) bad: SpanSet<InRegion>,
    /// Bytes that can be read.
    pub(crate) sound: SpanSet<InRegion>,
}

/// A failure to read claimed bytes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckError {
    #[error("cannot map the memory to read it")]
    Mapping(#[from] MappingError),
    #[error("cannot guard the read against memory errors")]
    Guard(#[source] io::Error),
}

/// Reads the `claimed` bytes of a slice that begins at `at` in its region and has the bytes of `backing`; what lies outside
/// is left out.
///
/// # Errors
/// [`CheckError`]: the state of the bytes is unknown then.
pub(crate) fn check(
    backing: &dyn Backing,
    at: Offset,
    claimed: &SpanSet<InRegion>,
) -> Result<ClaimCheck, CheckError> {
    let Ok(slice) = Span::new(at, backing.size()) else { return Ok(ClaimCheck::default()) };
    let pages: SpanSet<InRegion> =
        claimed.iter().filter_map(|span| pages_of(span.intersection(slice)?, slice)).collect();
    let (mut bad, mut sound) = (Vec::new(), Vec::new());
    for span in pages.iter() {
        let (mut from, end) = (span.start().get(), span.end().get());
        while from < end {
            let size = PIECE.min(end.saturating_sub(from));
            let (readable, unreadable) = read(backing, from, size)?;
            sound.extend(in_region(at, from, readable));
            from = from.saturating_add(readable);
            bad.extend(in_region(at, from, unreadable));
            from = from.saturating_add(unreadable);
        }
    }
    Ok(ClaimCheck { bad: bad.into_iter().collect(), sound: sound.into_iter().collect() })
}

/// Whole pages of `slice` with the bytes of `span`, as a span from the slice's begin.
fn pages_of(span: Span<InRegion>, slice: Span<InRegion>) -> Option<Span<InRegion>> {
    let (at, page) = (slice.start().get(), base_page());
    let from = align_down(span.start().get().checked_sub(at)?, page);
    let to = align_up(span.end().get().checked_sub(at)?, page)?.min(slice.size());
    Span::between(Offset::new(from), Offset::new(to))
}

/// The `size` bytes from byte `from` of a slice that begins at `at`; `None` for 0 bytes.
fn in_region(at: Offset, from: u64, size: u64) -> Option<Span<InRegion>> {
    Span::new(at.checked_add(from)?, size).ok()
}

/// Reads `size` bytes of `backing` from `from`, whole pages, up to the first that cannot be read: how many bytes could be
/// read, and how many after them could not.
fn read(backing: &dyn Backing, from: u64, size: u64) -> Result<(u64, u64), CheckError> {
    let number = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    let length = usize::try_from(size).unwrap_or(usize::MAX);
    let mapping = Mapping::new(backing, from, size, backing.offset().saturating_add(from))?;
    let mut bytes = vec![0; length];
    let page = rustix::param::page_size();
    let mut outcome = Ok(());
    match poison::guarded(&mapping, page, || outcome = mapping.read(0, &mut bytes))
        .map_err(CheckError::Guard)?
    {
        Ok(()) => outcome.map(|()| (size, 0)).map_err(CheckError::Mapping),
        Err(found) => {
            let readable = align_down(number(found.offset), number(page)).min(size);
            let unreadable = number(found.size).max(number(page)).min(size.saturating_sub(readable));
            Ok((readable, unreadable))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    const PAGE: u64 = 4096;

    /// A window of 16 pages on a file that may be shorter: reads beyond its end raise SIGBUS, as those of bad pages do.
    struct Cut(File);

    impl Backing for Cut {
        fn file(&self) -> &File {
            &self.0
        }
        fn offset(&self) -> u64 {
            0
        }
        fn size(&self) -> u64 {
            16 * PAGE
        }
        fn page_size(&self) -> u64 {
            PAGE
        }
        fn is_invisible(&self) -> bool {
            false
        }
        fn outlives_power(&self) -> bool {
            false
        }
    }

    fn pages(spans: &[(u64, u64)]) -> SpanSet<InRegion> {
        spans.iter().map(|(page, count)| Span::new(Offset::new(page * PAGE), count * PAGE).unwrap()).collect()
    }

    #[test]
    fn only_claimed_pages_that_cannot_be_read_are_bad() {
        if base_page() != PAGE {
            return println!("skipped: the kernel's pages are not 4 KiB");
        }
        let file = tempfile::tempfile().unwrap();
        file.set_len(10 * PAGE).unwrap();
        // The slice begins at page 100 of its region; pages 110 to 115 cannot be read.
        let claimed = pages(&[(90, 12), (105, 1), (109, 3), (115, 9)]);
        let verdict = check(&Cut(file), Offset::new(100 * PAGE), &claimed).unwrap();
        assert_eq!(verdict.bad, pages(&[(110, 2), (115, 1)]));
        assert_eq!(verdict.sound, pages(&[(100, 2), (105, 1), (109, 1)]));
    }

    #[test]
    fn a_claim_of_a_byte_is_one_of_its_page() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(16 * PAGE).unwrap();
        let byte = SpanSet::from_iter([Span::new(Offset::new(0x1234), 1).unwrap()]);
        let verdict = check(&Cut(file), Offset::new(0), &byte).unwrap();
        assert_eq!((verdict.bad.is_empty(), verdict.sound.size()), (true, base_page()));
    }
}
