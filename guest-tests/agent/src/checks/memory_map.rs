//! Claim: the guest has RAM at every planned address and at no other, and sees PCI windows and ECAM where they were planned.
//!
//! Read from `/proc/iomem` (what the kernel uses) and `/sys/firmware/memmap` (what it was given). Below 1 MiB the
//! kernel keeps parts for itself; elsewhere every page must be there.

use egm_address::{Gpa, Guest, Span, SpanSet, align_down, align_up};

use super::Context;
use crate::error::Broken;
use crate::expect::{Plan, WindowKind, first_mebibyte};
use crate::finding::{Claim, Finding};
use crate::sysfs;

pub(super) fn run(context: &Context) -> Result<Finding, Broken> {
    let text = sysfs::text("/proc/iomem")?;
    let mut claim = Claim::default();
    let regions = parse(&text)?;
    judge(&mut claim, &context.plan, &regions);
    let reported = reported_by_firmware()?;
    if !reported.is_empty() {
        let beyond = reported.minus(&all_planned(&context.plan));
        claim.holds(beyond.is_empty(), || {
            format!("firmware reports RAM that is not planned: {}", spans(&beyond))
        });
        let unreported = context.plan.usable(None).minus(&first_mebibyte()).minus(&reported);
        claim.holds(unreported.is_empty(), || {
            format!("firmware does not report planned RAM: {}", spans(&unreported))
        });
    }
    let ram = named(&regions, "System RAM").size();
    claim.seen(format!("{} ranges of System RAM", regions.iter().filter(|r| r.name == "System RAM").count()));
    Ok(claim.finish().with_value(mebibytes(ram), "MiB"))
}

/// A figure for a report; exact up to 2^53 bytes.
pub(super) fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// An entry of `/proc/iomem` that is in no other.
#[derive(Debug, Clone, PartialEq)]
struct Region {
    span: Span<Guest>,
    name: String,
}

/// Reads the outermost entries of `/proc/iomem`.
fn parse(text: &str) -> Result<Vec<Region>, Broken> {
    let form = "`first-last : name` in hexadecimal";
    let mut regions = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with(' ') && !line.is_empty()) {
        let wrong = || Broken::text("/proc/iomem", line, form);
        let (range, name) = line.split_once(" : ").ok_or_else(wrong)?;
        let (first, last) = range.split_once('-').ok_or_else(wrong)?;
        let number = |digits| u64::from_str_radix(digits, 16).ok();
        let span = inclusive(number(first).ok_or_else(wrong)?, number(last).ok_or_else(wrong)?);
        regions.push(Region { span: span.ok_or_else(wrong)?, name: name.trim().to_owned() });
    }
    if regions.iter().all(|r| r.span.size() == 1) {
        return Err(Broken::text("/proc/iomem", "0-0", "readable without privilege: run as root"));
    }
    Ok(regions)
}

fn inclusive(first: u64, last: u64) -> Option<Span<Guest>> {
    Span::between(Gpa::new(first), Gpa::new(last.checked_add(1)?))
}

fn named(regions: &[Region], start: &str) -> SpanSet<Guest> {
    regions.iter().filter(|r| r.name.starts_with(start)).map(|r| r.span).collect()
}

/// Addresses of the kernel: with address space randomisation anywhere in RAM, also in an EGM node.
pub(super) fn kernel_image(iomem: &str) -> SpanSet<Guest> {
    let parts = iomem.lines().filter(|line| line.contains(" : Kernel "));
    parts
        .filter_map(|line| {
            let (first, last) = line.trim().split_once(" : ")?.0.split_once('-')?;
            inclusive(u64::from_str_radix(first, 16).ok()?, u64::from_str_radix(last, 16).ok()?)
        })
        .collect()
}

fn windows(plan: &Plan, kinds: &[WindowKind]) -> SpanSet<Guest> {
    plan.windows.iter().filter(|w| kinds.contains(&w.kind)).map(|w| w.span).collect()
}

fn all_planned(plan: &Plan) -> SpanSet<Guest> {
    plan.memory.iter().map(|m| m.span).collect()
}

fn spans(set: &SpanSet<Guest>) -> String {
    set.iter().map(|span| span.to_string()).collect::<Vec<_>>().join(", ")
}

fn judge(claim: &mut Claim, plan: &Plan, regions: &[Region]) {
    let ram = named(regions, "System RAM");
    let unplanned = ram.minus(&all_planned(plan));
    claim.holds(unplanned.is_empty(), || format!("RAM that is not planned: {}", spans(&unplanned)));
    let missing = whole_pages(&plan.usable(None).minus(&first_mebibyte()).minus(&ram));
    claim.holds(missing.is_empty(), || format!("planned RAM that is missing: {}", spans(&missing)));

    let low = first_mebibyte(); // the legacy video window belongs to every x86 host bridge
    let planned = windows(plan, &[WindowKind::PciMemory32, WindowKind::PciMemory64]);
    let seen = named(regions, "PCI Bus ").minus(&low);
    if planned != seen {
        claim.untrue(format!("PCI windows are {}, planned {}", spans(&seen), spans(&planned)));
    }
    let planned = windows(plan, &[WindowKind::Ecam]);
    let mut seen = named(regions, "PCI ECAM");
    if seen.is_empty() {
        seen = named(regions, "PCI MMCONFIG"); // its name before Linux 6.9
    }
    if planned != seen {
        claim.untrue(format!("ECAM is {}, planned {}", spans(&seen), spans(&planned)));
    }
}

/// Spans without the parts of pages at their ends.
fn whole_pages(set: &SpanSet<Guest>) -> SpanSet<Guest> {
    const PAGE: u64 = 4096;
    set.iter()
        .filter_map(|span| {
            let start = align_up(span.start().get(), PAGE)?;
            Span::between(Gpa::new(start), Gpa::new(align_down(span.end().get(), PAGE)))
        })
        .collect()
}

/// RAM in the memory map that firmware handed over; empty where the kernel does not keep it.
fn reported_by_firmware() -> Result<SpanSet<Guest>, Broken> {
    const FOLDER: &str = "/sys/firmware/memmap";
    let mut ram = Vec::new();
    for entry in sysfs::names(FOLDER) {
        let file = |name| format!("{FOLDER}/{entry}/{name}");
        if sysfs::text(file("type"))?.trim() == "System RAM" {
            ram.extend(inclusive(sysfs::number(file("start"))?, sysfs::number(file("end"))?));
        }
    }
    Ok(ram.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expect::tests::q35;

    const IOMEM: &str = include_str!("../../fixtures/q35/iomem");

    fn judged(plan: &Plan, text: &str) -> String {
        let mut claim = Claim::default();
        judge(&mut claim, plan, &parse(text).unwrap());
        claim.finish().reason
    }

    #[test]
    fn a_recorded_map_is_as_planned() {
        assert_eq!(judged(&q35(), IOMEM), "");
    }

    #[test]
    fn the_kernel_image_is_found_inside_ram() {
        let image = kernel_image(IOMEM);
        assert!(image.iter().next().is_some_and(|code| code.start() == Gpa::new(0x12c0_0000)));
        assert_eq!(image.size(), 0x1aa_8000 + 0x27_2c80 + 0x52_a000);
    }

    #[test]
    fn missing_and_unplanned_ram_is_named() {
        let short = IOMEM.replace("00100000-2ffd8fff", "00100000-2ffc8fff");
        assert_eq!(judged(&q35(), &short), "planned RAM that is missing: 0x2ffc9000..0x2ffd9000");
        let more = format!("{IOMEM}900000000-90000ffff : System RAM\n");
        assert_eq!(judged(&q35(), &more), "RAM that is not planned: 0x900000000..0x900010000");
    }

    #[test]
    fn moved_windows_are_named() {
        let moved = IOMEM.replace("100000000-8ffffffff", "200000000-8ffffffff");
        assert!(judged(&q35(), &moved).starts_with("PCI windows are "));
        let gone = IOMEM.replace("PCI ECAM", "Something");
        assert_eq!(judged(&q35(), &gone), "ECAM is , planned 0xb0000000..0xc0000000");
    }

    #[test]
    fn a_map_without_privilege_is_not_taken_for_an_empty_machine() {
        assert!(parse("00000000-00000000 : System RAM\n00000000-00000000 : Reserved\n").is_err());
        assert!(parse("100-fff System RAM").is_err());
    }
}
