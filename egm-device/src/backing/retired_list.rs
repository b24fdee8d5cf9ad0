//! The list of retired pages that an EGM device keeps: `EGM_RETIRED_PAGES_LIST`.
//!
//! ```text
//! 0  argsz u32  in: bytes of the buffer; out: bytes that the whole list needs
//! 4  count u32  out: entries
//! 8  entries, 16 bytes each: offset in the region u64, bytes u64
//! ```
//! A buffer that is too small is answered with success, a larger `argsz` and no entries by the drivers that exist, and
//! with `ENOSPC` as their review asks: both mean "again, with more". The list grows at run time, in no order.

use std::fs::File;
use std::io;

use crate::region::Region;
use crate::retired::Retired;
use crate::sys;

const HEADER: usize = 8;
const ENTRY: usize = 16;
/// Room for entries that come between two requests.
const SLACK: usize = 256 * ENTRY;
/// No region is worth using with more: 65536 bad pages.
const MAX_BYTES: usize = HEADER + 65536 * ENTRY;
/// A list that still grew after as many questions is no list.
const MAX_QUESTIONS: usize = 8;
/// Bytes of the block that firmware retires; the kernel lists its pages of it.
const BLOCK: u64 = 0x1_0000;

/// A source of the list.
pub trait RetiredPages {
    /// Fills `buffer` with header and entries, and passes its length to the device.
    fn fill(&self, buffer: &mut [u8]) -> io::Result<()>;
}

impl RetiredPages for File {
    fn fill(&self, buffer: &mut [u8]) -> io::Result<()> {
        sys::egm_retired_pages(self, buffer)
    }
}

/// A failure to read the retired pages of a region.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum RetiredListError {
    #[error("cannot read the retired pages of region \"{region}\": the device refuses (ioctl 0x4564)")]
    Refused {
        region: String,
        #[source]
        source: io::Error,
    },
    /// The list is longer than any that can be right.
    #[error(
        "cannot read the retired pages of region \"{region}\": they need {bytes:#x} bytes, and {MAX_BYTES:#x} \
         at most are read"
    )]
    TooLong { region: String, bytes: usize },
    #[error(
        "cannot read the retired pages of region \"{region}\": {count} entries in room for {room}; the driver is not \
         the one that this program knows"
    )]
    Count { region: String, count: usize, room: usize },
    #[error(
        "cannot read the retired pages of region \"{region}\": they grew {MAX_QUESTIONS} times meanwhile"
    )]
    Endless { region: String },
}

/// The retired pages of `region` as its device lists them, in blocks of 64 KiB.
///
/// # Errors
/// [`RetiredListError`]; the region must then not be used, because its bad pages are not known.
pub(crate) fn retired_pages(
    device: &impl RetiredPages,
    region: &Region,
) -> Result<Retired, RetiredListError> {
    let name = || region.name.clone();
    let mut bytes = HEADER + SLACK;
    for _ in 0..MAX_QUESTIONS {
        let mut buffer = vec![0; bytes];
        let fits = match device.fill(&mut buffer) {
            Ok(()) => true,
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => false,
            Err(source) => return Err(RetiredListError::Refused { region: name(), source }),
        };
        let (needed, count) = header(&buffer);
        if fits && needed <= bytes {
            let room = bytes.saturating_sub(HEADER) / ENTRY;
            if count > room {
                return Err(RetiredListError::Count { region: name(), count, room });
            }
            return Ok(Retired::new(entries(&buffer).take(count), region.size.get(), BLOCK));
        }
        bytes = needed.max(bytes).saturating_add(SLACK);
        if bytes > MAX_BYTES {
            return Err(RetiredListError::TooLong { region: name(), bytes });
        }
    }
    Err(RetiredListError::Endless { region: name() })
}

/// Decodes `argsz`, the bytes that the whole list needs, and `count`, the number of entries.
fn header(buffer: &[u8]) -> (usize, usize) {
    let number = |at| buffer.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u32::from_ne_bytes(*b));
    let number = |at| usize::try_from(number(at)).unwrap_or(usize::MAX);
    (number(0), number(4))
}

fn entries(buffer: &[u8]) -> impl Iterator<Item = (u64, u64)> + '_ {
    let number = |bytes: &[u8]| bytes.first_chunk().map_or(0, |b| u64::from_ne_bytes(*b));
    buffer.get(HEADER..).unwrap_or_default().chunks_exact(ENTRY).map(move |entry| {
        let (offset, size) = entry.split_at(8);
        (number(offset), number(size))
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;
    use crate::backing::tests::region;
    use crate::region::RegionKind;

    const SIZE: u64 = 1 << 40;

    fn egm() -> Region {
        region(RegionKind::Egm { device: "/dev/egm4".into() }, SIZE, BLOCK)
    }

    /// A driver with `entries`, which grows by `growth` at each question.
    struct Driver {
        entries: Vec<(u64, u64)>,
        growth: usize,
        asked: Cell<usize>,
        full: fn() -> io::Result<()>,
    }

    impl Driver {
        fn new(count: u64) -> Self {
            let entries = (0..count).rev().map(|n| (n * 2 * BLOCK, 0x1000)).collect();
            Self { entries, growth: 0, asked: Cell::new(0), full: || Ok(()) }
        }
    }

    impl RetiredPages for Driver {
        fn fill(&self, buffer: &mut [u8]) -> io::Result<()> {
            let more = self.growth * self.asked.get();
            self.asked.set(self.asked.get() + 1);
            let entries: Vec<_> = self.entries.iter().copied().chain((0..more).map(|_| (0, 1))).collect();
            let needed = HEADER + entries.len() * ENTRY;
            buffer[..4].copy_from_slice(&u32::try_from(needed).unwrap().to_ne_bytes());
            if needed > buffer.len() {
                return (self.full)();
            }
            buffer[4..8].copy_from_slice(&u32::try_from(entries.len()).unwrap().to_ne_bytes());
            for ((offset, size), to) in entries.iter().zip(buffer[HEADER..].chunks_exact_mut(ENTRY)) {
                to[..8].copy_from_slice(&offset.to_ne_bytes());
                to[8..].copy_from_slice(&size.to_ne_bytes());
            }
            Ok(())
        }
    }

    /// A driver that answers whatever it likes.
    struct Liar {
        argsz: u32,
        count: u32,
        error: Option<i32>,
    }

    impl RetiredPages for Liar {
        fn fill(&self, buffer: &mut [u8]) -> io::Result<()> {
            buffer[..4].copy_from_slice(&self.argsz.to_ne_bytes());
            buffer[4..8].copy_from_slice(&self.count.to_ne_bytes());
            self.error.map_or(Ok(()), |error| Err(io::Error::from_raw_os_error(error)))
        }
    }

    #[test]
    fn a_long_list_is_read_by_asking_again_whichever_way_the_driver_reports_its_length() {
        for full in [|| Ok(()), || Err(io::Error::from_raw_os_error(libc::ENOSPC))] {
            let driver = Driver { full, ..Driver::new(5000) };
            let retired = retired_pages(&driver, &egm()).unwrap();
            assert_eq!(retired.spans().size(), 5000 * BLOCK);
            assert_eq!(driver.asked.get(), 2);
        }
    }

    #[test]
    fn no_retired_pages_is_an_answer() {
        assert!(retired_pages(&Driver::new(0), &egm()).unwrap().spans().is_empty());
    }

    #[test]
    fn a_list_that_grows_while_it_is_read_is_read_and_one_without_end_is_refused() {
        let slow = Driver { growth: 10, ..Driver::new(1000) };
        assert_eq!(retired_pages(&slow, &egm()).unwrap().spans().size(), 1000 * BLOCK);
        let endless = Driver { growth: 1000, ..Driver::new(1000) };
        assert!(matches!(retired_pages(&endless, &egm()), Err(RetiredListError::Endless { .. })));
        assert_eq!(endless.asked.get(), MAX_QUESTIONS);
    }

    #[test]
    fn a_driver_that_states_it_wrote_more_than_fits_is_refused() {
        let liar = Liar { argsz: 8, count: u32::MAX, error: None };
        assert!(matches!(retired_pages(&liar, &egm()), Err(RetiredListError::Count { .. })));
        let liar = Liar { argsz: u32::MAX, count: 0, error: None };
        assert!(matches!(retired_pages(&liar, &egm()), Err(RetiredListError::TooLong { .. })));
        let liar = Liar { argsz: 0, count: 0, error: Some(libc::ENOTTY) };
        assert!(matches!(retired_pages(&liar, &egm()), Err(RetiredListError::Refused { .. })));
    }

    proptest! {
        #[test]
        fn any_answer_ends_in_a_list_within_the_region_or_an_error(
            argsz: u32, count: u32, error in prop::option::of(prop::sample::select(vec![libc::ENOSPC, libc::EFAULT])),
        ) {
            if let Ok(retired) = retired_pages(&Liar { argsz, count, error }, &egm()) {
                prop_assert!(retired.spans().iter().all(|span| span.end().get() <= SIZE));
            }
        }
    }
}
