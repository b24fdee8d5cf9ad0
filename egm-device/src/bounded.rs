//! Reads untrusted input with a limit on its length.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::path::Path;

use egm_report::show::size;
use rustix::fs::{Mode, OFlags};

/// All bytes of the regular file `path`, `most` at most.
///
/// Its kind is found by a reference (`O_PATH`), because an open would wait for the writer of a pipe, and to open a
/// device can have effects.
///
/// # Errors
/// The kernel's, one for another kind of file, or `InvalidData` for more bytes.
pub(crate) fn file(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let reference = File::from(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?);
    let kind = reference.metadata()?.file_type();
    if kind.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !kind.is_file() && !egm_address::fault!("pipe-as-facts") {
        return Err(io::Error::other("it is not a regular file"));
    }
    read(File::open(format!("/proc/self/fd/{}", reference.as_raw_fd()))?, most)
}

/// All bytes of `source`, `most` at most.
///
/// # Errors
/// The kernel's, or `InvalidData` for more.
pub(crate) fn read(source: impl Read, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).is_ok_and(|length| length > most) {
        let what = format!("it is larger than {}", size(most));
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_regular_file_is_read_and_nothing_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let (text, pipe) = (folder.path().join("text"), folder.path().join("pipe"));
        std::fs::write(&text, "text").unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
        assert_eq!(file(&text, 4).unwrap(), b"text");
        assert_eq!(file(&text, 3).unwrap_err().to_string(), "it is larger than 3 B");
        // Without a writer, an open of the pipe would never return.
        for path in [Path::new("/dev/zero"), &pipe] {
            assert_eq!(
                file(path, 4).unwrap_err().to_string(),
                "it is not a regular file",
                "{}",
                path.display()
            );
        }
        assert_eq!(file(folder.path(), 4).unwrap_err().kind(), io::ErrorKind::IsADirectory);
    }

    #[test]
    fn as_many_bytes_are_read_and_one_more_is_too_many() {
        assert_eq!(read(&[7; 1024][..], 1024).unwrap(), [7; 1024]);
        assert_eq!(read(&[7; 1025][..], 1024).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let endless = read(io::repeat(0), 1 << 20).unwrap_err();
        assert_eq!(endless.to_string(), "it is larger than 1 MiB");
    }
}
