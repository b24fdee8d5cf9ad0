//! Memory that a process keeps although its owner has returned it or ended.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use egm_address::{InRegion, Offset, Span, SpanSet};
use egm_device::backing::BackingError;
use egm_device::carve::plan::Request;
use egm_device::close::Closing;
use egm_device::free::Hold;
use egm_device::ledger::record::GrantState;
use egm_device::ledger::{GrantError, Ledger, Memory, Watch};
use egm_device::region::{Region, Slice};
use egm_device::scrub::{Cause, ScrubError};
use egm_device::{Backing, Mapping};
use rustix::process::getuid;

use crate::common::{PAGE, PlainFile, is_zero, ledger, region, request, set};
use crate::in_flight::send;

/// Memory with a first page that does not become zero.
struct Stuck(PlainFile);

impl Memory for Stuck {
    fn open(
        &self,
        region: &Region,
        slice: &Slice,
        watch: &Watch<'_>,
    ) -> Result<Box<dyn Backing>, BackingError> {
        self.0.open(region, slice, watch)
    }

    fn zero(
        &self,
        _: &dyn Backing,
        at: Offset,
        _: &SpanSet<InRegion>,
        _: &Watch<'_>,
    ) -> Result<(), ScrubError> {
        let block = Span::new(at, PAGE).unwrap();
        Err(ScrubError { done: SpanSet::default(), cause: Cause::NotZero { at, block } })
    }
}

fn events(log: &Path) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(log).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn memory_that_does_not_become_zero_is_a_finding_of_the_audit_log() {
    let folder = tempfile::tempdir().unwrap();
    let region = region(folder.path(), 2).0;
    let stuck: Arc<dyn Memory> = Arc::new(Stuck(PlainFile(folder.path().join("memory"))));
    let ledger = ledger(folder.path());
    let error = ledger.grant_from(&stuck, &region, &request("a", 2), &UNOBSERVED).unwrap_err();
    assert!(matches!(error, GrantError::Scrub { .. }), "{error}");
    let log = egm_device::audit::Paths::below(folder.path());
    for file in [log.file, log.findings] {
        let found = events(&file);
        assert!(found.iter().any(|line| line["event"] == "mismatch" && line["bytes"] == PAGE), "{found:?}");
    }
}

#[test]
fn so_is_one_that_a_scrub_found_which_the_owner_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 4);
    let ledger = ledger(folder.path());
    let first = ledger.grant_from(&memory, &region, &request("a", 1), &UNOBSERVED).unwrap();
    let lease = ledger.grant_from(&memory, &region, &request("b", 2), &UNOBSERVED).unwrap();
    let at = Offset::new(PAGE);
    let block = Span::new(at, PAGE).unwrap();
    lease.log_mismatch(block, &Cause::NotZero { at, block });
    let found = events(&egm_device::audit::Paths::below(folder.path()).findings);
    let found = found.iter().find(|line| line["event"] == "mismatch").unwrap();
    assert_eq!((&found["owner"], &found["span"]["offset"]), (&"b".into(), &(2 * PAGE).into()), "{found}");
    drop(first);
}

const UNOBSERVED: Watch<'static> = Watch::unobserved();

#[test]
fn memory_that_a_peer_still_has_is_in_use_although_its_owner_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 6);
    let ledger = ledger(folder.path());
    let lease = ledger.grant_from(&memory, &region, &request("a", 2), &UNOBSERVED).unwrap();
    let peer = Mapping::new(&lease, PAGE, PAGE, 0).unwrap();
    drop(lease);
    let next = ledger.grant_from(&memory, &region, &request("b", 2), &UNOBSERVED).unwrap();
    assert_eq!(next.slice().offset, 2 * PAGE);
    let kept = &ledger.states(&region).unwrap().held[0];
    let page = SpanSet::from_iter([kept.span]);
    assert_eq!(
        (kept.usage, kept.evidence[0].hold, page),
        (GrantState::Quarantined, Hold::Mapping, set(1, 1))
    );
    let wanted = Request { at: Some(0), ..request("c", 2) };
    let error = ledger.grant_from(&memory, &region, &wanted, &UNOBSERVED).unwrap_err();
    assert!(error.to_string().contains("held by quarantine after a (process "), "{error}");
    drop(peer);
    assert!(is_zero(&ledger.grant_from(&memory, &region, &wanted, &UNOBSERVED).unwrap()));
}

#[test]
fn a_slice_is_not_called_clean_while_a_peer_could_write_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 2);
    let ledger = ledger(folder.path());
    let lease = ledger.grant_from(&memory, &region, &request("a", 2), &UNOBSERVED).unwrap();
    let peer = Mapping::new(&lease, PAGE, PAGE, 0).unwrap();
    let error = lease.return_slice(&UNOBSERVED).unwrap_err();
    assert!(matches!(&error, GrantError::StillUsed { owner, .. } if owner == "a"), "{error}");
    assert!(ledger.states(&region).unwrap().clean.is_empty());
    drop(peer);
}

/// As a machine does once it has mapped its memory.
#[test]
fn an_owner_that_closed_every_descriptor_of_the_memory_returns_it_scrubbed() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 2);
    let ledger = ledger(folder.path());
    let lease = ledger.grant_from(&memory, &region, &request("a", 2), &UNOBSERVED).unwrap();
    Mapping::new(&lease, 0, PAGE, 0).unwrap().write(0, b"secret").unwrap();
    let mut closing = Closing::default();
    closing.add(lease.file()).unwrap();
    assert!(closing.close().unwrap() > 0);
    lease.return_slice(&UNOBSERVED).unwrap();
    assert!(ledger.states(&region).unwrap().dirty.is_empty());
    assert!(is_zero(&ledger.grant_from(&memory, &region, &request("b", 2), &UNOBSERVED).unwrap()));
}

/// Memory that cannot be opened.
struct Broken;

impl Memory for Broken {
    fn open(&self, region: &Region, _: &Slice, _: &Watch<'_>) -> Result<Box<dyn Backing>, BackingError> {
        let (region, device) = (region.name.clone(), "/dev/none".into());
        Err(BackingError::Interrupted { region, device })
    }
}

/// An owner of `region` that ended, and left a descriptor in flight in a socket of the child.
fn leave_in_flight(ledger: &Ledger, region: &Region, memory: &Arc<dyn Memory>) -> Child {
    let me = getuid();
    // Root is trusted with descriptors in flight.
    let tenant = if me.is_root() { 0x3fff_0002 } else { me.as_raw() };
    let mut wanted = request("a", 2);
    wanted.owner.uid = tenant;
    let lease = ledger.grant_from(memory, region, &wanted, &UNOBSERVED).unwrap();
    let (near, far) = UnixStream::pair().unwrap();
    send(&near, lease.file());
    let mut child = Command::new("/bin/cat");
    child.stdin(Stdio::piped()).stderr(OwnedFd::from(far)).uid(tenant).spawn().unwrap()
}

/// Checks that no owner gets the memory until `child` ends.
fn assert_kept(ledger: &Ledger, region: &Region, memory: &Arc<dyn Memory>, mut child: Child) {
    ledger.grant_from(memory, region, &request("c", 2), &UNOBSERVED).unwrap_err();
    let kept = &ledger.states(region).unwrap().held[0];
    assert_eq!((kept.usage, kept.evidence[0].hold), (GrantState::Quarantined, Hold::InFlight));
    // A review does not free it either.
    ledger.review(region).unwrap();
    assert_eq!(ledger.states(region).unwrap().held.len(), 1);
    drop(child.stdin.take());
    child.wait().unwrap();
    // For an unknown owner, descriptors that another test has in flight count, too.
    let grant = |_| ledger.grant_from(memory, region, &request("d", 2), &UNOBSERVED).ok();
    (0..1000).find_map(grant).unwrap();
}

#[test]
fn an_owner_is_not_forgotten_when_a_later_one_gets_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 2);
    let ledger = ledger(folder.path());
    let child = leave_in_flight(&ledger, &region, &memory);
    let broken: Arc<dyn Memory> = Arc::new(Broken);
    ledger.grant_from(&broken, &region, &request("b", 2), &UNOBSERVED).unwrap_err();
    assert_kept(&ledger, &region, &memory, child);
}

/// The record of an owner is lost, and a later owner gets no memory: that owner is not the only one that had the bytes.
#[test]
fn nor_is_it_forgotten_that_owners_are_unknown() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 2);
    let ledger = ledger(folder.path());
    let child = leave_in_flight(&ledger, &region, &memory);
    fs::remove_file(folder.path().join("var/lib/egm-device/ledger.json")).unwrap();
    let broken: Arc<dyn Memory> = Arc::new(Broken);
    let mut wanted = request("b", 2);
    wanted.owner.uid = 0x3fff_0003;
    ledger.grant_from(&broken, &region, &wanted, &UNOBSERVED).unwrap_err();
    assert_kept(&ledger, &region, &memory, child);
}

/// Its lock file was removed: a new lock file has no such lock.
#[test]
fn a_repair_spares_a_living_owner_without_its_lock_file() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 2);
    let ledger = ledger(folder.path());
    let lease = ledger.grant_from(&memory, &region, &request("a", 2), &UNOBSERVED).unwrap();
    let mut closing = Closing::default();
    closing.add(lease.file()).unwrap();
    closing.close().unwrap();
    fs::remove_file(folder.path().join("run/egm-device/test.lock")).unwrap();
    assert!(ledger.repair(std::slice::from_ref(&region)).unwrap().forgotten.is_empty());
    ledger.grant_from(&memory, &region, &request("b", 2), &UNOBSERVED).unwrap_err();
    drop(lease);
}

#[test]
fn nor_when_the_record_is_repaired() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 2);
    let ledger = ledger(folder.path());
    let child = leave_in_flight(&ledger, &region, &memory);
    assert!(ledger.repair(std::slice::from_ref(&region)).unwrap().forgotten.is_empty());
    assert_kept(&ledger, &region, &memory, child);
}

#[test]
fn where_a_repair_lacks_the_region_any_user_may_be_an_earlier_owner() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), 2);
    let ledger = ledger(folder.path());
    let child = leave_in_flight(&ledger, &region, &memory);
    assert_eq!(ledger.repair(&[]).unwrap().forgotten.len(), 1);
    assert_kept(&ledger, &region, &memory, child);
}
