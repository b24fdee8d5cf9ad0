//! Mapping memory for a device, as a machine's start does it, beside one ioctl of the kernel over the same memory.
//!
//! ```text
//! cargo bench -p egm-vfio --bench dma -- --function 0000:01:00.0 --interface legacy --mib 1024 --page 4K --rounds 5
//! ```
//! prints one line of JSON: seconds of each round of `ours` and of `raw`, which alternate in going first, and in
//! `before` those of the checks that a start makes once, whatever the size. The memory is present, and both have an
//! address space of their own with the function in it, opened before the clock starts.
//! Needs a function that VFIO's driver has, and for `--page 2M` a pool of such pages.
#![expect(unsafe_code, reason = "the ioctls that we are compared with")]
#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use egm_address::{Iova, PciAddress, Span};
use egm_vfio::dma::{Access, Memlock, Piece, locked_bytes, map_all, order};
use egm_vfio::kernel::{Container, Iommufd, KernelDomain, KernelFunction};
use egm_vfio::mapping::{MadeOf, Mapping};
use egm_vfio::memory::{HostBacking, HostMemory};
use iommufd_bindings::iommufd as iommu;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vfio_bindings::bindings::vfio;

/// Where devices find the memory: 4 GiB.
const IOVA: u64 = 1 << 32;

// linux/vfio.h and linux/iommufd.h: `_IO(';', n)` all of them.
const SET_IOMMU: libc::Ioctl = 0x3b66;
const SET_CONTAINER: libc::Ioctl = 0x3b68;
const GET_DEVICE: libc::Ioctl = 0x3b6a;
const MAP: libc::Ioctl = 0x3b71;
const BIND: libc::Ioctl = 0x3b76;
const ATTACH: libc::Ioctl = 0x3b77;
const IOAS_ALLOC: libc::Ioctl = 0x3b81;
const IOAS_MAP_FILE: libc::Ioctl = 0x3b8f;

fn main() {
    let word = |name| argument(name).unwrap_or_else(|| panic!("{name}: see the top of vfio/benches/dma.rs"));
    let (function, legacy) = (word("--function"), word("--interface") == "legacy");
    let number = |name, default| argument(name).map_or(default, |text| text.parse().unwrap());
    let (mib, rounds): (u64, u64) = (number("--mib", 1024), number("--rounds", 5));
    let memory = memory(mib << 20, argument("--page").as_deref() == Some("2M"));
    let ours = || ours(function.parse().unwrap(), legacy, &memory);
    let raw = || if legacy { raw_legacy(&function, &memory) } else { raw_iommufd(&function, &memory) };
    let (mut seconds, mut before) = ([Vec::new(), Vec::new()], Vec::new());
    for round in 0..rounds {
        let mut sample = |way: usize| {
            let taken = if way == 0 {
                let (asked, mapped) = ours();
                before.push(asked.to_string());
                mapped
            } else {
                raw()
            };
            seconds[way].push(taken.to_string());
        };
        let first = usize::from(!round.is_multiple_of(2));
        sample(first);
        sample(1 - first);
    }
    let [ours, raw] = seconds.map(|seconds| seconds.join(","));
    println!("{{\"before\":[{}],\"ours\":[{ours}],\"raw\":[{raw}]}}", before.join(","));
}

/// The word after `name`; `cargo bench` adds words of its own.
fn argument(name: &str) -> Option<String> {
    std::env::args().skip_while(|word| word != name).nth(1)
}

/// Memory of a guest, with all its pages.
fn memory(size: u64, huge: bool) -> Arc<dyn HostMemory> {
    let pages = if huge { MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { MemfdFlags::empty() };
    let file = memfd_create("bench", MemfdFlags::CLOEXEC | pages).unwrap();
    ftruncate(&file, size).unwrap();
    let made_of = MadeOf::File(file.try_clone().unwrap(), 0);
    let memory: Arc<dyn HostMemory> = Arc::new(Mapping::of(file.as_fd(), 0, size, IOVA, made_of).unwrap());
    (0..size).step_by(4096).for_each(|page| memory.write(page, &[0x5a]).unwrap());
    memory
}

/// Seconds of the checks made once, and of the map.
fn ours(function: PciAddress, legacy: bool, memory: &Arc<dyn HostMemory>) -> (f64, f64) {
    let space = if legacy {
        KernelDomain::Legacy(Container::new(None).unwrap())
    } else {
        KernelDomain::Iommufd(Iommufd::new(None).unwrap())
    };
    let _function = KernelFunction::open(function, &space).unwrap();
    let domain = space.domain();
    let piece = Piece {
        iova: Span::new(Iova::new(IOVA), memory.size()).unwrap(),
        memory: Arc::clone(memory),
        offset: 0,
        access: Access::ReadWrite,
        node: None,
    };
    let begun = Instant::now();
    let pieces = order(vec![piece], &domain.limits()).unwrap();
    Memlock::of_process().check(locked_bytes(&pieces)).unwrap();
    let asked = begun.elapsed();
    map_all(domain.as_ref(), pieces, &|_| {}).unwrap();
    (asked.as_secs_f64(), (begun.elapsed() - asked).as_secs_f64())
}

fn raw_legacy(function: &str, memory: &Arc<dyn HostMemory>) -> f64 {
    let group = fs::read_link(format!("/sys/bus/pci/devices/{function}/iommu_group")).unwrap();
    let group = open(&format!("/dev/vfio/{}", group.file_name().unwrap().display()));
    let container = open("/dev/vfio/vfio");
    call(&group, SET_CONTAINER, address(&mut container.as_raw_fd()));
    call(&container, SET_IOMMU, vfio::VFIO_TYPE1v2_IOMMU.try_into().unwrap());
    let name = CString::new(function).unwrap();
    let function = call(&group, GET_DEVICE, name.as_ptr().expose_provenance());
    // SAFETY: the kernel has just made this descriptor for us.
    let _function = unsafe { OwnedFd::from_raw_fd(function) };
    let mut map = vfio::vfio_iommu_type1_dma_map {
        argsz: size_of::<vfio::vfio_iommu_type1_dma_map>().try_into().unwrap(),
        flags: vfio::VFIO_DMA_MAP_FLAG_READ | vfio::VFIO_DMA_MAP_FLAG_WRITE,
        vaddr: memory.address().as_ptr().expose_provenance().try_into().unwrap(),
        iova: IOVA,
        size: memory.size(),
    };
    let begun = Instant::now();
    call(&container, MAP, address(&mut map));
    begun.elapsed().as_secs_f64()
}

fn raw_iommufd(function: &str, memory: &Arc<dyn HostMemory>) -> f64 {
    let mut folder = fs::read_dir(format!("/sys/bus/pci/devices/{function}/vfio-dev")).unwrap();
    let function = folder.next().unwrap().unwrap().file_name();
    let (iommufd, function) =
        (open("/dev/iommu"), open(&format!("/dev/vfio/devices/{}", function.display())));
    let mut bind = vfio::vfio_device_bind_iommufd {
        argsz: 16, // the size before kernels had tokens
        iommufd: iommufd.as_raw_fd(),
        ..Default::default()
    };
    call(&function, BIND, address(&mut bind));
    let mut space = iommu::iommu_ioas_alloc { size: 12, ..Default::default() };
    call(&iommufd, IOAS_ALLOC, address(&mut space));
    let mut attach = vfio::vfio_device_attach_iommufd_pt {
        argsz: 12, // the size before kernels had PASIDs
        pt_id: space.out_ioas_id,
        ..Default::default()
    };
    call(&function, ATTACH, address(&mut attach));
    let HostBacking::File { file, offset } = memory.backing() else { unreachable!("it was made of a file") };
    let mut map = iommu::iommu_ioas_map_file {
        size: size_of::<iommu::iommu_ioas_map_file>().try_into().unwrap(),
        flags: iommu::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA
            | iommu::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE
            | iommu::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE,
        ioas_id: space.out_ioas_id,
        fd: file.as_raw_fd(),
        start: offset,
        length: memory.size(),
        iova: IOVA,
    };
    let begun = Instant::now();
    call(&iommufd, IOAS_MAP_FILE, address(&mut map));
    begun.elapsed().as_secs_f64()
}

fn open(path: &str) -> File {
    File::options().read(true).write(true).open(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn address<T>(argument: &mut T) -> usize {
    (&raw mut *argument).expose_provenance()
}

/// An ioctl that must work. `argument` is a number, or the address of what the request takes.
fn call(file: &File, request: libc::Ioctl, argument: usize) -> libc::c_int {
    // SAFETY: each caller passes the argument that its request takes: alive, and as large as it states.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request, argument) };
    assert!(result >= 0, "ioctl {request:#x}: {}", std::io::Error::last_os_error());
    result
}
