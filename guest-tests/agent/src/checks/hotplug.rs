//! Claim: a device that comes while the guest runs is driven, and goes without harm when the host requests it.
//!
//! For each of `hotplug.devices` (separated by commas, default `nvme`) the guest prints `egm-hotplug plug N` and waits
//! for a device of that kind. It prints `egm-hotplug found ADDRESS` and uses the device; then it prints
//! `egm-hotplug unplug N` and waits for the device to go. The reader of the console plugs it in and out.
//!
//! | kind | use |
//! |---|---|
//! | `nvme` | the drive is written and read, before and after a reset of its bus |
//! | `disk` | the last block has the text `hotplug.text`; then the virtio disk is written and read |
//! | `net` | the virtio interface has the hardware address `hotplug.mac`; datagrams and streams come back |
//! | `slice` | the slice behind the function is zero; then it is used as in check `egm_device` |

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use egm_address::PciAddress;

use super::{Context, egm_device, virtio_blk, virtio_net};
use crate::egm_function;
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::sysfs;

/// A device comes within seconds, and goes within the ten that Linux waits for second thoughts; an emulated guest is slower.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Interval between two looks for it.
const LOOK: Duration = Duration::from_millis(100);

/// Kinds of devices that come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Nvme,
    Disk,
    Net,
    Slice,
}

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let kinds = Kind::list(context.args.text("hotplug.devices").unwrap_or("nvme"))?;
    let mut claim = Claim::default();
    for (round, kind) in (1..).zip(&kinds) {
        let before: Vec<PciAddress> = functions().collect();
        print_event(&format!("plug {round}"));
        let Some((name, address)) = wait(|| kind.find()) else {
            claim.untrue(format!("no {kind:?} came in round {round}"));
            break;
        };
        print_event(&format!("found {address}"));
        let others: Vec<PciAddress> =
            functions().filter(|other| *other != address && !before.contains(other)).collect();
        claim.equal(format!("the other functions that came in round {round}"), &others, &Vec::new());
        kind.exercise(&mut claim, context, &name, address)?;
        print_event(&format!("unplug {round}"));
        let folder = sysfs::pci(address);
        let gone = || (!folder.exists()).then_some(());
        claim.holds(wait(gone).is_some(), || format!("{address} did not go in round {round}"));
        claim.seen(format!("{name} at {address} came and went"));
    }
    Ok(claim.finish().with_value(kinds.len() as f64, "devices"))
}

impl Kind {
    /// The kinds of `names`, which commas separate.
    fn list(names: &str) -> Result<Vec<Self>, Broken> {
        let kind = |name: &str| match name {
            "nvme" => Ok(Self::Nvme),
            "disk" => Ok(Self::Disk),
            "net" => Ok(Self::Net),
            "slice" => Ok(Self::Slice),
            _ => Err(Broken::Argument(format!("hotplug.devices={names}"), "has an unknown kind")),
        };
        names.split(',').map(kind).collect()
    }

    /// A device of this kind that can be used: the kernel's name of it, and its address.
    fn find(self) -> Option<(String, PciAddress)> {
        functions().find_map(|address| Some((self.name(address)?, address)))
    }

    /// The kernel's name of the device at `address`, if it is of this kind. A disk can be opened later than it has a name.
    fn name(self, address: PciAddress) -> Option<String> {
        let disk = match self {
            Self::Nvme => {
                let controller = sysfs::names(sysfs::pci(address).join("nvme")).into_iter().next()?;
                format!("{controller}n1")
            }
            Self::Disk => virtio_blk::name(address)?,
            Self::Net => return sysfs::virtio_child(address, "net"),
            Self::Slice => return egm_function::at(address).ok()?.map(|_| "slice".to_owned()),
        };
        File::open(Path::new("/dev").join(&disk)).is_ok().then_some(disk)
    }

    /// Uses the device `name` of this kind.
    fn exercise(
        self,
        claim: &mut Claim,
        context: &Context,
        name: &str,
        address: PciAddress,
    ) -> Result<(), Broken> {
        let args = &context.args;
        match self {
            Self::Nvme => {
                virtio_blk::keeps(claim, name, name, args)?;
                let reset = reset_bus(&sysfs::pci(address));
                claim.holds(reset.is_ok(), || format!("the bus of {address} cannot be reset: {reset:?}"));
                virtio_blk::keeps(claim, name, name, args)
            }
            Self::Disk => {
                let (text, planned) = (virtio_blk::last_text(name)?, args.text("hotplug.text"));
                claim.equal(format!("the last block of {name}"), &Some(text.as_str()), &planned);
                virtio_blk::keeps(claim, name, name, args)
            }
            Self::Net => {
                let mac = sysfs::text(format!("/sys/class/net/{name}/address"))?;
                let planned = args.text("hotplug.mac");
                claim.equal(format!("the hardware address of {name}"), &Some(mac.trim()), &planned);
                virtio_net::carries(claim, context, name).map(drop)
            }
            Self::Slice => {
                let function = egm_function::at(address)?;
                let before = function.map(|function| egm_device::check(claim, &function)).transpose()?;
                claim.equal("the number of checks that its memory has seen", &before, &Some(0));
                Ok(())
            }
        }
    }
}

/// The PCI functions that the guest has now.
fn functions() -> impl Iterator<Item = PciAddress> {
    sysfs::names("/sys/bus/pci/devices").into_iter().filter_map(|name| name.parse().ok())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_read_in_order_and_another_one_is_refused_by_its_argument() {
        assert_eq!(Kind::list("disk,net,nvme").unwrap(), [Kind::Disk, Kind::Net, Kind::Nvme]);
        for names in ["", "disk,", "floppy"] {
            let error = Kind::list(names).unwrap_err().to_string();
            assert!(error.contains(&format!("hotplug.devices={names}")), "{error}");
        }
    }
}
