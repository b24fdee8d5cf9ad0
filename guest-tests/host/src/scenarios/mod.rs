//! The scenarios: each is data in a file of its own.

mod assigned;
mod boots;
mod broker;
mod button;
mod confined;
mod debian_root;
mod demo;
mod grace;
mod hostile;
mod kernel;
mod panic;
mod peer;
mod plugged;
mod poison;
mod ram;
mod rdma;
mod reset;
pub(crate) mod run_scenario;
mod sigterm;
mod slices;
mod smp;
mod snapshot;
mod steps;
mod user;
mod vfio;

use crate::engine::error::LabError;
use crate::engine::scenario::{Fault, GraceKernel, PLAIN, Runs, Scenario, SliceTest, WITH_FAULT};

/// Every scenario, in the order in which they run.
pub(crate) const ALL: &[Scenario] = &[
    demo::SCENARIO,
    ram::HUGETLB,
    smp::SCENARIO,
    reset::SCENARIO,
    reset::REBOOT,
    snapshot::SNAPSHOT,
    snapshot::UPGRADE,
    panic::SCENARIO,
    sigterm::SCENARIO,
    button::SCENARIO,
    hostile::SCENARIO,
    slices::MEM,
    slices::MEMMAP,
    slices::DEVDAX,
    slices::DEVDAX_OWNERS,
    slices::DEVDAX_OWNED,
    slices::FSDAX,
    slices::HUGETLB,
    slices::MEMFD,
    slices::GUEST_MEMFD,
    slices::DEVICE,
    slices::DEVICE_KINDS,
    broker::SCENARIO,
    poison::FOUND,
    poison::READ,
    kernel::TESTS,
    vfio::NVME,
    vfio::REBOOT,
    vfio::IOMMUFD,
    vfio::INTX,
    vfio::DMA,
    vfio::DMA_OWN,
    vfio::SWITCH,
    vfio::HOSTILE,
    assigned::NET,
    assigned::SWITCHED,
    assigned::MOVES,
    assigned::PAIR,
    assigned::FAULT,
    assigned::ERROR,
    assigned::REFUSED,
    assigned::RESET,
    assigned::DMA_KINDS,
    assigned::DMA_IOMMUFD,
    assigned::ROUNDS,
    confined::MEM,
    confined::PIN,
    confined::PIN_IOMMUFD,
    plugged::HOTPLUG,
    plugged::REQUEST,
    plugged::VIRTIO,
    plugged::SLICE,
    user::SERVED,
    user::PLUGGED,
    peer::QEMU,
    peer::CLOUD_HYPERVISOR,
    rdma::CARDS,
    rdma::VIRTIO,
    grace::STOCK,
    grace::REBOOT,
    ram::GRACE_HUGETLB,
    grace::DEMO,
    grace::EGM,
    grace::NVME,
    grace::INTX,
    grace::USER,
    grace::GPU,
    grace::VFIO_USER_GPU,
    grace::TRUST,
    confined::GRACE_EGM,
    grace::RDMA,
    grace::NODES,
    grace::AGAIN,
    grace::MEDIUM_PAGES,
    grace::LARGE_PAGES,
    grace::POISON,
    grace::READ,
    boots::SCENARIO,
    debian_root::SCENARIO,
    plugged::PULLED,
    plugged::PULLED_IOMMUFD,
];

/// The scenarios called `names`, or without names all those that are run by default.
pub(crate) fn select(names: &[String], full: bool) -> Result<Vec<Scenario>, LabError> {
    if names.is_empty() {
        return Ok(ALL.iter().copied().filter(|s| full || !s.long).collect());
    }
    names.iter().map(|name| find(name)).collect()
}

fn find(name: &str) -> Result<Scenario, LabError> {
    if let Some((scenario, fault)) = name.split_once(WITH_FAULT) {
        let scenario = find(scenario)?;
        // Names live as long as the program, as those of the scenarios themselves.
        let fault = Fault { name: String::leak(fault.to_owned()), of: scenario.name };
        return Ok(Scenario { name: String::leak(name.to_owned()), fault: Some(fault), ..scenario });
    }
    ALL.iter().copied().find(|s| s.name == name).ok_or_else(|| {
        let known: Vec<_> = ALL.iter().map(|s| s.name).collect();
        LabError::Usage(format!("no scenario \"{name}\": there are {}", known.join(", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_scenarios_have_a_kernel_of_the_lab() {
        for s in ALL.iter().filter(|s| !s.long) {
            assert!(
                !s.needs_own_kernel() && (!s.grace || matches!(s.grace_kernel, GraceKernel::Debian)),
                "{}",
                s.name
            );
        }
    }

    #[test]
    fn names_are_unique_and_fit_a_directory() {
        for (i, scenario) in ALL.iter().enumerate() {
            assert!(scenario.name.chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{}", scenario.name);
            assert!(!scenario.summary.is_empty());
            assert!(ALL.iter().skip(i + 1).all(|other| other.name != scenario.name));
        }
    }

    /// A reader assumes that a scenario without such a note is part of every run.
    #[test]
    fn the_pages_list_the_scenarios_that_run_only_on_request() {
        let pages = [
            include_str!("../../../../README.md"),
            include_str!("../../../../docs/evidence.md"),
            include_str!("../../../../docs/security.md"),
        ]
        .concat();
        for scenario in ALL.iter().filter(|scenario| scenario.long) {
            let name = format!("`{}`", scenario.name);
            for line in pages.lines().filter(|line| line.contains("| scenario") && line.contains(&name)) {
                assert!(line.contains("--full"), "{name} in {line}");
            }
        }
    }

    #[test]
    fn an_unknown_scenario_is_an_error_that_lists_the_known_ones() {
        let error = select(&["dmeo".into()], false).unwrap_err();
        assert!(error.to_string().contains("demo") && error.exit_code() == 2);
    }

    /// The names after `key` in `words`.
    fn listed<'w>(words: &'w str, key: &str) -> Vec<&'w str> {
        words
            .split_whitespace()
            .filter_map(|word| word.strip_prefix(key))
            .flat_map(|list| list.split(','))
            .collect()
    }

    #[test]
    fn every_scenario_requires_what_its_guest_runs() {
        for scenario in ALL.iter().filter(|scenario| !scenario.debian) {
            let required = scenario.expected.checks;
            let names =
                [listed(scenario.words, "egm.checks="), listed(scenario.words, "egm.validate=")].concat();
            // A guest that is stopped while it writes does not report.
            if scenario.terminate_on.is_none() {
                assert!(names.iter().all(|name| required.contains(name)), "{}: {names:?}", scenario.name);
            }
            assert!(required.iter().all(|name| names.contains(name)), "{}: {required:?}", scenario.name);
            // Steps without words of the scenario choose the checks of each of their machines.
            let chooses = scenario.runs != Runs::Steps || !scenario.words.is_empty();
            assert!(!chooses || !names.is_empty(), "{} runs every check", scenario.name);
        }
    }

    #[test]
    fn long_ones_run_only_when_asked_for() {
        assert!(select(&[], false).unwrap().iter().all(|s| !s.long));
        assert_eq!(select(&[], true).unwrap().len(), ALL.len());
        assert_eq!(select(&["boots".into()], false).unwrap().len(), 1);
    }
}
