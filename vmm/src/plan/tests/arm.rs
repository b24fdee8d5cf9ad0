//! What is particular to Arm: large pages, few pieces of memory, numbers of nodes.

use egm_address::Gpa;
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
fn a_hole_is_as_large_as_the_largest_page_of_a_guest_and_the_plan_states_what_that_costs() {
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

/// An Arm machine with a whole region of 64 GiB as its first node's memory, in which these 64 KiB pages are retired.
fn egm_only(retired: &[u64]) -> Result<Plan, PlanError> {
    let (mut spec, mut facts) = (spec(vec![node(0, 0, "0"), node(1, GIB, "1")]), facts());
    (spec.arch, facts.arch) = (Architecture::Aarch64, Architecture::Aarch64);
    spec.memory.size = ByteSize::new(GIB);
    spec.egm = vec![slice(0, 64 * GIB)];
    spec.egm[0].regions = vec!["egm4".to_owned()];
    let region = &mut facts.regions[1].region;
    region.retired = Retired::new(retired.iter().map(|page| (*page, 64 * KIB)), 64 * GIB, 64 * KIB);
    plan(&spec, &facts)
}

/// The same as a plan, for tests of others.
pub(crate) fn egm_first(retired: &[u64]) -> Plan {
    egm_only(retired).unwrap()
}

#[test]
fn a_slice_is_the_memory_of_a_node_with_processors_and_the_guest_starts_in_it() {
    let plan = egm_only(&[]).unwrap();
    let node = &plan.nodes[0];
    assert_eq!(
        (node.id, node.egm, node.cpus.to_string(), node.memory),
        (0, true, "0".into(), 64 * GIB - 2 * MIB)
    );
    assert!(plan.nodes.len() == 2 && !plan.nodes[1].egm);
    // The tables lie in the slice, so that it is one span from its first byte on, whichever part of it is RAM.
    assert_eq!(pieces(&plan), [(2 * MIB, 64 * GIB - 2 * MIB)]);
    let first = &plan.memory[0];
    assert_eq!(plan.backings[first.backing].id, "egm0");
    assert_eq!(
        plan.window_memory().collect::<Vec<_>>(),
        [WindowMemory {
            span: plan.window(WindowKind::Firmware).unwrap(),
            backing: first.backing,
            offset: 0
        }]
    );
    assert_eq!((plan.memory[1].node, plan.memory[1].span.start()), (1, Gpa::new(65 * GIB)));
}

#[test]
fn a_slice_without_good_pages_for_the_tables_is_no_first_memory() {
    assert_eq!(
        pieces(&egm_only(&[4 * MIB]).unwrap()),
        [(2 * MIB, 2 * MIB), (4 * MIB + 64 * KIB, 64 * GIB - 4 * MIB - 64 * KIB)]
    );
    let error = egm_only(&[MIB]).unwrap_err();
    let text = "EGM slice 0 is the guest's first memory, and egm4 has a retired page at 0x100000, where the guest's tables would be";
    assert_eq!(error.to_string(), text);
    assert!(error.help().unwrap().contains("egm[0] a node of its own"));
}

#[test]
fn a_slice_that_does_not_fit_where_a_pc_starts_is_no_first_memory() {
    let mut spec = spec(vec![node(0, 0, "0")]);
    spec.egm = vec![slice(0, 8 * GIB)];
    spec.memory.size = ByteSize::new(0);
    let error = plan(&spec, &facts()).unwrap_err();
    assert_eq!(error, PlanError::FirstSlice { slice: 0, size: 8 * GIB, at: Gpa::new(0) });
    spec.egm[0].size = ByteSize::new(2 * GIB);
    let plan = plan(&spec, &facts()).unwrap();
    assert_eq!(plan.memory[0].span.start(), Gpa::new(0));
    assert_eq!(plan.memory.len(), 2, "the hole below 1 MiB is none of it");
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

/// Its tables have no numbers for them.
#[test]
fn nodes_of_a_gpu_beyond_the_last_are_refused_with_what_to_change() {
    let configs = std::path::Path::new("../configs");
    let mut spec = crate::config::load(&configs.join("grace-1gpu-egm.json")).unwrap();
    let facts = crate::facts::load(&configs.join("facts/grace.json")).unwrap();
    spec.egm[0].node = 1;
    for (id, fits) in [(247, true), (248, false)] {
        spec.memory.nodes[0].id = id;
        spec.egm[0].distances.clear();
        let error = plan(&spec, &facts).err().map(|error| error.to_string());
        assert_eq!(error.is_none(), fits, "{error:?}");
        assert!(error.is_none_or(|error| error.contains("would be 249 to 256")));
    }
}

/// It would take other bytes of the region for those of the slice.
#[test]
fn a_slice_is_a_gpus_egm_only_at_the_beginning_of_its_region() {
    let configs = std::path::Path::new("../configs");
    let spec = crate::config::load(&configs.join("grace-1gpu-egm.json")).unwrap();
    let mut facts = crate::facts::load(&configs.join("facts/grace.json")).unwrap();
    let made = |facts: &Facts| {
        let plan = plan(&spec, facts).unwrap();
        let egm = plan.pci.iter().find_map(|function| match &function.role {
            FunctionRole::Endpoint { assigned: Some(assigned), .. } => assigned.memory.as_ref()?.egm,
            _ => None,
        });
        let slice = plan.backings.iter().position(|backing| backing.id == "egm0").unwrap();
        let notes: Vec<String> = plan.notes.into_iter().filter(|note| note.contains(" as EGM")).collect();
        (egm.map(|index| index == slice), plan.backings[slice].offset, notes)
    };
    let span = |start, size| Span::new(Offset::new(start), size).unwrap();
    let region = facts.regions.iter_mut().find(|host| host.region.name == "egm4").unwrap();
    region.clean.push(span(256 * GIB, 128 * GIB)); // where another slice would go
    assert_eq!(made(&facts), (Some(true), 0, Vec::new()));
    let region = facts.regions.iter_mut().find(|host| host.region.name == "egm4").unwrap();
    region.held.push(HeldSpan { span: span(0, GIB), owner: "another".to_owned(), trust: Trust::Unrecorded });
    let (egm, offset, notes) = made(&facts);
    assert_eq!((egm, notes.len()), (None, 1), "{notes:?}");
    assert!(offset >= GIB && notes[0].contains("0009:01:00.0 does not use egm0 as EGM"), "{notes:?}");
}
