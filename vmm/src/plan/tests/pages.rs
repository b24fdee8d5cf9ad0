//! Host pages behind ordinary memory, on hosts that offer more and less.

use super::*;
use crate::plan::make_private;

const MOUNTS: Probe<HugeFiles> = Probe::Present(HugeFiles { user_namespace: true });

/// A host with these settings of shared and of private memory.
fn host(shmem: &str, private: &str, huge_files: Probe<HugeFiles>) -> Facts {
    let (shmem_huge_pages, anonymous_huge_pages) = (shmem.to_owned(), private.to_owned());
    Facts { shmem_huge_pages, anonymous_huge_pages, huge_files, ..facts() }
}

fn refused() -> Probe<HugeFiles> {
    Probe::Absent("cannot open a tmpfs: Operation not permitted".to_owned())
}

/// The pages of the first backing, and the notes of the plan.
fn pages(spec: &Spec, facts: &Facts) -> (HostPages, Vec<String>) {
    let plan = plan(spec, facts).unwrap();
    check(spec, facts, &plan);
    (plan.backings[0].pages.clone().unwrap(), plan.notes)
}

#[test]
fn memory_gets_the_largest_pages_of_the_host_in_the_order_of_what_they_cost() {
    let spec = spec(vec![node(0, GIB, "0")]);
    let base = ByteSize::new(4 << 10);
    for (facts, allocation, why) in [
        (host("advise", "never", refused()), Allocation::Memfd, None),
        (host("within_size", "never", MOUNTS), Allocation::Memfd, None),
        (host("never", "madvise", MOUNTS), Allocation::HugeFile, None),
        (host("never", "madvise", refused()), Allocation::Private, None),
        (host("deny", "always", MOUNTS), Allocation::Private, None),
        (
            host("never", "never", refused()),
            Allocation::Memfd,
            Some("transparent_hugepage/enabled is \"never\""),
        ),
        (host("", "", refused()), Allocation::Memfd, Some("no huge pages for memory files")),
    ] {
        let (pages, notes) = pages(&spec, &facts);
        let huge = why.is_none();
        assert_eq!((pages.allocation, pages.size), (allocation, if huge { facts.huge_page } else { base }));
        assert_eq!((pages.why_not_larger.is_some(), notes.len()), (!huge, usize::from(!huge)), "{notes:?}");
        if let (Some(why), [note]) = (why, notes.as_slice()) {
            assert!(note.starts_with("node0 has pages of 4 KiB: ") && note.contains(why), "{note}");
        }
        let text = text(&plan(&spec, &facts).unwrap(), &View::of(&facts));
        assert!(text.contains(if huge { "in 2 MiB pages" } else { "in 4 KiB pages: " }), "{text}");
    }
}

#[test]
fn a_vfio_user_server_receives_no_file_that_it_could_shrink() {
    let mut spec = spec(vec![node(0, GIB, "0")]);
    spec.devices.push(device("user0", true, DeviceKind::VfioUser { socket: "/run/gpu.sock".into() }));
    for facts in [host("never", "madvise", MOUNTS), host("never", "always", refused())] {
        let (pages, notes) = pages(&spec, &facts);
        assert_eq!(pages.allocation, Allocation::Memfd);
        assert!(
            notes[0].contains("\"user0\" receives a sealed file: set shmem_enabled to advise"),
            "{notes:?}"
        );
    }
    let (pages, _) = pages(&spec, &host("advise", "madvise", MOUNTS));
    assert_eq!((pages.allocation, pages.size.get()), (Allocation::Memfd, 2 << 20));
}

#[test]
fn a_small_machine_does_not_mount_and_a_large_one_does() {
    let facts = host("never", "madvise", MOUNTS);
    let small = spec(vec![node(0, 256 * MIB, "0")]);
    let (of_small, notes) = pages(&small, &facts);
    assert_eq!((of_small.allocation, notes.len(), may_mount(&small)), (Allocation::Memfd, 0, false));
    assert!(of_small.why_not_larger.unwrap().ends_with("the machine has less than 512 MiB"));
    let mut large = spec(vec![node(0, 256 * MIB, "0")]);
    large.egm = vec![slice(1, 256 * MIB), EgmSlice { form: EgmForm::Device, ..slice(0, GIB) }];
    assert!(may_mount(&large));
    let plan = plan(&large, &facts).unwrap();
    assert!(plan.backings.iter().all(|b| b.pages.as_ref().unwrap().allocation == Allocation::HugeFile));
    large.memory.page_size = PageSize::Size4K;
    large.egm.clear();
    assert!(!may_mount(&large));
    let (fixed, notes) = pages(&large, &facts);
    assert_eq!((fixed.why_not_larger.as_deref(), notes.len()), (Some("\"page_size\" is \"4K\""), 0));
}

#[test]
fn memory_that_is_read_on_demand_is_private_unless_it_is_hugetlb_or_behind_a_bar() {
    let mut spec = spec(vec![node(0, GIB, "0")]);
    spec.egm = vec![EgmSlice { form: EgmForm::Device, ..slice(0, GIB) }, slice(1, GIB)];
    let mut plan = plan(&spec, &host("advise", "madvise", refused())).unwrap();
    plan.backings[2].page_size = PageSize::Size2M;
    make_private(&mut plan.backings);
    let allocation = |backing: &BackingPlan| backing.pages.as_ref().unwrap().allocation;
    let allocations: Vec<_> = plan.backings.iter().map(allocation).collect();
    assert_eq!(allocations, [Allocation::Private, Allocation::Memfd, Allocation::Memfd]);
}

#[test]
fn memory_behind_a_bar_is_a_file() {
    let mut spec = spec(vec![node(0, GIB, "0")]);
    spec.egm = vec![EgmSlice { form: EgmForm::Device, ..slice(0, GIB) }];
    let plan = plan(&spec, &host("never", "madvise", refused())).unwrap();
    let pages: Vec<_> = plan.backings.iter().filter_map(|backing| backing.pages.as_ref()).collect();
    assert_eq!((pages[0].allocation, pages[1].allocation), (Allocation::Private, Allocation::Memfd));
    assert!(plan.notes[0].contains("egm0") && plan.notes[0].contains("memory behind a BAR is a file"));
}

#[test]
fn spans_are_aligned_to_the_hosts_huge_pages_and_facts_that_are_wrong_change_nothing() {
    let spec = spec(vec![node(0, 5 * GIB + 128 * MIB, "0"), node(1, 5 * GIB, "1")]);
    let place = |huge_page: u64| {
        let facts = Facts { huge_page: ByteSize::new(huge_page), ..facts() };
        let plan = plan(&spec, &facts).unwrap();
        check(&spec, &facts, &plan);
        plan.memory.iter().map(|m| (m.span.start().get() - m.offset) % (512 * MIB)).collect::<Vec<_>>()
    };
    assert!(place(512 * MIB).iter().all(|remainder| *remainder == 0));
    let usual = place(2 * MIB);
    assert!(usual.iter().any(|remainder| *remainder > 0));
    assert_eq!([0, 3, 1 << 40].map(place), [usual.clone(), usual.clone(), usual]);
}

#[test]
fn a_machine_of_512_mib_is_worth_a_mount_whichever_memory_makes_it_so() {
    let facts = host("never", "madvise", MOUNTS);
    let least = spec(vec![node(0, 512 * MIB, "0")]);
    assert!(may_mount(&least));
    assert_eq!(pages(&least, &facts).0.allocation, Allocation::HugeFile);
    // Memory of chosen pages is never mounted, so it does not make a small rest worth one.
    let mut fixed = spec(vec![node(0, GIB, "0")]);
    fixed.memory.page_size = PageSize::Size4K;
    assert!(!may_mount(&fixed));
    fixed.egm = vec![slice(1, 256 * MIB)];
    let of_slice = plan(&fixed, &facts).unwrap().backings[1].pages.clone().unwrap();
    assert_eq!((may_mount(&fixed), of_slice.allocation), (false, Allocation::Memfd));
    assert!(of_slice.why_not_larger.unwrap().ends_with("the machine has less than 512 MiB"));
}

#[test]
fn memory_of_a_region_or_of_the_machine_itself_has_the_pages_that_it_has() {
    let mut spec = spec(vec![node(0, GIB, "0")]);
    spec.egm = vec![slice(1, GIB), slice(2, GIB)];
    for (slice, region) in spec.egm.iter_mut().zip(["egm4", "guest-memfd"]) {
        slice.regions = vec![region.to_owned()];
    }
    let mut facts = facts();
    facts.regions[0].region.kind = RegionKind::GuestMemfd;
    let chosen = plan(&spec, &facts).unwrap().backings;
    assert_eq!(
        chosen.iter().map(|backing| backing.pages.is_some()).collect::<Vec<_>>(),
        [true, false, false]
    );
}

#[test]
fn memory_smaller_than_a_huge_page_of_the_host_has_base_pages_and_states_why() {
    let mut spec = spec(vec![node(0, 600 * MIB, "0"), node(1, 512 * MIB, "1"), node(2, 256 * MIB, "2")]);
    spec.cpus.count = 3;
    let facts = Facts { huge_page: ByteSize::new(512 * MIB), ..host("advise", "madvise", MOUNTS) };
    let plan = plan(&spec, &facts).unwrap();
    let pages: Vec<_> = plan.backings.iter().filter_map(|backing| backing.pages.as_ref()).collect();
    assert_eq!(pages.iter().map(|p| p.size.get()).collect::<Vec<_>>(), [512 * MIB, 512 * MIB, 4 << 10]);
    let why = pages[2].why_not_larger.as_deref();
    assert_eq!(why, Some("a huge page of the host has 512 MiB"));
    assert!(pages[..2].iter().all(|p| p.why_not_larger.is_none()));
}

#[test]
fn a_huge_page_is_a_power_of_two_from_2_mib_to_1_gib() {
    let spec = spec(vec![node(0, 2 * GIB, "0")]);
    let size = |huge_page: u64| {
        let facts = Facts { huge_page: ByteSize::new(huge_page), ..host("advise", "madvise", MOUNTS) };
        pages(&spec, &facts).0.size.get()
    };
    assert_eq!([2 * MIB, 32 * MIB, GIB].map(size), [2 * MIB, 32 * MIB, GIB]);
    assert_eq!([0, 4096, 3 * MIB, 2 * GIB, 1 << 40].map(size), [2 * MIB; 5]);
}

#[test]
fn a_kernel_without_a_setting_of_private_huge_pages_is_not_asked_to_change_it() {
    let spec = spec(vec![node(0, GIB, "0")]);
    let (pages, _) = pages(&spec, &host("never", "", refused()));
    let why = pages.why_not_larger.unwrap();
    assert!(why.ends_with("Operation not permitted") && !why.contains("transparent_hugepage"), "{why}");
}
