//! Memory that a process has pinned, and neither maps nor has open: the kernel reads and writes it for that process.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use egm_device::Mapping;
use egm_device::free::Hold;
use egm_device::ledger::record::GrantState;
use rustix::process::getuid;

use crate::common::{is_zero, ledger, region, request};
use crate::ring::{pin, ring};
use crate::trust::UNOBSERVED;

/// A client registers the slice with an io_uring, unmaps it, leaves the ring to another process, and ends.
#[test]
fn memory_pinned_by_an_io_uring_is_quarantined_until_the_ring_is_gone() {
    let Some(ring) = ring() else { return };
    // Of files, the kernel pins those of memory alone for long.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let (region, memory) = region(folder.path(), 2);
    let ledger = ledger(folder.path());
    let me = getuid();
    // Root is trusted with rings. No other test has this user, because the user's descriptors in flight would count
    // as well.
    let tenant = if me.is_root() { 0x3fff_0001 } else { me.as_raw() };
    let mut wanted = request("a", 2);
    wanted.owner.uid = tenant;
    let lease = ledger.grant_from(&memory, &region, &wanted, &UNOBSERVED).unwrap();
    pin(&ring, &Mapping::new(&lease, 0, lease.slice().size.get(), 0).unwrap());
    drop(lease);
    let mut child = Command::new("/bin/cat");
    child.stdin(Stdio::piped()).stderr(ring).uid(tenant);
    let mut keeper = child.spawn().unwrap();
    drop(child);
    ledger.grant_from(&memory, &region, &request("b", 2), &UNOBSERVED).unwrap_err();
    let kept = &ledger.states(&region).unwrap().held[0];
    assert_eq!((kept.usage, kept.evidence[0].hold), (GrantState::Quarantined, Hold::RingPin));
    drop(keeper.stdin.take());
    keeper.wait().unwrap();
    // The kernel releases a ring's pages after the process that had it.
    let grant = |_| ledger.grant_from(&memory, &region, &request("c", 2), &UNOBSERVED).ok();
    assert!(is_zero(&(0..1000).find_map(grant).unwrap()));
}
