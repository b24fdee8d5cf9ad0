//! Regions of the nvgrace-egm driver, in the three forms that its `/sys/class/egm` has had.
//!
//! The GPUs that reach a region come from links below `egmN/` named by PCI address (second version of the driver), from
//! a file `gpu_devices` (the vendor's kernels), or from a link `egmN` below each GPU (first version).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use egm_address::{ByteSize, Hpa, PciAddress};

use crate::region::facts::HostFacts;
use crate::region::read::{bytes, names, node, number, parse_number, text};
use crate::region::refused::{RefusedRegion, RegionRefusal, printable};
use crate::region::{Region, RegionKind, largest_page};
use crate::retired::Retired;

/// Regions that the driver shows below `root`, without their retired pages: those need the device to be opened.
pub(super) fn discover(
    root: &Path,
    facts: &HostFacts,
) -> impl Iterator<Item = Result<Region, RefusedRegion>> {
    let folder = root.join("sys/class/egm");
    let names = names(&folder);
    let links = if names.is_empty() { Vec::new() } else { links(root) };
    names.into_iter().map(move |name| {
        region(root, &folder.join(&name), &name, &links, facts).map_err(|why| RefusedRegion::new(&name, why))
    })
}

fn region(
    root: &Path,
    folder: &Path,
    name: &str,
    links: &[(String, PciAddress)],
    facts: &HostFacts,
) -> Result<Region, RegionRefusal> {
    let domain = name.strip_prefix("egm").and_then(|n| n.parse::<u32>().ok()).ok_or(RegionRefusal::Name)?;
    let size = size(&folder.join("egm_size"))?;
    let functions = functions(folder, name, links);
    let base = base(root, folder, &functions).or_else(|| described(facts, domain, size));
    let page_size = largest_page(base.map_or(0, Hpa::get), size).ok_or(RegionRefusal::Unaligned {
        what: "size",
        value: size,
        page: ByteSize::new(4096),
    })?;
    let of_gpu = |gpu: &PciAddress| node(&device(root, *gpu).join("numa_node"));
    Ok(Region {
        name: name.to_owned(),
        kind: RegionKind::Egm { device: Path::new("/dev").join(name) },
        node: node(&folder.join("device/numa_node")).or_else(|| functions.iter().find_map(of_gpu)),
        size: ByteSize::new(size),
        page_size,
        base,
        functions,
        retired: Retired::default(),
    })
}

fn device(root: &Path, function: PciAddress) -> PathBuf {
    root.join("sys/bus/pci/devices").join(function.to_string())
}

/// The driver prints hexadecimal digits, with `0x` or without.
fn size(path: &Path) -> Result<u64, RegionRefusal> {
    let text = text(path).map_err(|source| RegionRefusal::Read { path: path.to_owned(), source })?;
    let digits = text.strip_prefix("0x").unwrap_or(&text);
    let size = u64::from_str_radix(digits, 16).ok().filter(|size| (1..1 << 52).contains(size));
    size.ok_or_else(|| RegionRefusal::Content {
        path: path.to_owned(),
        text: printable(&text),
        expected: "a hexadecimal number of bytes, below 4 PiB",
    })
}

fn functions(folder: &Path, name: &str, links: &[(String, PciAddress)]) -> Vec<PciAddress> {
    let listed = text(&folder.join("gpu_devices")).unwrap_or_default();
    let listed = listed.lines().filter_map(|line| line.trim().parse().ok());
    let below = names(folder).into_iter().filter_map(|name| name.parse().ok());
    let reversed = links.iter().filter(|(region, _)| region == name).map(|(_, function)| *function);
    let all: BTreeSet<PciAddress> = listed.chain(below).chain(reversed).collect();
    all.into_iter().collect()
}

/// Links to regions below PCI functions: the region's name and the function.
fn links(root: &Path) -> Vec<(String, PciAddress)> {
    let of = |function: PciAddress| {
        let folder = device(root, function);
        let direct = names(&folder).into_iter().filter(|name| name.starts_with("egm") && name != "egm");
        direct.chain(names(&folder.join("egm"))).map(move |name| (name, function)).collect::<Vec<_>>()
    };
    names(&root.join("sys/bus/pci/devices"))
        .iter()
        .filter_map(|name| name.parse().ok())
        .flat_map(of)
        .collect()
}

/// Start of the region: from the driver's own file, or from a GPU's node in a device tree. Linux shows ACPI's device
/// properties to no program.
fn base(root: &Path, folder: &Path, functions: &[PciAddress]) -> Option<Hpa> {
    let of_tree = |gpu: &PciAddress| {
        let bytes = bytes(&device(root, *gpu).join("of_node/nvidia,egm-base-pa")).ok()?;
        Some(u64::from_be_bytes(bytes.try_into().ok()?))
    };
    let hexadecimal = |text: String| parse_number(&text).or_else(|| u64::from_str_radix(&text, 16).ok());
    let file = folder.join("egm_phys");
    let own = number(&file).or_else(|| text(&file).ok().and_then(hexadecimal));
    own.or_else(|| functions.iter().find_map(of_tree)).map(Hpa::new)
}

/// The driver numbers regions by proximity domain; ACPI's affinity table may list that domain's memory. It is trusted
/// only if it is one span of exactly this size.
fn described(facts: &HostFacts, domain: u32, size: u64) -> Option<Hpa> {
    let mut spans = facts.affinity.iter().filter(|affinity| affinity.domain == domain);
    match (spans.next(), spans.next()) {
        (Some(only), None) if only.span.size() == size => Some(only.span.start()),
        _ => None,
    }
}
