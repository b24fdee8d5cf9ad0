//! Claim: a drive that comes while the guest runs is driven, and goes without harm when the host requests it.
//!
//! The guest prints `egm-hotplug plug N` and waits for a drive, which it writes and reads; it resets the drive's bus
//! and does so again; then it prints `egm-hotplug unplug N` and waits for it to go. So `hotplug.rounds` times (default
//! 1). The reader of the console plugs it in and out.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::{Context, virtio_blk};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::sysfs;

/// A drive comes within seconds, and goes within the ten that Linux waits for second thoughts; an emulated guest is slower.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Interval between two looks for it.
const LOOK: Duration = Duration::from_millis(100);

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let mut claim = Claim::default();
    let rounds: u32 = context.args.get("hotplug.rounds", 1)?;
    for round in 1..=rounds {
        print_event(&format!("plug {round}"));
        let Some((controller, address)) = wait(drive) else {
            claim.untrue(format!("no drive came in round {round}"));
            break;
        };
        let keeps = |claim: &mut Claim| {
            virtio_blk::keeps(claim, &format!("{controller}n1"), &controller, &context.args)
        };
        keeps(&mut claim)?;
        let reset = reset_bus(&Path::new("/sys/bus/pci/devices").join(&address));
        claim.holds(reset.is_ok(), || format!("the bus of {address} cannot be reset: {reset:?}"));
        keeps(&mut claim)?;
        print_event(&format!("unplug {round}"));
        let gone = || (!Path::new("/sys/bus/pci/devices").join(&address).exists()).then_some(());
        claim.holds(wait(gone).is_some(), || format!("{address} did not go in round {round}"));
        claim.seen(format!("{controller} at {address} came and went"));
    }
    Ok(claim.finish().with_value(f64::from(rounds), "drives"))
}

/// Secondary Bus Reset of the port above (PCI Express base specification 6.0, 7.5.1.3.13), as the kernel does it for a function.
fn reset_bus(device: &Path) -> io::Result<()> {
    fs::write(device.join("reset_method"), "bus")?;
    fs::write(device.join("reset"), "1")
}

/// Standard error is the console; standard output is the report.
fn print_event(what: &str) {
    let _ = io::stderr().write_all(format!("egm-hotplug {what}\n").as_bytes());
}

/// A drive with a name space that can be opened, and where it is. The kernel makes the device file before that.
fn drive() -> Option<(String, String)> {
    let class = Path::new("/sys/class/nvme");
    sysfs::names(class).into_iter().find_map(|name| {
        let device = fs::read_link(class.join(&name).join("device")).ok()?;
        let address = device.file_name()?.to_string_lossy().into_owned();
        let opened = File::open(Path::new("/dev").join(format!("{name}n1")));
        opened.is_ok().then_some((name, address))
    })
}

/// The result of `look`, if it comes in time.
pub(super) fn wait<T>(look: impl Fn() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    loop {
        let found = look();
        if found.is_some() || begun.elapsed() > TIMEOUT {
            return found;
        }
        thread::sleep(LOOK);
    }
}
