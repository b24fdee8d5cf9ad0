//! Links run as fast and as wide as both ends can, BARs have addresses, and no errors were counted.

use egm_guest::findings::Figure;

use super::Validation;
use crate::finding::{Claim, Finding};
use crate::sysfs;
use crate::tree::{self, NVIDIA, Tree};

pub(super) static ALL: &[Validation] = &[
    Validation {
        name: "pci.links",
        claim: "every link has the speed and width that both of its ends can",
        run: |_| Ok(links(&Tree::live())),
    },
    Validation {
        name: "pci.bars",
        claim: "every BAR has an address, and those of 256 MiB and more are 64-bit and prefetchable",
        run: |_| Ok(bars(&Tree::live())),
    },
    Validation {
        name: "pci.errors",
        claim: "no uncorrectable error was counted (AER); corrected ones are named",
        run: |_| Ok(errors(&Tree::live())),
    },
];

/// Flags of Linux's `ioport.h`: memory, prefetchable, 64-bit, and without an address.
const MEMORY: u64 = 0x200;
const PREFETCH: u64 = 0x2000;
const MEMORY_64: u64 = 0x10_0000;
const UNSET: u64 = 0x2000_0000;
/// From this size on a BAR that is not 64-bit and prefetchable is in the way of others.
const LARGE: u64 = 256 << 20;
const NONE: &str = "this machine has no PCI functions in /sys/bus/pci/devices";

/// A function's link: what it is and what it can, in 10^9 transfers a second, and lanes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Link {
    /// Present speed, in 10^9 transfers a second.
    pub(crate) speed: f64,
    /// Number of lanes in use.
    pub(crate) width: u64,
    /// Speed that it can.
    pub(crate) max_speed: f64,
    /// Lanes that it has.
    pub(crate) max_width: u64,
}

/// The link of a function towards the root; `None` without one, or if unknown ("Unknown", 0, 63 or 255 lanes).
pub(crate) fn link(tree: &Tree, function: &str) -> Option<Link> {
    let speed = |file: &str| {
        let text = tree.word(&tree::pci(function, file))?;
        text.split_whitespace().next()?.parse::<f64>().ok().filter(|speed| *speed > 0.0)
    };
    let width = |file: &str| tree.number(&tree::pci(function, file)).filter(|lanes| (1..=32).contains(lanes));
    Some(Link {
        speed: speed("current_link_speed")?,
        width: width("current_link_width")?,
        max_speed: speed("max_link_speed")?,
        max_width: width("max_link_width")?,
    })
}

/// The function above, towards the root: a port; `None` at the root.
pub(crate) fn above(tree: &Tree, function: &str) -> Option<String> {
    let names = tree.real(&tree::pci(function, ""))?;
    let [.., port, _] = names.as_slice() else { return None };
    port.parse::<egm_address::PciAddress>().ok().map(|_| port.clone())
}

fn links(tree: &Tree) -> Finding {
    let functions = tree.functions();
    if functions.is_empty() {
        return Finding::skipped(NONE);
    }
    let (mut claim, mut known) = (Claim::default(), 0);
    let mut figures = Vec::new();
    for function in &functions {
        let (Some(link), Some(port)) = (link(tree, function), above(tree, function)) else { continue };
        known += 1;
        let upper = self::link(tree, &port).unwrap_or(link);
        let (speed, width) = (link.max_speed.min(upper.max_speed), link.max_width.min(upper.max_width));
        let end = format!("{function}, {} GT/s x{} of {speed} GT/s x{width}", link.speed, link.width);
        claim.holds(link.width >= width, || {
            format!("{end}: lanes are missing: reseat the card, look at its slot")
        });
        if link.speed < speed {
            let is_gpu = tree.is_of(function, NVIDIA) && tree.class(function).is_some_and(tree::is_display);
            if is_gpu {
                claim.seen(format!("{end}: an idle GPU lowers its speed, look again under load"));
            } else {
                claim.untrue(format!("{end}: it was trained slower than both ends can"));
            }
        }
        let mut lanes = [f64::from(u32::try_from(link.width).unwrap_or(0))];
        figures.push(Figure::of(format!("width, {function}"), None, "lanes", &mut lanes));
        figures.push(Figure::of(format!("speed, {function}"), None, "GT/s", &mut [link.speed]));
    }
    if known == 0 {
        return Finding::skipped(format!(
            "none of {} functions is behind a port and reports speed and width of its link: emulated PCI Express links have \
             none; look on the host",
            functions.len()
        ));
    }
    claim.seen(format!("{known} links"));
    claim.finish().with_figures(figures)
}

/// A BAR as the kernel has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bar {
    pub(crate) index: usize,
    pub(crate) start: u64,
    /// Bytes from `start` on.
    pub(crate) size: u64,
    pub(crate) flags: u64,
}

impl Bar {
    /// Whether it is memory that may be prefetched.
    pub(crate) const fn is_prefetchable(self) -> bool {
        self.flags & (MEMORY | PREFETCH) == MEMORY | PREFETCH
    }
}

/// The memory BARs of a function.
pub(crate) fn memory_bars(tree: &Tree, function: &str) -> Vec<Bar> {
    let text = tree.text(&tree::pci(function, "resource")).unwrap_or_default();
    let bar = |(index, line): (usize, &str)| {
        let numbers: Option<Vec<u64>> = line.split_whitespace().map(sysfs::parse_number).collect();
        let [start, last, flags] = numbers?.try_into().ok()?;
        let size = last.checked_sub(start)?.checked_add(1)?;
        (flags & MEMORY != 0).then_some(Bar { index, start, size, flags })
    };
    text.lines().take(6).enumerate().filter_map(bar).collect()
}

fn bars(tree: &Tree) -> Finding {
    let functions = tree.functions();
    if functions.is_empty() {
        return Finding::skipped(NONE);
    }
    let (mut claim, mut count) = (Claim::default(), 0);
    for function in &functions {
        for bar in memory_bars(tree, function) {
            count += 1;
            let name = format!("BAR {} of {function}, {:#x} bytes", bar.index, bar.size);
            if bar.start == 0 || bar.flags & UNSET != 0 {
                claim.untrue(format!(
                    "{name}, has no address: the VMM's window for 64-bit BARs is too small, or the firmware's"
                ));
            } else if bar.size >= LARGE {
                claim.holds(bar.flags & MEMORY_64 != 0, || format!("{name}, is no 64-bit BAR"));
                claim.holds(bar.is_prefetchable(), || format!("{name}, is not prefetchable"));
                claim.seen(format!("{name}, at {:#x}", bar.start));
            }
        }
    }
    claim.seen(format!("{count} memory BARs of {} functions", functions.len()));
    claim.finish()
}

/// The total of a function's AER counters of one kind.
fn counted(tree: &Tree, function: &str, kind: &str) -> Option<u64> {
    let text = tree.text(&tree::pci(function, &format!("aer_dev_{kind}")))?;
    text.lines().find_map(|line| line.strip_prefix("TOTAL_ERR_")?.split_once(' ')?.1.trim().parse().ok())
}

fn errors(tree: &Tree) -> Finding {
    let functions = tree.functions();
    let (mut claim, mut counters) = (Claim::default(), 0);
    for function in &functions {
        for kind in ["fatal", "nonfatal", "correctable"] {
            let Some(count) = counted(tree, function, kind) else { continue };
            counters += 1;
            match (kind, count) {
                (_, 0) => {}
                ("correctable", _) => claim
                    .seen(format!("{function} corrected {count} errors: a link that wears out begins so")),
                _ => claim.untrue(format!("{function} counted {count} {kind} errors: see dmesg for AER")),
            }
        }
    }
    if counters == 0 {
        return Finding::skipped(
            "no function has AER counters: the host keeps them (a guest's ports are emulated), or the kernel has no CONFIG_PCIEAER",
        );
    }
    claim.seen(format!("{counters} counters"));
    claim.finish()
}

#[cfg(test)]
mod tests {
    use egm_guest::findings::Outcome;

    use super::*;
    use crate::tree::tests::recorded;

    /// A port and a function behind it.
    fn machine(port: &str, end: &str, more: &str) -> (tempfile::TempDir, Tree) {
        let mut text = String::new();
        let root = "/sys/devices/pci0000:00/0000:00:01.0";
        for (folder, link) in [(root.to_owned(), port), (format!("{root}/0000:01:00.0"), end)] {
            let [speed, width, max_speed, max_width] =
                link.split(' ').collect::<Vec<_>>().try_into().unwrap();
            for (file, value) in [
                ("current_link_speed", format!("{speed} GT/s PCIe")),
                ("current_link_width", width.to_owned()),
                ("max_link_speed", format!("{max_speed} GT/s PCIe")),
                ("max_link_width", max_width.to_owned()),
            ] {
                text.push_str(&format!("== {folder}/{file}\n{value}\n"));
            }
        }
        text.push_str("-> /sys/bus/pci/devices/0000:00:01.0 ../../../devices/pci0000:00/0000:00:01.0\n");
        text.push_str(
            "-> /sys/bus/pci/devices/0000:01:00.0 ../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0\n",
        );
        recorded(&(text + more))
    }

    #[test]
    fn a_link_is_held_against_what_both_ends_can() {
        let judged = |port: &str, end: &str| {
            let (_folder, tree) = machine(port, end, "");
            links(&tree)
        };
        assert_eq!(judged("32.0 16 32.0 16", "32.0 16 32.0 16").outcome, Outcome::Passed);
        assert_eq!(
            judged("16.0 8 16.0 8", "16.0 8 32.0 16").outcome,
            Outcome::Passed,
            "its port can no more"
        );
        let narrow = judged("32.0 8 32.0 16", "32.0 8 32.0 16");
        assert!(narrow.reason.contains("32 GT/s x8 of 32 GT/s x16: lanes are missing"), "{}", narrow.reason);
        assert_eq!(judged("32.0 16 32.0 16", "2.5 16 32.0 16").outcome, Outcome::Failed);
        assert_eq!(judged("Unknown 0 Unknown 255", "Unknown 0 Unknown 255").outcome, Outcome::Skipped);
    }

    #[test]
    fn an_idle_gpu_is_no_fault() {
        let gpu = "== /sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/vendor\n0x10de\n\
                   == /sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/class\n0x030200\n";
        let (_folder, tree) = machine("2.5 16 32.0 16", "2.5 16 32.0 16", gpu);
        let finding = links(&tree);
        assert_eq!(finding.outcome, Outcome::Passed);
        assert!(finding.reason.contains("idle GPU"), "{}", finding.reason);
    }

    #[test]
    fn a_large_bar_is_64_bit_and_prefetchable_and_every_one_has_an_address() {
        let judged = |line: &str| {
            let (_folder, tree) =
                recorded(&format!("== /sys/bus/pci/devices/0000:01:00.0/resource\n{line}\n0x0 0x0 0x0\n"));
            bars(&tree)
        };
        assert_eq!(judged("0x380000000000 0x383fffffffff 0x14220c").outcome, Outcome::Passed);
        for (line, said) in [
            ("0x0 0x3fffffffff 0x14220c", "has no address"),
            ("0x380000000000 0x383fffffffff 0x2014220c", "has no address"),
            ("0x380000000000 0x383fffffffff 0x140204", "is not prefetchable"),
            ("0x80000000 0x9fffffff 0x4220c", "is no 64-bit BAR"),
        ] {
            let finding = judged(line);
            assert!(
                finding.outcome == Outcome::Failed && finding.reason.contains(said),
                "{line}: {}",
                finding.reason
            );
        }
        assert_eq!(judged("0x0 strange").outcome, Outcome::Passed, "no BAR can be read of it");
    }

    #[test]
    fn uncorrectable_errors_fail_and_corrected_ones_are_named() {
        let judged = |file: &str, count: u32| {
            let (_folder, tree) = recorded(&format!(
                "== /sys/bus/pci/devices/0000:01:00.0/aer_dev_{file}\nRxErr 0\nTOTAL_ERR_X {count}\n"
            ));
            errors(&tree)
        };
        assert_eq!(judged("fatal", 0).outcome, Outcome::Passed);
        assert_eq!(judged("nonfatal", 2).outcome, Outcome::Failed);
        let corrected = judged("correctable", 3);
        assert_eq!(corrected.outcome, Outcome::Passed);
        assert!(corrected.reason.contains("corrected 3 errors"), "{}", corrected.reason);
        let (_folder, none) = recorded("");
        assert_eq!((errors(&none).outcome, links(&none).outcome), (Outcome::Skipped, Outcome::Skipped));
    }
}
