//! Claims about a slice behind a PCI function, to which something happens while the guest runs. The guest prints on its
//! console what it waits for; the reader of the console makes it happen.
//!
//! No driver has the function, so its vector is aimed at an interrupt that Linux counts and does nothing else about:
//! the one that notifies a processor of posted interrupts, `PIN` in `/proc/interrupts`. Nothing else raises it in a
//! guest that runs no guests.

use std::fs;
use std::io::Write;
use std::path::Path;

use super::egm_device::{QUIESCE, check};
use super::hotplug::wait;
use crate::cmdline::Arguments;
use crate::egm_function::{self, Function, narrow};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::{config_space, sysfs};

/// The vector by which the owner asks for the slice, and its bit.
const WANTED: usize = 2;
const WANTED_BIT: u32 = 1 << WANTED;
/// MSI to the processor with APIC id 0, fixed, edge (Intel SDM volume 3, 11.11).
const TO_FIRST: u32 = 0xfee0_0000;
/// Linux's vector for the notification of posted interrupts, `POSTED_INTR_VECTOR`.
const POSTED: u32 = 0xf2;
/// In the MSI-X message control (PCI 3.0, 6.8.2.3).
const ENABLED: u16 = 1 << 15;
const MASKED: u16 = 1 << 14;
/// The command register, and its bits: it decodes memory, it may send interrupts.
const COMMAND: usize = 4;
const DECODES_AND_SENDS: u16 = 1 << 1 | 1 << 2;

/// A function that is plugged in passes the check of one that was there, and goes when the guest has given it back.
pub(super) fn plugged(_: &Arguments) -> Result<Finding, Broken> {
    let mut claim = Claim::default();
    let before = addresses();
    print_event("plug");
    let Some(address) = came(&before) else {
        claim.untrue("no function came");
        return Ok(claim.finish());
    };
    // The kernel shows a function before its BARs have their places and their files.
    let ready = Path::new("/sys/bus/pci/devices").join(&address).join("resource2");
    let is_it = |found: &egm_memory::Function| found.address.to_string() == address;
    let found = wait(|| ready.exists().then(egm_function::all)?.ok()?.into_iter().find(is_it));
    let Some(found) = found else {
        claim.untrue(format!("{address} has no place for its BARs, or is another function"));
        return Ok(claim.finish());
    };
    check(&mut claim, &found)?;
    print_event("unplug");
    let folder = sysfs::pci(found.address);
    claim.holds(wait(|| (!folder.exists()).then_some(())).is_some(), || format!("{address} did not go"));
    Ok(claim.finish())
}

/// The owner's request interrupts the guest and stays pending until the guest has seen it; the guest quiesces.
pub(super) fn wanted(args: &Arguments) -> Result<Finding, Broken> {
    let Some(function) = first()? else { return Ok(none()) };
    let Some(before) = posted()? else {
        return Ok(Finding::skipped("this kernel does not count posted interrupts"));
    };
    let mut claim = Claim::default();
    aim(&function)?;
    let word = |at| function.registers.read_word(at);
    let events = word(narrow::EVENTS);
    claim.equal("what is pending before", &(word(narrow::PENDING) & WANTED_BIT), &0);
    print_event("want");
    // The interrupt, not the register: that it comes is the claim.
    let came = wait(|| posted().ok().flatten().filter(|count| *count > before));
    claim.equal("the interrupts", &came.map(|count| count - before), &Some(1));
    claim.equal("what is pending", &(word(narrow::PENDING) & WANTED_BIT), &WANTED_BIT);
    claim.equal("the events", &word(narrow::EVENTS), &events.wrapping_add(1));
    function.registers.write_word(narrow::PENDING, WANTED_BIT);
    claim.equal("what is pending, confirmed", &(word(narrow::PENDING) & WANTED_BIT), &0);
    function.registers.write_word(narrow::DOORBELL, QUIESCE);
    without_server(&mut claim, &function, args)?;
    Ok(claim.finish())
}

/// A function without its server reads ones, but for memory that the monitor has mapped. The guest leaves it alone
/// until a newly plugged function shows that the server is dead: QEMU (11.1.3) aborts if it dies during a request.
pub(super) fn lost(args: &Arguments) -> Result<Finding, Broken> {
    let Some(function) = first()? else { return Ok(none()) };
    let mut claim = Claim::default();
    let (word, before) = (function.memory.read(0), addresses());
    print_event("lost");
    claim
        .holds(came(&before).is_some(), || "no function appeared, so the end of the server was not reported");
    without_server(&mut claim, &function, args)?;
    claim.equal("the first word", &function.memory.read(0), &word);
    Ok(claim.finish())
}

fn addresses() -> Vec<String> {
    sysfs::names("/sys/bus/pci/devices")
}

/// The function that is plugged in. Others' configuration is left alone: their monitor may have to ask a server for each word.
fn came(before: &[String]) -> Option<String> {
    wait(|| addresses().into_iter().find(|address| !before.contains(address)))
}

fn first() -> Result<Option<Function>, Broken> {
    egm_function::all()?.first().map(Function::open).transpose()
}

fn none() -> Finding {
    Finding::skipped("the guest has no slice behind a PCI function")
}

/// The registers of a function without a server read ones. `egm_events.ones=false` is for a monitor that gives the guest other
/// bytes: they can be read, and no value is expected.
fn without_server(claim: &mut Claim, function: &Function, args: &Arguments) -> Result<(), Broken> {
    if args.get("egm_events.ones", true)? {
        claim.holds(silent(function), || "its registers still answer");
    } else {
        claim.seen(format!("its magic reads {:#x}", function.registers.read_word(narrow::MAGIC)));
    }
    Ok(())
}

/// Whether the registers come to read ones.
fn silent(function: &Function) -> bool {
    wait(|| (function.registers.read_word(narrow::MAGIC) == u32::MAX).then_some(())).is_some()
}

/// Aims the vector at the first processor's interrupt for posted interrupts, and unmasks it alone.
fn aim(function: &Function) -> Result<(), Broken> {
    let unfit = |what| Broken::Argument(function.found.address.to_string(), what);
    let table = function.vectors()?.ok_or_else(|| unfit("has no MSI-X table with its registers"))?;
    if usize::from(table.entries) <= WANTED {
        return Err(unfit("has no vector for a request of its owner"));
    }
    let offset = usize::try_from(table.offset).map_err(|_| unfit("has a table far away"))?;
    let entry = offset + 16 * WANTED;
    for (at, word) in [(0, TO_FIRST), (4, 0), (8, POSTED), (12, 0)] {
        function.registers.write_word(entry + at, word);
    }
    function.change(COMMAND, DECODES_AND_SENDS, 0)?;
    let config = sysfs::bytes(sysfs::pci(function.found.address).join("config"))?;
    let control = config_space::capability(&config, config_space::MSIX);
    function.change(control.ok_or_else(|| unfit("has no MSI-X"))? + 2, ENABLED, MASKED)
}

/// Interrupts for posted interrupts so far, on all processors; `None` where the kernel does not count them.
fn posted() -> Result<Option<u64>, Broken> {
    const PATH: &str = "/proc/interrupts";
    Ok(count(&fs::read_to_string(PATH).map_err(Broken::file("read", PATH))?))
}

fn count(interrupts: &str) -> Option<u64> {
    let line = sysfs::field(interrupts, "PIN")?;
    Some(line.split_whitespace().map_while(|word| word.parse::<u64>().ok()).sum())
}

/// Standard error is the console; standard output is the report.
fn print_event(what: &str) {
    let _ = std::io::stderr().write_all(format!("egm-device {what}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn posted_interrupts_are_counted_on_all_processors() {
        let text = "            CPU0       CPU1\n  0:   21   0  IO-APIC\nPIN:    1    2   Posted-interrupt notification event\n";
        assert_eq!(count(text), Some(3));
        assert_eq!(count("NMI: 0 0 Non-maskable interrupts\n"), None);
    }
}
