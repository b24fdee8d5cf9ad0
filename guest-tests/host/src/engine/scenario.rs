//! A scenario: data alone, so that all that runs one may depend on it.

use std::time::Duration;

use egm_guest::findings::Check;

use crate::engine::disk::Proof;
use crate::engine::judge::{Expected, case};
use crate::engine::peer_program::PeerName;

/// Separates the names of a scenario and of the fault that is planted in it.
pub(crate) const WITH_FAULT: char = '+';

/// The environment variable that chooses a planted fault.
pub(crate) const FAULT_VARIABLE: &str = "EGM_FAULT";

/// One machine, the checks of its guest, and its expected end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scenario {
    /// Its name on the command line and in reports.
    pub(crate) name: &'static str,
    /// Its claim, in a sentence.
    pub(crate) summary: &'static str,
    /// What is done with its machine.
    pub(crate) runs: Runs,
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
    /// Whether its guest's kernel is the one for every machine, which has drivers of network cards.
    pub(crate) generic: bool,
    /// Whether its guest's kernel has RDMA, and its agent is linked to a libc, with the libraries for that.
    pub(crate) rdma: bool,
    /// Its vCPUs, when they are not its file's.
    pub(crate) vcpus: Option<u32>,
    /// Host functions that are assigned to its guest.
    pub(crate) assigned: &'static [&'static str],
    /// Taps, with a virtio network card of its guest for each, in addition to those of its file.
    pub(crate) taps: &'static [&'static str],
    /// Sockets of vfio-user servers; its guest has their functions, too.
    pub(crate) servers: &'static [&'static str],
    /// Whether the emulated host has the lab's own cards: GPUs and, in a PC, a network card.
    pub(crate) plugged: bool,
    /// Whether host functions are opened through iommufd, in an emulated host that has it.
    pub(crate) iommufd: bool,
    /// Whether its emulated host needs a kernel of our own for something other than iommufd that Debian's lacks.
    pub(crate) own_kernel: bool,
    /// Whether its host is a Grace one, emulated or not.
    pub(crate) grace: bool,
    /// Kernel of the emulated Grace host.
    pub(crate) grace_kernel: GraceKernel,
    /// Text that the VMM must print on standard error.
    pub(crate) prints: Option<&'static str>,
    /// Whether its guest's reset starts the guest again in the same machine.
    pub(crate) reboots: bool,
    /// Whether vhost serves the network and vsock devices of `demo.json`; `None` leaves that to the host.
    pub(crate) vhost: Option<bool>,
    /// Data that must be on the first disk afterwards.
    pub(crate) disk: Option<Proof>,
    /// Whether its machines run with `--sandbox strict`, unless another mode is chosen for the run.
    pub(crate) strict: bool,
    /// Whether a Debian root file system is on the first disk and reports, in place of the agent.
    pub(crate) debian: bool,
    /// Whether it runs tests of `egm-device`.
    pub(crate) tests: bool,
    /// Time for one boot, under emulation on two slow cores.
    pub(crate) deadline: Duration,
    /// Whether its guests run on this machine where others run in the emulated host: in an emulator, without privilege.
    pub(crate) on_this_machine: bool,
    /// The monitor that runs its guests, which the user provides.
    pub(crate) peer: Option<PeerName>,
    /// Whether it runs only by name or with `--full`.
    pub(crate) long: bool,
    /// The fault that is planted in its host's programs; its name is then `SCENARIO+FAULT`.
    pub(crate) fault: Option<Fault>,
}

/// What a scenario does with its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Runs {
    /// Boots it so many times in a row.
    Boots(u32),
    /// Runs the function of steps that `scenarios/steps.rs` lists.
    Steps,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Fault {
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
    /// Debian's: nothing is built, and it has no drivers of GPUs and EGM.
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
            // `egm_device.size` of its scenarios.
            Self::Device => "24MiB",
        }
    }
}

/// Default values of a scenario.
pub(crate) const PLAIN: Scenario = Scenario {
    name: "",
    summary: "",
    runs: Runs::Boots(1),
    config: "smoke.json",
    words: "",
    end: "",
    expected: Expected::power_off(&[]),
    terminate_on: None,
    press_on: None,
    region: None,
    slice_alone: false,
    hugetlb_ram: None,
    gigantic: false,
    slice_test: SliceTest::Owned,
    generic: false,
    rdma: false,
    vcpus: None,
    assigned: &[],
    taps: &[],
    servers: &[],
    plugged: false,
    iommufd: false,
    own_kernel: false,
    grace: false,
    grace_kernel: GraceKernel::Own,
    prints: None,
    reboots: false,
    vhost: None,
    disk: None,
    strict: false,
    debian: false,
    tests: false,
    deadline: Duration::from_secs(180),
    on_this_machine: false,
    peer: None,
    long: false,
    fault: None,
};
