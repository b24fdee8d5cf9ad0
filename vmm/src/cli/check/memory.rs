//! Rows for the guest's memory: what the host has of it now.

use egm_report::show::size;

use super::row::Row;
use crate::facts::{Facts, HostNode};
use crate::plan::{BackingPlan, Plan, scope};

/// A row for each backing of `plan`, which the host of `facts` has room for; a note of the plan names ordinary memory that
/// is not available now. `takes_slices`: whether this user takes slices without a broker.
pub(super) fn rows(plan: &Plan, facts: &Facts, takes_slices: bool) -> Vec<Row> {
    let row = |backing: &BackingPlan| match backing {
        BackingPlan { region: Some(region), .. } => Some(slice(backing, region, takes_slices)),
        BackingPlan { guest_memfd: true, .. } => {
            let found = format!("{}, the machine's own (guest_memfd)", size(backing.size));
            Some(Row::ok(subject(backing), found))
        }
        _ if backing.page_size.is_hugetlb() => Some(in_pool(backing, facts)),
        _ => ordinary(backing, plan, facts),
    };
    plan.backings.iter().filter_map(row).collect()
}

fn subject(backing: &BackingPlan) -> String {
    let kind = if backing.region.is_some() { "slice" } else { "memory" };
    format!("{kind} \"{}\"", backing.id)
}

fn slice(backing: &BackingPlan, region: &str, takes_slices: bool) -> Row {
    let found = format!("{} of region {region} at {:#x} are free", size(backing.size), backing.offset);
    if takes_slices {
        return Row::ok(subject(backing), found);
    }
    let help = "run the machine as root, or with the broker's socket: egm-vmm run --broker SOCKET".to_owned();
    Row::note(subject(backing), format!("{found}; this user gets them from a broker only"), Some(help))
}

fn in_pool(backing: &BackingPlan, facts: &Facts) -> Row {
    let pools = nodes(backing, facts).flat_map(|node| &node.pools);
    let pools = pools.filter(|pool| pool.page_size.get() == backing.page_size.bytes());
    let free = pools.fold(0u64, |sum, pool| sum.saturating_add(pool.free));
    let page = backing.page_size.bytes();
    let (needed, page) = (backing.size / page, size(page));
    let found =
        format!("{needed} huge pages of {page}; {} has {free} free", scope(backing.host_nodes.as_ref()));
    Row::ok(subject(backing), found)
}

/// `None` for memory that is not available now: the kernel allocates it as the guest uses it, and the plan has a note.
fn ordinary(backing: &BackingPlan, plan: &Plan, facts: &Facts) -> Option<Row> {
    let available = match backing.host_nodes {
        None => facts.memory.available.get(),
        Some(_) => {
            nodes(backing, facts).fold(0u64, |sum, node| sum.saturating_add(node.memory.available.get()))
        }
    };
    if needed_with(backing, plan) > available {
        return None;
    }
    let scope = scope(backing.host_nodes.as_ref());
    let pages = backing.pages.as_ref().map(|pages| format!(" in pages of {}", size(pages.size.get())));
    let own = format!("{}{}", size(backing.size), pages.unwrap_or_default());
    Some(Row::ok(subject(backing), format!("{own}; {scope} has {} available", size(available))))
}

/// Bytes that the machine can use where `backing` lies: on its nodes, or on any node for one without.
fn needed_with(backing: &BackingPlan, plan: &Plan) -> u64 {
    let is_ordinary =
        |other: &&BackingPlan| other.region.is_none() && !other.guest_memfd && !other.page_size.is_hugetlb();
    let is_near =
        |other: &&BackingPlan| backing.host_nodes.is_none() || other.host_nodes == backing.host_nodes;
    let sizes = plan.backings.iter().filter(is_ordinary).filter(is_near).map(|other| other.size);
    sizes.fold(0, u64::saturating_add)
}

fn nodes<'a>(backing: &'a BackingPlan, facts: &'a Facts) -> impl Iterator<Item = &'a HostNode> {
    let is_allowed =
        |node: &&HostNode| backing.host_nodes.as_ref().is_none_or(|nodes| nodes.contains(node.id));
    facts.nodes.iter().filter(is_allowed)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::row::RowState;
    use super::*;
    use crate::{config, facts, plan};

    fn planned(config: &str, recorded: &str) -> (Plan, Facts) {
        let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
        let spec = config::load(&configs.join(config)).unwrap();
        let facts = facts::load(&configs.join("facts").join(recorded)).unwrap();
        (plan::plan(&spec, &facts).unwrap(), facts)
    }

    #[test]
    fn pages_of_a_pool_are_counted_on_the_backings_own_node() {
        let (plan, facts) = planned("hgx-h200.json", "hgx-h200.json");
        let rows = rows(&plan, &facts, true);
        let found: Vec<&str> = rows.iter().map(|row| row.found.as_str()).collect();
        assert!(found[0].starts_with("768 huge pages of 1 GiB; host node 0 has "), "{found:?}");
        assert!(found[1].starts_with("768 huge pages of 1 GiB; host node 1 has "), "{found:?}");
        assert!(rows.iter().all(|row| row.state == RowState::Ok), "{found:?}");
    }

    #[test]
    fn memory_that_is_not_available_has_the_note_of_the_plan_alone() {
        let (mut plan, facts) = planned("smp.json", "x86-server.json");
        let ok = rows(&plan, &facts, true);
        assert!(ok.len() == 4 && ok.iter().all(|row| row.state == RowState::Ok), "{ok:?}");
        plan.backings[0].size = facts.memory.available.get();
        let rows = rows(&plan, &facts, true);
        assert!(rows.is_empty(), "{rows:?}");
    }

    #[test]
    fn a_user_without_the_right_to_a_slice_is_referred_to_the_broker() {
        let (plan, facts) = planned("grace-1gpu-egm.json", "grace.json");
        let slice = |takes_slices| rows(&plan, &facts, takes_slices).pop().unwrap();
        assert_eq!((slice(true).state, slice(false).state), (RowState::Ok, RowState::Note));
        assert!(slice(false).help.is_some_and(|help| help.contains("--broker")));
    }
}
