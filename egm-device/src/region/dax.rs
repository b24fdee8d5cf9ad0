//! Device-DAX: memory with struct pages that the kernel's allocator leaves alone.

use std::fs;
use std::path::Path;

use egm_address::{ByteSize, Hpa, Span};

use crate::region::facts::HostFacts;
use crate::region::read::{names, node, number};
use crate::region::refused::{RefusedRegion, RegionRefusal};
use crate::region::{DaxFiles, Region, RegionKind, check_pages};
use crate::retired::Retired;

/// Smallest span of a device of a dynamic region: the kernel adds struct pages for this many bytes at a time.
const LEAST_PAGE: u64 = 2 << 20;

/// Devices of `/sys/bus/dax/devices` below `root`, without those of size 0. A region that grants split into devices is
/// one region, and its devices are none.
pub(super) fn discover(
    root: &Path,
    facts: &HostFacts,
) -> impl Iterator<Item = Result<Region, RefusedRegion>> {
    let folder = root.join("sys/bus/dax/devices");
    let region = move |name: String| {
        region(&folder.join(&name), &name, facts).map_err(|why| RefusedRegion::new(&name, why)).transpose()
    };
    names(&root.join("sys/bus/dax/devices")).into_iter().filter_map(region)
}

fn region(folder: &Path, name: &str, facts: &HostFacts) -> Result<Option<Region>, RegionRefusal> {
    let digits = name.strip_prefix("dax").unwrap_or_default();
    if !digits.starts_with(|c: char| c.is_ascii_digit())
        || digits.len() > 16
        || !digits.chars().all(|c| c.is_ascii_digit() || c == '.')
    {
        return Err(RegionRefusal::Name);
    }
    let file = |file: &str, expected| {
        let path = folder.join(file);
        number(&path).ok_or_else(|| RegionRefusal::Content { path, text: String::new(), expected })
    };
    let is_dynamic = folder.join("../dax_region/create").exists();
    if is_dynamic && is_split(folder, name) {
        let is_first = name.ends_with(".0");
        let size = || file("../dax_region/size", "a number of bytes");
        return if is_first { split(folder, name, size()?, facts).map(Some) } else { Ok(None) };
    }
    let size = file("size", "a number of bytes")?;
    if size == 0 {
        return Ok(None);
    }
    let page = ByteSize::new(file("align", "a number of bytes")?);
    let driver = fs::read_link(folder.join("driver")).ok();
    let driver = driver.and_then(|path| Some(path.file_name()?.to_str()?.to_owned()));
    if driver.as_deref() != Some("device_dax") {
        return Err(RegionRefusal::Driver { driver });
    }
    if !(12..=30).contains(&page.get().trailing_zeros()) || !page.get().is_power_of_two() {
        return Err(RegionRefusal::PageSize(page));
    }
    let base = number(&folder.join("resource")).filter(|base| *base != 0);
    check_pages(base.unwrap_or(0), size, page)?;
    let files = if is_dynamic { DaxFiles::Whole } else { DaxFiles::Static };
    Ok(Some(Region {
        name: name.to_owned(),
        kind: RegionKind::Devdax { device: Path::new("/dev").join(name), files },
        node: node_of(folder, base, size, facts),
        size: ByteSize::new(size),
        page_size: page,
        base: base.map(Hpa::new),
        functions: Vec::new(),
        retired: Retired::default(),
    }))
}

/// Whether grants split the kernel's region of the device `name` in `folder`: its first device has no memory, which
/// leaves all of it to the devices of slices.
fn is_split(folder: &Path, name: &str) -> bool {
    let Some((region, _)) = name.split_once('.') else { return false };
    number(&folder.with_file_name(format!("{region}.0")).join("size")) == Some(0)
}

/// The region of `size` bytes with the first device `name`. The kernel shows its address on a device without memory.
fn split(folder: &Path, name: &str, size: u64, facts: &HostFacts) -> Result<Region, RegionRefusal> {
    let base = number(&folder.join("resource")).filter(|base| *base != 0);
    let page = ByteSize::new(number(&folder.join("align")).unwrap_or(0).max(LEAST_PAGE));
    check_pages(base.unwrap_or(0), size, page)?;
    Ok(Region {
        name: name.trim_end_matches(".0").to_owned(),
        kind: RegionKind::Devdax { device: Path::new("/dev").join(name), files: DaxFiles::PerSlice },
        node: node_of(folder, base, size, facts),
        size: ByteSize::new(size),
        page_size: page,
        base: base.map(Hpa::new),
        functions: Vec::new(),
        retired: Retired::default(),
    })
}

/// The node of the device in `folder`. The kernel reports none for memory of `memmap=`, but ACPI may describe it.
fn node_of(folder: &Path, base: Option<u64>, size: u64, facts: &HostFacts) -> Option<u32> {
    let described = || base.and_then(|base| facts.node_of(Span::new(Hpa::new(base), size).ok()?));
    node(&folder.join("target_node")).or_else(|| node(&folder.join("numa_node"))).or_else(described)
}
