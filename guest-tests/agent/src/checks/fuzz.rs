//! Claim: whatever a guest writes to configuration space, device registers, unused PCI addresses and I/O ports, its VMM
//! lives, and so does the guest.
//!
//! For `fuzz.seconds` (default 60), deterministic by `fuzz.seed` (default 1); `fuzz.only` names targets out of
//! `config,registers,windows,ports` to search for the one that did it. Drivers are unbound first; afterwards the devices are
//! of no use. So that the guest lives to report, bus mastering stays off and messages go to a processor that does not
//! exist; `fuzz.dma=1` lifts both, and then only the VMM is to be judged. With `fuzz.passed=1` functions of the host are
//! among the targets. Left alone are the planned ports (serial, power,
//! reset, panic) and those of the interrupt controller and timers, which belong to KVM and which Linux needs.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::Context;
use crate::config_space::{self, MsixTable};
use crate::error::Broken;
use crate::expect::{Bar, DeviceKind, Function, Plan, Role, Window, WindowKind};
use crate::finding::{Claim, Finding};
use crate::pattern::Random;
use crate::ports::Ports;
use crate::sys::Registers;
use crate::sysfs;

/// Both PICs, their edge/level registers, the PIT, port 61h and the RTC.
const KEPT_PORTS: [(u16, u16); 6] = [(0x20, 2), (0x40, 4), (0x61, 1), (0x70, 2), (0xa0, 2), (0x4d0, 2)];
/// Accesses until functions get their BARs and windows back, without which little would be reached.
const BURST: usize = 64;
/// Most bytes of a BAR that are mapped.
const MOST: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// Bytes of the standard header, and the command register in it with its bus master bit (PCI 3.0, 6.1 and 6.2.2).
const HEADER: usize = 64;
const COMMAND: usize = 4;
const BUS_MASTER: u8 = 4;

/// Accesses made, by target.
#[derive(Debug, Default)]
struct Count {
    config: u64,
    registers: u64,
    windows: u64,
    ports: u64,
}

/// Targets of the writes.
struct Targets {
    /// Configuration spaces, their headers before, and where the message of MSI is.
    configs: Vec<(File, [u8; HEADER], Option<Range<usize>>)>,
    /// BARs and where in each the MSI-X table is.
    registers: Vec<(Registers, Range<usize>)>,
    memory: Option<File>,
    windows: Vec<(u64, u64)>,
    ports: Option<Ports>,
    kept_ports: Vec<(u16, u16)>,
    /// Whether devices may write to memory.
    dma: bool,
}

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let seconds = context.args.get("fuzz.seconds", 60)?;
    let mut random = Random::new(context.args.get("fuzz.seed", 1)?);
    let on = |key| context.args.get(key, 0u8).map(|value| value != 0);
    let mut targets = Targets::open(&context.plan, on("fuzz.dma")?, on("fuzz.passed")?)?;
    if let Some(only) = context.args.text("fuzz.only") {
        targets.keep(only);
    }
    let mut count = Count::default();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(seconds) {
        targets.restore();
        for _ in 0..BURST {
            targets.access(&mut random, &mut count);
        }
    }
    targets.restore();
    let total = count.config + count.registers + count.windows + count.ports;
    let mut claim = Claim::default();
    claim.holds(total > 0, || format!("nothing was reached: {count:?}"));
    claim.seen(format!("{count:?}"));
    Ok(claim.finish().with_value(total as f64, "accesses"))
}

/// Functions that the guest survives without: ports, virtio devices and, where they are `passed` too, the host's.
fn fuzzed(plan: &Plan, passed: bool) -> impl Iterator<Item = &Function> {
    plan.pci.iter().filter(move |function| match &function.role {
        Role::HostBridge => false,
        Role::RootPort { .. } => true,
        Role::Endpoint { device, .. } => passed || device.kind != DeviceKind::Other,
    })
}

impl Targets {
    fn open(plan: &Plan, dma: bool, passed: bool) -> Result<Self, Broken> {
        let (mut configs, mut registers) = (Vec::new(), Vec::new());
        for function in fuzzed(plan, passed) {
            let folder = sysfs::pci(function.address);
            // Fails where no driver is bound, which is as good.
            let _ = fs::write(folder.join("driver/unbind"), function.address.to_string());
            let _ = fs::write(folder.join("enable"), "1");
            let open = |name: &str| {
                let path = folder.join(name);
                File::options().read(true).write(true).open(&path).map_err(Broken::file("open", path))
            };
            let mut space = [0; 256];
            let config = open("config")?;
            config.read_exact_at(&mut space, 0).map_err(Broken::file("read", folder.join("config")))?;
            let table = config_space::msix_table(&space);
            for bar in &function.bars {
                let size = usize::try_from(bar.span.size().min(MOST)).unwrap_or(0);
                let mapped = Registers::map(&open(&format!("resource{}", bar.index))?, size);
                let what = format!("cannot map BAR {} of {}", bar.index, function.address);
                registers.push((mapped.map_err(Broken::system(what))?, messages(bar, table)));
            }
            let mut header = [0; HEADER];
            header.copy_from_slice(&space[..HEADER]);
            configs.push((config, header, config_space::msi_message(&space)));
        }
        let in_window = |w: &&Window| matches!(w.kind, WindowKind::PciMemory32 | WindowKind::PciMemory64);
        let planned = plan.ports.iter().map(|port| (port.first, port.count));
        Ok(Self {
            configs,
            registers,
            memory: File::options().read(true).write(true).open("/dev/mem").ok(),
            windows: plan
                .windows
                .iter()
                .filter(in_window)
                .map(|w| (w.span.start().get(), w.span.size()))
                .collect(),
            ports: Ports::open(),
            kept_ports: planned.chain(KEPT_PORTS).collect(),
            dma,
        })
    }

    /// Forgets the targets that the list `only` does not name.
    fn keep(&mut self, only: &str) {
        let named = |target| only.split(',').any(|name| name == target);
        if !named("config") {
            self.configs.clear();
        }
        if !named("registers") {
            self.registers.clear();
        }
        if !named("windows") {
            self.windows.clear();
        }
        if !named("ports") {
            self.ports = None;
        }
    }

    /// Gives functions their headers back, the nearest to the root first.
    fn restore(&self) {
        for (config, header, _) in &self.configs {
            let mut header = *header;
            if !self.dma {
                header[COMMAND] &= !BUS_MASTER;
            }
            // From the end, so that the command register comes when all else is right.
            for at in (0..HEADER).step_by(4).rev() {
                let _ = config.write_all_at(&header[at..at + 4], at as u64);
            }
        }
    }

    /// One access to a target that `random` picks; `count` grows if it was carried out.
    fn access(&mut self, random: &mut Random, count: &mut Count) {
        match random.below(16) {
            0..5 => count.config += u64::from(self.config(random).is_some()),
            5..14 => count.registers += u64::from(self.register(random).is_some()),
            14 => count.windows += u64::from(self.window(random).is_some()),
            _ => count.ports += u64::from(self.port(random).is_some()),
        }
    }

    fn config(&self, random: &mut Random) -> Option<usize> {
        let (config, _, message) = self.configs.get(random.below(self.configs.len()))?;
        let size = [1, 2, 4][random.below(3)];
        let space = if random.below(2) == 0 { 256 } else { 4096 };
        let offset = random.below(space) / size * size;
        let mut value = interesting(random);
        if offset == COMMAND && !self.dma {
            value &= !u32::from(BUS_MASTER);
        }
        let message = message.as_ref().filter(|_| !self.dma);
        in_config(message, (offset, size, value))
            .map(|(offset, size, value)| config.write_at(&value.to_le_bytes()[..size], offset as u64).ok())
            .last()?
    }

    fn register(&mut self, random: &mut Random) -> Option<u32> {
        let index = random.below(self.registers.len());
        let (registers, table) = self.registers.get_mut(index)?;
        let offset = random.below(registers.size()) & !3;
        let value = interesting(random);
        if !table.contains(&offset) || self.dma {
            return registers.exchange(offset, value);
        }
        in_table(offset - table.start, value)
            .map(|(at, value)| registers.exchange(table.start + at, value))
            .last()?
    }

    /// An access to a random page of a PCI window; the kernel allows those that no driver claims.
    fn window(&self, random: &mut Random) -> Option<u32> {
        let (start, size) = *self.windows.get(random.below(self.windows.len()))?;
        let page = start + random.next() % (size / PAGE).max(1) * PAGE;
        let offset = random.below(4096);
        let mut registers = Registers::map_at(self.memory.as_ref()?, page, 4096).ok()?;
        registers.exchange(offset, interesting(random))
    }

    fn port(&self, random: &mut Random) -> Option<()> {
        let [low, high, width, ..] = random.next().to_le_bytes();
        let port = u16::from_le_bytes([low, high]);
        let value = interesting(random);
        let ports = self.ports.as_ref().filter(|_| !touches(&self.kept_ports, port))?;
        ports.exchange(port, usize::from(width), value);
        Some(())
    }
}

/// Bytes of the MSI-X table in `bar`; empty when it is not there.
pub(super) fn messages(bar: &Bar, table: Option<MsixTable>) -> Range<usize> {
    table.filter(|table| table.bar == bar.index).map_or(0..0, |table| {
        let start = usize::try_from(table.offset).unwrap_or(usize::MAX);
        start..start.saturating_add(16 * usize::from(table.entries))
    })
}

/// A write: offset, bytes, value.
pub(super) type Write = (usize, usize, u32);

/// Words of a fixed interrupt, vector ffh, for the APIC ID feh, physical mode, which no processor has (Intel SDM 3A, 12.11).
/// Another message could be an INIT or, where messages are plain writes, hit RAM.
///
/// No processor may get vector ffh: Linux takes it for a spurious interrupt, which has no bit in the in-service register,
/// and writes no EOI. The processor then accepts no interrupt any more (Intel SDM 3A, 12.9).
const NOWHERE: [u32; 3] = [0xfeef_e000, 0, 0xff];
/// The same of a function that has no upper half of the address.
const NARROW: [u32; 2] = [NOWHERE[0], NOWHERE[2]];

/// Writes in place of one of `value` to the word at `offset` of an MSI-X table: the message of its entry goes nowhere, and
/// only then `value` may unmask it.
pub(super) fn in_table(offset: usize, value: u32) -> impl Iterator<Item = (usize, u32)> {
    let entry = offset & !15;
    let control = (offset % 16 / 4 == 3).then_some((entry + 12, value));
    (entry..).step_by(4).zip(NOWHERE).chain(control)
}

/// Writes in place of `write` to configuration space: where it touches the word that enables MSI or the message after it,
/// the `message` goes nowhere first.
pub(super) fn in_config(message: Option<&Range<usize>>, write: Write) -> impl Iterator<Item = Write> {
    let word = write.0 & !3;
    let near = message.filter(|message| message.contains(&word) || word + 4 == message.start);
    let aimed = near.into_iter().flat_map(|message| {
        let words: &[u32] = if message.len() > 8 { &NOWHERE } else { &NARROW };
        message.clone().step_by(4).zip(words).map(|(at, value)| (at, 4, *value))
    });
    aimed.chain(Some(write).filter(|_| near.is_none_or(|message| word < message.start)))
}

/// Often a value on an edge, otherwise any.
pub(super) fn interesting(random: &mut Random) -> u32 {
    match random.below(4) {
        0 => 1u32 << random.below(32),
        1 => [0, 1, 0xff, 0xffff, 0xffff_ffff, 0x8000_0000][random.below(6)],
        _ => random.next_u32(),
    }
}

/// Whether four bytes from `port` share one with a range that is kept, or leave the ports.
fn touches(kept: &[(u16, u16)], port: u16) -> bool {
    let (port, end) = (u32::from(port), u32::from(port) + 4);
    end > 1 << 16
        || kept.iter().any(|(first, count)| {
            let first = u32::from(*first);
            port < first + u32::from(*count) && first < end
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expect::tests::q35;

    #[test]
    fn msi_is_enabled_only_with_a_message_to_no_processor() {
        let (wide, narrow) = (0x54..0x60, 0x54..0x5c);
        let writes = |message, write| in_config(message, write).collect::<Vec<_>>();
        let aimed = [(0x54, 4, 0xfeef_e000), (0x58, 4, 0), (0x5c, 4, 0xff)];
        assert_eq!(writes(Some(&wide), (0x55, 1, 0xff)), aimed);
        assert_eq!(writes(Some(&wide), (0x5e, 2, 0x0500)), aimed);
        assert_eq!(writes(Some(&narrow), (0x58, 2, 0x0500)), [(0x54, 4, 0xfeef_e000), (0x58, 4, 0xff)]);
        assert_eq!(writes(Some(&wide), (0x52, 2, 1)), [aimed.as_slice(), &[(0x52, 2, 1)]].concat());
        for beside in [(0x4e, 2, 1), (0x60, 4, 7)] {
            assert_eq!(writes(Some(&wide), beside), [beside]);
        }
        assert_eq!(writes(None, (0x54, 4, 0x0500)), [(0x54, 4, 0x0500)]);
    }

    #[test]
    fn kept_ports_are_not_touched_by_any_width() {
        let kept = [(0x600, 4)];
        assert!(
            touches(&kept, 0x603)
                && touches(&kept, 0x5fd)
                && !touches(&kept, 0x604)
                && !touches(&kept, 0x5fc)
        );
        assert!(touches(&KEPT_PORTS, 0x61) && !touches(&KEPT_PORTS, 0x80));
        assert!(touches(&[], 0xfffd) && !touches(&[], 0xfffc));
    }

    #[test]
    fn only_what_the_vmm_makes_is_fuzzed_unless_asked() {
        let plan = q35();
        let addresses: Vec<_> = fuzzed(&plan, false).map(|f| f.address.to_string()).collect();
        assert_eq!(
            addresses,
            ["0000:00:02.0", "0000:00:03.0", "0000:00:04.0", "0000:00:05.0", "0000:01:00.0"]
        );
        assert!(fuzzed(&plan, true).count() > addresses.len());
    }

    #[test]
    fn a_message_goes_to_no_processor() {
        let table = Some(MsixTable { bar: 4, offset: 0x2000, entries: 3 });
        let plan = q35();
        let blk = &plan.pci[2];
        assert_eq!(
            blk.bars.iter().map(|bar| messages(bar, table)).collect::<Vec<_>>(),
            [0..0, 0x2000..0x2030]
        );
        let aimed = [(0x30, 0xfeef_e000), (0x34, 0), (0x38, 0xff)];
        for word in [0x30, 0x34, 0x38] {
            assert_eq!(in_table(word, 0x0500).collect::<Vec<_>>(), aimed);
        }
        let unmasked = [aimed.as_slice(), &[(0x3c, 0)]].concat();
        assert_eq!(in_table(0x3c, 0).collect::<Vec<_>>(), unmasked);
    }
}
