//! Claim: whatever a guest does to the configuration of assigned functions, its VMM lives, memory that a BAR is moved over
//! stays memory, and an assigned drive that is left alone keeps working all the while.
//!
//! For `fuzz.seconds` (default 60), deterministic by `fuzz.seed` (default 1): random writes to all 4096 bytes, BARs moved over
//! RAM, over each other, out of the windows of their ports, with those ports open to everything, and back; decoding and bus
//! mastering switched, function-level resets, power states, and garbage in MSI-X tables. Messages, of MSI too, go to a
//! processor that does not exist. Other threads read a BAR and use the drive with the serial number `fuzz.disk`. Registers of the
//! functions are left alone: a device obeys them, and what it then does to memory would be the guest's own doing.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use egm_address::PciAddress;

use super::egm_beat::physical;
use super::fuzz::{in_config, in_table, interesting, messages};
use super::{Context, virtio_blk};
use crate::config_space::{PCI_EXPRESS, capability, msi_message, msix_table};
use crate::error::Broken;
use crate::expect::{Bar, BarKind, DeviceKind, Function, Plan, Role};
use crate::finding::{Claim, Finding};
use crate::pattern::{self, Random};
use crate::sys::{Mapping, Registers};
use crate::sysfs;

/// Accesses until everything gets its header back.
const BURST: usize = 64;
/// RAM that BARs are moved over: pages that lie anywhere.
const RAM: usize = 1 << 20;
/// Bytes of a header, and registers in it (PCI 3.0, 6.1).
const HEADER: usize = 64;
const COMMAND: u64 = 4;
const BARS: u64 = 0x10;
/// A port's windows for 32-bit and for prefetchable memory: base and limit, and the upper halves (PCI-to-PCI Bridge 1.2, 3.2.5).
const WINDOWS: Range<u64> = 0x20..0x30;
/// Windows from 0 to the last byte, of 32 and of 64 bits.
const OPEN: [u8; 16] = [0, 0, 0xf0, 0xff, 1, 0, 0xf1, 0xff, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
/// In the PCI Express capability: device control, and its bit that resets the function (PCI Express 6.0, 7.5.3.4).
const DEVICE_CONTROL: usize = 8;
const RESET: u16 = 1 << 15;
/// Id of the power management capability, and in it control and status.
const POWER: u8 = 1;
const POWER_CONTROL: usize = 4;

/// Number of each action so far.
#[derive(Debug, Default)]
struct Count {
    writes: u64,
    moves: u64,
    commands: u64,
    resets: u64,
    powers: u64,
    table: u64,
}

/// A function and its configuration space.
struct Target {
    config: File,
    header: [u8; HEADER],
}

/// A function that is maltreated.
struct Victim {
    target: Target,
    bars: Vec<Bar>,
    reset: Option<u64>,
    power: Option<u64>,
    /// Bytes of MSI's message.
    message: Option<Range<usize>>,
    /// The BAR with the MSI-X table, and where that is in it.
    table: Option<(Registers, Range<usize>)>,
}

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let seconds = context.args.get("fuzz.seconds", 60)?;
    let serial = context.args.text("fuzz.disk").unwrap_or_default();
    let (disk, victims): (Vec<_>, Vec<_>) = context
        .plan
        .devices()
        .filter(|(_, d)| d.kind == DeviceKind::Other)
        .partition(|(function, _)| drive(function.address, serial).is_some());
    let Some(disk) = disk.first().and_then(|(function, _)| drive(function.address, serial)) else {
        return Ok(Finding::skipped("no host function is the drive that is to be left alone"));
    };
    let functions: Vec<&Function> = victims.iter().map(|(function, _)| *function).collect();
    let mut claim = Claim::default();
    let (stop, read) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut fuzz = Fuzz::open(&context.plan, &functions, context.args.get("fuzz.seed", 1)?)?;
    let kept = thread::scope(|scope| {
        scope.spawn(|| reads(&functions, &stop, &read));
        let worker = scope.spawn(|| works(context, &disk, &stop));
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(seconds) {
            fuzz.restore();
            (0..BURST).for_each(|_| fuzz.step());
            fuzz.look(&mut claim);
        }
        fuzz.restore();
        stop.store(true, Ordering::Relaxed);
        worker.join()
    });
    match kept {
        Ok(Ok((rounds, kept))) => {
            claim.holds(kept, || format!("{disk}, which was left alone, lost what was written"));
            claim.seen(format!("{disk} was written and read {rounds} times"));
        }
        Ok(Err(broken)) => claim.untrue(format!("{disk}, which was left alone, cannot be used: {broken}")),
        Err(_) => claim.untrue("the thread that uses the drive ended early"),
    }
    claim.seen(format!("{:?}, {} reads of BARs", fuzz.count, read.load(Ordering::Relaxed)));
    Ok(claim.finish().with_value(f64::from(u32::try_from(functions.len()).unwrap_or(0)), "functions"))
}

/// The name of the drive at `address` when it has this serial number.
fn drive(address: PciAddress, serial: &str) -> Option<String> {
    let folder = sysfs::pci(address).join("nvme");
    let controller = sysfs::names(&folder).into_iter().next()?;
    let found = sysfs::text(folder.join(&controller).join("serial")).ok()?;
    (found.trim() == serial).then(|| format!("{controller}n1"))
}

/// Uses the drive until `stop`: how often, and whether it kept everything.
fn works(context: &Context, name: &str, stop: &AtomicBool) -> Result<(u64, bool), Broken> {
    let (mut rounds, mut claim) = (0, Claim::default());
    while !stop.load(Ordering::Relaxed) || rounds == 0 {
        virtio_blk::keeps(&mut claim, name, name, &context.args)?;
        rounds += 1;
    }
    Ok((rounds, claim.is_true()))
}

/// Reads the first register of each, which is there or reads ones.
fn reads(functions: &[&Function], stop: &AtomicBool, count: &AtomicU64) {
    let registers: Vec<_> = functions.iter().filter_map(|function| first_bar(function)).collect();
    while !stop.load(Ordering::Relaxed) {
        registers.iter().for_each(|registers| {
            std::hint::black_box(registers.read(0));
        });
        count.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_micros(200));
    }
}

fn open(address: PciAddress, name: &str) -> Result<File, Broken> {
    let path = sysfs::pci(address).join(name);
    File::options().read(true).write(true).open(&path).map_err(Broken::file("open", path))
}

fn bar(function: &Function, index: u8) -> Option<Registers> {
    let size = function.bars.iter().find(|bar| bar.index == index)?.span.size();
    Registers::map(&open(function.address, &format!("resource{index}")).ok()?, usize::try_from(size).ok()?)
        .ok()
}

fn first_bar(function: &Function) -> Option<Registers> {
    bar(function, function.bars.first()?.index)
}

impl Target {
    fn open(address: PciAddress) -> Result<(Self, Vec<u8>), Broken> {
        let config = open(address, "config")?;
        let mut space = vec![0; 256];
        config.read_exact_at(&mut space, 0).map_err(Broken::system(format!("cannot read {address}")))?;
        let mut header = [0; HEADER];
        header.copy_from_slice(&space[..HEADER]);
        Ok((Self { config, header }, space))
    }

    /// From the end, so that the command register comes when all else is right.
    fn restore(&self) {
        for at in (0..HEADER).step_by(4).rev() {
            self.write(at as u64, &self.header[at..at + 4]);
        }
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        // Refused only for what the space does not have.
        let _ = self.config.write_all_at(bytes, offset);
    }
}

impl Victim {
    fn open(function: &Function) -> Result<Self, Broken> {
        let folder = sysfs::pci(function.address);
        // Fails where no driver is bound, which is as good.
        let _ = fs::write(folder.join("driver/unbind"), function.address.to_string());
        let _ = fs::write(folder.join("enable"), "1");
        let (target, space) = Target::open(function.address)?;
        let place = |id, offset| Some((capability(&space, id)? + offset) as u64);
        let table = msix_table(&space).and_then(|table| {
            let holder = function.bars.iter().find(|bar| bar.index == table.bar)?;
            Some((bar(function, table.bar)?, messages(holder, Some(table))))
        });
        Ok(Self {
            target,
            bars: function.bars.clone(),
            reset: place(PCI_EXPRESS, DEVICE_CONTROL),
            power: place(POWER, POWER_CONTROL),
            message: msi_message(&space),
            table,
        })
    }

    /// Puts a BAR at `address`, with decoding off while it moves or not.
    fn place(&self, bar: &Bar, address: u64, quietly: bool) {
        let register = BARS + 4 * u64::from(bar.index);
        let bytes = address.to_le_bytes();
        if quietly {
            self.target.write(COMMAND, &[0]);
        }
        let width = if bar.kind == BarKind::Memory32 { 4 } else { 8 };
        self.target.write(register, &bytes[..4]);
        self.target.write(register + 4, &bytes[4..width]);
        self.target.write(COMMAND, &[self.target.header[4] | 2]);
    }
}

/// Everything that is written to.
struct Fuzz {
    victims: Vec<Victim>,
    /// The ports above the victims alone.
    ports: Vec<Target>,
    /// Memory that BARs are moved over, its addresses, and the pattern in it.
    ram: Mapping,
    pages: Vec<u64>,
    seed: u64,
    random: Random,
    count: Count,
}

impl Fuzz {
    fn open(plan: &Plan, functions: &[&Function], seed: u64) -> Result<Self, Broken> {
        let above = |function: &&Function| match function.role {
            Role::RootPort { secondary, subordinate, .. } => {
                let buses = secondary..=subordinate;
                let mut behind = plan.devices().filter(|(d, _)| buses.contains(&d.address.bus())).peekable();
                behind.peek().is_some()
                    && behind.all(|(d, _)| functions.iter().any(|f| f.address == d.address))
            }
            _ => false,
        };
        let victims =
            functions.iter().map(|function| Victim::open(function)).collect::<Result<Vec<_>, _>>()?;
        let ports = plan.pci.iter().filter(above).map(|port| Target::open(port.address));
        let ports = ports.collect::<Result<Vec<_>, _>>()?.into_iter().map(|(port, _)| port).collect();
        let mut ram = Mapping::new(RAM).map_err(Broken::system("no memory to move BARs over"))?;
        pattern::fill(ram.bytes_mut(), seed, 0, 0);
        let first = physical(&ram)?;
        Ok(Self {
            victims,
            ports,
            ram,
            pages: vec![0, first, 1 << 20],
            seed,
            random: Random::new(seed),
            count: Count::default(),
        })
    }

    fn restore(&self) {
        self.ports.iter().for_each(Target::restore);
        self.victims.iter().for_each(|victim| victim.target.restore());
    }

    /// Memory under BARs still has its pattern, and takes another.
    fn look(&mut self, claim: &mut Claim) {
        let ram = std::hint::black_box(&mut self.ram);
        if let Some(at) = pattern::difference(ram.bytes(), self.seed, 0, 0) {
            claim.untrue(format!("byte {at:#x} of memory changed when BARs were moved over it"));
        }
        self.seed = self.seed.wrapping_add(1);
        pattern::fill(ram.bytes_mut(), self.seed, 0, 0);
    }

    fn step(&mut self) {
        let Self { victims, ports, random, count, pages, .. } = self;
        let number = random.below(victims.len());
        let elsewhere =
            victims.get(random.below(victims.len())).and_then(|v| Some(v.bars.first()?.span.start().get()));
        let Some(victim) = victims.get_mut(number) else { return };
        match random.below(16) {
            0..8 => {
                let size = [1, 2, 4][random.below(3)];
                let space = [HEADER, 256, 4096][random.below(3)];
                let offset = random.below(space) / size * size;
                let write = (offset, size, interesting(random));
                for (offset, size, value) in in_config(victim.message.as_ref(), write) {
                    victim.target.write(offset as u64, &value.to_le_bytes()[..size]);
                }
                count.writes += 1;
            }
            8..11 => {
                for port in ports.iter() {
                    port.write(WINDOWS.start, &OPEN);
                }
                let ram = pages[random.below(pages.len())];
                let other =
                    [ram, ram, elsewhere.unwrap_or(0), random.next() & 0xff_ffff_f000, u64::MAX << 20];
                let address = other[random.below(other.len())];
                if let Some(bar) = victim.bars.get(random.below(victim.bars.len())) {
                    victim.place(bar, address, random.below(2) == 0);
                    count.moves += 1;
                }
            }
            11..13 => {
                victim.target.write(COMMAND, &interesting(random).to_le_bytes()[..2]);
                count.commands += 1;
            }
            13 => {
                if let Some(at) = victim.reset {
                    victim.target.write(at, &RESET.to_le_bytes());
                    count.resets += 1;
                }
            }
            14 => {
                if let Some(at) = victim.power {
                    victim.target.write(at, &[u8::try_from(random.below(4)).unwrap_or(0)]);
                    count.powers += 1;
                }
            }
            _ => {
                if let Some((registers, table)) = &mut victim.table {
                    let offset = random.below(table.len()) & !3;
                    for (at, value) in in_table(offset, interesting(random)) {
                        registers.exchange(table.start + at, value);
                    }
                    count.table += 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use egm_address::Span;
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn a_bar_moves_with_all_its_bits_and_decodes_again_afterwards() {
        let config = File::from(memfd_create("config", MemfdFlags::CLOEXEC).unwrap());
        config.set_len(HEADER as u64).unwrap();
        let target = Target { config, header: [0; HEADER] };
        let span = Span::new(egm_address::Gpa::new(0x4000), 0x4000).unwrap();
        let victim =
            Victim { target, bars: Vec::new(), reset: None, power: None, message: None, table: None };
        victim.place(&Bar { index: 2, kind: BarKind::Memory64, span }, 0x1_2345_6000, true);
        let mut header = [0; HEADER];
        victim.target.config.read_exact_at(&mut header, 0).unwrap();
        assert_eq!(header[0x18..0x20], 0x1_2345_6000_u64.to_le_bytes());
        assert_eq!(header[4] & 2, 2);
        victim.target.restore();
        victim.target.config.read_exact_at(&mut header, 0).unwrap();
        assert_eq!(header, [0; HEADER]);
    }
}
