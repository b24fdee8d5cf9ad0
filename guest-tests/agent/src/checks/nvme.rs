//! Claim: each host function that is an NVMe drive is driven: the drive keeps what is written and flushed, and its
//! interrupts come by MSI-X.
//!
//! Transfers and the signature are those of [`super::virtio_blk`]. The argument `nvme.serial` is the serial number that the
//! drive must have: that it is the right one. `nvme.drives` is the number of drives (default: 1). With `nvme.intx=1`
//! interrupts must come by a line instead.

use super::{Context, virtio_blk};
use crate::error::Broken;
use crate::expect::DeviceKind;
use crate::finding::{Claim, Finding};
use crate::sysfs;

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let mut claim = Claim::default();
    let mut drives = 0u32;
    for (function, device) in context.plan.devices().filter(|(_, d)| d.kind == DeviceKind::Other) {
        let folder = sysfs::pci(function.address).join("nvme");
        let Some(controller) = sysfs::names(&folder).into_iter().next() else { continue };
        drives += 1;
        let id = &device.id;
        let folder = folder.join(&controller);
        if let Some(serial) = context.args.text("nvme.serial") {
            claim.equal(
                format!("the serial number of {id}"),
                &sysfs::text(folder.join("serial"))?.trim(),
                &serial,
            );
        }
        let before = interrupts(&sysfs::text("/proc/interrupts")?, &controller);
        let name = format!("{controller}n1");
        virtio_blk::keeps(&mut claim, &name, id, &context.args)?;
        let after = interrupts(&sysfs::text("/proc/interrupts")?, &controller);
        let fired = after.count.saturating_sub(before.count);
        claim.holds(fired > 0, || format!("no interrupt of {id} came while it was used"));
        let (wrong, way) = match context.args.get("nvme.intx", 0u8)? {
            0 => (after.other, "MSI-X"),
            _ => (after.vectors - after.other, "a line"),
        };
        claim.holds(wrong == 0, || format!("{wrong} vectors of {id} do not come by {way}"));
        claim.seen(format!("{id}: {} vectors, {fired} interrupts", after.vectors));
    }
    if drives == 0 {
        return Ok(Finding::skipped("no host function is an NVMe drive"));
    }
    claim.equal("the number of drives", &drives, &context.args.get("nvme.drives", 1)?);
    Ok(claim.finish().with_value(f64::from(drives), "drives"))
}

/// Interrupts of a device, from `/proc/interrupts`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Interrupts {
    pub(super) vectors: u32,
    /// Of them, not by MSI-X.
    pub(super) other: u32,
    /// Number of interrupts, on all CPUs.
    pub(super) count: u64,
}

/// The queues of `controller` (`nvme0`) are `nvme0q0`, `nvme0q1`, ….
fn interrupts(text: &str, controller: &str) -> Interrupts {
    interrupts_named(text, &format!("{controller}q"))
}

/// The interrupts with names that begin with `prefix`.
pub(super) fn interrupts_named(text: &str, prefix: &str) -> Interrupts {
    let cpus = text.lines().next().map_or(0, |head| head.split_whitespace().count());
    let mut found = Interrupts::default();
    for line in text.lines().skip(1) {
        if !line.split_whitespace().last().is_some_and(|name| name.starts_with(prefix)) {
            continue;
        }
        found.vectors += 1;
        found.other += u32::from(!line.contains("MSI-X") && !line.contains("MSIX"));
        let words = line.split_whitespace().skip(1).take(cpus);
        found.count += words.filter_map(|word| word.parse::<u64>().ok()).sum::<u64>();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queues_of_a_controller_are_counted_over_cpus() {
        let text = "           CPU0       CPU1\n \
                    24:          3          4  PCI-MSIX-0000:01:00.0   0-edge      nvme0q0\n \
                    25:          0          5  PCI-MSIX-0000:01:00.0   1-edge      nvme0q1\n \
                    26:          9          9  IR-IO-APIC   16-fasteoi   nvme1q0\n";
        assert_eq!(interrupts(text, "nvme0"), Interrupts { vectors: 2, other: 0, count: 12 });
        assert_eq!(interrupts(text, "nvme1"), Interrupts { vectors: 1, other: 1, count: 18 });
    }
}
