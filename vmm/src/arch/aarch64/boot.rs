//! Putting a kernel into guest memory: an arm64 `Image` behind the firmware window and its initramfs behind it, where nothing
//! is retired, and the kernel's device tree at the window's end.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

use egm_address::{Gpa, Guest, Span};
use linux_loader::loader::KernelLoader;
use linux_loader::loader::pe::PE;
use rustix::rand::{GetRandomFlags, getrandom};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::boot_spans;
use super::image::{self, Header};
use super::layout::TREE;
use crate::arch::boot::{BootError, BootFiles, Initramfs, InitramfsRange};
use crate::config::BootTables;
use crate::firmware::Image;
use crate::firmware::tree::{self, Chosen};
use crate::plan::Plan;

/// First instruction and device tree of the first vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// First instruction of the kernel, for the program counter.
    pub address: Gpa,
    /// Start of the device tree, for X0 (Linux arm64 booting.rst).
    pub tree: Gpa,
}

impl Entry {
    /// The entry of a machine without a kernel in memory: a reset loads it, and its state comes from elsewhere until then.
    pub const UNLOADED: Self = Self { address: Gpa::new(0), tree: Gpa::new(0) };
}

/// Clears nothing: Linux clears its own bss on Arm, and all boot data is written in full.
///
/// # Errors
/// None.
pub const fn clear(_: &Plan, _: &GuestMemoryMmap, _: &mut BootFiles) -> Result<(), BootError> {
    Ok(())
}

/// Loads kernel, initramfs and device tree of the plan; `tables` are in memory already.
///
/// # Errors
/// [`BootError`]; guest memory is then in no useful state.
pub fn load(
    plan: &Plan,
    memory: &GuestMemoryMmap,
    files: &mut BootFiles,
    tables: &Image,
) -> Result<Entry, BootError> {
    let kernel = load_kernel(plan, memory, &mut files.kernel)?;
    let initramfs = files.initramfs.as_mut().map(Initramfs::new).transpose()?;
    let place = |size| {
        let end = kernel.end().get();
        boot_spans::initramfs(plan, kernel, size).map_or(
            InitramfsRange { from: end, end, at: None },
            |span| {
                let from = span.start().get();
                InitramfsRange { from, end: span.end().get(), at: Some(from) }
            },
        )
    };
    let initrd = initramfs.map(|file| file.load(memory, place)).transpose()?;
    let chosen = Chosen {
        command_line: &plan.boot.cmdline,
        initrd,
        kaslr_seed: u64::from_ne_bytes(random()?),
        rng_seed: random()?,
    };
    let tree = match plan.boot.tables {
        BootTables::Acpi => tree::stub(tables, &chosen)?,
        BootTables::DeviceTree => tree::full(plan, &chosen)?,
    };
    let size = u64::try_from(tree.len()).unwrap_or(u64::MAX);
    if size > TREE.size() {
        return Err(BootError::Tree { size, room: TREE.size() });
    }
    let at = TREE.start();
    memory.write_slice(&tree, GuestAddress(at.get())).map_err(|_| BootError::Memory { at: at.get() })?;
    Ok(Entry { address: kernel.start(), tree: at })
}

/// The format of the kernel in `file`, judged by its header.
///
/// # Errors
/// [`BootError`], for a file that nothing here starts.
pub fn kernel_format(file: &mut File) -> Result<&'static str, BootError> {
    inspect(file).map(|_| "arm64 Image")
}

/// A kernel that is not loaded yet.
struct Unloaded {
    header: Header,
    /// Bytes of the file.
    size: u64,
}

fn inspect(file: &mut File) -> Result<Unloaded, BootError> {
    let size = file.seek(SeekFrom::End(0)).map_err(BootError::ReadKernel)?;
    let needs = u64::try_from(image::SIZE).unwrap_or(u64::MAX);
    if size < needs {
        return Err(BootError::Truncated { has: size, needs });
    }
    let mut header = [0; image::SIZE];
    file.seek(SeekFrom::Start(0)).map_err(BootError::ReadKernel)?;
    file.read_exact(&mut header).map_err(BootError::ReadKernel)?;
    Ok(Unloaded { header: image::parse(&header)?, size })
}

/// Loads the kernel, and returns the memory that it uses.
fn load_kernel(plan: &Plan, memory: &GuestMemoryMmap, file: &mut File) -> Result<Span<Guest>, BootError> {
    let Unloaded { header: Header { text_offset, size }, size: has } = inspect(file)?;
    let needed = text_offset.saturating_add(size.max(has));
    let free = boot_spans::kernel(plan, needed);
    let has = free.map_or(0, |span| span.size());
    let Some(base) = free.filter(|_| needed <= has).map(|span| span.start()) else {
        return Err(BootError::TooLarge { needed, has });
    };
    let loaded = PE::load(memory, Some(GuestAddress(base.get())), file, None).map_err(BootError::Load)?;
    let (start, end) = (Gpa::new(loaded.kernel_load.0), base.get().saturating_add(needed));
    Span::between(start, Gpa::new(end)).ok_or_else(|| BootError::Memory { at: start.get() })
}

fn random<const SIZE: usize>() -> Result<[u8; SIZE], BootError> {
    let mut bytes = [0; SIZE];
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(got) if got == SIZE => Ok(bytes),
        Ok(_) => Err(BootError::Random(io::ErrorKind::UnexpectedEof.into())),
        Err(error) => Err(BootError::Random(error.into())),
    }
}
