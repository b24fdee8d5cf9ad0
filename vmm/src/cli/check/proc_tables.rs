//! Tables of the kernel in `/proc` that show which files are locked and where processes listen.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{self, Path};

/// Locks and Unix sockets of the processes that this one sees: those of other containers may be missing.
pub(crate) struct ProcTables {
    locks: String,
    sockets: String,
}

/// A file, as the table of locks names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileId {
    major: u32,
    minor: u32,
    inode: u64,
}

impl FileId {
    pub(super) fn of(file: &Metadata) -> Self {
        let (major, minor) = (rustix::fs::major(file.dev()), rustix::fs::minor(file.dev()));
        Self { major, minor, inode: file.ino() }
    }

    /// `MAJOR:MINOR:INODE`; the device's numbers are hexadecimal.
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let major = u32::from_str_radix(parts.next()?, 16).ok()?;
        let minor = u32::from_str_radix(parts.next()?, 16).ok()?;
        Some(Self { major, minor, inode: parts.next()?.parse().ok()? })
    }
}

impl ProcTables {
    /// Reads them; a table that cannot be read is empty.
    pub(crate) fn read() -> Self {
        let read = |table: &str| String::from_utf8_lossy(&fs::read(table).unwrap_or_default()).into_owned();
        Self { locks: read("/proc/locks"), sockets: read("/proc/net/unix") }
    }

    /// Whether a flock(2) of `file` would fail: any lock excludes an exclusive one, and only an exclusive one excludes a
    /// `shared` one.
    pub(super) fn excludes(&self, file: FileId, shared: bool) -> bool {
        self.locks.lines().any(|line| {
            // 1: FLOCK  ADVISORY  WRITE 713 08:01:1048 0 EOF; a lock that waits has an arrow after the number
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                [_, "FLOCK", _, kind, _, id, ..] => {
                    FileId::parse(id) == Some(file) && (*kind == "WRITE" || !shared)
                }
                _ => false,
            }
        })
    }

    /// Whether a process was seen to listen at `path`, by its full name: a relative one in the table is of an unknown folder.
    pub(super) fn listens(&self, path: &Path) -> bool {
        let whole = path::absolute(path).unwrap_or_else(|_| path.to_owned());
        whole.to_str().is_some_and(|whole| self.has_listener(whole))
    }

    /// Lines are `Num RefCount Protocol Flags Type St Inode Path`; a listening socket has the flag `__SO_ACCEPTCON`.
    fn has_listener(&self, path: &str) -> bool {
        const LISTENS: &str = "00010000";
        self.sockets.lines().filter_map(|line| line.strip_suffix(path)).any(|before| {
            let words: Vec<&str> = before.split_whitespace().collect();
            before.ends_with(' ') && words.len() == 7 && words.get(3) == Some(&LISTENS)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    const LOCKS: &str = "\
        1: POSIX  ADVISORY  WRITE 713 08:01:7 0 EOF\n\
        2: FLOCK  ADVISORY  WRITE 713 08:1a:1048 0 EOF\n\
        2: -> FLOCK  ADVISORY  WRITE 714 08:01:9 0 EOF\n\
        3: FLOCK  ADVISORY  READ 0 08:01:8 0 EOF\n";
    const SOCKETS: &str = "\
        Num       RefCount Protocol Flags    Type St Inode Path\n\
        0000000000000000: 00000002 00000000 00010000 0001 01 20517 /run/a server\n\
        0000000000000000: 00000003 00000000 00000000 0001 03 20518 /run/client\n\
        0000000000000000: 00000003 00000000 00000000 0001 03     9\n";

    fn tables() -> ProcTables {
        ProcTables { locks: LOCKS.to_owned(), sockets: SOCKETS.to_owned() }
    }

    #[test]
    fn a_lock_excludes_others_and_a_shared_one_only_exclusive_ones() {
        let excludes = |minor, inode, shared| tables().excludes(FileId { major: 8, minor, inode }, shared);
        assert_eq!([excludes(0x1a, 1048, true), excludes(0x1a, 1048, false)], [true, true]);
        assert_eq!([excludes(1, 8, true), excludes(1, 8, false)], [false, true]);
        assert!(!excludes(1, 7, false), "a record lock is none of flock(2)");
        assert!(!excludes(1, 9, false), "a lock that waits is none yet");
        assert!(!excludes(2, 1048, false), "a file of another device");
    }

    #[test]
    fn a_listener_is_known_by_its_whole_path() {
        let listens = |path: &str| tables().listens(Path::new(path));
        assert_eq!([listens("/run/a server"), listens("server"), listens("/server")], [true, false, false]);
        assert!(!listens("/run/client"), "connected, and does not listen");
    }

    /// On a tmpfs: its files have one device number for both system calls and table.
    #[test]
    fn the_kernels_tables_have_our_own_lock_and_socket() {
        let folder = match tempfile::tempdir_in("/dev/shm") {
            Ok(folder) if fs::metadata("/proc/locks").is_ok() => folder,
            _ => return println!("skipped: no /dev/shm or no /proc/locks"),
        };
        let (disk, socket) = (folder.path().join("disk"), folder.path().join("socket"));
        let file = fs::File::create(&disk).unwrap();
        let id = FileId::of(&file.metadata().unwrap());
        assert!(!ProcTables::read().excludes(id, false));
        file.try_lock_shared().unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let tables = ProcTables::read();
        assert_eq!(
            [tables.excludes(id, true), tables.excludes(id, false)],
            [false, true],
            "{}",
            tables.locks
        );
        assert!(tables.listens(&socket), "{}", tables.sockets);
        drop((file, listener));
        let tables = ProcTables::read();
        assert!(!tables.excludes(id, false) && !tables.listens(&socket));
    }
}
