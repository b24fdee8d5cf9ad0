//! System calls without a safe interface: the ioctls of EGM devices and of KVM, a thread's scheduling class, the replacement of a
//! descriptor, leases, blocks and handles of files, and comparison of threads. This is an unsafe module.
//!
//! Callers may rely on this: no function here lets the kernel write outside the buffer that it is given.
#![expect(
    unsafe_code,
    reason = "ioctl (FS_IOC_FIEMAP, too), sched_setscheduler, dup3, F_SETLEASE, kcmp and file handles have no safe \
              interface"
)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// `EGM_RETIRED_PAGES_LIST`, `_IO('E', 100)`: the number has no size, the buffer does.
const EGM_RETIRED_PAGES_LIST: libc::Ioctl = 0x4564;
/// `KVM_CHECK_EXTENSION`, `_IO(KVMIO, 0x03)`: the value of a capability, 0 where KVM lacks it.
const KVM_CHECK_EXTENSION: libc::Ioctl = 0xae03;
/// `KVM_CREATE_GUEST_MEMFD`, `_IOWR(KVMIO, 0xd4, struct kvm_create_guest_memfd)`.
const KVM_CREATE_GUEST_MEMFD: libc::Ioctl = 0xc040_aed4;
/// `KVM_CAP_GUEST_MEMFD_FLAGS`, called `…_MMAP` at first: the flags that the host knows.
const KVM_CAP_GUEST_MEMFD_FLAGS: libc::c_ulong = 244;

/// `FS_IOC_FIEMAP`, `_IOWR('f', 11, struct fiemap)`.
const FS_IOC_FIEMAP: libc::Ioctl = 0xc020_660b;
/// Extents that the kernel reports at a time.
const EXTENTS: usize = 64;
/// `FIEMAP_EXTENT_LAST`: the file has no extent behind this one.
const LAST: u32 = 1;

/// `F_SETSIG`: the signal of a descriptor's events.
const F_SETSIG: libc::c_int = 10;
/// `KCMP_FILES`: compares tables of descriptors.
const KCMP_FILES: libc::c_int = 2;

/// `MAX_HANDLE_SZ`: bytes of the largest handle (open_by_handle_at(2)).
const HANDLE: usize = 128;

/// `struct file_handle`, with room for every handle.
#[repr(C)]
struct RawHandle {
    length: u32,
    kind: i32,
    bytes: [u8; HANDLE],
}

/// Name that the kernel gives an inode, and no later inode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Handle {
    /// Type of the handle.
    pub(crate) kind: i32,
    pub(crate) bytes: Vec<u8>,
}

/// `struct kvm_create_guest_memfd` of linux/kvm.h.
#[repr(C)]
struct CreateGuestMemfd {
    size: u64,
    flags: u64,
    reserved: [u64; 6],
}

/// `struct fiemap` with its extents.
#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FiemapExtent; EXTENTS],
}

/// `struct fiemap_extent` of linux/fiemap.h; positions and length are in bytes.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FiemapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved: [u64; 2],
    flags: u32,
    more: [u32; 3],
}

/// Blocks of a file that lie together on its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    /// First byte in the file.
    pub(crate) logical: u64,
    /// First byte on the device.
    pub(crate) physical: u64,
    pub(crate) length: u64,
}

/// The extents of `file`, in order.
pub(crate) fn extents(file: &File) -> io::Result<Vec<Extent>> {
    let (mut found, mut start) = (Vec::new(), 0u64);
    loop {
        let mut map = Fiemap {
            start,
            length: u64::MAX.saturating_sub(start),
            flags: 0,
            mapped_extents: 0,
            extent_count: u32::try_from(EXTENTS).unwrap_or(0),
            reserved: 0,
            extents: [FiemapExtent::default(); EXTENTS],
        };
        // SAFETY: the kernel reads a header of this layout (its size is in the number) and writes `extent_count` extents at
        // most behind it, all of which `map` has.
        check(unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut map) })?;
        let count = usize::try_from(map.mapped_extents).unwrap_or(0).min(EXTENTS);
        let new = map.extents.get(..count).unwrap_or_default();
        found.extend(new.iter().map(|one| Extent {
            logical: one.logical,
            physical: one.physical,
            length: one.length,
        }));
        let Some(last) = new.last().filter(|last| last.flags & LAST == 0) else { return Ok(found) };
        let next = last.logical.saturating_add(last.length);
        if next <= start {
            return Err(io::ErrorKind::InvalidData.into());
        }
        start = next;
    }
}

/// Reads the retired pages of an EGM device. The first four bytes of `buffer` are overwritten with its length, which is
/// all that the kernel fills.
pub(crate) fn egm_retired_pages(file: &File, buffer: &mut [u8]) -> io::Result<()> {
    let length = u32::try_from(buffer.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let argsz = buffer.first_chunk_mut::<4>().ok_or(io::ErrorKind::InvalidInput)?;
    *argsz = length.to_ne_bytes();
    // SAFETY: the kernel writes `argsz` bytes at most, which is the buffer's length, and it has all of them.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), EGM_RETIRED_PAGES_LIST, buffer.as_mut_ptr()) };
    check(result).map(drop)
}

/// `GUEST_MEMFD_FLAG_MMAP`: the host may map it. `GUEST_MEMFD_FLAG_INIT_SHARED`: its pages begin as shared; without it,
/// an access from the host gets a SIGBUS until the guest shares the page, which no guest here does.
pub(crate) const GUEST_MEMFD_FLAGS: u64 = 1 << 0 | 1 << 1;

/// Whether the flags `has` of [`guest_memfd_flags`] let the host map a guest_memfd.
pub(crate) const fn can_map_guest_memfd(has: u64) -> bool {
    has & GUEST_MEMFD_FLAGS == GUEST_MEMFD_FLAGS
}

/// The flags of guest_memfd that the host's KVM knows for `vm`; 0 when it cannot map one.
pub(crate) fn guest_memfd_flags(vm: BorrowedFd<'_>) -> io::Result<u64> {
    // SAFETY: the argument is a number, no memory is involved.
    let result = unsafe { libc::ioctl(vm.as_raw_fd(), KVM_CHECK_EXTENSION, KVM_CAP_GUEST_MEMFD_FLAGS) };
    check(result).map(|flags| u64::from(flags.unsigned_abs()))
}

/// A guest_memfd of `vm`.
pub(crate) fn create_guest_memfd(vm: BorrowedFd<'_>, size: u64, flags: u64) -> io::Result<OwnedFd> {
    let mut create = CreateGuestMemfd { size, flags, reserved: [0; 6] };
    // SAFETY: the kernel reads a structure of this layout (its size is in the number) and keeps no pointer.
    let result = unsafe { libc::ioctl(vm.as_raw_fd(), KVM_CREATE_GUEST_MEMFD, &raw mut create) };
    let descriptor = check(result)?;
    // SAFETY: the kernel has just made this descriptor for us; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Lets the calling thread run only on idle processors. A refusal by the kernel changes nothing.
pub(crate) fn run_when_idle() {
    let parameter = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel reads one `sched_param`; 0 is the calling thread.
    let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameter) };
}

/// Makes descriptor `number`, whatever owns it, one of the file of `with`.
pub(crate) fn replace_descriptor(number: RawFd, with: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: no memory is involved. The owner of `number` goes on owning an open descriptor of that number.
    check(unsafe { libc::dup3(with.as_raw_fd(), number, libc::O_CLOEXEC) }).map(drop)
}

/// Requests a write lease of `file`: the kernel grants it where no other description of the file exists. The signal
/// that ends a process by default (SIGIO) is replaced by one that does nothing.
pub(crate) fn write_lease(file: &File) -> io::Result<()> {
    control(file, F_SETSIG, libc::SIGURG)?;
    control(file, libc::F_SETLEASE, libc::F_WRLCK)
}

/// fcntl(2) of a command that takes a number.
fn control(file: &File, command: libc::c_int, number: libc::c_int) -> io::Result<()> {
    // SAFETY: the argument of both callers' commands is a number, no memory is involved.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, number) };
    check(result).map(drop)
}

/// Whether thread `tid` has the table of descriptors of process `pid`; false where the kernel does not answer.
pub(crate) fn share_descriptors(pid: u32, tid: u32) -> bool {
    let [pid, tid] = [pid, tid].map(libc::c_ulong::from);
    // SAFETY: all arguments are numbers, no memory is involved.
    unsafe { libc::syscall(libc::SYS_kcmp, pid, tid, KCMP_FILES, 0, 0) == 0 }
}

/// The handle of `file`; an error if its file system has no handles.
pub(crate) fn handle(file: &File) -> io::Result<Handle> {
    let length = u32::try_from(HANDLE).map_err(io::Error::other)?;
    let (mut raw, mut mount) = (RawHandle { length, kind: 0, bytes: [0; HANDLE] }, 0 as libc::c_int);
    let (this, path, flags) = (file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH);
    // SAFETY: the path ends with NUL. The kernel writes a header and `length` bytes at most behind it, all of which `raw` has,
    // and one `int`.
    let result = unsafe {
        libc::syscall(libc::SYS_name_to_handle_at, this, path, &raw mut raw, &raw mut mount, flags)
    };
    check(i32::try_from(result).map_err(io::Error::other)?)?;
    let length = usize::try_from(raw.length).unwrap_or(0);
    let bytes = raw.bytes.get(..length).ok_or(io::ErrorKind::InvalidData)?;
    Ok(Handle { kind: raw.kind, bytes: bytes.to_vec() })
}

/// An `O_PATH` descriptor of the file with this `handle` on the file system of `file`; `None` if that file is gone.
pub(crate) fn open_handle(file: &File, handle: &Handle) -> io::Result<Option<OwnedFd>> {
    let mut raw = RawHandle { length: 0, kind: handle.kind, bytes: [0; HANDLE] };
    raw.length = u32::try_from(handle.bytes.len()).map_err(io::Error::other)?;
    let to = raw.bytes.get_mut(..handle.bytes.len()).ok_or(io::ErrorKind::InvalidInput)?;
    to.copy_from_slice(&handle.bytes);
    let (on, flags) = (file.as_raw_fd(), libc::O_PATH | libc::O_CLOEXEC);
    // SAFETY: the kernel reads a header and `length` bytes behind it, all of which `raw` has.
    let result = unsafe { libc::syscall(libc::SYS_open_by_handle_at, on, &raw const raw, flags) };
    match check(i32::try_from(result).map_err(io::Error::other)?) {
        // SAFETY: the kernel has just made this descriptor for us; nothing else owns it.
        Ok(descriptor) => Ok(Some(unsafe { OwnedFd::from_raw_fd(descriptor) })),
        Err(error) if error.raw_os_error() == Some(libc::ESTALE) => Ok(None),
        Err(error) => Err(error),
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// `KVM_CREATE_VM`, `_IO(KVMIO, 0x01)`: creates a virtual machine and returns its descriptor.
    const KVM_CREATE_VM: libc::Ioctl = 0xae01;

    /// A virtual machine, where the host lets us have one.
    pub(crate) fn vm() -> Option<OwnedFd> {
        let kvm = File::options().read(true).write(true).open("/dev/kvm").ok()?;
        // SAFETY: the argument is a number, no memory is involved.
        let descriptor = check(unsafe { libc::ioctl(kvm.as_raw_fd(), KVM_CREATE_VM, 0) }).ok()?;
        // SAFETY: the kernel has just made this descriptor for us; nothing else owns it.
        Some(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    #[test]
    fn a_buffer_without_room_for_its_length_is_refused_before_the_kernel_sees_it() {
        let null = File::open("/dev/null").unwrap();
        let refused = egm_retired_pages(&null, &mut [0; 3]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        assert_eq!(egm_retired_pages(&null, &mut [0; 8]).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
    }
}
