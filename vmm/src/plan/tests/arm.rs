//! What is particular to Arm: large pages, few pieces of memory, numbers of nodes.

use egm_device::retired::Retired;
use proptest::prelude::*;

use super::*;

const KIB: u64 = 1 << 10;

/// An Arm machine with a slice of 64 GiB, of which these 4 KiB pages are retired.
fn planned(retired: impl IntoIterator<Item = u64>) -> Plan {
    let (mut spec, mut facts) = (spec(vec![node(0, GIB, "0")]), facts());
    (spec.arch, facts.arch) = (Architecture::Aarch64, Architecture::Aarch64);
    spec.egm = vec![slice(1, 64 * GIB)];
    spec.egm[0].regions = vec!["egm4".to_owned()];
    let region = &mut facts.regions[1].region;
    region.page_size = ByteSize::new(4 * KIB);
    region.retired = Retired::new(retired.into_iter().map(|page| (page, 4 * KIB)), 64 * GIB, 4 * KIB);
    plan(&spec, &facts).unwrap()
}

/// Offset and size of each piece of the slice.
fn pieces(plan: &Plan) -> Vec<(u64, u64)> {
    let egm = plan.memory.iter().filter(|m| m.kind == MemoryKind::Egm);
    egm.map(|m| (m.offset, m.span.size())).collect()
}

#[test]
fn a_hole_is_as_large_as_the_largest_page_of_a_guest_and_the_plan_says_what_that_costs() {
    let plan = planned([GIB + 4 * KIB]);
    assert_eq!(pieces(&plan), [(0, GIB), (GIB + 64 * KIB, 63 * GIB - 64 * KIB)]);
    assert_eq!(
        plan.notes,
        [
            "node 1 lacks 60 KiB of egm4 that are good but near retired pages: holes are of 64 KiB each, since a guest may \
          have pages of that size"
        ]
    );
    let whole = planned((0..16).map(|page| GIB + page * 4 * KIB));
    assert_eq!(whole.notes, [""; 0], "what is retired alone costs nothing more");
}

#[test]
fn more_holes_than_a_kernel_keeps_grow_until_near_ones_are_one() {
    // Pairs of pages 1 MiB apart, a pair every 32 MiB: holes of 1 MiB touch.
    let pairs = (0..800).flat_map(|pair| [0, MIB].map(|apart| pair * 32 * MIB + 64 * KIB + apart));
    let plan = planned(pairs);
    assert_eq!(pieces(&plan).len(), 800);
    assert!(pieces(&plan).iter().all(|(offset, size)| offset % (2 * MIB) == 0 && size % (2 * MIB) == 0));
    assert!(plan.notes[0].contains("holes are of 1 MiB each, since a guest's kernel keeps about 900 pieces"));
}

#[test]
fn memory_that_large_pages_do_not_divide_is_refused() {
    let (mut spec, mut facts) = (spec(vec![node(0, GIB + 4 * KIB, "0")]), facts());
    plan(&spec, &facts).unwrap(); // x86 has no such pages
    (spec.arch, facts.arch) = (Architecture::Aarch64, Architecture::Aarch64);
    let error = plan(&spec, &facts).unwrap_err();
    assert_eq!(error, PlanError::NodeSize { node: 0, size: GIB + 4 * KIB, page: 64 * KIB });
    assert!(
        error
            .to_string()
            .contains("no multiple of 64 KiB, the largest page of such a guest: change its size")
    );
}

proptest! {
    /// No retired byte is memory, every edge suits every page, and there are never more pieces than a kernel keeps.
    #[test]
    fn holes_cover_what_is_retired(pages in prop::collection::vec(0u64..(64 * GIB / (4 * KIB)), 0..3000)) {
        let plan = planned(pages.iter().map(|page| page * 4 * KIB));
        let found = pieces(&plan);
        prop_assert!(plan.memory.len() <= 900);
        for (offset, size) in &found {
            prop_assert!(offset % (64 * KIB) == 0 && size % (64 * KIB) == 0);
        }
        for page in pages {
            let at = page * 4 * KIB;
            let after = found.partition_point(|(offset, _)| *offset <= at);
            prop_assert!(found[..after].last().is_none_or(|(offset, size)| offset + size <= at), "{at:#x}");
        }
    }
}
