//! Host pages of ordinary memory: the largest that the host has, and why not larger ones.
//!
//! ```text
//!  "2M", "1G" ─► hugetlb: a promise, or an error
//!  "4K" ───────► memfd in base pages
//!  "auto" ──1──► memfd in huge pages     shmem_enabled allows them: sealed, and costs nothing
//!           2──► a file on an own tmpfs  not for memory that a vfio-user server receives: it has no seals
//!           3──► private memory          not for memory that something needs as a file
//!           4──► memfd in base pages
//!  restored on demand ──► private memory, mapped from the snapshot
//! ```
//! A mount costs 0.1 ms of a start, with a user namespace 0.3 ms to 2 ms (Linux 6.18, two busy cores), so steps 2 and 3 are for
//! machines of [`LEAST`] and more.

use egm_address::ByteSize;
use egm_report::show::size;

use crate::config::{DeviceKind, PageSize, Spec};
use crate::facts::{Facts, Probe};
use crate::plan::{Allocation, BackingPlan, HostPages};

/// Ordinary memory of a machine that is worth a mount.
const LEAST: u64 = 512 << 20;
const BASE: u64 = 4 << 10;
/// Facts of a larger huge page are wrong: Arm processors with pages of 64 KiB have 512 MiB.
const MOST: u64 = 1 << 30;

/// Bytes of a transparent huge page of the host.
pub(in crate::plan) fn huge_page(facts: &Facts) -> u64 {
    let plausible =
        |bytes: &u64| bytes.is_power_of_two() && (PageSize::Size2M.bytes()..=MOST).contains(bytes);
    Some(facts.huge_page.get()).filter(plausible).unwrap_or(PageSize::Size2M.bytes())
}

/// Whether the plan of `spec` depends on what the host mounts.
pub(crate) fn may_mount(spec: &Spec) -> bool {
    let slices = spec.egm.iter().filter(|slice| slice.page_size == PageSize::Auto);
    let nodes = if spec.memory.page_size == PageSize::Auto { spec.memory.size.get() } else { 0 };
    let all = slices.fold(nodes, |sum, slice| sum.saturating_add(slice.size.get()));
    all >= LEAST && server(spec).is_none()
}

/// The device with a server that receives the machine's memory.
fn server(spec: &Spec) -> Option<&str> {
    let served = |kind: &DeviceKind| matches!(kind, DeviceKind::VfioUser { .. });
    spec.devices.iter().find(|device| served(&device.kind)).map(|device| device.id.as_str())
}

/// Decides the pages of `backings` that are ordinary memory; returns notes for the operator.
pub(super) fn decide(spec: &Spec, facts: &Facts, backings: &mut [BackingPlan]) -> Vec<String> {
    let ordinary = |backing: &&mut BackingPlan| backing.region.is_none() && !backing.guest_memfd;
    let auto = backings.iter_mut().filter(|b| ordinary(b) && b.page_size == PageSize::Auto);
    let total = auto.fold(0u64, |sum, backing| sum.saturating_add(backing.size));
    let host = Host { facts, huge_page: huge_page(facts), server: server(spec), is_small: total < LEAST };
    let mut notes = Vec::new();
    for backing in backings.iter_mut().filter(ordinary) {
        let pages = host.pages(backing);
        let why = pages.why_not_larger.as_ref().filter(|_| {
            backing.page_size == PageSize::Auto && backing.size >= host.huge_page && !host.is_small
        });
        notes.extend(why.map(|why| format!("{} has pages of {}: {why}", backing.id, size(pages.size.get()))));
        backing.pages = Some(pages);
    }
    notes
}

/// Makes ordinary memory private, unless it is hugetlb memory or behind a BAR: a private mapping can begin as a file.
pub(crate) fn make_private(backings: &mut [BackingPlan]) {
    let can = |backing: &&mut BackingPlan| !backing.device && !backing.page_size.is_hugetlb();
    for pages in backings.iter_mut().filter(can).filter_map(|backing| backing.pages.as_mut()) {
        let why_not_larger = Some("it is read from a snapshot as the guest touches it".to_owned());
        *pages = HostPages { allocation: Allocation::Private, size: ByteSize::new(BASE), why_not_larger };
    }
}

/// Properties of host and machine that decide the pages.
struct Host<'a> {
    facts: &'a Facts,
    huge_page: u64,
    server: Option<&'a str>,
    /// Whether the machine has less than [`LEAST`].
    is_small: bool,
}

impl Host<'_> {
    fn pages(&self, backing: &BackingPlan) -> HostPages {
        let memfd = |bytes, why: Option<String>| HostPages {
            allocation: Allocation::Memfd,
            size: ByteSize::new(bytes),
            why_not_larger: why,
        };
        match backing.page_size {
            PageSize::Size2M | PageSize::Size1G => memfd(backing.page_size.bytes(), None),
            PageSize::Size4K => memfd(BASE, Some("\"page_size\" is \"4K\"".to_owned())),
            PageSize::Auto if backing.size < self.huge_page => {
                memfd(BASE, Some(format!("a huge page of the host has {}", size(self.huge_page))))
            }
            PageSize::Auto if self.shmem_is_huge() => memfd(self.huge_page, None),
            PageSize::Auto => match self.without_shmem(backing) {
                Ok(allocation) => {
                    HostPages { allocation, size: ByteSize::new(self.huge_page), why_not_larger: None }
                }
                Err(why) => memfd(BASE, Some(format!("{}, and {why}", self.shmem_setting()))),
            },
        }
    }

    /// Whether a memfd has huge pages.
    fn shmem_is_huge(&self) -> bool {
        matches!(self.facts.shmem_huge_pages.as_str(), "always" | "within_size" | "advise" | "force")
    }

    fn shmem_setting(&self) -> String {
        match self.facts.shmem_huge_pages.as_str() {
            "" => "the host has no huge pages for memory files".to_owned(),
            setting => format!("the host's shmem_enabled is \"{setting}\""),
        }
    }

    /// Huge pages where a memfd has none, or why not.
    fn without_shmem(&self, backing: &BackingPlan) -> Result<Allocation, String> {
        if let Some(device) = self.server {
            return Err(format!(
                "the server of device \"{device}\" receives a sealed file: set shmem_enabled to advise, or \"page_size\" to \
                 \"2M\""
            ));
        }
        if self.is_small {
            return Err(format!("the machine has less than {}", size(LEAST)));
        }
        let why = match &self.facts.huge_files {
            _ if self.facts.shmem_huge_pages == "deny" => "that denies them to every tmpfs".to_owned(),
            Probe::Present(_) => return Ok(Allocation::HugeFile),
            Probe::Absent(why) => format!("a tmpfs of its own has none: {why}"),
        };
        match self.facts.anonymous_huge_pages.as_str() {
            _ if backing.device => Err(format!("{why}; memory behind a BAR is a file")),
            "always" | "madvise" => Ok(Allocation::Private),
            "" => Err(why),
            setting => Err(format!("{why}; transparent_hugepage/enabled is \"{setting}\"")),
        }
    }
}
