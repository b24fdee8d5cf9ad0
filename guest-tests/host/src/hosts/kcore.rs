//! RAM of the host's kernel, by physical address. Distributions' kernels refuse it in `/dev/mem`
//! (CONFIG_STRICT_DEVMEM); `/proc/kcore` shows it to root, by the kernel's own map of all RAM.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// All RAM of the kernel: an ELF file, in which segments of RAM have physical addresses.
#[derive(Debug)]
pub(crate) struct Ram {
    file: File,
    segments: Vec<Segment>,
}

/// Bytes of the file that are RAM.
#[derive(Debug, PartialEq, Eq)]
struct Segment {
    offset: u64,
    address: u64,
    size: u64,
}

impl Ram {
    pub(crate) fn open() -> io::Result<Self> {
        Self::of(Path::new("/proc/kcore"))
    }

    fn of(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let mut header = [0; 64];
        file.read_exact_at(&mut header, 0)?;
        let (start, count) = (long(&header, 0x20), half(&header, 0x38)); // e_phoff, e_phnum
        let mut headers = vec![0; usize::from(count) * 56];
        file.read_exact_at(&mut headers, start)?;
        let segments = headers.as_chunks::<56>().0.iter().filter_map(Segment::read).collect();
        Ok(Self { file, segments })
    }

    /// The word at `address`, as it is now.
    pub(crate) fn word(&self, address: u64) -> io::Result<u64> {
        let offset = self.segments.iter().find_map(|segment| segment.offset_of(address));
        let mut word = [0; 8];
        self.file.read_exact_at(&mut word, offset.ok_or(io::ErrorKind::NotFound)?)?;
        Ok(u64::from_le_bytes(word))
    }
}

impl Segment {
    /// A program header of type load with a physical address: those of other memory have none, all ones.
    fn read(header: &[u8; 56]) -> Option<Self> {
        let [offset, _, address, size] = [8, 16, 24, 32].map(|at| long(header, at));
        (half(header, 0) == 1 && address != u64::MAX).then_some(Self { offset, address, size })
    }

    fn offset_of(&self, address: u64) -> Option<u64> {
        let inside = address.checked_sub(self.address).filter(|inside| *inside < self.size)?;
        Some(self.offset + inside)
    }
}

fn long(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

fn half(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u16::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_found_by_its_physical_address_and_nothing_where_no_ram_is() {
        let mut elf = vec![0; 0x2000];
        let mut put = |at: usize, value: u64| elf[at..at + 8].copy_from_slice(&value.to_le_bytes());
        put(0x20, 64); // e_phoff
        put(0x38, 2); // e_phnum
        // Memory that has no physical address, then RAM at 4 GiB.
        for (at, address) in [(64, u64::MAX), (120, 1 << 32)] {
            for (field, value) in [(0, 1), (8, 0x1000), (24, address), (32, 0x800)] {
                put(at + field, value);
            }
        }
        put(0x1010, 7);
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().write_all_at(&elf, 0).unwrap();
        let ram = Ram::of(file.path()).unwrap();
        assert_eq!(ram.word((1 << 32) + 0x10).unwrap(), 7);
        assert!(ram.word((1 << 32) + 0x800).is_err() && ram.word(0x10).is_err());
    }
}
