//! Device-DAX: memory with struct pages that the kernel's allocator leaves alone.

use std::fs;
use std::path::Path;

use egm_address::{ByteSize, Hpa, Span};

use crate::region::facts::HostFacts;
use crate::region::read::{names, node, number};
use crate::region::refused::{Reason, Refused};
use crate::region::{Region, RegionKind};
use crate::retired::Retired;

/// Devices of `/sys/bus/dax/devices` below `root`, but for those of size 0, which wait to be given some.
pub(super) fn discover(root: &Path, facts: &HostFacts) -> impl Iterator<Item = Result<Region, Refused>> {
    let folder = root.join("sys/bus/dax/devices");
    let region = move |name: String| {
        region(&folder.join(&name), &name, facts).map_err(|why| Refused::new(&name, why)).transpose()
    };
    names(&root.join("sys/bus/dax/devices")).into_iter().filter_map(region)
}

fn region(folder: &Path, name: &str, facts: &HostFacts) -> Result<Option<Region>, Reason> {
    let digits = name.strip_prefix("dax").unwrap_or_default();
    if !digits.starts_with(|c: char| c.is_ascii_digit())
        || digits.len() > 16
        || !digits.chars().all(|c| c.is_ascii_digit() || c == '.')
    {
        return Err(Reason::Name);
    }
    let file = |file: &str, expected| {
        let path = folder.join(file);
        number(&path).ok_or_else(|| Reason::Content { path, text: String::new(), expected })
    };
    let size = file("size", "a number of bytes")?;
    if size == 0 {
        return Ok(None);
    }
    let page = ByteSize::new(file("align", "a number of bytes")?);
    let driver = fs::read_link(folder.join("driver")).ok();
    let driver = driver.and_then(|path| Some(path.file_name()?.to_str()?.to_owned()));
    if driver.as_deref() != Some("device_dax") {
        return Err(Reason::Driver { driver });
    }
    if !(12..=30).contains(&page.get().trailing_zeros()) || !page.get().is_power_of_two() {
        return Err(Reason::PageSize(page));
    }
    let base = number(&folder.join("resource")).filter(|base| *base != 0);
    for (what, value) in [("size", size), ("base", base.unwrap_or(0))] {
        if !value.is_multiple_of(page.get()) {
            return Err(Reason::Unaligned { what, value, page });
        }
    }
    // Of what memmap= made, the kernel does not say the node, but ACPI may.
    let described = base.and_then(|base| facts.node_of(Span::new(Hpa::new(base), size).ok()?));
    let told = node(&folder.join("target_node")).or_else(|| node(&folder.join("numa_node")));
    Ok(Some(Region {
        name: name.to_owned(),
        kind: RegionKind::Devdax { device: Path::new("/dev").join(name) },
        node: told.or(described),
        size: ByteSize::new(size),
        page_size: page,
        base: base.map(Hpa::new),
        functions: Vec::new(),
        retired: Retired::default(),
    }))
}
