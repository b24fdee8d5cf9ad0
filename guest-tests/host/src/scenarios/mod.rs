//! The scenarios: each is data in a file of its own.

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
mod passed;
mod peer;
mod plugged;
mod poison;
mod ram;
mod rdma;
mod reset;
mod sigterm;
mod slices;
mod smp;
mod user;
mod vfio;

use std::time::Duration;

use egm_guest::findings::Check;

use crate::disk::Proof;
use crate::error::LabError;
use crate::judge::{Expected, case};
use crate::peer_program::PeerName;
use crate::steps::StepsOf;

/// One machine, the checks of its guest, and its expected end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scenario {
    /// Its name on the command line and in reports.
    pub(crate) name: &'static str,
    /// Its claim, in a sentence.
    pub(crate) summary: &'static str,
    /// A file of configs/, which the scenario extends by a kernel, an initramfs and a command line.
    pub(crate) config: &'static str,
    /// More words on the kernel command line: the agent's checks, their arguments and the end of the guest.
    pub(crate) words: &'static str,
    /// The word for how its guest ends, where that is not by power off.
    pub(crate) end: &'static str,
    /// Expected exit code and checks.
    pub(crate) expected: Expected,
    /// The VMM gets SIGTERM when the guest writes a line that contains this.
    pub(crate) terminate_on: Option<&'static str>,
    /// The same with SIGPWR, which presses the guest's power button.
    pub(crate) press_on: Option<&'static str>,
    /// Region of its EGM slice, for the scenarios of slices, which have boots of their own.
    pub(crate) region: Option<&'static str>,
    /// Whether its guest has no other memory: the slice is its node 0, with its processor.
    pub(crate) slice_alone: bool,
    /// RAM of its guest in hugetlb pages, in place of its file's RAM.
    pub(crate) hugetlb_ram: Option<HugetlbRam>,
    /// Whether its emulated PC sets a hugetlb page of 1 GiB aside at its boot.
    pub(crate) gigantic: bool,
    /// Kind of slice scenario.
    pub(crate) slice_test: SliceTest,
    /// The function that runs its steps, when those are more than boots of one machine.
    pub(crate) steps: Option<StepsOf>,
    /// Whether its guest's kernel is the one for every machine, which has drivers of network cards.
    pub(crate) generic: bool,
    /// Whether its guest's kernel has RDMA, and its agent is linked to a libc, with the libraries for that.
    pub(crate) rdma: bool,
    /// Its vCPUs, when they are not its file's.
    pub(crate) vcpus: Option<u32>,
    /// Host functions that are assigned to its guest.
    pub(crate) passed: &'static [&'static str],
    /// Taps, with a virtio network card of its guest for each, in addition to those of its file.
    pub(crate) taps: &'static [&'static str],
    /// Sockets of vfio-user servers; its guest has their functions, too.
    pub(crate) servers: &'static [&'static str],
    /// Whether the emulated host has GPUs of the lab's own, and a PC a network card.
    pub(crate) plugged: bool,
    /// Whether they are opened through iommufd, in an emulated host that has it.
    pub(crate) iommufd: bool,
    /// Whether its emulated host needs a kernel of our own for something other than iommufd that Debian's lacks.
    pub(crate) own_kernel: bool,
    /// Whether its host is a Grace one, emulated or not.
    pub(crate) grace: bool,
    /// Kernel of the emulated Grace host.
    pub(crate) grace_kernel: GraceKernel,
    /// Text that the VMM must print on standard error.
    pub(crate) prints: Option<&'static str>,
    /// Data that must be on the first disk afterwards.
    pub(crate) disk: Option<Proof>,
    /// Whether a Debian root file system is on the first disk and reports, in place of the agent.
    pub(crate) debian: bool,
    /// Whether it runs tests of `egm-device`.
    pub(crate) tests: bool,
    /// Boots in a row.
    pub(crate) boots: u32,
    /// Time for one boot, under emulation on two slow cores.
    pub(crate) deadline: Duration,
    /// Whether its guests run on this machine where others run in the emulated host: in an emulator, without privilege.
    pub(crate) outside: bool,
    /// The monitor that runs its guests, which the user provides.
    pub(crate) peer: Option<PeerName>,
    /// Whether it runs only by name or with `--full`.
    pub(crate) long: bool,
    /// The fault that is planted in its host's programs; its name is then `SCENARIO+FAULT`.
    pub(crate) fault: Option<Fault>,
}

/// A planted fault.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fault {
    /// Its name.
    pub(crate) name: &'static str,
    /// The scenario's name without it.
    pub(crate) of: &'static str,
}

impl Scenario {
    /// For a Grace host's scenario, checks that this host has the page size of the scenario's kernel.
    pub(crate) fn page_size(&self) -> Option<Check> {
        let (is, planned) = (rustix::param::page_size(), self.grace_kernel.page());
        let fault = (is != planned).then(|| format!("the host's pages have {is} bytes, not {planned}"));
        self.grace.then(|| case("page-size", fault, 0))
    }

    /// Whether its emulated PC has a kernel of our own.
    pub(crate) fn needs_own_kernel(&self) -> bool {
        self.iommufd || self.own_kernel
    }
}

/// Guest RAM in hugetlb pages of one size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HugetlbRam {
    /// Its size, as configurations have it.
    pub(crate) size: &'static str,
    /// The size of its pages, as configurations have it.
    pub(crate) page_size: &'static str,
    /// The size of its pages, in KiB.
    pub(crate) page_kib: u64,
    /// Number of its pages.
    pub(crate) pages: u64,
}

/// The kernel of an emulated Grace host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GraceKernel {
    /// Debian's: nothing is built, and nothing is there that makes it a Grace host.
    Debian,
    /// Debian's with pages of 16 KiB.
    Debian16k,
    /// Ours, with the drivers of GPUs and EGM.
    Own,
    /// The same with pages of 64 KiB.
    LargePages,
}

impl GraceKernel {
    /// Bytes of its pages.
    pub(crate) const fn page(self) -> usize {
        match self {
            Self::Debian | Self::Own => 4 << 10,
            Self::Debian16k => 16 << 10,
            Self::LargePages => 64 << 10,
        }
    }
}

/// Kinds of scenarios about a slice.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SliceTest {
    /// It is used, exclusive, scrubbed, returned.
    Owned,
    /// The same of a file of a file system, which has little room.
    File,
    /// A page of it goes bad.
    BadPage,
    /// A broker grants it and its neighbour.
    Granted,
    /// It is the machine's own memfd or guest_memfd: no other process grants it.
    Own,
    /// It is a PCI function.
    Device,
}

impl SliceTest {
    /// Size of a slice of a lab region, each of 1 GiB: one slice fits, or two from a broker.
    pub(crate) const fn slice(self) -> &'static str {
        match self {
            Self::Owned | Self::BadPage => "528MiB",
            Self::Granted => "342MiB",
            // Base pages, each a nested page fault of its own under emulation.
            Self::Own | Self::File => "128MiB",
            Self::Device => "24MiB",
        }
    }
}

/// Default values of a scenario.
const PLAIN: Scenario = Scenario {
    name: "",
    summary: "",
    config: "smoke.json",
    words: "",
    end: "",
    expected: Expected { exit: 0, summary: true, checks: &[] },
    terminate_on: None,
    press_on: None,
    region: None,
    slice_alone: false,
    hugetlb_ram: None,
    gigantic: false,
    slice_test: SliceTest::Owned,
    steps: None,
    generic: false,
    rdma: false,
    vcpus: None,
    passed: &[],
    taps: &[],
    servers: &[],
    plugged: false,
    iommufd: false,
    own_kernel: false,
    grace: false,
    grace_kernel: GraceKernel::Own,
    prints: None,
    disk: None,
    debian: false,
    tests: false,
    boots: 1,
    deadline: Duration::from_secs(180),
    outside: false,
    peer: None,
    long: false,
    fault: None,
};

/// Every scenario, in the order in which they run.
pub(crate) const ALL: &[Scenario] = &[
    demo::SCENARIO,
    ram::HUGETLB,
    smp::SCENARIO,
    reset::SCENARIO,
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
    vfio::IOMMUFD,
    vfio::INTX,
    vfio::DMA,
    vfio::DMA_OWN,
    vfio::SWITCH,
    vfio::HOSTILE,
    passed::NET,
    passed::SWITCHED,
    passed::MOVES,
    passed::PAIR,
    passed::FAULT,
    passed::ERROR,
    passed::REFUSED,
    passed::RESET,
    passed::DMA_KINDS,
    passed::DMA_IOMMUFD,
    passed::ROUNDS,
    confined::MEM,
    confined::PIN,
    plugged::HOTPLUG,
    plugged::REQUEST,
    user::SERVED,
    user::PLUGGED,
    peer::QEMU,
    peer::CLOUD_HYPERVISOR,
    rdma::CARDS,
    rdma::VIRTIO,
    grace::STOCK,
    ram::GRACE_HUGETLB,
    grace::DEMO,
    grace::EGM,
    grace::NVME,
    grace::INTX,
    grace::USER,
    grace::GPU,
    grace::OUTSIDE,
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

/// Separates the names of a scenario and of the fault that is planted in it.
pub(crate) const WITH_FAULT: char = '+';

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
    fn names_are_unique_and_fit_a_directory() {
        for (i, scenario) in ALL.iter().enumerate() {
            assert!(scenario.name.chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{}", scenario.name);
            assert!(!scenario.summary.is_empty());
            assert!(ALL.iter().skip(i + 1).all(|other| other.name != scenario.name));
        }
    }

    /// A reader assumes that a scenario without such a note is part of every run.
    #[test]
    fn the_pages_say_which_scenarios_run_only_when_asked_for() {
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
    fn a_scenario_that_does_not_exist_is_told_with_those_that_do() {
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
            let runs =
                [listed(scenario.words, "egm.checks="), listed(scenario.words, "egm.validate=")].concat();
            // A guest that is stopped while it writes does not report.
            if scenario.terminate_on.is_none() {
                assert!(runs.iter().all(|name| required.contains(name)), "{}: {runs:?}", scenario.name);
            }
            assert!(required.iter().all(|name| runs.contains(name)), "{}: {required:?}", scenario.name);
            let is_one_machine = scenario.steps.is_none() && scenario.region.is_none();
            assert!(!is_one_machine || !runs.is_empty(), "{} runs every check", scenario.name);
        }
    }

    #[test]
    fn long_ones_run_only_when_asked_for() {
        assert!(select(&[], false).unwrap().iter().all(|s| !s.long));
        assert_eq!(select(&[], true).unwrap().len(), ALL.len());
        assert_eq!(select(&["boots".into()], false).unwrap().len(), 1);
    }
}
