//! Who maps bytes of a file, as `/proc` tells.
//!
//! For memory whose file opens once: its descriptions are one, so no lock tells the mapping of a slice from that of another, and
//! a process that was handed the descriptor can map a slice still when its owner has ended.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{major, minor};
use rustix::io::Errno;

/// A file as `/proc/PID/maps` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Name {
    major: u32,
    minor: u32,
    inode: u64,
}

/// A process that maps any of `bytes` of `file`, the calling one included.
///
/// Processes that this one may not look at (`CAP_SYS_PTRACE`), or cannot see (of an outer PID namespace), are left out, and so is
/// who holds only a descriptor.
///
/// # Errors
/// The kernel's, where `/proc` or a process in it cannot be read for another reason, and no process is found.
pub(crate) fn by(file: &File, bytes: &Range<u64>) -> io::Result<Option<u32>> {
    let metadata = file.metadata()?;
    let device = metadata.dev();
    let name = Name { major: major(device), minor: minor(device), inode: metadata.ino() };
    below(Path::new("/proc"), name, bytes)
}

fn below(proc: &Path, name: Name, bytes: &Range<u64>) -> io::Result<Option<u32>> {
    let mut unknown = None;
    for entry in fs::read_dir(proc)? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|pid| pid.parse::<u32>().ok()) else { continue };
        match process_maps_any(&entry.path(), name, bytes) {
            Ok(true) => return Ok(Some(pid)),
            Ok(false) => {}
            Err(error) if is_out_of_sight(&error) => {}
            Err(error) => unknown = Some(error),
        }
    }
    unknown.map_or(Ok(None), Err)
}

/// Whether a process maps any of `bytes` of the file. Where its first thread has ended it says so only of the others.
fn process_maps_any(process: &Path, name: Name, bytes: &Range<u64>) -> io::Result<bool> {
    if let Some(found) = maps_any(File::open(process.join("maps"))?, name, bytes)? {
        return Ok(found);
    }
    for thread in fs::read_dir(process.join("task")).into_iter().flatten() {
        let maps = File::open(thread?.path().join("maps")).and_then(|maps| maps_any(maps, name, bytes));
        match maps {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => {}
            Err(error) if is_out_of_sight(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// Whether who has these `maps` maps any of `bytes` of the file. `None`: it maps nothing at all.
fn maps_any(maps: File, name: Name, bytes: &Range<u64>) -> io::Result<Option<bool>> {
    let mut found = None;
    // Bytes, since names of files are not Unicode.
    for line in BufReader::new(maps).split(b'\n') {
        let mapping = mapping(&String::from_utf8_lossy(&line?));
        if mapping.is_some_and(|(of, at)| of == name && at.start < bytes.end && bytes.start < at.end) {
            return Ok(Some(true));
        }
        found = Some(false);
    }
    Ok(found)
}

/// That the process has ended since its name was read, or is not ours to look at.
fn is_out_of_sight(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied)
        || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

/// File and bytes of a line such as `7f0000000000-7f0000200000 rw-s 00400000 00:06 1234 /dev/egm4`.
fn mapping(line: &str) -> Option<(Name, Range<u64>)> {
    let mut fields = line.split_ascii_whitespace();
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end) = fields.next()?.split_once('-')?;
    let size = hex(end)?.checked_sub(hex(start)?)?;
    let offset = hex(fields.nth(1)?)?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    let name = Name { major: number(major)?, minor: number(minor)?, inode: fields.next()?.parse().ok()? };
    Some((name, offset..offset.checked_add(size)?))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::backing::tests::{region, slice};
    use crate::backing::{self, Patience};
    use crate::mapping::Mapping;
    use crate::region::RegionKind;

    const EGM: Name = Name { major: 0, minor: 6, inode: 1234 };

    #[test]
    fn a_line_names_a_file_and_its_bytes() {
        let line = "7f0000000000-7f0000200000 rw-s 00400000 00:06 1234                       /dev/egm4";
        assert_eq!(mapping(line), Some((EGM, 0x40_0000..0x60_0000)));
        assert_eq!(
            mapping("00400000-00401000 r--p 00000000 103:1f 7 /a b (deleted)"),
            Some((Name { major: 0x103, minor: 0x1f, inode: 7 }, 0..0x1000))
        );
        for wrong in
            ["", "7f-8f", "8f-7f rw-s 0 00:06 1", "0-1000 rw-s fffffffffffffff0 00:06 1", "x-y r 0 0:0 0"]
        {
            assert_eq!(mapping(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn only_who_maps_those_bytes_of_that_file_is_found() {
        let proc = tempfile::tempdir().unwrap();
        let process = |pid: &str, maps: &[u8]| {
            fs::create_dir(proc.path().join(pid)).unwrap();
            fs::write(proc.path().join(pid).join("maps"), maps).unwrap();
        };
        process("1", b"");
        process("self", b"0-1000 rw-s 00400000 00:06 1234 /dev/egm4\n");
        fs::create_dir(proc.path().join("2")).unwrap();
        process("30", b"0-1000 rw-p 0 00:00 0 \xff\n1000-3000 rw-s 00400000 00:06 1234 /dev/egm4\n");
        let found = |name: Name, bytes: Range<u64>| below(proc.path(), name, &bytes).unwrap();
        assert_eq!(found(EGM, 0x40_1000..0x40_2000), Some(30));
        assert_eq!(found(EGM, 0x30_0000..0x40_0001), Some(30));
        assert_eq!(found(EGM, 0..0x40_0000), None, "the slice before");
        assert_eq!(found(EGM, 0x40_2000..0x50_0000), None, "the slice behind");
        assert_eq!(found(Name { inode: 1235, ..EGM }, 0..u64::MAX), None);
        assert_eq!(found(Name { minor: 7, ..EGM }, 0..u64::MAX), None);
        assert!(below(&proc.path().join("nothing"), EGM, &(0..1)).is_err());
        // The first thread of a process has ended, and others have not.
        process("50", b"");
        fs::create_dir_all(proc.path().join("50/task/51")).unwrap();
        fs::write(proc.path().join("50/task/51/maps"), b"0-1000 rw-s 0 00:06 77 /dev/egm5\n").unwrap();
        assert_eq!(found(Name { inode: 77, ..EGM }, 0..0x1000), Some(50));
        // What cannot be read is not known to map nothing; who is found to is enough.
        fs::create_dir_all(proc.path().join("4/maps")).unwrap();
        assert!(below(proc.path(), Name { inode: 1235, ..EGM }, &(0..u64::MAX)).is_err());
        assert_eq!(found(EGM, 0x40_1000..0x40_2000), Some(30));
    }

    #[test]
    fn the_kernel_names_a_mapping_like_that() {
        let region = region(RegionKind::Memfd, 0x4000, 0x1000);
        let patience = Patience { progress: &|_| {}, cancel: &AtomicBool::new(false) };
        let memory = backing::open(&region, &slice(0, 0x4000), &patience).unwrap();
        let mapping = Mapping::new(memory.as_ref(), 0x1000, 0x2000, 0).unwrap();
        assert_eq!(by(memory.file(), &(0x2000..0x4000)).unwrap(), Some(std::process::id()));
        assert_eq!(by(memory.file(), &(0..0x1000)).unwrap(), None);
        drop(mapping);
        assert_eq!(by(memory.file(), &(0..0x4000)).unwrap(), None);
    }
}
