//! Which region of the host each EGM slice comes from, and where in it; and whether its trust domain may have it.
//!
//! A slice names regions or kinds, the most wanted first, and gets the first that can give it now; the plan notes what
//! it then lacks. Slices of one plan do not overlap: each comes from what the earlier ones leave free.

use egm_address::{CpuSet, Hpa, InRegion, Offset, PciAddress, Span, SpanSet};
use egm_device::carve::plan::{Request, place};
use egm_device::owner::{Owner, is_same};
use egm_device::region::{Region, RegionKind};
use egm_device::trust::{self, Conflict, Holding, Party};

use crate::config::{DeviceKind, EgmSlice, GUEST_MEMFD, LOCAL, PageSize, Spec};
use crate::facts::{Facts, HeldSpan, HostRegion, Trust};
use crate::plan::{NoPlacement, PlanError};

/// A GPU and a hypervisor both map memory best in pieces of this size.
const HUGE_PAGE: u64 = 1 << 30;

/// How a slice of `size` bytes is aligned so that huge mappings survive in it; 0 when it is too small for one.
pub(crate) const fn huge_alignment(size: u64) -> u64 {
    if size >= HUGE_PAGE { HUGE_PAGE } else { 0 }
}

/// Source of a slice's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::plan) struct Source {
    /// The region, or `None` for memory of this process.
    pub(in crate::plan) region: Option<String>,
    /// Whether it is memory of the machine itself.
    pub(in crate::plan) guest_memfd: bool,
    /// Offset of its first byte in the region.
    pub(in crate::plan) offset: u64,
    /// Host physical address of its first byte, where the region's is known.
    pub(in crate::plan) hpa: Option<Hpa>,
    /// Retired bytes, counted in the region.
    pub(in crate::plan) holes: SpanSet<InRegion>,
    /// Host pages that the slice or the region asks for.
    pub(in crate::plan) page_size: PageSize,
    /// Note on what the slice lacks against its first choice.
    pub(in crate::plan) lost: Option<String>,
}

/// One source for each slice of `spec`.
pub(super) fn choose(spec: &Spec, facts: &Facts) -> Result<Vec<Source>, PlanError> {
    let mut hosts: Vec<HostRegion> = facts.regions.clone();
    let all = spec.egm.iter().enumerate();
    all.map(|(index, slice)| one(index, slice, spec, &mut hosts)).collect()
}

fn one(index: usize, slice: &EgmSlice, spec: &Spec, hosts: &mut [HostRegion]) -> Result<Source, PlanError> {
    let mut tried: Vec<(String, NoPlacement)> = Vec::new();
    for wanted in &slice.regions {
        match source(wanted, slice, spec, hosts) {
            Ok(mut source) => {
                source.lost =
                    tried.first().map(|(region, why)| lost(index, wanted, kind(wanted, hosts), region, why));
                return Ok(source);
            }
            Err(why) => tried.push((wanted.clone(), why)),
        }
    }
    Err(match tried.as_slice() {
        [(region, NoPlacement::Unknown)] => {
            let known = hosts.iter().map(|host| host.region.name.clone()).collect();
            let kinds = hosts.iter().map(|host| host.region.kind.word()).collect();
            PlanError::Region { slice: index, region: region.clone(), known, kinds }
        }
        _ => PlanError::NoPlacement { slice: index, tried },
    })
}

/// Lowest span in the first region named `wanted`, or of that kind, that has one: at offset 0 if a GPU of the machine
/// uses the region as EGM, since the GPU counts from there; else aligned for huge mappings; else anywhere.
fn source(
    wanted: &str,
    slice: &EgmSlice,
    spec: &Spec,
    hosts: &mut [HostRegion],
) -> Result<Source, NoPlacement> {
    if wanted == LOCAL || wanted == "memfd" {
        return Ok(Source::own(false, slice.page_size));
    }
    if wanted == GUEST_MEMFD {
        return guest_memfd(slice, hosts);
    }
    // The owner does not affect placement; the launch requests with its own process id.
    let request = Request::new(
        slice.size.get(),
        Owner { name: spec.name.clone(), uid: 0, pid: 0, started: 0, domain: None },
    );
    let beginning = Request { at: Some(0), ..request.clone() };
    let huge = Request { align: huge_alignment(request.size), ..request.clone() };
    let mut first = None;
    for host in hosts.iter_mut().filter(|host| host.region.name == wanted || offers(host, wanted, slice)) {
        if let Err(conflict) = check_trust(spec, host, &[]) {
            first.get_or_insert(NoPlacement::Exclusive(conflict));
            continue;
        }
        let busy = host.held.iter().map(|held| held.span).collect();
        let clean = host.clean.iter().copied().collect();
        let at = |request| place(&host.region, &busy, &clean, request);
        let anywhere = || at(&huge).or_else(|_| at(&request));
        let placed =
            if is_of_gpu(&host.region, spec) { at(&beginning).or_else(|_| anywhere()) } else { anywhere() };
        match placed {
            Ok(place) => {
                let span = Span::new(Offset::new(place.offset), place.size.get());
                let held =
                    |span| HeldSpan { span, owner: "this machine".to_owned(), trust: Trust::Unrecorded };
                host.held.extend(span.map(held));
                return Ok(Source {
                    region: Some(host.region.name.clone()),
                    guest_memfd: false,
                    offset: place.offset,
                    hpa: host.region.base.and_then(|base| base.checked_add(place.offset)),
                    holes: host.region.retired.spans().clone(),
                    page_size: huge_pages(&host.region),
                    lost: None,
                });
            }
            Err(short) => {
                first.get_or_insert_with(|| NoPlacement::Short { short, held: host.held.clone() });
            }
        }
    }
    Err(first.unwrap_or(NoPlacement::Unknown))
}

/// Whether a host function of the machine uses `region` as EGM.
fn is_of_gpu(region: &Region, spec: &Spec) -> bool {
    let mut assigned = spec.devices.iter().filter_map(|device| match device.kind {
        DeviceKind::Vfio { function, .. } => Some(function),
        _ => None,
    });
    matches!(region.kind, RegionKind::Egm { .. })
        && assigned.any(|function| region.functions.contains(&function))
}

impl Source {
    /// Memory that is made for the machine, as a file that no other process has.
    const fn own(guest_memfd: bool, page_size: PageSize) -> Self {
        Self { region: None, guest_memfd, offset: 0, hpa: None, holes: SpanSet::EMPTY, page_size, lost: None }
    }
}

/// Memory of the machine's own VM. No ledger records it: no other machine can take it, and it ends with the VM.
fn guest_memfd(slice: &EgmSlice, hosts: &[HostRegion]) -> Result<Source, NoPlacement> {
    let chosen = [(slice.page_size.is_hugetlb(), "page_size"), (slice.host_nodes.is_some(), "host_nodes")];
    if let Some((_, key)) = chosen.into_iter().find(|(chosen, _)| *chosen) {
        return Err(NoPlacement::NoChoice { key });
    }
    if !hosts.iter().any(|host| host.region.kind == RegionKind::GuestMemfd) {
        return Err(NoPlacement::NoGuestMemfd);
    }
    Ok(Source::own(true, PageSize::Size4K))
}

/// Whether `host` is of the kind `wanted`, and of the pages and the nodes that the slice asks for.
fn offers(host: &HostRegion, wanted: &str, slice: &EgmSlice) -> bool {
    let region = &host.region;
    let pages = !slice.page_size.is_hugetlb() || slice.page_size == huge_pages(region);
    let near = |nodes: &CpuSet| region.node.is_some_and(|node| nodes.contains(node));
    region.kind.word() == wanted
        && (!matches!(region.kind, RegionKind::Hugetlb)
            || pages && slice.host_nodes.as_ref().is_none_or(near))
}

/// The pages of a pool; other memory is mapped as the kernel can.
fn huge_pages(region: &Region) -> PageSize {
    match (&region.kind, region.page_size.get()) {
        (RegionKind::Hugetlb, HUGE_PAGE) => PageSize::Size1G,
        (RegionKind::Hugetlb, _) => PageSize::Size2M,
        _ => PageSize::Auto,
    }
}

/// The kind that `chosen`, a region or a kind, means.
fn kind<'a>(chosen: &'a str, hosts: &[HostRegion]) -> &'a str {
    hosts.iter().find(|host| host.region.name == chosen).map_or(chosen, |host| host.region.kind.word())
}

/// Note on what slice `index` lacks because it comes from `chosen`, which is of `kind`, and not from `first`; and why.
pub(crate) fn lost(
    index: usize,
    chosen: &str,
    kind: &str,
    first: &str,
    why: &impl std::fmt::Display,
) -> String {
    let lacks = lacks(kind);
    format!("egm{index} comes from \"{chosen}\": {lacks}; \"{first}\" was unavailable: {why}")
}

/// Properties of EGM that memory of a kind lacks.
fn lacks(kind: &str) -> &'static str {
    match kind {
        "egm" => "nothing is lost",
        "reserved" => "no GPU reaches it at link speed",
        "devdax" => "no GPU reaches it at link speed, and the host kernel has struct pages for it",
        "fsdax" => {
            "no GPU reaches it at link speed, no host function by DMA, and the host kernel has struct pages for it"
        }
        "hugetlb" => "no GPU reaches it at link speed, and the host kernel sees it",
        GUEST_MEMFD => {
            "no GPU reaches it at link speed, the host kernel sees it, its pages are small, and one that goes bad ends the \
             machine"
        }
        _ => "no GPU reaches it at link speed, the host kernel sees it, and its pages may be small",
    }
}

/// Refuses GPUs of `spec` that would reach slices or a region of another trust domain's GPUs.
pub(super) fn check_gpus(spec: &Spec, facts: &Facts) -> Result<(), PlanError> {
    let gpus = spec.devices.iter().filter_map(|device| match device.kind {
        DeviceKind::Vfio { function, .. } => Some(function),
        _ => None,
    });
    for gpu in gpus {
        for host in facts.regions.iter().filter(|host| host.region.functions.contains(&gpu)) {
            check_trust(spec, host, &[gpu])?;
        }
    }
    Ok(())
}

/// Whether the machine of `spec` may have `gpus` of the region of `host`, or a slice of it when `gpus` is empty.
fn check_trust(spec: &Spec, host: &HostRegion, gpus: &[PciAddress]) -> Result<(), Box<Conflict>> {
    let domain = spec.trust_domain.as_deref();
    let hold = |owner: &String, theirs: &Trust, gpu| Holding {
        party: Party { owner: owner.clone(), domain: theirs.domain().map(str::to_owned) },
        is_trusted: *theirs == Trust::Unrecorded || is_same(domain, theirs.domain()),
        gpu,
    };
    let live = host.gpus.iter().map(|gpu| hold(&gpu.owner, &gpu.trust, Some(gpu.function)));
    let slices = host.held.iter().map(|held| hold(&held.owner, &held.trust, None));
    let requester = Party { owner: format!("machine \"{}\"", spec.name), domain: spec.trust_domain.clone() };
    trust::check(&host.region.name, &requester, gpus, live.chain(slices))
}

#[cfg(test)]
mod tests {
    use egm_address::ByteSize;
    use egm_device::retired::Retired;

    use super::*;

    #[test]
    fn losses_are_reported_of_a_kind_and_of_a_region_of_that_kind() {
        let region = Region {
            name: "dax0.0".into(),
            kind: RegionKind::Devdax {
                device: "/dev/dax0.0".into(),
                files: egm_device::region::DaxFiles::Static,
            },
            node: None,
            size: ByteSize::new(HUGE_PAGE),
            page_size: ByteSize::new(2 << 20),
            base: None,
            functions: Vec::new(),
            retired: Retired::default(),
        };
        let host = HostRegion { region, held: Vec::new(), clean: Vec::new(), gpus: Vec::new() };
        assert_eq!(lacks(kind("dax0.0", std::slice::from_ref(&host))), lacks(kind("devdax", &[])));
        assert_eq!(lacks(kind("egm", &[host])), "nothing is lost");
    }

    #[test]
    fn every_kind_of_memory_lacks_something_of_its_own() {
        let kinds = ["egm", "reserved", "devdax", "fsdax", "hugetlb", GUEST_MEMFD, "memfd"];
        let distinct: std::collections::BTreeSet<&str> = kinds.into_iter().map(lacks).collect();
        assert_eq!(distinct.len(), kinds.len());
    }
}
