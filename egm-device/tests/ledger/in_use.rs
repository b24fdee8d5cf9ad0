//! Memory that a process keeps although its owner has returned it or ended.

use egm_address::SpanSet;
use egm_device::Mapping;
use egm_device::carve::plan::Request;
use egm_device::free::Hold;
use egm_device::ledger::record::Use;
use egm_device::ledger::{GrantError, Watch};

use crate::common::{PAGE, is_zero, ledger, region, request, set};

const NOBODY: Watch<'static> = Watch::nobody();

#[test]
fn memory_that_a_peer_still_has_is_in_use_although_its_owner_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 6);
    let ledger = ledger(folder.path());
    let lease = ledger.grant_from(&memory, &region, &request("a", 2), &NOBODY).unwrap();
    let peer = Mapping::new(&lease, PAGE, PAGE, 0).unwrap();
    drop(lease);
    let next = ledger.grant_from(&memory, &region, &request("b", 2), &NOBODY).unwrap();
    assert_eq!(next.slice().offset, 2 * PAGE);
    let kept = &ledger.states(&region).unwrap().held[0];
    let page = SpanSet::from_iter([kept.span]);
    assert_eq!((kept.usage, kept.evidence[0].hold, page), (Use::Quarantined, Hold::Mapping, set(1, 1)));
    let wanted = Request { at: Some(0), ..request("c", 2) };
    let error = ledger.grant_from(&memory, &region, &wanted, &NOBODY).unwrap_err();
    assert!(error.to_string().contains("held by quarantine after a (process "), "{error}");
    drop(peer);
    assert!(is_zero(&ledger.grant_from(&memory, &region, &wanted, &NOBODY).unwrap()));
}

#[test]
fn a_slice_is_not_called_clean_while_a_peer_could_write_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 2);
    let ledger = ledger(folder.path());
    let lease = ledger.grant_from(&memory, &region, &request("a", 2), &NOBODY).unwrap();
    let peer = Mapping::new(&lease, PAGE, PAGE, 0).unwrap();
    let error = lease.give_back(&NOBODY).unwrap_err();
    assert!(matches!(&error, GrantError::StillUsed { owner, .. } if owner == "a"), "{error}");
    assert!(ledger.states(&region).unwrap().clean.is_empty());
    drop(peer);
}
