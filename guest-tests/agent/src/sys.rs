//! The unsafe module: system calls that no safe library offers, and memory that this process maps.
//!
//! Callers rely on this: a [`Mapping`] is memory of its own that nothing else writes, zeroed, page aligned and unmapped
//! when dropped; a [`Registers`] mapping is only ever accessed volatile and within its bounds.
#![expect(
    unsafe_code,
    reason = "NUMA policy, block discard, vsock addresses, device registers and I/O ports"
)]

pub(crate) mod pages;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::time::Duration;

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Anonymous memory of this process: zeroed, page aligned, not shared.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    size: usize,
}

// SAFETY: the mapping is owned, and access goes through `&self` and `&mut self` as for a `Vec<u8>`.
unsafe impl Send for Mapping {}

impl Mapping {
    /// `size` bytes, at least 1; pages come on first touch, in large pages where the kernel can.
    pub(crate) fn new(size: usize) -> io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), size, ProtFlags::READ | ProtFlags::WRITE, flags)
        }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Self { start, size };
        // SAFETY: the range is the mapping just made; the advice changes page sizes, not contents.
        let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), size, Advice::LinuxHugepage) };
        Ok(mapping)
    }

    /// As [`Mapping::new`], with every page from NUMA node `node` and no other.
    pub(crate) fn on_node(size: usize, node: u32) -> io::Result<Self> {
        let mapping = Self::new(size)?;
        mapping.bind(node)?;
        Ok(mapping)
    }

    /// `size` bytes of the pool of huge pages of `1 << shift` bytes, a multiple of that, all on NUMA node `node`. The
    /// node must have them free: a touch that finds none ends the process.
    pub(crate) fn huge(size: usize, shift: u32, node: u32) -> io::Result<Self> {
        let page = MapFlags::from_bits_retain(shift << 26); // MAP_HUGE_SHIFT
        let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | page;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), size, ProtFlags::READ | ProtFlags::WRITE, flags)
        }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Self { start, size };
        mapping.bind(node)?;
        Ok(mapping)
    }

    /// Every page from `node` and no other.
    fn bind(&self, node: u32) -> io::Result<()> {
        const MASK_BITS: usize = 1024;
        let mut mask = [0u64; MASK_BITS / 64];
        let node = usize::try_from(node).unwrap_or(usize::MAX);
        let word = mask.get_mut(node / 64).ok_or(io::ErrorKind::InvalidInput)?;
        *word |= 1 << (node % 64);
        // SAFETY: the range is this mapping, and the mask has MASK_BITS bits (the kernel reads `maxnode` - 1).
        let done = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.start.as_ptr(),
                self.size,
                libc::MPOL_BIND,
                mask.as_ptr(),
                MASK_BITS + 1,
                0,
            )
        };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// The NUMA node of the page at `offset`, which is touched for it, as the memory policy has it (`get_mempolicy`).
    pub(crate) fn policy_node(&self, offset: usize) -> io::Result<i32> {
        const F_NODE_OF_ADDRESS: libc::c_ulong = 1 | 2; // MPOL_F_NODE, MPOL_F_ADDR
        let mut node: libc::c_int = -1;
        let at = self.bytes().get(offset).map(ptr::from_ref).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the kernel writes one number; the address is inside the mapping, and is only looked up.
        let done = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                ptr::from_mut(&mut node),
                ptr::null_mut::<libc::c_ulong>(),
                0,
                at,
                F_NODE_OF_ADDRESS,
            )
        };
        if done == 0 { Ok(node) } else { Err(io::Error::last_os_error()) }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is readable for `size` bytes, initialised by the kernel, and borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.size) }
    }

    /// The bytes, to write.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`, writable, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.size) }
    }

    /// The NUMA node of each page of `page_size` bytes, in order, negative (an error number) where there is none.
    pub(crate) fn nodes(&self, page_size: usize) -> io::Result<Vec<i32>> {
        const AT_ONCE: usize = 1 << 16;
        let mut nodes = vec![0i32; self.size.div_ceil(page_size)];
        for (batch, status) in nodes.chunks_mut(AT_ONCE).enumerate() {
            let first = batch * AT_ONCE;
            let pages: Vec<*const u8> = (first..first + status.len())
                .map(|page| self.start.as_ptr().wrapping_add(page * page_size).cast_const())
                .collect();
            // SAFETY: both arrays have `status.len()` entries; without target nodes the call only reports.
            let done = unsafe {
                libc::syscall(
                    libc::SYS_move_pages,
                    0,
                    status.len(),
                    pages.as_ptr(),
                    ptr::null::<i32>(),
                    status.as_mut_ptr(),
                    0,
                )
            };
            if done != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(nodes)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping; no borrow of it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.size) };
    }
}

/// Device registers behind a file such as sysfs `resource4`.
#[derive(Debug)]
pub(crate) struct Registers {
    start: NonNull<u8>,
    size: usize,
}

impl Registers {
    /// Maps the first `size` bytes of `file`.
    pub(crate) fn map(file: &File, size: usize) -> io::Result<Self> {
        Self::map_at(file, 0, size)
    }

    /// Maps `size` bytes of `file` from `offset`, a multiple of the page size.
    pub(crate) fn map_at(file: &File, offset: u64, size: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start =
            unsafe { rustix::mm::mmap(ptr::null_mut(), size, protection, MapFlags::SHARED, file, offset) }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, size })
    }

    /// Size of the mapping, in bytes.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Writes all 64 bits at `offset`, a multiple of 8; nothing past the end.
    pub(crate) fn write(&self, offset: usize, value: u64) {
        if let Some(register) = self.place::<u64>(offset) {
            // SAFETY: `place` checked that the bytes lie inside the mapping; what they do is the device's business.
            unsafe { register.write_volatile(value) };
        }
    }

    /// Writes 32 bits at `offset`, a multiple of 4; nothing past the end.
    pub(crate) fn write_word(&self, offset: usize, value: u32) {
        if let Some(register) = self.place::<u32>(offset) {
            // SAFETY: as in `write`.
            unsafe { register.write_volatile(value) };
        }
    }

    /// Reads 64 bits at `offset`, a multiple of 8; all ones past the end.
    pub(crate) fn read(&self, offset: usize) -> u64 {
        // SAFETY: as in `write`.
        self.place::<u64>(offset).map_or(u64::MAX, |register| unsafe { register.read_volatile() })
    }

    /// Reads 32 bits at `offset`, a multiple of 4; all ones past the end.
    pub(crate) fn read_word(&self, offset: usize) -> u32 {
        // SAFETY: as in `write`.
        self.place::<u32>(offset).map_or(u32::MAX, |register| unsafe { register.read_volatile() })
    }

    /// The first `count` 32-bit words, read one by one.
    pub(crate) fn words(&self, count: usize) -> Vec<u8> {
        (0..count).flat_map(|index| self.read_word(index * 4).to_le_bytes()).collect()
    }

    /// Address of a register, if all of it lies inside and it is aligned.
    fn place<T>(&self, offset: usize) -> Option<*mut T> {
        let inside =
            offset.checked_add(size_of::<T>())? <= self.size && offset.is_multiple_of(size_of::<T>());
        inside.then(|| self.start.as_ptr().wrapping_add(offset).cast())
    }

    /// Writes `value` and reads it back at `offset`, rounded down to a multiple of 4; `None` past the end.
    pub(crate) fn exchange(&mut self, offset: usize, value: u32) -> Option<u32> {
        let offset = offset & !3;
        if offset.checked_add(4)? > self.size {
            return None;
        }
        let register = self.start.as_ptr().wrapping_add(offset).cast::<u32>();
        // SAFETY: four aligned bytes inside the mapping; what they do is the device's business, not this process's.
        unsafe { register.write_volatile(value) };
        // SAFETY: as above.
        Some(unsafe { register.read_volatile() })
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping; no reference into it exists.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.size) };
    }
}

/// Discards `size` bytes from `offset` of a block device (`BLKDISCARD`); their contents are undefined afterwards.
pub(crate) fn discard(disk: &File, offset: u64, size: u64) -> io::Result<()> {
    const BLKDISCARD: rustix::ioctl::Opcode = rustix::ioctl::opcode::none(0x12, 119);
    // SAFETY: the kernel reads two 64-bit numbers, which is what the array holds.
    let call = unsafe { rustix::ioctl::Setter::<BLKDISCARD, [u64; 2]>::new([offset, size]) };
    // SAFETY: BLKDISCARD writes nothing to this process.
    Ok(unsafe { rustix::ioctl::ioctl(disk, call) }?)
}

/// Linux's `IOCTL_VM_SOCKETS_GET_LOCAL_CID`: `_IO(7, 0xb9)`.
const VSOCK_GET_LOCAL_CID: rustix::ioctl::Opcode = rustix::ioctl::opcode::none(7, 0xb9);

/// The context id of this machine, from `device`, an open `/dev/vsock`.
///
/// A socket's own address does not show it: one that connects without `bind` keeps `VMADDR_CID_ANY`.
pub(crate) fn vsock_local_cid(device: &File) -> io::Result<u32> {
    // SAFETY: the kernel writes one 32-bit number.
    let call = unsafe { rustix::ioctl::Getter::<VSOCK_GET_LOCAL_CID, u32>::new() };
    // SAFETY: nothing but that number is written to this process.
    Ok(unsafe { rustix::ioctl::ioctl(device, call) }?)
}

/// A vsock stream to `cid`.
pub(crate) fn vsock_connect(cid: u32, port: u32, timeout: Duration) -> io::Result<File> {
    // SAFETY: no pointers.
    let fd = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    for option in [rustix::net::sockopt::Timeout::Recv, rustix::net::sockopt::Timeout::Send] {
        rustix::net::sockopt::set_socket_timeout(socket.as_fd(), option, Some(timeout))?;
    }
    let address = vsock_address(cid, port);
    let size = libc::socklen_t::try_from(size_of::<libc::sockaddr_vm>()).unwrap_or(0);
    // SAFETY: the address is a whole sockaddr_vm of `size` bytes.
    if unsafe { libc::connect(socket.as_raw_fd(), ptr::from_ref(&address).cast(), size) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(File::from(socket))
}

fn vsock_address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: a sockaddr_vm is integers and arrays of them; zero is a value of each.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::sa_family_t::try_from(libc::AF_VSOCK).unwrap_or(0);
    address.svm_cid = cid;
    address.svm_port = port;
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_and_keeps_what_is_written() {
        let mut memory = Mapping::new(8192).unwrap();
        assert!(memory.bytes().iter().all(|b| *b == 0));
        memory.bytes_mut()[8191] = 7;
        assert_eq!(memory.bytes()[8191], 7);
    }

    #[test]
    fn registers_are_not_read_past_their_end() {
        let file = tempfile();
        file.set_len(4096).unwrap();
        let mut registers = Registers::map(&file, 4096).unwrap();
        assert_eq!(registers.exchange(4095, 9), Some(9));
        assert_eq!(registers.exchange(4096, 9), None);
        assert_eq!(registers.exchange(usize::MAX, 9), None);
    }

    #[test]
    fn the_context_id_comes_from_the_vsock_device_alone() {
        assert_eq!(VSOCK_GET_LOCAL_CID, 0x7b9);
        assert!(vsock_local_cid(&tempfile()).is_err());
    }

    fn tempfile() -> File {
        File::from(rustix::fs::memfd_create("registers", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
    }
}
