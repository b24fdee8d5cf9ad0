//! Claim: an assigned function with a copy engine (`vfio/fixtures`) reaches memory where the guest has it: ordinary
//! memory, the EGM node, other functions' BARs, the memory of GPUs; and other engines reach its BAR. The argument
//! `functions.count` is the number of such functions (default: 1), and `functions.places` that of such places (default:
//! those that were found).
//!
//! By name only, for a function that its host takes away: it reads ones from then on, and the guest goes on.

use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use super::Context;
use super::edu::{self, Engine, PAGE, find, map, master, seen, touched};
use super::egm_beat::physical;
use crate::config_space::capability;
use crate::error::Broken;
use crate::expect::{self, DeviceKind, Plan};
use crate::finding::{Claim, Finding};
use crate::sys::{Mapping, Registers};
use crate::{pattern, sysfs};

/// "EGMF", the first register.
const MAGIC: &[u8] = b"EGMF";
const FROM: usize = 0x10;
const TO: usize = 0x18;
const COUNT: usize = 0x20;
const COMMAND: usize = 0x2c;
/// As one of the 32-bit words from the first register on.
const STATUS: usize = 0x30 / 4;
const RUNS: u32 = 1;
const DONE: u32 = 2;
/// Bytes of BAR 0, by which the function is known before it is asked: of any, and of one that is a Grace GPU.
const REGISTERS: [u64; 2] = [0x4000, 16 << 20];
/// Bytes of it that have registers.
const MAPPED: usize = 0x1000;
/// The BAR that is its memory, and the address bit that means that memory.
const MEMORY_BAR: u8 = 2;
pub(super) const OWN: u64 = 1 << 63;
/// Id of a vendor-specific capability.
const VENDOR_SPECIFIC: u8 = 0x09;
/// A copy through a host that answers each piece takes a while under emulation.
const TIMEOUT: Duration = Duration::from_secs(60);

pub(super) struct Function<'a> {
    planned: &'a expect::Function,
    registers: Registers,
    /// The first page of its own memory.
    pub(super) memory: Registers,
}

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let functions = all(&context.plan)?;
    if functions.is_empty() {
        return Ok(Finding::skipped("the guest has no function with a copy engine"));
    }
    let mut claim = Claim::default();
    claim.equal("the number of functions", &functions.len(), &context.args.get("functions.count", 1)?);
    let mut copies = Copies {
        claim: &mut claim,
        count: 0,
        source: Mapping::new(PAGE).map_err(Broken::system("no page"))?,
    };
    for function in &functions {
        let config = sysfs::bytes(sysfs::pci(function.planned.address).join("config"))?;
        let planned = Plan::clique(function.planned);
        copies.claim.equal(format!("the clique of {}", function.planned.address), &clique(&config), &planned);
        copies.memory(function, "memory", Mapping::new(PAGE).map_err(Broken::system("no page"))?)?;
        for node in context.plan.egm_nodes().filter_map(|node| context.plan.linux_node(node.id)) {
            let page = Mapping::on_node(PAGE, node).map_err(Broken::system("no page of the EGM node"))?;
            copies.memory(function, "EGM", page)?;
        }
        for peer in functions.iter().filter(|peer| peer.planned.address != function.planned.address) {
            copies.peer(function, "another function's BAR", peer.bar()?, &peer.memory)?;
        }
        for (gpu, bar) in context.plan.gpu_memory() {
            let memory = map(gpu, bar.index, PAGE)?;
            copies.peer(function, "GPU memory", bar.span.start().get(), &memory)?;
        }
    }
    if let Some(engine) = find(&context.plan, edu::EDU)? {
        let engine = Engine::open(engine)?;
        for function in &functions {
            copies.by_engine(&engine, function)?;
        }
    }
    let count = copies.count;
    let promised = context.args.get("functions.places", count)?;
    claim.equal("the number of places", &count, &promised);
    Ok(claim.finish().with_value(f64::from(count), "places"))
}

/// Announces that it waits, and waits until the function is gone: one with the engine, or else the first assigned one.
pub(super) fn lost(context: &Context) -> Result<Finding, Broken> {
    let engines = all(&context.plan)?;
    let passed = context.plan.devices().find(|(_, device)| device.kind == DeviceKind::Other);
    let engine = engines.first().map(|function| function.planned);
    let Some(function) = engine.or_else(|| passed.map(|(function, _)| function)) else {
        return Ok(Finding::skipped("the guest has no function of its host or of a server"));
    };
    let mut claim = Claim::default();
    // Standard error is the console; standard output is the report.
    let _ = std::io::stderr().write_all(b"egm-lost waits\n");
    // Not its registers: the kernel takes mappings away with the function.
    let (begun, folder) = (Instant::now(), sysfs::pci(function.address));
    while folder.exists() && begun.elapsed() < TIMEOUT {
        thread::sleep(Duration::from_millis(10));
    }
    claim.holds(!folder.exists(), || "it is still there");
    Ok(claim.finish())
}

/// The functions of the plan that have the engine, which may write memory from now on.
pub(super) fn all(plan: &Plan) -> Result<Vec<Function<'_>>, Broken> {
    let mut functions = Vec::new();
    for (planned, _) in plan.devices() {
        let bar = |index| planned.bars.iter().find(|bar| bar.index == index);
        let (Some(registers), Some(_)) = (bar(0), bar(MEMORY_BAR)) else { continue };
        if !REGISTERS.contains(&registers.span.size()) {
            continue;
        }
        let registers = map(planned, 0, MAPPED)?;
        if registers.words(1) == MAGIC {
            master(&sysfs::pci(planned.address))?;
            functions.push(Function { planned, registers, memory: map(planned, MEMORY_BAR, PAGE)? });
        }
    }
    Ok(functions)
}

/// The clique in a GPU's vendor-specific capability ("P2P", then the number above three bits).
fn clique(config: &[u8]) -> Option<u8> {
    let at = capability(config, VENDOR_SPECIFIC)?;
    let body = config.get(at + 3..at + 7)?;
    body.strip_prefix(b"P2P").and_then(|number| Some(number.first()? >> 3))
}

/// Guest physical address of a function's memory BAR.
fn start_of(function: &expect::Function) -> Result<u64, Broken> {
    let bar = function.bars.iter().find(|bar| bar.index == MEMORY_BAR);
    bar.map(|bar| bar.span.start().get())
        .ok_or_else(|| Broken::Argument(function.address.to_string(), "has no BAR 2"))
}

impl Function<'_> {
    fn bar(&self) -> Result<u64, Broken> {
        start_of(self.planned)
    }

    /// Copies a page; whether the engine could.
    pub(super) fn copy(&self, from: u64, to: u64) -> Result<bool, Broken> {
        for (register, value) in [(FROM, from), (TO, to), (COUNT, PAGE as u64)] {
            self.registers.write(register, value);
        }
        self.registers.write_word(COMMAND, 1);
        let begun = Instant::now();
        loop {
            match self.status() {
                RUNS if begun.elapsed() < TIMEOUT => thread::sleep(Duration::from_millis(10)),
                RUNS => {
                    return Err(Broken::Argument(self.planned.address.to_string(), "does not end its copy"));
                }
                status => return Ok(status == DONE),
            }
        }
    }

    fn status(&self) -> u32 {
        let words = self.registers.words(STATUS + 1);
        words.last_chunk().map_or(u32::MAX, |word| u32::from_le_bytes(*word))
    }
}

/// Copies, each of a pattern of its own.
struct Copies<'a> {
    claim: &'a mut Claim,
    count: u32,
    source: Mapping,
}

impl Copies<'_> {
    fn next(&mut self) -> Result<u64, Broken> {
        self.count += 1;
        pattern::fill(self.source.bytes_mut(), self.count.into(), 0, 0);
        physical(&self.source)
    }

    fn judge(&mut self, what: &str, at: u64, could: bool, is: &[u8]) {
        let same = is == self.source.bytes();
        self.claim.holds(could, || format!("the device cannot reach {what} at {at:#x}"));
        self.claim
            .holds(same || !could, || format!("what the device wrote to {what} at {at:#x} is not there"));
        self.claim.seen(format!("{what} at {at:#x}"));
    }

    /// From memory into the device, and from there into `page`.
    fn memory(&mut self, function: &Function<'_>, what: &str, page: Mapping) -> Result<(), Broken> {
        let (from, page) = (self.next()?, touched(page));
        let read = function.copy(from, OWN)?;
        self.judge("its own memory", OWN, read, &function.memory.words(PAGE / 4));
        let to = physical(&page)?;
        let written = function.copy(OWN, to)?;
        self.judge(what, to, written, &seen(&page));
        Ok(())
    }

    /// From memory into the device, and from there into a BAR, which `memory` is the first page of.
    fn peer(
        &mut self,
        function: &Function<'_>,
        what: &str,
        to: u64,
        memory: &Registers,
    ) -> Result<(), Broken> {
        let from = self.next()?;
        let could = function.copy(from, OWN)? && function.copy(OWN, to)?;
        self.judge(what, to, could, &memory.words(PAGE / 4));
        Ok(())
    }

    /// From memory into another engine, and from there into the function's BAR.
    fn by_engine(&mut self, engine: &Engine, function: &Function<'_>) -> Result<(), Broken> {
        let (from, to) = (self.next()?, function.bar()?);
        engine.read(from)?;
        engine.write(to)?;
        self.judge("its BAR, by a host function", to, true, &function.memory.words(PAGE / 4));
        Ok(())
    }
}
