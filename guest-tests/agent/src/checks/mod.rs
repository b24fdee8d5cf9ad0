//! The checks: one file a claim.

mod acpi_tables;
mod clock;
mod cpus;
mod hmat;
mod memory_map;
mod numa;
mod pci;
mod rng;

use crate::cmdline::Arguments;
use crate::error::Broken;
use crate::expect::Plan;
use crate::finding::Finding;

/// What a check is given.
#[derive(Debug)]
pub(crate) struct Context {
    /// What was promised.
    pub(crate) plan: Plan,
    /// Arguments from the kernel or shell command line.
    pub(crate) args: Arguments,
}

/// A check of one claim.
#[derive(Debug)]
pub(crate) struct Check {
    /// Name in `egm.checks=`.
    pub(crate) name: &'static str,
    /// What it claims, in one line.
    pub(crate) claim: &'static str,
    /// Whether `all` leaves it out.
    pub(crate) by_name_only: bool,
    /// Decides the claim.
    pub(crate) run: fn(&Context) -> Result<Finding, Broken>,
}

const fn check(
    name: &'static str,
    claim: &'static str,
    run: fn(&Context) -> Result<Finding, Broken>,
) -> Check {
    Check { name, claim, by_name_only: false, run }
}

/// All checks, in the order in which `all` runs them.
pub(crate) const ALL: &[Check] = &[
    check("cpus", "every planned vCPU runs, with the planned topology", cpus::run),
    check("clock", "time moves forward on every vCPU, by kvm-clock or the TSC", clock::run),
    check(
        "memory_map",
        "RAM, PCI windows and ECAM are where they were planned and nowhere else",
        memory_map::run,
    ),
    check("numa", "nodes, their vCPUs, sizes and distances are as planned", numa::run),
    check("acpi_tables", "SRAT, SLIT and HMAT say what was planned, byte by byte", acpi_tables::run),
    check("hmat", "Linux took the planned latencies and bandwidths from the HMAT", hmat::run),
    check("pci", "the PCI tree is the planned one: functions, BARs, buses, windows", pci::run),
    check("rng", "the hardware random number generator is virtio-rng and gives bytes", rng::run),
];

/// The check called `name`.
pub(crate) fn find(name: &str) -> Option<&'static Check> {
    ALL.iter().find(|check| check.name == name)
}

/// Names in the order given, with `all` in place of every check that is not by name only.
pub(crate) fn expand(names: &[String]) -> Vec<String> {
    let all = || ALL.iter().filter(|c| !c.by_name_only).map(|c| c.name.to_owned()).collect();
    names.iter().flat_map(|name| if name == "all" { all() } else { vec![name.clone()] }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_leaves_out_what_runs_by_name_only() {
        let names = expand(&["x".into(), "all".into()]);
        assert_eq!(names[0], "x");
        for check in ALL {
            assert_eq!(names.iter().any(|n| n == check.name), !check.by_name_only, "{}", check.name);
            assert!(std::ptr::eq(find(check.name).unwrap(), check), "{} is there twice", check.name);
        }
    }
}
