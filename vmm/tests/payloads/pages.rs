//! Host pages behind guest memory, in machines that run.

use egm_fixtures::payload::{Entry, Ports};
use egm_fixtures::pool::Pool;
use serde_json::json;

use crate::{Guest, assert_ok, kvm, line, plan_of, programs, run_in};

/// Runs a machine with `size` of hugetlb pages as its RAM, and checks every edge of it.
fn starts_with_hugetlb(size: &str, page: &str) {
    let config = json!({ "memory": { "size": size, "page_size": page }, "console": "stdio" });
    let ended = run_in(config, |_| (), programs::memory);
    assert_ok(&ended);
}

#[test]
fn a_machine_starts_with_hugetlb_pages_of_2_mib_as_its_ram() {
    if kvm()
        && let Some(_pool) = Pool::reserve(8, 2 << 10)
    {
        starts_with_hugetlb("16MiB", "2M");
    }
}

#[test]
fn a_machine_starts_with_a_hugetlb_page_of_1_gib_as_its_ram() {
    if kvm()
        && let Some(_pool) = Pool::reserve(1, 1 << 20)
    {
        starts_with_hugetlb("1GiB", "1G");
    }
}

/// Whether the host has twice 512 MiB of free memory in blocks of a huge page and more, once the kernel has joined the small
/// ones, which only root can request; prints a skip elsewhere. The kernel gives base pages in their place.
pub(crate) fn host_has_huge_pages() -> bool {
    let _ = std::fs::write("/proc/sys/vm/compact_memory", "1");
    let zones = std::fs::read_to_string("/proc/buddyinfo").unwrap();
    // "Node 0, zone Normal", then the free blocks of 4 KiB, 8 KiB and so on.
    let large = |zone: &str| {
        let blocks = zone.split_whitespace().skip(4).enumerate().skip(9);
        blocks.map(|(order, count)| count.parse::<u64>().unwrap() * (4 << order)).sum::<u64>()
    };
    let enough = zones.lines().map(large).sum::<u64>() >= 1 << 20;
    if !enough {
        println!("skipped: the host has too little contiguous memory");
    }
    enough
}

/// A machine of 512 MiB, where the host has huge pages for it; prints why not elsewhere.
fn with_huge_pages(prefault: bool) -> Option<serde_json::Value> {
    if !host_has_huge_pages() {
        return None;
    }
    let config = json!({ "memory": { "size": "512MiB", "prefault": prefault }, "boot": { "kernel": "x" }, "console": "stdio" });
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vm.json");
    std::fs::write(&file, config.to_string()).unwrap();
    let pages = plan_of(&file).backings[0].pages.clone().unwrap();
    if let Some(why) = &pages.why_not_larger {
        println!("skipped: {why}");
        return None;
    }
    println!("{pages:?}");
    Some(config)
}

#[test]
fn prefaulted_memory_is_in_huge_pages_by_default_and_the_program_reports_it() {
    if !kvm() {
        return;
    }
    let Some(config) = with_huge_pages(true) else { return };
    let ended = run_in(config, |_| (), |_| egm_fixtures::payload::hello(Ports::USUAL, Entry::Pvh));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let line = ended.messages.lines().find_map(|line| line.strip_prefix("memory: "));
    let line = line.unwrap_or_else(|| panic!("{ended:?}"));
    let (huge, all) = line.split_once(" MiB of ").unwrap();
    let (all, _) = all.split_once(" MiB present in huge pages of the host").unwrap();
    let [huge, all]: [f64; 2] = [huge, all].map(|number| number.parse().unwrap());
    assert!(all > 511.0 && huge >= 0.95 * all && !ended.messages.contains("warning"), "{ended:?}");
}

/// KiB of `field` in the mapping of guest memory of the program that `timeout` runs.
fn of_guest_memory(timeout: u32, field: &str) -> u64 {
    let children = std::fs::read_to_string(format!("/proc/{timeout}/task/{timeout}/children")).unwrap();
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", children.trim())).unwrap();
    let mut counts = false;
    let mut sum = 0;
    for line in smaps.lines() {
        if line.split_once('-').is_some_and(|(start, _)| start.len() == 12) {
            counts = line.ends_with("egm-vmm (deleted)");
        } else if let Some(kib) = line.strip_prefix(field).filter(|_| counts) {
            sum += kib.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().unwrap();
        }
    }
    sum
}

#[test]
fn memory_that_the_guest_touches_comes_in_huge_pages() {
    if !kvm() {
        return;
    }
    let Some(config) = with_huge_pages(false) else { return };
    let (from, to) = (16 << 20, 144 << 20);
    let mut guest =
        Guest::start(config, |_| (), |_| egm_fixtures::payload::zeros(Ports::USUAL, from, to - from));
    assert_eq!(line(guest.child.stdout.as_mut().unwrap()).trim_end(), "zeros");
    let [huge, present] = ["ShmemPmdMapped", "Rss"].map(|field| of_guest_memory(guest.child.id(), field));
    guest.terminate();
    assert_eq!(guest.end().code, Some(0));
    println!("{huge} KiB of {present} KiB in huge pages");
    assert!(present >= (to - from) >> 10 && huge * 100 >= present * 95, "{huge} KiB of {present} KiB");
}
