//! Closes every descriptor of a file that this process has, whatever holds it.
//!
//! A mapping keeps memory without a descriptor. Owners of the closed descriptors go on with descriptors of `/dev/null`.

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use crate::sys;

/// Names a file, whichever descriptor or path it was reached by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum FileIdentity {
    /// A character device, by its number: several nodes may name it.
    Device(u64),
    /// Any other file, by its file system and inode.
    Inode(u64, u64),
}

impl From<&Metadata> for FileIdentity {
    fn from(metadata: &Metadata) -> Self {
        match metadata.file_type().is_char_device() {
            true => Self::Device(metadata.rdev()),
            false => Self::Inode(metadata.dev(), metadata.ino()),
        }
    }
}

/// Files of which every descriptor is closed.
#[derive(Debug, Default)]
pub struct Closing(BTreeSet<FileIdentity>);

impl Closing {
    /// Adds the file behind `file`.
    ///
    /// # Errors
    /// The kernel's, of fstat(2).
    pub fn add(&mut self, file: &File) -> io::Result<()> {
        self.0.insert(FileIdentity::from(&file.metadata()?));
        Ok(())
    }

    /// These files, less those of `kept`.
    #[must_use]
    pub fn without(mut self, kept: &Self) -> Self {
        self.0.retain(|file| !kept.0.contains(file));
        self
    }

    /// Closes every descriptor of these files and returns their number. No other thread may open them meanwhile.
    ///
    /// # Errors
    /// The kernel's; some descriptors may be closed then.
    pub fn close(&self) -> io::Result<usize> {
        if self.0.is_empty() {
            return Ok(0);
        }
        let null = File::options().read(true).write(true).open("/dev/null")?;
        let mut count = 0;
        for number in descriptors()?.into_iter().filter(|number| *number != null.as_raw_fd()) {
            let found = match fs::metadata(format!("/proc/self/fd/{number}")) {
                Ok(metadata) => FileIdentity::from(&metadata),
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue, // of the listing itself
                Err(error) => return Err(error),
            };
            if self.0.contains(&found) {
                sys::replace_descriptor(number, null.as_fd())?;
                count += 1;
            }
        }
        Ok(count)
    }
}

/// The numbers of this process's descriptors.
fn descriptors() -> io::Result<Vec<RawFd>> {
    let entries = fs::read_dir("/proc/self/fd")?.collect::<io::Result<Vec<_>>>()?;
    let number = |name: std::ffi::OsString| name.to_str()?.parse().ok();
    Ok(entries.into_iter().filter_map(|entry| number(entry.file_name())).collect())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn every_descriptor_of_a_file_is_closed_and_its_owners_hold_null() {
        let mut secret = tempfile::tempfile().unwrap();
        let mut other = tempfile::tempfile().unwrap();
        secret.write_all(b"secret").unwrap();
        other.write_all(b"other").unwrap();
        let again = File::open(format!("/proc/self/fd/{}", secret.as_raw_fd())).unwrap();
        let mut closing = Closing::default();
        closing.add(&secret).unwrap();
        assert_eq!(closing.close().unwrap(), 2);
        for mut file in [&secret, &again] {
            let mut text = Vec::new();
            file.read_to_end(&mut text).unwrap();
            assert!(text.is_empty() && file.metadata().unwrap().file_type().is_char_device());
        }
        assert!(other.metadata().unwrap().is_file());
        assert_eq!(closing.close().unwrap(), 0);
    }
}
