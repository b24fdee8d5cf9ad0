//! What a byte of a region is, from grant to return.
use egm_device::carve::plan::Request;
use egm_device::ledger::record::Use;
use egm_device::ledger::{GrantError, Progress, Watch};
use egm_device::report::{Blame, Chain, Report};

use crate::common::{PAGE, fill, is_zero, ledger, region, request, set};

const NOBODY: Watch<'static> = Watch::nobody();

#[test]
fn a_slice_is_scrubbed_for_its_owner_and_returned_clean() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 8);
    let ledger = ledger(folder.path());
    let lease = ledger.grant_from(&memory, &region, &request("a", 4), &NOBODY).unwrap();
    assert!(is_zero(&lease));
    let states = ledger.states(&region).unwrap();
    assert_eq!((states.busy(), states.dirty), (set(0, 4), set(4, 4)));
    let held = &states.held[0];
    assert_eq!((held.owner.as_ref(), held.usage), (Some(lease.owner()), Use::Granted));
    fill(&lease, 1);
    lease.give_back(&NOBODY).unwrap();
    let states = ledger.states(&region).unwrap();
    assert_eq!((states.held.len(), states.clean, states.dirty), (0, set(0, 4), set(4, 4)));
    // Clean bytes leave at once, as they are: zero.
    let progress = |progress| assert!(!matches!(progress, Progress::Scrubbing { .. }));
    let watch = Watch { progress: &progress, ..NOBODY };
    let lease = ledger.grant_from(&memory, &region, &request("b", 4), &watch).unwrap();
    assert!(lease.slice().offset == 0 && is_zero(&lease));
}

#[test]
fn a_lease_that_is_dropped_leaves_dirty_bytes_which_the_next_grant_scrubs() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 4);
    let ledger = ledger(folder.path());
    for byte in 1..4 {
        let lease = ledger.grant_from(&memory, &region, &request("a", 4), &NOBODY).unwrap();
        assert!(is_zero(&lease));
        fill(&lease, byte);
        drop(lease);
        assert_eq!(ledger.states(&region).unwrap().dirty, set(0, 4));
    }
}

#[test]
fn who_asks_for_bytes_in_use_hears_who_has_them() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 8);
    let ledger = ledger(folder.path());
    let lease = ledger.grant_from(&memory, &region, &request("first", 4), &NOBODY).unwrap();
    let wanted = Request { at: Some(2 * PAGE), ..request("second", 4) };
    let error = ledger.grant_from(&memory, &region, &wanted, &NOBODY).unwrap_err();
    let GrantError::Short { holders, .. } = &error else { panic!("{error}") };
    assert_eq!(holders[0].owner.as_ref(), Some(lease.owner()));
    assert_eq!(error.blame(), Blame::Host);
    let text = Chain(&error).to_string();
    assert!(text.contains(&format!("held by first (process {}, user ", std::process::id())), "{text}");
    let error = ledger.grant_from(&memory, &region, &request("second", 8), &NOBODY).unwrap_err();
    assert!(error.to_string().contains("held by first"), "{error}");
}
