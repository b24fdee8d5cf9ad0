//! A region that a GPU reaches belongs to one trust domain, and its bytes change owners only through a scrub.

use egm_address::{PciAddress, SpanSet};
use egm_device::carve::plan::Request;
use egm_device::ledger::{GpuLease, GrantError, Ledger, Memory, Watch};
use egm_device::owner::{Owner, started};
use egm_device::region::Region;
use std::sync::Arc;

use crate::common::{PAGE, fill, is_zero, ledger, region, set};

pub(crate) const UNOBSERVED: Watch<'static> = Watch::unobserved();

pub(crate) fn gpu() -> PciAddress {
    "0009:01:00.0".parse().unwrap()
}

/// A region of eight pages that [`gpu`] reaches.
pub(crate) fn reached(folder: &std::path::Path) -> (Region, Arc<dyn Memory>) {
    let (region, memory) = region(folder, 8);
    (Region { functions: vec![gpu()], ..region }, memory)
}

/// This process as an owner.
pub(crate) fn own(domain: Option<&str>) -> Owner {
    Owner::this("vm1").in_domain(domain.map(str::to_owned))
}

/// Another process that runs, as an owner of the same user.
pub(crate) fn other(domain: Option<&str>) -> Owner {
    let pid = std::os::unix::process::parent_id();
    Owner { name: "vm2".to_owned(), pid, started: started(pid).unwrap(), ..own(domain) }
}

pub(crate) fn two_pages(owner: Owner) -> Request {
    Request::new(2 * PAGE, owner)
}

pub(crate) fn claim(
    ledger: &Ledger,
    region: &Region,
    memory: &Arc<dyn Memory>,
    owner: &Owner,
) -> Result<Option<GpuLease>, GrantError> {
    ledger.claim_gpus(memory, std::slice::from_ref(region), &[gpu()], owner, &UNOBSERVED)
}

#[test]
fn two_owners_share_a_region_until_one_of_them_asks_for_its_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let ((region, memory), ledger) = (reached(folder.path()), ledger(folder.path()));
    let _own = ledger.grant_from(&memory, &region, &two_pages(own(None)), &UNOBSERVED).unwrap();
    let others = ledger.grant_from(&memory, &region, &two_pages(other(None)), &UNOBSERVED).unwrap();
    let error = claim(&ledger, &region, &memory, &own(None)).unwrap_err();
    assert!(matches!(error, GrantError::Exclusive(_)));
    assert_eq!(
        error.to_string(),
        format!(
            "cannot give GPU 0009:01:00.0, which reaches all of region test, to {} of no trust domain: {} of no trust domain \
             has a slice of the region",
            own(None),
            other(None)
        )
    );
    drop(others);
    assert!(claim(&ledger, &region, &memory, &own(None)).unwrap().is_some());
}

#[test]
fn a_gpu_makes_its_region_exclusive_to_one_owner_or_one_trust_domain() {
    let folder = tempfile::tempdir().unwrap();
    let ((region, memory), ledger) = (reached(folder.path()), ledger(folder.path()));
    // Its owner has no slice of the region.
    let gpus = claim(&ledger, &region, &memory, &own(Some("a"))).unwrap().unwrap();
    for owner in [other(None), other(Some("b"))] {
        let slice = ledger.grant_from(&memory, &region, &two_pages(owner.clone()), &UNOBSERVED);
        assert!(matches!(slice, Err(GrantError::Exclusive(_))), "{owner:?}");
        assert!(matches!(claim(&ledger, &region, &memory, &owner), Err(GrantError::Exclusive(_))));
    }
    for friend in [own(None), other(Some("a"))] {
        assert!(ledger.grant_from(&memory, &region, &two_pages(friend.clone()), &UNOBSERVED).is_ok());
        assert!(claim(&ledger, &region, &memory, &friend).is_ok());
    }
    let live = ledger.states(&region).unwrap().gpus;
    assert_eq!(
        live.iter().map(|gpu| (gpu.function, gpu.owner.clone())).collect::<Vec<_>>(),
        [(gpu(), Some(own(Some("a"))))]
    );
    drop(gpus);
    assert!(ledger.grant_from(&memory, &region, &two_pages(other(None)), &UNOBSERVED).is_ok());
}

#[test]
fn a_gpu_of_another_region_and_a_region_without_gpus_are_no_matter() {
    let folder = tempfile::tempdir().unwrap();
    let ((region, memory), ledger) = (reached(folder.path()), ledger(folder.path()));
    let none = Region { functions: Vec::new(), ..region.clone() };
    assert!(claim(&ledger, &none, &memory, &own(None)).unwrap().is_none());
    let elsewhere = Region { functions: vec!["0018:01:00.0".parse().unwrap()], ..region };
    assert!(claim(&ledger, &elsewhere, &memory, &own(None)).unwrap().is_none());
    assert!(ledger.grant_from(&memory, &none, &two_pages(other(None)), &UNOBSERVED).is_ok());
}

#[test]
fn a_gpu_finds_no_earlier_owners_bytes_and_leaves_none_for_later_owners() {
    let folder = tempfile::tempdir().unwrap();
    let ((region, memory), ledger) = (reached(folder.path()), ledger(folder.path()));
    // An owner that was killed: all of the region has its bytes or older ones.
    let left = ledger.grant_from(&memory, &region, &two_pages(other(None)), &UNOBSERVED).unwrap();
    fill(&left, 7);
    drop(left);
    let lease = ledger.grant_from(&memory, &region, &two_pages(own(None)), &UNOBSERVED).unwrap();
    let gpus = claim(&ledger, &region, &memory, &own(None)).unwrap().unwrap();
    let bytes = std::fs::read(folder.path().join("memory")).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "the GPU reaches bytes that were not scrubbed");
    // Bytes that are scrubbed while the GPU is claimed may be written again.
    let again = ledger.grant_from(&memory, &region, &two_pages(own(None)), &UNOBSERVED).unwrap();
    again.return_slice(&UNOBSERVED).unwrap();
    assert_eq!(ledger.states(&region).unwrap().clean, SpanSet::default());
    drop(gpus);
    std::fs::write(folder.path().join("memory"), vec![0xdd; 8 * 4096]).unwrap();
    // Bytes that are scrubbed afterwards may not.
    lease.return_slice(&UNOBSERVED).unwrap();
    let states = ledger.states(&region).unwrap();
    assert_eq!((states.clean, states.dirty), (set(0, 2), set(2, 6)));
    assert!(is_zero(&ledger.grant_from(&memory, &region, &two_pages(other(None)), &UNOBSERVED).unwrap()));
}

#[test]
fn a_claim_ends_with_its_lock_and_its_process_and_without_its_record_still_counts() {
    let folder = tempfile::tempdir().unwrap();
    let ((region, memory), ledger) = (reached(folder.path()), ledger(folder.path()));
    // The owner has ended, but a process that inherited the lock has not.
    let dead = Owner { pid: u32::MAX, started: 1, ..other(None) };
    let gpus = claim(&ledger, &region, &memory, &dead).unwrap().unwrap();
    let inherited = gpus.lock().try_clone().unwrap();
    drop(gpus);
    let live = ledger.states(&region).unwrap().gpus;
    assert_eq!(live.iter().map(|gpu| gpu.owner.clone()).collect::<Vec<_>>(), [None]);
    let refused = ledger.grant_from(&memory, &region, &two_pages(own(None)), &UNOBSERVED).unwrap_err();
    assert!(refused.to_string().contains("an unknown process"), "{refused}");
    drop(inherited);
    assert!(ledger.grant_from(&memory, &region, &two_pages(own(None)), &UNOBSERVED).is_ok());
}
