//! Which region of the host each EGM slice comes from, and where in it.
//!
//! A slice names regions or kinds, the most wanted first. The first that can give it now does; the plan says what the
//! slice then lacks. Slices of one plan do not overlap, because each place is taken from what is left by those before.

use egm_address::{InRegion, Offset, Span, SpanSet};
use egm_device::carve::plan::{Request, Short, place};
use egm_device::owner::Owner;
use egm_device::region::{Region, RegionKind};

use crate::config::{EgmSlice, PageSize, Spec};
use crate::facts::{Facts, HostRegion};
use crate::plan::PlanError;

/// A GPU and a hypervisor both map memory best in pieces of this size.
const HUGE_PAGE: u64 = 1 << 30;

/// Where a slice's bytes come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Source {
    /// The region, or `None` for memory of this process.
    pub(super) region: Option<String>,
    /// Offset of its first byte in the region.
    pub(super) offset: u64,
    /// Retired bytes, counted in the region.
    pub(super) holes: SpanSet<InRegion>,
    /// Host pages.
    pub(super) page_size: PageSize,
    /// What the slice lacks that its first choice would have given.
    pub(super) lost: Option<String>,
}

/// One source for each slice of `spec`.
pub(super) fn choose(spec: &Spec, facts: &Facts) -> Result<Vec<Source>, PlanError> {
    let mut hosts: Vec<HostRegion> = facts.regions.clone();
    let mut pools = Pools::of(spec, facts);
    spec.egm
        .iter()
        .enumerate()
        .map(|(index, slice)| one(index, slice, &spec.name, &mut hosts, &mut pools))
        .collect()
}

fn one(
    index: usize,
    slice: &EgmSlice,
    owner: &str,
    hosts: &mut [HostRegion],
    pools: &mut Pools,
) -> Result<Source, PlanError> {
    let mut tried = Vec::new();
    let mut first = None;
    for wanted in &slice.regions {
        let found = match wanted.as_str() {
            "local" | "memfd" => Ok(local(slice.page_size)),
            "hugetlb" => {
                pools.take(slice).map(local).ok_or_else(|| "no pool has enough free pages".to_owned())
            }
            _ => carve(wanted, slice, owner, hosts).map_err(|why| match why {
                Some(short) => {
                    let text = short.to_string();
                    first.get_or_insert(short);
                    text
                }
                None => "the host has none".to_owned(),
            }),
        };
        match found {
            Ok(mut source) => {
                let lost = tried.first().map(|(region, why)| {
                    format!(
                        "egm{index} comes from \"{wanted}\": {}; \"{region}\" was not to be had: {why}",
                        lacks(wanted, hosts)
                    )
                });
                source.lost = lost;
                return Ok(source);
            }
            Err(why) => tried.push((wanted.clone(), why)),
        }
    }
    Err(match (first, tried.as_slice()) {
        (Some(source), [_]) => PlanError::RegionSize { slice: index, source },
        (None, [(region, _)]) if region != "hugetlb" => {
            let known = hosts.iter().map(|host| host.region.name.clone()).collect();
            PlanError::Region { slice: index, region: region.clone(), known }
        }
        _ => {
            let tried = tried.iter().map(|(region, why)| format!("\"{region}\": {why}")).collect();
            PlanError::NoRegion { slice: index, tried }
        }
    })
}

const fn local(page_size: PageSize) -> Source {
    Source { region: None, offset: 0, holes: SpanSet::EMPTY, page_size, lost: None }
}

/// The lowest best place in the first region called `wanted`, or of that kind, that has one. At first one that huge
/// mappings survive in, then any. `None` when the host has no such region.
fn carve(
    wanted: &str,
    slice: &EgmSlice,
    owner: &str,
    hosts: &mut [HostRegion],
) -> Result<Source, Option<Short>> {
    let owner = Owner { name: owner.to_owned(), uid: 0, pid: 0, started: 0 };
    let size = slice.size.get();
    let request = Request::new(size, owner);
    let huge = Request { align: if size >= HUGE_PAGE { HUGE_PAGE } else { 0 }, ..request.clone() };
    let mut short = None;
    for host in hosts.iter_mut().filter(|host| host.region.name == wanted || kind(&host.region) == wanted) {
        let (busy, clean) = (host.busy.iter().copied().collect(), host.clean.iter().copied().collect());
        let placed = place(&host.region, &busy, &clean, &huge)
            .or_else(|_| place(&host.region, &busy, &clean, &request));
        match placed {
            Ok(place) => {
                host.busy.extend(Span::new(Offset::new(place.offset), place.size.get()));
                return Ok(Source {
                    region: Some(host.region.name.clone()),
                    offset: place.offset,
                    holes: host.region.retired.spans().clone(),
                    page_size: PageSize::Auto,
                    lost: None,
                });
            }
            Err(why) => {
                short.get_or_insert(why);
            }
        }
    }
    Err(short)
}

/// The word for a region's kind.
const fn kind(region: &Region) -> &'static str {
    match region.kind {
        RegionKind::Egm { .. } => "egm",
        RegionKind::Reserved { .. } => "reserved",
        RegionKind::Devdax { .. } => "devdax",
        RegionKind::Hugetlb => "hugetlb",
        RegionKind::Memfd => "memfd",
        RegionKind::GuestMemfd => "guest-memfd",
    }
}

/// What memory of the region or kind `chosen` lacks beside EGM.
fn lacks(chosen: &str, hosts: &[HostRegion]) -> &'static str {
    let named = hosts.iter().find(|host| host.region.name == chosen).map(|host| kind(&host.region));
    match named.unwrap_or(chosen) {
        "egm" => "nothing is lost",
        "reserved" => "no GPU reaches it at link speed",
        "devdax" => "no GPU reaches it at link speed, and the host kernel has struct pages for it",
        "hugetlb" => "no GPU reaches it at link speed, and the host kernel sees it",
        _ => "no GPU reaches it at link speed, the host kernel sees it, and its pages may be small",
    }
}

/// Free pages of the host's hugetlb pools, all nodes together.
struct Pools(Vec<(PageSize, u64)>);

impl Pools {
    /// What ordinary memory leaves.
    fn of(spec: &Spec, facts: &Facts) -> Self {
        let free = |page: PageSize| {
            let pools = facts.nodes.iter().flat_map(|node| &node.pools).filter(|pool| pool.page_size == page);
            let free: u64 = pools.map(|pool| pool.free.saturating_mul(page.bytes())).sum();
            let memory = if spec.memory.page_size == page { spec.memory.size.get() } else { 0 };
            (page, free.saturating_sub(memory))
        };
        Self(vec![free(PageSize::Size1G), free(PageSize::Size2M)])
    }

    /// Takes `slice` from the pool of its page size, or of the largest that it is a multiple of.
    fn take(&mut self, slice: &EgmSlice) -> Option<PageSize> {
        let size = slice.size.get();
        let fits = |page: PageSize| match slice.page_size.is_hugetlb() {
            true => page == slice.page_size,
            false => size.is_multiple_of(page.bytes()),
        };
        let (page, free) = self.0.iter_mut().find(|(page, free)| fits(*page) && *free >= size)?;
        *free -= size;
        Some(*page)
    }
}

#[cfg(test)]
mod tests {
    use egm_address::ByteSize;
    use egm_device::retired::Retired;

    use super::*;

    #[test]
    fn what_is_lost_is_said_of_a_kind_and_of_a_region_of_that_kind() {
        let region = Region {
            name: "dax0.0".into(),
            kind: RegionKind::Devdax { device: "/dev/dax0.0".into() },
            node: None,
            size: ByteSize::new(HUGE_PAGE),
            page_size: ByteSize::new(2 << 20),
            base: None,
            functions: Vec::new(),
            retired: Retired::default(),
        };
        let host = HostRegion { region, busy: Vec::new(), clean: Vec::new() };
        assert_eq!(lacks("dax0.0", std::slice::from_ref(&host)), lacks("devdax", &[]));
        assert_eq!(lacks("egm", &[host]), "nothing is lost");
    }
}
