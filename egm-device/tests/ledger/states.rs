//! States of a byte of a region, from grant to return.
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use egm_address::{Hpa, SpanSet};
use egm_device::carve::plan::Request;
use egm_device::ledger::record::{Doubt, GrantState};
use egm_device::ledger::{GrantError, Identity, Ledger, Paths, Progress, Watch};
use egm_device::owner::Owner;
use egm_device::region::Region;
use egm_device::scrub::Cause;
use egm_device::{Backing, Mapping};
use egm_report::{Blame, Chain, Report};

use crate::common::{
    PAGE, PlainFile, egm_region, fill, identity, is_full_of, is_zero, ledger, region, request, set,
};

const UNOBSERVED: Watch<'static> = Watch::unobserved();

#[test]
fn a_slice_is_scrubbed_for_its_owner_and_returned_clean() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 8);
    let ledger = ledger(folder.path());
    let lease = ledger.grant_from(&memory, &region, &request("a", 4), &UNOBSERVED).unwrap();
    assert!(is_zero(&lease));
    let states = ledger.states(&region).unwrap();
    assert_eq!((states.busy(), states.dirty), (set(0, 4), set(4, 4)));
    let held = &states.held[0];
    assert_eq!((held.owner.as_ref(), held.usage), (Some(lease.owner()), GrantState::Granted));
    fill(&lease, 1);
    lease.return_slice(&UNOBSERVED).unwrap();
    let states = ledger.states(&region).unwrap();
    assert_eq!((states.held.len(), states.clean, states.dirty), (0, set(0, 4), set(4, 4)));
    // Clean bytes are granted at once, as they are: zero.
    let progress = |progress| assert!(!matches!(progress, Progress::Scrubbing { .. }));
    let watch = Watch { progress: &progress, ..UNOBSERVED };
    let lease = ledger.grant_from(&memory, &region, &request("b", 4), &watch).unwrap();
    assert!(lease.slice().offset == 0 && is_zero(&lease));
}

#[test]
fn a_lease_that_is_dropped_leaves_dirty_bytes_which_the_next_grant_scrubs() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 4);
    let ledger = ledger(folder.path());
    for word in 1..4 {
        let lease = ledger.grant_from(&memory, &region, &request("a", 4), &UNOBSERVED).unwrap();
        assert!(is_zero(&lease));
        fill(&lease, word);
        drop(lease);
        assert_eq!(ledger.states(&region).unwrap().dirty, set(0, 4));
    }
}

#[test]
fn a_request_for_bytes_in_use_is_refused_with_the_name_of_their_owner() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 8);
    let ledger = ledger(folder.path());
    let lease = ledger.grant_from(&memory, &region, &request("first", 4), &UNOBSERVED).unwrap();
    let wanted = Request { at: Some(2 * PAGE), ..request("second", 4) };
    let error = ledger.grant_from(&memory, &region, &wanted, &UNOBSERVED).unwrap_err();
    let GrantError::Short { holders, .. } = &error else { panic!("{error}") };
    assert_eq!(holders[0].owner.as_ref(), Some(lease.owner()));
    assert_eq!(error.blame(), Blame::Host);
    let text = Chain(&error).to_string();
    assert!(text.contains(&format!("held by first (process {}, user ", std::process::id())), "{text}");
    let error = ledger.grant_from(&memory, &region, &request("second", 8), &UNOBSERVED).unwrap_err();
    assert!(error.to_string().contains("held by first"), "{error}");
}

#[test]
fn slices_of_a_device_that_is_opened_once_are_given_back_one_by_one_and_outlive_its_opener() {
    let folder = tempfile::tempdir().unwrap();
    let (region, broker) = egm_region(folder.path(), 6);
    // The kernel lets another process open it as well.
    let (_, other) = egm_region(folder.path(), 6);
    let ledger = ledger(folder.path());
    let lease = ledger.grant_from(&broker, &region, &request("a", 2), &UNOBSERVED).unwrap();
    let lost = ledger.grant_from(&broker, &region, &request("b", 2), &UNOBSERVED).unwrap();
    lease.return_slice(&UNOBSERVED).unwrap();
    let (client, at) = (Mapping::new(&lost, 0, lost.size(), 0).unwrap(), Some(lost.slice().offset));
    drop((lost, broker));
    let again = ledger.grant_from(&other, &region, &request("c", 2), &UNOBSERVED).unwrap();
    assert_eq!(again.slice().offset, 0);
    let wanted = Request { at, ..request("d", 2) };
    let error = ledger.grant_from(&other, &region, &wanted, &UNOBSERVED).unwrap_err();
    assert!(error.to_string().contains("held by quarantine after b (process "), "{error}");
    drop(client);
    assert!(is_zero(&ledger.grant_from(&other, &region, &wanted, &UNOBSERVED).unwrap()));
}

#[test]
fn the_owner_of_the_claim_keeps_the_slice() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 2);
    let ledger = ledger(folder.path());
    let lease = ledger.grant_from(&memory, &region, &request("a", 2), &UNOBSERVED).unwrap();
    let claim = lease.claim().try_clone().unwrap();
    drop(lease);
    assert_eq!(ledger.states(&region).unwrap().held[0].owner.as_ref().unwrap().name, "a");
    assert!(ledger.grant_from(&memory, &region, &request("b", 1), &UNOBSERVED).is_err());
    drop(claim);
    assert_eq!(ledger.repair(&[]).unwrap().forgotten[0].owner.name, "a");
    assert!(is_zero(&ledger.grant_from(&memory, &region, &request("b", 1), &UNOBSERVED).unwrap()));
}

#[test]
fn a_removed_lock_file_does_not_free_what_a_living_process_has() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 2);
    let ledger = ledger(folder.path());
    let lease = ledger.grant_from(&memory, &region, &request("a", 2), &UNOBSERVED).unwrap();
    fs::remove_file(folder.path().join("run/egm-device/test.lock")).unwrap();
    let error = ledger.grant_from(&memory, &region, &request("b", 1), &UNOBSERVED).unwrap_err();
    assert!(error.to_string().contains("held by a"), "{error}");
    drop(lease);
}

/// Two slices, one clean and one dirty after its owner's end, and one retired page.
fn used(folder: &Path, region: &Region) {
    let (ledger, memory) = (ledger(folder), crate::common::region(folder, 0).1);
    let clean = ledger.grant_from(&memory, region, &request("a", 2), &UNOBSERVED).unwrap();
    drop(ledger.grant_from(&memory, region, &request("b", 2), &UNOBSERVED).unwrap());
    clean.return_slice(&UNOBSERVED).unwrap();
    ledger.retire(region, &set(5, 1), &Owner::this("test"), "a test says so").unwrap();
    assert_eq!(ledger.states(region).unwrap().clean, set(0, 2));
}

#[test]
fn a_record_that_is_not_trusted_makes_everything_dirty() {
    let other = |machine: &str, boot: &str| Identity { machine: Some(machine.into()), boot: boot.into() };
    let nothing = |_: &Path| {};
    let cut = |path: &Path| {
        let text = fs::read(path).unwrap();
        fs::write(path, &text[..text.len() / 2]).unwrap();
    };
    let huge = |path: &Path| fs::File::options().write(true).open(path).unwrap().set_len(1 << 40).unwrap();
    let gone = |path: &Path| fs::remove_file(path).unwrap();
    type Wound<'a> = &'a dyn Fn(&Path);
    let cases: [(Wound<'_>, Identity, Option<Doubt>, u64); 6] = [
        (&nothing, other("host", "next"), Some(Doubt::OtherBoot), 1),
        (&nothing, other("other", "boot"), Some(Doubt::OtherHost), 0),
        (&nothing, other("other", "next"), Some(Doubt::OtherHost), 0),
        (&cut, identity(), Some(Doubt::Broken), 1),
        (&huge, identity(), Some(Doubt::Broken), 1),
        (&gone, identity(), Some(Doubt::Missing), 1),
    ];
    for (wound, identity, doubt, retired) in cases {
        let folder = tempfile::tempdir().unwrap();
        let (region, memory) = region(folder.path(), 6);
        used(folder.path(), &region);
        let record = folder.path().join("var/lib/egm-device/ledger.json");
        wound(&record);
        let ledger = Ledger::open(Paths::below(folder.path()), identity).unwrap();
        let states = ledger.states(&region).unwrap();
        assert_eq!(
            (states.doubt, states.clean.size(), states.retired.spans().size()),
            (doubt, 0, retired * PAGE)
        );
        let lease = ledger.grant_from(&memory, &region, &request("c", 4), &UNOBSERVED).unwrap();
        assert!(is_zero(&lease));
        let kept = doubt.is_some_and(|doubt| doubt != Doubt::Missing);
        assert_eq!(record.with_extension("json.aside").exists(), kept, "{doubt:?}");
        assert_eq!(ledger.states(&region).unwrap().doubt, None);
    }
}

#[test]
fn bad_pages_are_known_as_long_as_one_of_two_files_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let (region, _) = region(folder.path(), 6);
    used(folder.path(), &region);
    let state = folder.path().join("var/lib/egm-device");
    let ledger = ledger(folder.path());
    let is_known = || ledger.states(&region).unwrap().retired.spans() == &set(5, 1);
    // Each change repairs the one from the other.
    for file in ["retired.json", "ledger.json", "retired.json", "ledger.json"] {
        fs::write(state.join(file), "{").unwrap();
        assert!(is_known(), "{file}");
        ledger.repair(&[]).unwrap();
        assert!(is_known() && fs::read(state.join(file)).unwrap().len() > 1, "{file}");
    }
}

#[test]
fn an_old_record_that_is_put_back_is_not_trusted() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 6);
    used(folder.path(), &region);
    let record = folder.path().join("var/lib/egm-device/ledger.json");
    let old = fs::read(&record).unwrap();
    let ledger = ledger(folder.path());
    let lease = ledger.grant_from(&memory, &region, &request("c", 2), &UNOBSERVED).unwrap();
    fill(&lease, 1);
    drop(lease);
    fs::write(&record, old).unwrap();
    assert_eq!(ledger.states(&region).unwrap().doubt, Some(Doubt::RolledBack));
    assert!(is_zero(&ledger.grant_from(&memory, &region, &request("d", 2), &UNOBSERVED).unwrap()));
}

#[test]
fn removing_all_lock_files_frees_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 4);
    let first =
        ledger(folder.path()).grant_from(&memory, &region, &request("first", 4), &UNOBSERVED).unwrap();
    fs::remove_dir_all(folder.path().join("run/egm-device")).unwrap();
    let refused = ledger(folder.path()).grant_from(&memory, &region, &request("second", 4), &UNOBSERVED);
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("held by first (process "), "{text}");
    drop(first);
}

#[test]
fn the_clock_decides_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 4);
    let ledger = ledger(folder.path());
    // A grant from before 1970, and one from the future, by clocks that jumped.
    for since in [0, u64::MAX] {
        let lease = ledger.grant_from(&memory, &region, &request("a", 2), &UNOBSERVED).unwrap();
        fill(&lease, 1);
        let (mut record, _) = ledger.look().unwrap();
        record.grants[0].since = since;
        fs::write(folder.path().join("var/lib/egm-device/ledger.json"), record.encode().unwrap()).unwrap();
        assert_eq!(ledger.states(&region).unwrap().held[0].since, since);
        assert!(ledger.repair(&[]).unwrap().forgotten.is_empty());
        assert!(
            ledger
                .grant_from(&memory, &region, &Request { at: Some(0), ..request("b", 2) }, &UNOBSERVED)
                .is_err()
        );
        drop(lease);
        assert_eq!(ledger.repair(&[]).unwrap().forgotten.len(), 1);
    }
}

#[test]
fn retired_pages_are_holes_of_later_slices_and_outlive_a_boot() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 4);
    let lease = ledger(folder.path()).grant_from(&memory, &region, &request("a", 4), &UNOBSERVED).unwrap();
    let byte = SpanSet::from_iter(egm_address::Span::new(egm_address::Offset::new(PAGE + 5), 1));
    ledger(folder.path()).retire(&region, &byte, &Owner::this("test"), "a test says so").unwrap();
    assert!(lease.holes().is_empty());
    lease.return_slice(&UNOBSERVED).unwrap();
    assert_eq!(ledger(folder.path()).states(&region).unwrap().clean, set(0, 4).minus(&set(1, 1)));
    let next = Identity { boot: "next".to_owned(), ..identity() };
    let ledger = Ledger::open(Paths::below(folder.path()), next).unwrap();
    let lease = ledger.grant_from(&memory, &region, &request("b", 4), &UNOBSERVED).unwrap();
    assert_eq!((lease.holes(), lease.region().retired.spans().clone()), (set(1, 1), set(1, 1)));
}

#[test]
fn a_scrub_that_is_cancelled_goes_on_where_it_ended() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 4);
    let ledger = ledger(folder.path());
    let cancel = AtomicBool::new(true);
    let watch = Watch { cancel: &cancel, ..UNOBSERVED };
    let error = ledger.grant_from(&memory, &region, &request("a", 4), &watch).unwrap_err();
    let GrantError::Scrub { source, .. } = &error else { panic!("{error}") };
    assert!(matches!(source.cause, Cause::Cancelled));
    let states = ledger.states(&region).unwrap();
    assert_eq!((states.held.len(), states.dirty), (0, set(0, 4)));
    assert_eq!(ledger.scrub(&memory, &region, Some(&set(1, 2)), &UNOBSERVED).unwrap(), 2 * PAGE);
    assert_eq!(ledger.states(&region).unwrap().clean, set(1, 2));
    assert_eq!(ledger.scrub(&memory, &region, None, &UNOBSERVED).unwrap(), 2 * PAGE);
    cancel.store(true, Ordering::Relaxed);
    assert!(is_zero(&ledger.grant_from(&memory, &region, &request("a", 4), &watch).unwrap()));
}

#[test]
fn a_scrub_of_several_pieces_reports_all_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 6);
    let ledger = ledger(folder.path());
    let between = Request { at: Some(2 * PAGE), ..request("a", 1) };
    let _lease = ledger.grant_from(&memory, &region, &between, &UNOBSERVED).unwrap();
    let reports = Mutex::new(Vec::new());
    let progress = |progress| match progress {
        Progress::Scrubbing { done, of } => reports.lock().unwrap().push((done / PAGE, of / PAGE)),
        Progress::Opening(_) => {}
    };
    let watch = Watch { progress: &progress, ..UNOBSERVED };
    assert_eq!(ledger.scrub(&memory, &region, None, &watch).unwrap(), 5 * PAGE);
    assert_eq!(reports.into_inner().unwrap(), [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]);
}

#[test]
fn memory_with_an_address_is_the_same_under_another_name() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 8);
    let ledger = ledger(folder.path());
    let old = Region { base: Some(Hpa::new(1 << 32)), ..region };
    // Renamed, and begun two pages later in the host file.
    let base = Some(Hpa::new((1 << 32) + 2 * PAGE));
    let new = Region { name: "new".into(), base, size: egm_address::ByteSize::new(6 * PAGE), ..old.clone() };
    let lease = ledger.grant_from(&memory, &old, &request("a", 3), &UNOBSERVED).unwrap();
    assert_eq!(ledger.states(&new).unwrap().busy(), set(0, 1));
    let wanted = Request { at: Some(0), ..request("b", 1) };
    assert!(
        ledger.grant_from(&memory, &new, &wanted, &UNOBSERVED).unwrap_err().to_string().contains("held by a")
    );
    lease.return_slice(&UNOBSERVED).unwrap();
    assert_eq!(ledger.states(&new).unwrap().clean, set(0, 1));
    // A grant in one region removes no grant in another of the same host.
    let far = Region { name: "far".into(), base: Some(Hpa::new(1 << 40)), ..old.clone() };
    let _far = ledger.grant_from(
        &(std::sync::Arc::new(PlainFile(folder.path().join("far"))) as _),
        &far,
        &wanted,
        &UNOBSERVED,
    );
    let _near = ledger.grant_from(&memory, &old, &request("c", 1), &UNOBSERVED).unwrap();
    assert_eq!(ledger.states(&old).unwrap().held[0].owner.as_ref().unwrap().name, "c");
}

#[test]
fn operators_at_once_never_have_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 16);
    let take = |n: u64| {
        let ledger = ledger(folder.path());
        let lease =
            ledger.grant_from(&memory, &region, &request(&format!("operator {n}"), 4), &UNOBSERVED).unwrap();
        assert!(is_zero(&lease));
        fill(&lease, n);
        (n, lease)
    };
    let leases: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (1..=4).map(|n| scope.spawn(move || take(n))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (n, lease) in &leases {
        assert!(is_full_of(lease, *n));
    }
    let all = ledger(folder.path()).states(&region).unwrap();
    assert_eq!((all.busy(), all.held.len()), (set(0, 16), 4));
}

#[test]
fn a_region_that_no_file_can_be_named_after_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (region, _) = region(folder.path(), 1);
    for (name, base) in [("../x", None), ("", None), ("@host", None), ("x", Some(Hpa::new(1 << 63)))] {
        let region = Region { name: name.into(), base, ..region.clone() };
        assert!(ledger(folder.path()).states(&region).is_err(), "{name}");
    }
}

#[test]
fn a_pool_has_nothing_to_scrub_and_accounts_for_its_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let (region, _) = region(folder.path(), 4);
    let pool = Region { kind: egm_device::region::RegionKind::Memfd, ..region };
    let ledger = ledger(folder.path());
    let request = |pages| Request::new(pages * PAGE, Owner::this("vm"));
    let lease = ledger.grant(&pool, &request(3), &UNOBSERVED).unwrap();
    assert!(ledger.grant(&pool, &request(2), &UNOBSERVED).is_err());
    assert!(ledger.states(&pool).unwrap().dirty.is_empty());
    lease.return_slice(&UNOBSERVED).unwrap();
    assert_eq!(ledger.states(&pool).unwrap().clean, set(0, 4));
}
