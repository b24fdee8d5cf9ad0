//! The regions of a host.

use std::path::Path;

use egm_address::{ByteSize, CpuSet, align_down};
use serde::Serialize;

use crate::region::facts::HostFacts;
use crate::region::host_file::HostFile;
use crate::region::refused::{RefusedRegion, RegionRefusal};
use crate::region::{Region, RegionKind, dax, egm, fsdax, reserved};
use crate::retired::Retired;

/// A host's memory, and the regions that it offers to guests.
#[derive(Debug, Serialize)]
pub struct Survey {
    /// Facts of the host.
    pub host: HostFacts,
    /// Its regions: EGM, reserved, device-DAX, fsdax, then pools.
    pub regions: Vec<Region>,
    /// Candidates that are refused as regions.
    pub refused: Vec<RefusedRegion>,
}

impl Survey {
    /// The processors near `region`, where its node is known.
    #[must_use]
    pub fn near(&self, region: &Region) -> Option<&CpuSet> {
        self.host.nodes.iter().find(|node| Some(node.id) == region.node).map(|node| &node.cpus)
    }

    /// Surveys the host with its `/proc` and `/sys` below `root`, and the spans in `files`. `/dev/kvm` is the only
    /// device that it opens, to query its capabilities.
    #[must_use]
    pub fn of(root: &Path, files: &[HostFile]) -> Self {
        let host = HostFacts::read(root);
        let named = files.iter().flat_map(|file| &file.regions);
        let named = named.map(|span| {
            reserved::region(span, &host).map_err(|reason| RefusedRegion::new(&span.name, reason))
        });
        let folders = files.iter().flat_map(|file| &file.fsdax);
        let folders = folders.map(|folder| {
            fsdax::region(root, folder).map_err(|reason| RefusedRegion::new(&folder.name, reason))
        });
        let found = egm::discover(root, &host).chain(named).chain(dax::discover(root, &host)).chain(folders);
        let (mut regions, mut refused): (Vec<Region>, Vec<RefusedRegion>) = (Vec::new(), Vec::new());
        for region in found.chain(pools(&host).map(Ok)) {
            match region.and_then(|region| apart(&regions, region)) {
                Ok(region) => regions.push(region),
                Err(why) => refused.push(why),
            }
        }
        Self { host, regions, refused }
    }
}

/// Refuses a region that shares its name or a byte with another.
fn apart(regions: &[Region], region: Region) -> Result<Region, RefusedRegion> {
    if regions.iter().any(|other| other.name == region.name) {
        return Err(RefusedRegion::new(&region.name, RegionRefusal::NameTaken));
    }
    if let RegionKind::Fsdax { folder: path, device } = &region.kind {
        let is_same =
            |other: &&Region| matches!(&other.kind, RegionKind::Fsdax { device: of, .. } if of == device);
        if let Some(other) = regions.iter().find(is_same) {
            let reason = RegionRefusal::SameFileSystem { path: path.clone(), other: other.name.clone() };
            return Err(RefusedRegion::new(&region.name, reason));
        }
    }
    let Some(span) = region.span() else { return Ok(region) };
    match regions.iter().find(|other| other.span().is_some_and(|other| other.overlaps(span))) {
        Some(other) => {
            Err(RefusedRegion::new(&region.name, RegionRefusal::Overlap { span, other: other.name.clone() }))
        }
        None => Ok(region),
    }
}

/// hugetlb pools with pages, guest memory that the host can map, and memory of this process, which always exists.
fn pools(host: &HostFacts) -> impl Iterator<Item = Region> + '_ {
    let hugetlb = host.nodes.iter().flat_map(|node| {
        node.pools.iter().filter(|pool| pool.total > 0).map(|huge| {
            let page = huge.page_size.get();
            let short = if page == 1 << 30 { "1g" } else { "2m" };
            Region {
                name: format!("hugetlb-{short}-node{}", node.id),
                node: Some(node.id),
                ..pool(RegionKind::Hugetlb, huge.total.saturating_mul(page), page)
            }
        })
    });
    let local = Region { name: "local".to_owned(), ..pool(RegionKind::Memfd, host.total(), 2 << 20) };
    let guest_memfd =
        Region { name: "guest-memfd".to_owned(), ..pool(RegionKind::GuestMemfd, host.total(), 4096) };
    hugetlb.chain(host.guest_memfd.then_some(guest_memfd)).chain(std::iter::once(local))
}

/// A pool of `size` bytes in pages of `page`, without a name.
fn pool(kind: RegionKind, size: u64, page: u64) -> Region {
    Region {
        name: String::new(),
        kind,
        node: None,
        size: ByteSize::new(align_down(size, page)),
        page_size: ByteSize::new(page),
        base: None,
        functions: Vec::new(),
        retired: Retired::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_folders_of_one_file_system_are_not_two_regions() {
        let fsdax = |name: &str, minor| Region {
            name: name.to_owned(),
            ..pool(RegionKind::Fsdax { folder: name.into(), device: (259, minor) }, 4 << 20, 2 << 20)
        };
        let regions = [fsdax("a", 1)];
        assert!(apart(&regions, fsdax("b", 2)).is_ok());
        let refused = apart(&regions, fsdax("b", 1)).unwrap_err();
        assert!(
            matches!(&refused.reason, RegionRefusal::SameFileSystem { other, .. } if other == "a"),
            "{refused:?}"
        );
    }

    #[test]
    fn memory_of_machines_is_a_region_where_kvm_has_it_and_memory_of_processes_is_one_everywhere() {
        let folder = tempfile::tempdir().unwrap();
        let names = |guest_memfd| {
            let host = HostFacts { guest_memfd, ..HostFacts::read(folder.path()) };
            pools(&host).map(|region| (region.name, region.page_size.get())).collect::<Vec<_>>()
        };
        let local = ("local".to_owned(), 2 << 20);
        assert_eq!(names(false), std::slice::from_ref(&local));
        assert_eq!(names(true), [("guest-memfd".to_owned(), 4096), local]);
    }
}
