//! Claim: whatever a guest writes to configuration space, device registers, unused PCI addresses and I/O ports, its VMM
//! lives, and so does the guest.
//!
//! For `fuzz.seconds` (default 60), deterministic by `fuzz.seed` (default 1). Drivers are unbound first; afterwards the
//! devices are of no use. Left alone are the planned ports (serial, power, reset, panic) and those of the interrupt
//! controller and timers, which belong to KVM and which Linux needs.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::Context;
use crate::error::Broken;
use crate::expect::{DeviceKind, Function, Plan, Role, WindowKind};
use crate::finding::{Claim, Finding};
use crate::pattern::Random;
use crate::ports::Ports;
use crate::sys::Registers;
use crate::sysfs;

/// Both PICs, their edge/level registers, the PIT, port 61h and the RTC.
const KEPT_PORTS: [(u16, u16); 6] = [(0x20, 2), (0x40, 4), (0x61, 1), (0x70, 2), (0xa0, 2), (0x4d0, 2)];
/// Accesses between looks at the clock.
const BURST: usize = 64;
/// Most bytes of a register file that are mapped.
const MOST: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// Accesses made, by target.
#[derive(Debug, Default)]
struct Count {
    config: u64,
    registers: u64,
    windows: u64,
    ports: u64,
}

/// What is written to.
struct Targets {
    configs: Vec<File>,
    registers: Vec<Registers>,
    memory: Option<File>,
    windows: Vec<(u64, u64)>,
    ports: Option<Ports>,
    kept_ports: Vec<(u16, u16)>,
}

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let seconds = context.args.get("fuzz.seconds", 60)?;
    let mut random = Random::new(context.args.get("fuzz.seed", 1)?);
    let mut targets = Targets::open(&context.plan)?;
    let mut count = Count::default();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(seconds) {
        for _ in 0..BURST {
            targets.access(&mut random, &mut count);
        }
    }
    let total = count.config + count.registers + count.windows + count.ports;
    let mut claim = Claim::default();
    claim.holds(count.config > 0 && count.registers > 0, || format!("nothing was reached: {count:?}"));
    claim.seen(format!("{count:?}"));
    Ok(claim.finish().with_value(total as f64, "accesses"))
}

/// Functions that the VMM makes and the guest survives without: virtio devices and root ports.
fn fuzzed(plan: &Plan) -> impl Iterator<Item = &Function> {
    plan.pci.iter().filter(|function| match &function.role {
        Role::HostBridge => false,
        Role::RootPort { .. } => true,
        Role::Endpoint { device } => device.kind != DeviceKind::Other,
    })
}

impl Targets {
    fn open(plan: &Plan) -> Result<Self, Broken> {
        let (mut configs, mut registers) = (Vec::new(), Vec::new());
        for function in fuzzed(plan) {
            let folder = sysfs::pci(function.address);
            // Fails where no driver is bound, which is as good.
            let _ = fs::write(folder.join("driver/unbind"), function.address.to_string());
            let _ = fs::write(folder.join("enable"), "1");
            let open = |name: &str| {
                let path = folder.join(name);
                File::options().read(true).write(true).open(&path).map_err(Broken::file("open", path))
            };
            configs.push(open("config")?);
            for bar in &function.bars {
                let size = usize::try_from(bar.span.size().min(MOST)).unwrap_or(0);
                let file = open(&format!("resource{}", bar.index))?;
                registers.push(Registers::map(&file, size).map_err(Broken::system(format!(
                    "cannot map BAR {} of {}",
                    bar.index, function.address
                )))?);
            }
        }
        let in_window =
            |w: &&crate::expect::Window| matches!(w.kind, WindowKind::PciMemory32 | WindowKind::PciMemory64);
        let windows =
            plan.windows.iter().filter(in_window).map(|w| (w.span.start().get(), w.span.size())).collect();
        let planned = plan.ports.iter().map(|port| (port.first, port.count));
        Ok(Self {
            configs,
            registers,
            memory: File::options().read(true).write(true).open("/dev/mem").ok(),
            windows,
            ports: Ports::open(),
            kept_ports: planned.chain(KEPT_PORTS).collect(),
        })
    }

    /// One access somewhere.
    fn access(&mut self, random: &mut Random, count: &mut Count) {
        let value = interesting(random);
        match random.below(16) {
            0..5 => {
                let index = random.below(self.configs.len());
                let Some(config) = self.configs.get(index) else { return };
                let space = if random.below(2) == 0 { 256 } else { 4096 };
                let size = [1, 2, 4][random.below(3)];
                let offset = (random.below(space) / size * size) as u64;
                let bytes = &value.to_le_bytes()[..size];
                count.config += u64::from(config.write_at(bytes, offset).is_ok());
            }
            5..14 => {
                let index = random.below(self.registers.len());
                let Some(registers) = self.registers.get_mut(index) else { return };
                let offset = random.below(registers.size());
                count.registers += u64::from(registers.exchange(offset, value).is_some());
            }
            14 => count.windows += u64::from(self.window(random, value).is_some()),
            _ => {
                let [low, high, width, ..] = random.next().to_le_bytes();
                let port = u16::from_le_bytes([low, high]);
                if let Some(ports) = &self.ports
                    && !touches(&self.kept_ports, port)
                {
                    ports.exchange(port, usize::from(width), value);
                    count.ports += 1;
                }
            }
        }
    }

    /// An access to a random page of a PCI window; the kernel allows those that no driver claims.
    fn window(&self, random: &mut Random, value: u32) -> Option<u32> {
        let (start, size) = *self.windows.get(random.below(self.windows.len()))?;
        let page = start + random.next() % (size / PAGE).max(1) * PAGE;
        let offset = random.below(4096);
        Registers::map_at(self.memory.as_ref()?, page, 4096).ok()?.exchange(offset, value)
    }
}

/// Often a value on an edge, otherwise any.
fn interesting(random: &mut Random) -> u32 {
    match random.below(4) {
        0 => 1u32 << random.below(32),
        1 => [0, 1, 0xff, 0xffff, 0xffff_ffff, 0x8000_0000][random.below(6)],
        _ => random.next_u32(),
    }
}

/// Whether four bytes from `port` share one with a range that is kept.
fn touches(kept: &[(u16, u16)], port: u16) -> bool {
    let (port, end) = (u32::from(port), u32::from(port) + 4);
    kept.iter().any(|(first, count)| {
        let first = u32::from(*first);
        port < first + u32::from(*count) && first < end
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expect::tests::q35;

    #[test]
    fn kept_ports_are_not_touched_by_any_width() {
        let kept = [(0x600, 4)];
        assert!(
            touches(&kept, 0x603)
                && touches(&kept, 0x5fd)
                && !touches(&kept, 0x604)
                && !touches(&kept, 0x5fc)
        );
        assert!(touches(&KEPT_PORTS, 0x61) && !touches(&KEPT_PORTS, 0x80) && !touches(&[], 0xffff));
    }

    #[test]
    fn only_what_the_vmm_makes_is_fuzzed() {
        let plan = q35();
        let addresses: Vec<_> = fuzzed(&plan).map(|f| f.address.to_string()).collect();
        assert_eq!(
            addresses,
            ["0000:00:02.0", "0000:00:03.0", "0000:00:04.0", "0000:00:05.0", "0000:01:00.0"]
        );
    }
}
