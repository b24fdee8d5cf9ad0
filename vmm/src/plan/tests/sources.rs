//! Where slices come from, and what to change where they come from nowhere.

use super::*;

/// A machine with a slice of 1 GiB from these regions or kinds.
fn machine(regions: &[&str]) -> Spec {
    let mut spec = spec(vec![node(0, GIB, "0")]);
    let regions = regions.iter().map(|&region| region.to_owned()).collect();
    spec.egm = vec![EgmSlice { regions, ..slice(1, GIB) }];
    spec
}

fn help(spec: &Spec, facts: &Facts) -> String {
    plan(spec, facts).unwrap_err().help().unwrap()
}

/// A host with a pool of 1 GiB pages on node 0 and one of 2 MiB pages on node 1.
fn with_pools() -> Facts {
    let mut facts = facts();
    for (name, node, page) in [("pool0", 0, GIB), ("pool1", 1, 2 * MIB)] {
        let mut pool = region(name, RegionKind::Hugetlb, 4);
        (pool.region.node, pool.region.page_size) = (Some(node), ByteSize::new(page));
        facts.regions.push(pool);
    }
    facts
}

#[test]
fn a_slice_of_huge_pages_comes_from_a_pool_of_its_pages_and_its_nodes() {
    let facts = with_pools();
    let from = |page_size: PageSize, nodes: Option<&str>| {
        let mut spec = machine(&["hugetlb"]);
        (spec.egm[0].page_size, spec.egm[0].host_nodes) =
            (page_size, nodes.map(|nodes| nodes.parse().unwrap()));
        let plan = plan(&spec, &facts).ok()?;
        Some((plan.backings[1].region.clone().unwrap(), plan.backings[1].page_size))
    };
    let [first, second] = [("pool0", PageSize::Size1G), ("pool1", PageSize::Size2M)]
        .map(|(name, size)| Some((name.to_owned(), size)));
    assert_eq!(from(PageSize::Auto, None), first);
    assert_eq!(from(PageSize::Size2M, None), second);
    assert_eq!(from(PageSize::Auto, Some("1")), second);
    assert_eq!(from(PageSize::Size1G, Some("0")), first);
    assert_eq!(from(PageSize::Size1G, Some("1")), None);
    assert_eq!(from(PageSize::Size2M, Some("0")), None);
}

#[test]
fn memory_without_pools_is_not_chosen_by_pages() {
    let mut spec = machine(&["devdax"]);
    spec.egm[0].page_size = PageSize::Size2M;
    let plan = plan(&spec, &facts()).unwrap();
    assert_eq!(plan.backings[1].region.as_deref(), Some("dax0.0"));
}

/// A GPU counts from the beginning of its region; other slices avoid retired pages where they can.
#[test]
fn a_slice_begins_where_its_region_does_if_a_gpu_of_the_machine_counts_from_there() {
    let mut facts = facts();
    let gpu = big_gpu(1);
    for host in &mut facts.regions {
        host.region.functions = vec![gpu.address];
        host.region.retired = Retired::new([(0, 64 << 10)], host.region.size.get(), 64 << 10);
    }
    let offset = |spec: &Spec, facts: &Facts| plan(spec, facts).unwrap().backings[1].offset;
    let (mut egm, mut dax) = (machine(&["egm4"]), machine(&["dax0.0"]));
    assert_eq!(offset(&egm, &facts), GIB);
    assign(&mut egm, &mut facts, gpu.clone(), true);
    dax.devices = egm.devices.clone();
    assert_eq!((offset(&egm, &facts), offset(&dax, &facts)), (0, GIB));
    let mut other = facts.clone();
    other.regions.iter_mut().for_each(|host| host.region.functions.clear());
    assert_eq!(offset(&egm, &other), GIB);
}

#[test]
fn a_region_without_room_names_its_holders_and_a_smaller_slice_is_one_remedy() {
    let mut facts = facts();
    let whole = Span::new(Offset::new(0), 64 * GIB).unwrap();
    facts.regions[1].held = vec![HeldSpan { span: whole, owner: "vm9".to_owned(), trust: Trust::Unrecorded }];
    let error = plan(&machine(&["egm4"]), &facts).unwrap_err().to_string();
    assert!(error.ends_with("; held by vm9"), "{error}");
    let size = "lower the slice's \"size\", or give \"region\" a list that ends in \"local\"";
    assert_eq!(help(&machine(&["egm4"]), &facts), size);
    assert_eq!(help(&machine(&["egm4", "fsdax"]), &facts), size);
    assert_eq!(
        help(&machine(&["fsdax", "guest-memfd"]), &facts),
        "give \"region\" a list that ends in \"local\"",
        "no size helps"
    );
    facts.regions[1].held.clear();
    let mut large = machine(&["egm4"]);
    large.egm[0].size = ByteSize::new(65 * GIB);
    assert!(!plan(&large, &facts).unwrap_err().to_string().contains("held by"));
}

#[test]
fn a_region_that_the_host_lacks_is_compared_with_those_it_has() {
    assert!(help(&machine(&["dax0.1"]), &facts()).starts_with("did you mean \"dax0.0\"? "));
    let known = help(&machine(&["fsdax"]), &facts());
    assert!(known.starts_with("\"egm-device regions\" shows"), "a kind is no misspelling: {known}");
}

#[test]
fn the_place_of_a_slice_in_its_region_survives_the_json_form_of_a_plan() {
    let mut facts = facts();
    let span = Span::new(Offset::new(0), MIB).unwrap();
    facts.regions[1].held = vec![HeldSpan { span, owner: "vm9".to_owned(), trust: Trust::Unrecorded }];
    let made = plan(&machine(&["egm4"]), &facts).unwrap();
    assert_eq!(made.backings[1].offset, GIB);
    assert_eq!(serde_json::from_str::<Plan>(&json(&made)).unwrap(), made);
}

#[test]
fn a_plan_that_contradicts_itself_is_our_mistake_not_the_configurations() {
    assert_eq!(PlanError::Internal("a test").blame(), crate::error::Blame::Internal);
}
