//! Files that an option names in cloud-hypervisor's way.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::str::FromStr;

use crate::inherited;

/// A file by its path, or by the number of a descriptor that this program inherits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cli) enum PathOrDescriptor {
    Path(PathBuf),
    Descriptor(RawFd),
}

impl FromStr for PathOrDescriptor {
    type Err = String;

    /// Reads `path=PATH`, `fd=NUMBER` or a path.
    fn from_str(text: &str) -> Result<Self, String> {
        match (text.strip_prefix("path="), text.strip_prefix("fd=")) {
            (_, Some(number)) => {
                let number = number.parse().ok().filter(|number| *number >= 0);
                number
                    .map(Self::Descriptor)
                    .ok_or_else(|| "expected fd=NUMBER, with a number of 0 or more".to_owned())
            }
            (path, None) => Ok(Self::Path(path.unwrap_or(text).into())),
        }
    }
}

impl fmt::Display for PathOrDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Descriptor(number) => write!(f, "descriptor {number}"),
        }
    }
}

impl PathOrDescriptor {
    /// The file, to append to: made where there is none. A named pipe waits for its reader.
    ///
    /// # Errors
    /// Those of open(2); `EBADF` for a number without a file.
    pub(super) fn open(&self) -> io::Result<File> {
        match self {
            Self::Path(path) => File::options().append(true).create(true).open(path),
            Self::Descriptor(number) => Ok(inherited::descriptor(*number)?.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_a_path_or_the_number_of_a_descriptor() {
        for (text, read) in [
            ("vm.sock", Some(PathOrDescriptor::Path("vm.sock".into()))),
            ("path=/run/fd=3", Some(PathOrDescriptor::Path("/run/fd=3".into()))),
            ("fd=21", Some(PathOrDescriptor::Descriptor(21))),
            ("fd=-1", None),
            ("fd=", None),
            ("fd=99999999999", None),
        ] {
            assert_eq!(text.parse().ok(), read, "{text}");
        }
    }
}
