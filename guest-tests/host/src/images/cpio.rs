//! The `newc` archive that Linux unpacks as its initial root (Documentation/driver-api/early-userspace/
//! buffer-format.rst). Pure: names and bytes in, one archive out, so that device nodes need no root.

/// Largest archive member; the format's size field has 32 bits.
const MAX_FILE: usize = u32::MAX as usize;

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER: u32 = 0o020_000;

/// An archive in the making.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    members: u32,
}

/// A file for an archive.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Content {
    /// Its path below the root.
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
}

/// Numbers of a device node; zeros for other members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Device {
    major: u32,
    minor: u32,
}

const NO_DEVICE: Device = Device { major: 0, minor: 0 };

/// Reason why a member cannot be added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CpioError {
    /// The name would not be unpacked at its own path.
    #[error("cannot archive \"{0}\": a name is relative, not empty and has no NUL")]
    Name(String),
    /// The size field is too small.
    #[error("cannot archive \"{name}\": {size:#x} bytes, at most {MAX_FILE:#x}")]
    Size { name: String, size: usize },
}

impl Archive {
    /// Adds a directory with mode 0755; a parent must come before its children.
    pub(crate) fn directory(&mut self, name: &str) -> Result<(), CpioError> {
        self.member(name, DIRECTORY | 0o755, NO_DEVICE, &[])
    }

    /// Adds a file with the permission bits `mode`.
    pub(crate) fn file(&mut self, name: &str, mode: u32, data: &[u8]) -> Result<(), CpioError> {
        self.member(name, REGULAR | (mode & 0o7777), NO_DEVICE, data)
    }

    /// Adds a symbolic link to `target`.
    pub(crate) fn symlink(&mut self, name: &str, target: &str) -> Result<(), CpioError> {
        self.member(name, SYMLINK | 0o777, NO_DEVICE, target.as_bytes())
    }

    /// Adds a character device with mode 0600.
    pub(crate) fn character(&mut self, name: &str, major: u32, minor: u32) -> Result<(), CpioError> {
        self.member(name, CHARACTER | 0o600, Device { major, minor }, &[])
    }

    /// The archive with its trailer.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.record("TRAILER!!!", 0, NO_DEVICE, &[], 0);
        self.bytes
    }

    fn member(&mut self, name: &str, mode: u32, device: Device, data: &[u8]) -> Result<(), CpioError> {
        if name.is_empty() || name.starts_with('/') || name.contains('\0') {
            return Err(CpioError::Name(name.to_owned()));
        }
        let Ok(size) = u32::try_from(data.len()) else {
            return Err(CpioError::Size { name: name.to_owned(), size: data.len() });
        };
        self.record(name, mode, device, data, size);
        Ok(())
    }

    fn record(&mut self, name: &str, mode: u32, device: Device, data: &[u8], size: u32) {
        self.members += 1;
        let links = if mode & DIRECTORY == DIRECTORY { 2 } else { 1 };
        // ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
        let fields = [self.members, mode, 0, 0, links, 0, size, 0, 0, device.major, device.minor];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(format!("{:08X}{:08X}", name.len() + 1, 0).as_bytes());
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(data);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, PartialEq, Eq)]
    struct Member {
        name: String,
        mode: u32,
        device: Device,
        data: Vec<u8>,
    }

    /// Parses an archive by the format's specification, without any of the writer's code.
    fn read(mut bytes: &[u8]) -> Vec<Member> {
        let mut members = Vec::new();
        let mut offset = 0;
        loop {
            assert_eq!(&bytes[..6], b"070701");
            let field = |i: usize| {
                let text = std::str::from_utf8(&bytes[6 + 8 * i..14 + 8 * i]).unwrap();
                u32::from_str_radix(text, 16).unwrap()
            };
            let device = Device { major: field(9), minor: field(10) };
            let (mode, size, name_size) = (field(1), field(6), field(11));
            let name_end = 110 + usize::try_from(name_size).unwrap();
            assert_eq!(bytes[name_end - 1], 0);
            let name = String::from_utf8(bytes[110..name_end - 1].to_vec()).unwrap();
            let start = (name_end + 3) & !3;
            let end = start + usize::try_from(size).unwrap();
            if name == "TRAILER!!!" {
                assert_eq!(bytes.len(), start);
                return members;
            }
            members.push(Member { name, mode, device, data: bytes[start..end].to_vec() });
            let next = (end + 3) & !3;
            offset += next;
            assert_eq!(offset % 4, 0);
            bytes = &bytes[next..];
        }
    }

    #[test]
    fn the_console_is_a_device_node_without_root() {
        let mut archive = Archive::default();
        archive.directory("dev").unwrap();
        archive.character("dev/console", 5, 1).unwrap();
        archive.symlink("bin", "usr/bin").unwrap();
        let members = read(&archive.finish());
        assert_eq!(members[0].mode, 0o040_755);
        assert_eq!((members[1].mode, members[1].device), (0o020_600, Device { major: 5, minor: 1 }));
        assert_eq!((members[2].mode, members[2].data.as_slice()), (0o120_777, b"usr/bin".as_slice()));
    }

    #[test]
    fn a_name_that_would_unpack_elsewhere_is_refused() {
        for name in ["", "/init", "a\0b"] {
            assert_eq!(Archive::default().file(name, 0, &[]), Err(CpioError::Name(name.into())));
        }
    }

    proptest! {
        #[test]
        fn what_was_archived_is_read_back(
            files in prop::collection::vec(("[a-z]{1,9}(/[a-z]{1,9})?", 0..0o10000_u32, any::<Vec<u8>>()), 0..9),
        ) {
            let mut archive = Archive::default();
            for (name, mode, data) in &files {
                archive.file(name, *mode, data).unwrap();
            }
            let member = |(name, mode, data)| Member { name, mode: REGULAR | mode, device: NO_DEVICE, data };
            let expected: Vec<_> = files.into_iter().map(member).collect();
            prop_assert_eq!(read(&archive.finish()), expected);
        }
    }
}
