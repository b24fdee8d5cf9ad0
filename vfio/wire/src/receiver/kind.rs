//! Type of a peer's descriptor, by calls that no file system's server answers.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, FileType, StatxFlags, fcntl_get_seals, fstatfs, major, makedev, minor, readlink, statx,
};

/// Required type of a message's descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum FileKind {
    /// Nothing that this process would use: none is passed on.
    Nothing = 0,
    /// An eventfd, recognised by its name in `/proc/self/fd`.
    Event = 1,
    /// A memfd, a guest_memfd, a dma-buf, or a file of tmpfs or hugetlbfs.
    Memory = 2,
    /// Memory as above, or a device with mappable memory: EGM, device-DAX, `/dev/mem`.
    Mapping = 3,
}

impl TryFrom<u32> for FileKind {
    type Error = ();

    fn try_from(number: u32) -> Result<Self, ()> {
        [Self::Nothing, Self::Event, Self::Memory, Self::Mapping]
            .into_iter()
            .find(|kind| *kind as u32 == number)
            .ok_or(())
    }
}

impl FileKind {
    pub(super) fn is_of(self, fd: BorrowedFd<'_>) -> bool {
        match self {
            Self::Nothing => false,
            Self::Event => is_event(fd),
            Self::Memory => is_memory(fd),
            Self::Mapping => is_memory(fd) || is_device_memory(fd),
        }
    }
}

/// Path of a file. It begins with a slash unless the file has no path.
fn path(fd: BorrowedFd<'_>) -> String {
    let link = readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new());
    link.ok().and_then(|link| link.into_string().ok()).unwrap_or_default()
}

fn is_event(fd: BorrowedFd<'_>) -> bool {
    path(fd) == "anon_inode:[eventfd]"
}

/// The kernel has seals for files of tmpfs (memfds among them) and hugetlbfs, and for no others.
fn is_memory(fd: BorrowedFd<'_>) -> bool {
    fcntl_get_seals(fd).is_ok() || is_guest_memfd(fd) || is_dma_buf(fd)
}

/// Since Linux 6.18 guest_memfd has a file system of its own, so a file of another one may have the same path. Then
/// fstatfs queries the server of that file system; while it does not answer, its client gets no answer either.
fn is_guest_memfd(fd: BorrowedFd<'_>) -> bool {
    const GUEST_MEMFD: u32 = 0x474d_454d;
    let path = path(fd);
    let is_type = || fstatfs(fd).is_ok_and(|about| u32::try_from(about.f_type) == Ok(GUEST_MEMFD));
    path == "anon_inode:[kvm-gmem]" || path.starts_with("/[kvm-gmem]") && is_type()
}

/// The kernel names a dma-buf's exporter, and no other file's.
fn is_dma_buf(fd: BorrowedFd<'_>) -> bool {
    let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()));
    about.is_ok_and(|about| about.lines().any(|line| line.starts_with("exp_name:")))
}

fn is_device_memory(fd: BorrowedFd<'_>) -> bool {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let Ok(stat) = statx(fd, c"", flags, StatxFlags::TYPE) else { return false };
    let number = makedev(stat.stx_rdev_major, stat.stx_rdev_minor);
    let link = format!("/sys/dev/char/{}:{}/subsystem", major(number), minor(number));
    let subsystem = readlink(link, Vec::new()).ok().and_then(|link| link.into_string().ok());
    let name = subsystem.as_deref().and_then(|link| Path::new(link).file_name()?.to_str());
    FileType::from_raw_mode(stat.stx_mode.into()) == FileType::CharacterDevice
        && matches!(name, Some("egm" | "dax" | "mem"))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn eventfds_and_memory_differ_from_everything_else() {
        let kinds = |fd: BorrowedFd<'_>| {
            [FileKind::Nothing, FileKind::Event, FileKind::Memory, FileKind::Mapping]
                .map(|kind| kind.is_of(fd))
        };
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert_eq!(kinds(event.as_fd()), [false, true, false, false]);
        let memory = memfd_create(c"anon_inode:[eventfd]", MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(kinds(memory.as_fd()), [false, false, true, true]);
        let device = File::open("/dev/zero").unwrap();
        assert_eq!(kinds(device.as_fd()), [false, false, false, true]);
        let (pipe, _writer) = std::io::pipe().unwrap();
        assert_eq!(kinds(pipe.as_fd()), [false; 4]);
        assert_eq!(kinds(File::open("/proc/self/status").unwrap().as_fd()), [false; 4]);
    }
}
