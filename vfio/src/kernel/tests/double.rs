//! A double of the kernel: an `ioctl` of this program that answers requests to the files of doubles and passes all others
//! to the kernel. So the requests of vfio-ioctls are tested without a device.
#![expect(unsafe_code, reason = "a function that replaces libc's, and messages behind raw pointers")]

use std::collections::BTreeMap;
use std::ffi::{c_int, c_ulong};
use std::fs::{self, File};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, fstat, memfd_create};

pub(super) const GET_INFO: u64 = 0x3b6b;
pub(super) const BIND: u64 = 0x3b76;
pub(super) const ATTACH: u64 = 0x3b77;
pub(super) const DETACH: u64 = 0x3b78;
pub(super) const FEATURE: u64 = 0x3b75;
const GET_REGION_INFO: u64 = 0x3b6c;
const GET_IRQ_INFO: u64 = 0x3b6d;
const IOMMU_DESTROY: u64 = 0x3b80;
const IOAS_ALLOC: u64 = 0x3b81;

/// Number of the address space of every double of `/dev/iommu`.
const IOAS: u32 = 7;
/// Offset of the command register in configuration space, and its value in a function that a guest has used.
const COMMAND: u64 = (7 << 40) + 4;
const RUNNING: u16 = 0x406;

/// A region of the double: flags, bytes, areas that can be mapped, or the error of the query.
pub(super) type Region = Result<(u32, u64, &'static [(u64, u64)]), c_int>;

/// A file that answers as VFIO's or iommufd's would.
#[derive(Default)]
pub(super) struct Double {
    /// Requests and events, in order.
    pub(super) log: Vec<String>,
    /// Requests that are refused, with the error.
    pub(super) refuses: BTreeMap<u64, c_int>,
    pub(super) flags: u32,
    pub(super) regions: Vec<Region>,
    /// Flags and count, or the error of the query.
    pub(super) interrupts: Vec<Result<(u32, u32), c_int>>,
}

static DOUBLES: Mutex<BTreeMap<u64, Arc<Mutex<Double>>>> = Mutex::new(BTreeMap::new());

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file that answers by `double`, with `name` in this process's list of descriptors.
pub(super) fn file(name: &str, double: Double) -> (File, Arc<Mutex<Double>>) {
    let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC).unwrap());
    file.set_len(16 << 40).unwrap();
    file.write_all_at(&RUNNING.to_le_bytes(), COMMAND).unwrap();
    let double = Arc::new(Mutex::new(double));
    lock(&DOUBLES).insert(file.metadata().unwrap().ino(), Arc::clone(&double));
    (file, double)
}

/// Number of descriptors of this process that are files of that name.
pub(super) fn open(name: &str) -> usize {
    let links =
        fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with(&format!("/memfd:{name} "))).count()
}

/// Replaces libc's function of this name in the whole test program.
#[unsafe(no_mangle)]
extern "C" fn ioctl(file: c_int, request: c_ulong, argument: *mut u8) -> c_int {
    // SAFETY: the descriptor is used during this call only, in which the caller keeps it.
    let found = (file >= 0).then(|| unsafe { BorrowedFd::borrow_raw(file) });
    let double = found.and_then(|found| lock(&DOUBLES).get(&fstat(found).ok()?.st_ino).cloned());
    let (Some(file), Some(double)) = (found, double) else {
        // SAFETY: the caller's own request, as libc would send it.
        let result = unsafe { libc::syscall(libc::SYS_ioctl, file, request, argument) };
        return c_int::try_from(result).unwrap_or(-1);
    };
    // SAFETY: every request that a double answers has an argument that begins with its size in bytes.
    let size = unsafe { argument.cast::<u32>().read_unaligned() };
    // SAFETY: the caller passes that many bytes, and no other code uses them until this call returns.
    let message = unsafe { std::slice::from_raw_parts_mut(argument, usize::try_from(size).unwrap()) };
    match lock(&double).answer(file, request, message) {
        Ok(result) => result,
        Err(number) => {
            // SAFETY: the function has no requirement.
            let place = unsafe { libc::__errno_location() };
            // SAFETY: this thread's error number.
            unsafe { *place = number };
            -1
        }
    }
}

fn get(message: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(message[at..at + 4].try_into().unwrap())
}

fn put(message: &mut [u8], at: usize, words: &[u32]) {
    for (word, place) in words.iter().zip(message[at..].chunks_exact_mut(4)) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
}

fn halves(long: u64) -> [u32; 2] {
    [u32::try_from(long & 0xffff_ffff).unwrap(), u32::try_from(long >> 32).unwrap()]
}

impl Double {
    fn answer(&mut self, file: BorrowedFd<'_>, request: u64, message: &mut [u8]) -> Result<c_int, c_int> {
        let name = match request {
            BIND => "bind".to_owned(),
            ATTACH => format!("attach to {}", get(message, 8)),
            DETACH => format!("detach with command {:#x}", command(file)),
            IOMMU_DESTROY => format!("destroy {}", get(message, 4)),
            IOAS_ALLOC => "allocate".to_owned(),
            FEATURE => format!("feature {:#x}", get(message, 4)),
            _ => String::new(),
        };
        self.log.extend((!name.is_empty()).then_some(name));
        if let Some(number) = self.refuses.get(&request) {
            return Err(*number);
        }
        match request {
            GET_INFO => {
                let counts =
                    [self.regions.len(), self.interrupts.len()].map(|count| u32::try_from(count).unwrap());
                put(message, 4, &[self.flags, counts[0], counts[1]]);
            }
            GET_REGION_INFO => self.region(message)?,
            GET_IRQ_INFO => {
                let index = usize::try_from(get(message, 8)).unwrap();
                let (flags, count) =
                    *self.interrupts.get(index).unwrap_or(&Err(libc::EINVAL)).as_ref().map_err(|e| *e)?;
                put(message, 4, &[flags]);
                put(message, 12, &[count]);
            }
            IOAS_ALLOC => put(message, 8, &[IOAS]),
            FEATURE if get(message, 4) & vfio_bindings::bindings::vfio::VFIO_DEVICE_FEATURE_PROBE == 0 => {
                return Ok(memfd_create("dma-buf", MemfdFlags::CLOEXEC).unwrap().into_raw_fd());
            }
            BIND | ATTACH | DETACH | IOMMU_DESTROY | FEATURE => {}
            _ => return Err(libc::ENOTTY),
        }
        Ok(0)
    }

    /// The kernel's answer about a region: too small a message gets the size that is needed.
    fn region(&self, message: &mut [u8]) -> Result<(), c_int> {
        use vfio_bindings::bindings::vfio::VFIO_REGION_INFO_FLAG_CAPS as CAPS;
        let index = get(message, 8);
        let region = self.regions.get(usize::try_from(index).unwrap()).unwrap_or(&Err(libc::EINVAL));
        let (flags, size, areas) = *region.as_ref().map_err(|number| *number)?;
        let needed = 32 + if areas.is_empty() { 0 } else { 16 + 16 * areas.len() };
        let complete = message.len() >= needed;
        put(message, 0, &[u32::try_from(needed.max(message.len())).unwrap()]);
        let (caps, first) = if areas.is_empty() { (0, 0) } else { (CAPS, if complete { 32 } else { 0 }) };
        put(message, 4, &[flags | caps]);
        put(message, 12, &[first]);
        put(message, 16, &halves(size));
        put(message, 24, &halves(u64::from(index) << 40));
        if first > 0 {
            // Kind 1 of version 1, without a next one: sparse areas.
            put(message, 32, &[0x1_0001, 0, u32::try_from(areas.len()).unwrap(), 0]);
            let words: Vec<u32> =
                areas.iter().flat_map(|(at, size)| [halves(*at), halves(*size)]).flatten().collect();
            put(message, 48, &words);
        }
        Ok(())
    }
}

fn command(file: BorrowedFd<'_>) -> u16 {
    let mut bytes = [0; 2];
    File::from(file.as_fd().try_clone_to_owned().unwrap()).read_exact_at(&mut bytes, COMMAND).unwrap();
    u16::from_le_bytes(bytes)
}
