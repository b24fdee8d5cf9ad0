//! Claims about huge pages: transparent ones come where a program asks for them, those set aside lie on their node; both
//! keep what is written.

use egm_guest::findings::{Figure, Outcome};

use super::node_memory::{self, NodeMemory};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::pattern::{difference, fill};
use crate::sys::Mapping;
use crate::sysfs;
use crate::tree::{self, Tree};
use crate::validate::Setting;

const TRANSPARENT: &str = "/sys/kernel/mm/transparent_hugepage";

pub(super) fn transparent(setting: &Setting) -> Result<Finding, Broken> {
    let tree = Tree::live();
    let Some(enabled) = tree.word(&format!("{TRANSPARENT}/enabled")) else {
        return Ok(Finding::skipped(
            "the kernel has no transparent huge pages (CONFIG_TRANSPARENT_HUGEPAGE)",
        ));
    };
    if chosen(&enabled) == Some("never") {
        return Ok(Finding::skipped(format!(
            "transparent huge pages are off: write `madvise` to {TRANSPARENT}/enabled"
        )));
    }
    let page = tree.number(&format!("{TRANSPARENT}/hpage_pmd_size")).unwrap_or(2 << 20).max(4096);
    let (places, left_out) = node_memory::places(&tree, setting)?;
    let (mut claim, mut figures, mut tried) = (Claim::default(), Vec::new(), false);
    for place in places.iter().filter(|place| place.size as u64 >= 2 * page) {
        tried = true;
        let before = anonymous_huge(&tree);
        let mut memory = place.memory(place.size)?;
        kept(&mut claim, &place.name(), &mut memory, setting.seed);
        let (Some(before), Some(after)) = (before, anonymous_huge(&tree)) else {
            return Ok(Finding::skipped("/proc/self/smaps_rollup does not say how many pages are huge"));
        };
        let huge = after.saturating_sub(before);
        claim.seen(format!("{}: {huge} of {} bytes", place.name(), place.size));
        figures.extend(part(&place.name(), huge, place.size as u64, page));
    }
    if !tried {
        let short = format!("--size and free memory allow less than two huge pages, {} bytes", 2 * page);
        let reasons: Vec<String> = std::iter::once(short).chain(left_out).collect();
        return Ok(Finding::skipped(reasons.join("; ")));
    }
    let none_came = figures.is_empty();
    let finding = claim.finish().with_figures(figures);
    if none_came && finding.outcome == Outcome::Passed {
        return Ok(Finding::skipped(format!(
            "what was written is kept, but the kernel gave no huge page: its free memory is in pieces (`echo 1 > \
             /proc/sys/vm/compact_memory`), or --size leaves room for few ({})",
            finding.reason
        )));
    }
    Ok(finding)
}

/// How much of what can be is in huge pages; no figure where nothing is, which is seen, and is how a full node looks.
fn part(name: &str, huge: u64, size: u64, page: u64) -> Option<Figure> {
    // What does not fill a page at either end cannot be huge.
    let most = (size / page).saturating_sub(1).max(1) * page;
    #[expect(clippy::cast_precision_loss, reason = "a figure")]
    let part = (huge as f64 / most as f64).min(1.0);
    let series = format!("in huge pages, {name}");
    (huge > 0).then(|| Figure::of(series, None, "of what can be", &mut [part]))
}

/// The word in brackets: `always [madvise] never`.
fn chosen(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

/// Bytes of this process that are in transparent huge pages.
fn anonymous_huge(tree: &Tree) -> Option<u64> {
    let text = tree.text("/proc/self/smaps_rollup")?;
    sysfs::field(&text, "AnonHugePages")?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

pub(super) fn hugetlb(setting: &Setting) -> Result<Finding, Broken> {
    let tree = Tree::live();
    let (places, _) = node_memory::places(&tree, setting)?;
    let mut claim = Claim::default();
    let mut tried = false;
    for (place, page, free) in places.iter().flat_map(|place| pools(&tree, place)) {
        let Some(node) = place.node else { continue };
        let count = free.min(setting.most / page).max(1);
        let (Ok(size), true) = (usize::try_from(count.saturating_mul(page)), free > 0) else { continue };
        tried = true;
        let name = format!("{count} pages of {page} bytes on node {node}");
        let mut memory = Mapping::huge(size, page.trailing_zeros(), node)
            .map_err(Broken::system(format!("cannot map {name}, though {free} are free")))?;
        kept(&mut claim, &name, &mut memory, setting.seed);
        let step = usize::try_from(page).unwrap_or(size);
        let nodes = memory.nodes(step).map_err(Broken::system("move_pages"))?;
        let wanted = i32::try_from(node).unwrap_or(-1);
        if let Some(other) = nodes.iter().find(|is| **is != wanted) {
            claim.untrue(format!("of {name} one lies on node {other}"));
        }
        claim.seen(name);
    }
    if !tried {
        return Ok(Finding::skipped(
            "no huge page is set aside and free: run `echo 64 > /proc/sys/vm/nr_hugepages`, or boot with hugepages=",
        ));
    }
    Ok(claim.finish())
}

/// Sizes of huge pages, powers of two, and how many are free on a node.
fn pools<'a>(tree: &Tree, place: &'a NodeMemory) -> Vec<(&'a NodeMemory, u64, u64)> {
    let Some(node) = place.node else { return Vec::new() };
    let folder = tree::node(node, "hugepages");
    let pool = |name: String| {
        let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let page = kib.checked_mul(1024).filter(|page| page.is_power_of_two())?;
        Some((place, page, tree.number(&format!("{folder}/{name}/free_hugepages"))?))
    };
    tree.names(&folder).into_iter().filter_map(pool).collect()
}

fn kept(claim: &mut Claim, name: &str, memory: &mut Mapping, seed: u64) {
    for flip in [0, u64::MAX] {
        fill(memory.bytes_mut(), seed, 0, flip);
        if let Some(at) = difference(memory.bytes(), seed, 0, flip) {
            claim.untrue(format!("{name} did not keep the byte at {at:#x}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::tests::recorded;

    #[test]
    fn a_node_without_huge_pages_has_no_figure_and_fails_nothing() {
        let page = 2 << 20;
        assert_eq!(part("node 1", 0, 16 << 20, page), None);
        let good = [part("node 0", page, 16 << 20, page), part("node 1", 0, 16 << 20, page)];
        assert_eq!(good[0].as_ref().map(|figure| figure.value), Some(1.0 / 7.0));
        let figures = good.into_iter().flatten().collect();
        let finding = Claim::default().finish().with_figures(figures).without_nonsense();
        assert_eq!(finding.outcome, Outcome::Passed);
    }

    #[test]
    fn the_choice_is_in_brackets() {
        assert_eq!(chosen("always [madvise] never"), Some("madvise"));
        assert_eq!(chosen("always madvise"), None);
    }

    #[test]
    fn pools_are_read_from_their_node() {
        let (_folder, tree) = recorded(
            "== /sys/devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages\n3\n\
             == /sys/devices/system/node/node1/hugepages/hugepages-1048576kB/free_hugepages\n0\n\
             == /sys/devices/system/node/node1/hugepages/strange/free_hugepages\n9\n",
        );
        let place = NodeMemory { node: Some(1), size: 4096, cpus: "0".parse().unwrap(), has_cpus: true };
        let found: Vec<(u64, u64)> =
            pools(&tree, &place).into_iter().map(|(_, page, free)| (page, free)).collect();
        assert_eq!(found, [(1 << 30, 0), (2 << 20, 3)]);
    }
}
