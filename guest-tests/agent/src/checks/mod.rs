//! The checks: one file a claim.

mod acpi_numa;
mod acpi_tables;
mod arm_tables;
mod assigned_fuzz;
mod assigned_net;
mod clock;
mod cpus;
mod disk_busy;
mod edu;
mod egm_aperture;
mod egm_bandwidth;
mod egm_bar;
mod egm_beat;
mod egm_commands;
mod egm_device;
mod egm_events;
mod egm_pattern;
mod functions;
mod fuzz;
mod gpu_memory;
mod hmat;
mod hotplug;
mod memory_map;
mod msix;
mod numa;
mod nvme;
mod pci;
mod power_button;
mod restarts;
mod restored;
mod rng;
mod validate;
mod virtio_blk;
mod virtio_net;
mod vsock;

use crate::cmdline::Arguments;
use crate::error::Broken;
use crate::expect::Plan;
use crate::finding::Finding;
use crate::sysfs;

/// Input of a check.
#[derive(Debug)]
pub(crate) struct Context {
    /// The plan of this guest.
    pub(crate) plan: Plan,
    /// Arguments from the kernel or shell command line.
    pub(crate) args: Arguments,
}

/// A check of one claim.
#[derive(Debug)]
pub(crate) struct Check {
    /// Name by which `egm.checks=` and `egm-guest run` select it.
    pub(crate) name: &'static str,
    /// The claim, in one line.
    pub(crate) claim: &'static str,
    /// Whether `all` leaves it out.
    pub(crate) by_name_only: bool,
    pub(crate) run: Decide,
}

/// Code that decides a claim.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Decide {
    /// It compares the guest with its plan.
    Planned(fn(&Context) -> Result<Finding, Broken>),
    /// It needs no plan: the monitor may be another one.
    Alone(fn(&Arguments) -> Result<Finding, Broken>),
}

/// Bytes that NUMA node `number` (Linux's number) has free.
fn free_memory(number: u32) -> Result<usize, Broken> {
    let path = format!("/sys/devices/system/node/node{number}/meminfo");
    let text = sysfs::text(&path)?;
    sysfs::node_meminfo(&text, number, "MemFree")
        .and_then(|bytes| usize::try_from(bytes).ok())
        .ok_or_else(|| Broken::text(path, &text, "a node's meminfo with MemFree"))
}

const fn check(
    name: &'static str,
    claim: &'static str,
    run: fn(&Context) -> Result<Finding, Broken>,
) -> Check {
    Check { name, claim, by_name_only: false, run: Decide::Planned(run) }
}

const fn alone(
    name: &'static str,
    claim: &'static str,
    run: fn(&Arguments) -> Result<Finding, Broken>,
) -> Check {
    Check { name, claim, by_name_only: false, run: Decide::Alone(run) }
}

/// Not part of `all`: it disturbs the guest or has no end of its own.
const fn by_name(check: Check) -> Check {
    Check { by_name_only: true, ..check }
}

/// All checks, in the order in which `all` runs them.
pub(crate) static ALL: &[Check] = &[
    check("cpus", "every planned vCPU runs, with the planned topology", cpus::run),
    check("clock", "time moves forward on every vCPU, by kvm-clock or the TSC", clock::run),
    check(
        "memory_map",
        "RAM, PCI windows and ECAM are where they were planned and nowhere else",
        memory_map::run,
    ),
    check("numa", "nodes, their vCPUs, sizes and distances are as planned", numa::run),
    check("acpi_tables", "SRAT, SLIT and HMAT are as planned, byte by byte", acpi_tables::run),
    by_name(check("acpi_numa", "the kernel logs that it took the planned nodes from ACPI", acpi_numa::run)),
    check("hmat", "Linux took the planned latencies and bandwidths from the HMAT", hmat::run),
    check("pci", "the PCI tree is the planned one: functions, BARs, buses, windows", pci::run),
    check("rng", "the hardware random number generator is virtio-rng and gives bytes", rng::run),
    check(
        "virtio_blk",
        "disks keep what is written and flushed, discard, and refuse writes when read-only",
        virtio_blk::run,
    ),
    check("nvme", "an assigned NVMe drive keeps what is written, with interrupts by MSI-X", nvme::run),
    check("edu", "an assigned DMA engine reaches memory, the EGM node and other functions' BARs", edu::run),
    check(
        "gpu_memory",
        "memory of an assigned GPU keeps its values, all that there is, and beyond it nothing does",
        gpu_memory::run,
    ),
    check(
        "functions",
        "assigned functions with copy engines reach memory, the EGM node and each other's BARs",
        functions::run,
    ),
    check(
        "passed_net",
        "bytes go through an assigned network card and back, with interrupts by MSI-X",
        assigned_net::run,
    ),
    check("virtio_net", "UDP and TCP through the tap come back byte for byte", virtio_net::run),
    check("vsock", "256 KiB to the host's vsock port come back byte for byte", vsock::run),
    check("msix", "each virtio device has its MSI-X vectors and they fire", msix::run),
    check(
        "egm_pattern",
        "the EGM node's free memory, at least 90 % of it, keeps its values and lies on the node",
        egm_pattern::run,
    ),
    check(
        "egm_bandwidth",
        "EGM memory is as fast as ordinary memory (a figure, not a verdict)",
        egm_bandwidth::run,
    ),
    alone(
        "egm_device",
        "a slice behind a PCI function matches its capability, keeps its bytes, and answers doorbells",
        egm_device::run,
    ),
    by_name(check(
        "egm_bar",
        "a slice behind a BAR is as fast as one that is memory (figures of each round, not a verdict)",
        egm_bar::run,
    )),
    by_name(alone(
        "egm_commands",
        "egm-guest list and test print what slices behind PCI functions are, and end as documented; their bytes are lost",
        egm_commands::run,
    )),
    by_name(alone(
        "egm_plugged",
        "a slice behind a PCI function that is plugged in passes egm_device, and goes when its owner requests it",
        egm_events::plugged,
    )),
    by_name(alone(
        "egm_wanted",
        "the owner of a slice behind a PCI function asks for it: an interrupt comes, and the guest gives it",
        egm_events::wanted,
    )),
    by_name(alone(
        "egm_lost",
        "a slice behind a PCI function reads ones after its server has died, but for memory that the monitor has mapped",
        egm_events::lost,
    )),
    by_name(alone(
        "validate",
        "egm-guest validate finds nothing wrong with this guest, and egm-guest doctor has something to say",
        validate::run,
    )),
    by_name(check(
        "power_button",
        "the guest gets an event of its power button, which the host presses",
        power_button::run,
    )),
    by_name(check(
        "restarts",
        "the guest starts again after each of its resets, and its disk has what the start before wrote",
        restarts::run,
    )),
    by_name(check(
        "restored",
        "a guest that is saved, and restored in another process, keeps its memory, its requests and its time",
        restored::run,
    )),
    by_name(check(
        "disk_busy",
        "writes and flushes until the machine ends, saying `egm-busy N`",
        disk_busy::run,
    )),
    by_name(check(
        "egm_beat",
        "a word on the EGM node counts, for the host to find it, until the machine ends",
        egm_beat::run,
    )),
    by_name(check(
        "passed_fuzz",
        "assigned functions are reset and moved over memory; the VMM must live, and a drive that is left alone work",
        assigned_fuzz::run,
    )),
    by_name(check(
        "hotplug",
        "a device that is plugged in works, and goes when the host requests it",
        hotplug::run,
    )),
    by_name(check(
        "function_lost",
        "an assigned function that its host takes away leaves the guest, which goes on",
        functions::lost,
    )),
    by_name(check(
        "egm_aperture",
        "an assigned GPU reads and writes the slice of another owner, which is what trust domains are for",
        egm_aperture::run,
    )),
    by_name(check("fuzz", "random config space, port and MMIO writes; the VMM must live", fuzz::run)),
];

/// The check called `name`.
pub(crate) fn find(name: &str) -> Option<&'static Check> {
    ALL.iter().find(|check| check.name == name)
}

/// A check to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Selected {
    /// Its name, which may be that of no check.
    pub(crate) name: String,
    /// Whether it is selected by its own name, and not by `all`.
    pub(crate) required: bool,
}

/// The selected checks in the order given, with `all` in place of every check that is not by name only; of those that need a plan
/// only when there is one.
pub(crate) fn expand(names: &[String], planned: bool) -> Vec<Selected> {
    let applies = |check: &&Check| !check.by_name_only && (planned || matches!(check.run, Decide::Alone(_)));
    let selected = |name: &str, required| Selected { name: name.to_owned(), required };
    let all = || ALL.iter().filter(applies).map(|check| selected(check.name, false)).collect();
    names.iter().flat_map(|name| if name == "all" { all() } else { vec![selected(name, true)] }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_leaves_out_what_runs_by_name_only() {
        let names = expand(&["x".into(), "all".into()], true);
        assert_eq!(names[0], Selected { name: "x".into(), required: true });
        for check in ALL {
            let selected = Selected { name: check.name.into(), required: false };
            assert_eq!(names.contains(&selected), !check.by_name_only, "{}", check.name);
            assert!(std::ptr::eq(find(check.name).unwrap(), check), "{} is there twice", check.name);
        }
    }

    #[test]
    fn without_a_plan_all_is_what_needs_none() {
        let names = |word: &str| -> Vec<(String, bool)> {
            expand(&[word.into()], false).into_iter().map(|one| (one.name, one.required)).collect()
        };
        assert_eq!(names("all"), [("egm_device".to_owned(), false)]);
        assert_eq!(names("numa"), [("numa".to_owned(), true)], "a check by name reports the missing plan");
    }
}
