//! Claim: an assigned DMA engine reaches memory where the guest has it: ordinary memory, the EGM node, another assigned
//! function's BAR (peer-to-peer), and a GPU's memory.
//!
//! The engine is QEMU's edu (`docs/specs/edu.rst`), the BAR that of its ivshmem. A pattern goes from memory into the engine's
//! buffer and from there to each place, where it is looked at without the engine.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::Context;
use super::egm_beat::physical;
use crate::error::Broken;
use crate::expect::{Function, Plan};
use crate::finding::{Claim, Finding};
use crate::sys::{Mapping, Registers};
use crate::{pattern, sysfs};

pub(super) const EDU: PciIds = PciIds { vendor: 0x1234, device: 0x11e8 };
const IVSHMEM: PciIds = PciIds { vendor: 0x1af4, device: 0x1110 };
/// The BAR that is ivshmem's memory.
const MEMORY_BAR: u8 = 2;

const SOURCE: usize = 0x80;
const DESTINATION: usize = 0x88;
const COUNT: usize = 0x90;
const COMMAND: usize = 0x98;
const RUN: u64 = 1;
const TO_MEMORY: u64 = 2;
/// The engine's address of its own buffer, which is a page.
const BUFFER: u64 = 0x4_0000;
const REGISTERS: usize = 0x1000;
pub(super) const PAGE: usize = 4096;
/// A transfer takes 100 ms of the device's own clock; under emulation clocks differ.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Vendor and device of a PCI function.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct PciIds {
    vendor: u64,
    device: u64,
}

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let Some(function) = find(&context.plan, EDU)? else {
        return Ok(Finding::skipped("the guest has no edu"));
    };
    let engine = Engine::open(function)?;
    let mut claim = Claim::default();
    let system = |what: &'static str| Broken::system(what);
    let mut source = Mapping::new(PAGE).map_err(system("no page"))?;
    pattern::fill(source.bytes_mut(), 0, 0, 0);
    let mut places = 0u32;
    let mut check = |what: &str, to: u64, look: &dyn Fn() -> Vec<u8>| -> Result<(), Broken> {
        places += 1;
        engine.read(physical(&source)?)?;
        engine.write(to)?;
        let same = look() == source.bytes();
        claim.holds(same, || format!("what the device wrote to {what} at {to:#x} is not there"));
        claim.seen(format!("{what} at {to:#x}"));
        Ok(())
    };
    let target = touched(Mapping::new(PAGE).map_err(system("no page"))?);
    check("memory", physical(&target)?, &|| seen(&target))?;
    for node in context.plan.egm_nodes().filter_map(|node| context.plan.linux_node(node.id)) {
        let target = touched(Mapping::on_node(PAGE, node).map_err(system("no page of the EGM node"))?);
        check("EGM", physical(&target)?, &|| seen(&target))?;
    }
    if let Some(peer) = find(&context.plan, IVSHMEM)? {
        let bar = peer.bars.iter().find(|bar| bar.index == MEMORY_BAR);
        let bar = bar.ok_or_else(|| Broken::Argument("ivshmem".to_owned(), "has no BAR 2"))?;
        let memory = map(peer, MEMORY_BAR, PAGE)?;
        check("a peer's BAR", bar.span.start().get(), &|| memory.words(PAGE / 4))?;
    }
    for (gpu, bar) in context.plan.gpu_memory() {
        let memory = map(gpu, bar.index, PAGE)?;
        let what = format!("GPU memory, BAR {} of {},", bar.index, gpu.address);
        check(&what, bar.span.start().get(), &|| memory.words(PAGE / 4))?;
    }
    let all = context.args.get("edu.places", places)?;
    claim.holds(places == all, || {
        format!("the device had {places} places to write to, and {all} were promised")
    });
    Ok(claim.finish().with_value(f64::from(places), "places"))
}

/// The assigned function with these ids.
pub(super) fn find(plan: &Plan, ids: PciIds) -> Result<Option<&Function>, Broken> {
    for (function, _) in plan.devices() {
        let folder = sysfs::pci(function.address);
        let vendor = sysfs::number(folder.join("vendor"))?;
        if ids == (PciIds { vendor, device: sysfs::number(folder.join("device"))? }) {
            return Ok(Some(function));
        }
    }
    Ok(None)
}

/// A page that is there, which it is after the first write.
pub(super) fn touched(mut page: Mapping) -> Mapping {
    page.bytes_mut().fill(0xa5);
    page
}

/// Bytes of a page now; the device wrote them behind the compiler's back.
pub(super) fn seen(page: &Mapping) -> Vec<u8> {
    std::hint::black_box(page).bytes().to_vec()
}

pub(super) fn map(function: &Function, bar: u8, size: usize) -> Result<Registers, Broken> {
    let folder = sysfs::pci(function.address);
    let _ = fs::write(folder.join("enable"), "1");
    let path = folder.join(format!("resource{bar}"));
    let file = File::options().read(true).write(true).open(&path).map_err(Broken::file("open", &path))?;
    Registers::map(&file, size).map_err(Broken::file("map", path))
}

pub(super) struct Engine(Registers);

impl Engine {
    /// The engine, which may write memory from now on.
    pub(super) fn open(function: &Function) -> Result<Self, Broken> {
        let registers = map(function, 0, REGISTERS)?;
        master(&sysfs::pci(function.address))?;
        Ok(Self(registers))
    }

    /// A page at `from` into its buffer.
    pub(super) fn read(&self, from: u64) -> Result<(), Broken> {
        self.copy(from, BUFFER, RUN)
    }

    /// A page of its buffer to `to`.
    pub(super) fn write(&self, to: u64) -> Result<(), Broken> {
        self.copy(BUFFER, to, RUN | TO_MEMORY)
    }

    fn copy(&self, from: u64, to: u64, command: u64) -> Result<(), Broken> {
        for (register, value) in [(SOURCE, from), (DESTINATION, to), (COUNT, PAGE as u64), (COMMAND, command)]
        {
            self.0.write(register, value);
        }
        let begun = Instant::now();
        while self.0.read(COMMAND) & RUN != 0 {
            if begun.elapsed() > TIMEOUT {
                return Err(Broken::Argument("edu".to_owned(), "does not end its transfer"));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

/// Sets the bus master bit.
pub(super) fn master(folder: &Path) -> Result<(), Broken> {
    const COMMAND_REGISTER: u64 = 4;
    let path = folder.join("config");
    let file = File::options().read(true).write(true).open(&path).map_err(Broken::file("open", &path))?;
    let mut command = [0; 2];
    file.read_exact_at(&mut command, COMMAND_REGISTER)
        .and_then(|()| file.write_all_at(&(u16::from_le_bytes(command) | 6).to_le_bytes(), COMMAND_REGISTER))
        .map_err(Broken::file("change", path))
}
