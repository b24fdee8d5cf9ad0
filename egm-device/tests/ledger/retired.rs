//! Pages that an EGM device lists as bad, only once it is open: no access touches them, from the first grant on.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use egm_address::{InRegion, Offset, SpanSet};
use egm_device::Backing;
use egm_device::backing::{BackingError, RetiredListError};
use egm_device::ledger::{GrantError, Identity, Ledger, Memory, Paths, Watch};
use egm_device::region::{Region, RegionKind, Slice};
use egm_device::retired::Retired;
use egm_device::scrub::ScrubError;

use crate::common::{PAGE, PlainFile, fill, identity, ledger, region, request, set};

const UNOBSERVED: Watch<'static> = Watch::unobserved();
const PAGES: u64 = 8;

/// An EGM device, which opens once for all slices, with a list that grows.
struct Device {
    memory: PlainFile,
    list: Mutex<SpanSet<InRegion>>,
}

impl Device {
    fn retire(&self, page: u64) {
        let mut list = self.list.lock().unwrap();
        *list = list.iter().chain(set(page, 1).iter()).collect();
    }
}

impl Memory for Device {
    fn open(
        &self,
        region: &Region,
        slice: &Slice,
        watch: &Watch<'_>,
    ) -> Result<Box<dyn Backing>, BackingError> {
        self.memory.open(region, slice, watch)
    }

    fn retired(&self, _: &Region, _: &dyn Backing) -> Result<Retired, RetiredListError> {
        Ok(Retired::default().and(&self.list.lock().unwrap()))
    }

    fn zero(
        &self,
        backing: &dyn Backing,
        at: Offset,
        spans: &SpanSet<InRegion>,
        watch: &Watch<'_>,
    ) -> Result<(), ScrubError> {
        self.memory.zero(backing, at, spans, watch)
    }
}

fn egm(folder: &Path) -> (Region, PathBuf) {
    let path = folder.join("memory");
    let (region, _) = region(folder, PAGES);
    (Region { kind: RegionKind::Egm { device: path.clone() }, ..region }, path)
}

fn device(memory: PathBuf) -> (Arc<Device>, Arc<dyn Memory>) {
    let device = Arc::new(Device { memory: PlainFile(memory), list: Mutex::default() });
    (device.clone(), device)
}

/// The pages of `file` that were written since it was made.
fn touched(file: &Path) -> SpanSet<InRegion> {
    let bytes = std::fs::read(file).unwrap();
    let pages = bytes.chunks_exact(usize::try_from(PAGE).unwrap()).zip(0..);
    let touched = pages.filter(|(page, _)| page.iter().any(|byte| *byte != 0xee));
    touched.flat_map(|(_, n)| set(n, 1).iter().collect::<Vec<_>>()).collect()
}

#[test]
fn a_page_that_the_device_names_once_it_is_open_is_a_hole_and_is_not_touched() {
    let folder = tempfile::tempdir().unwrap();
    let (region, file) = egm(folder.path());
    let ledger = ledger(folder.path());
    let (device, memory) = device(file.clone());
    device.retire(2);
    device.retire(6);
    let lease = ledger.grant_from(&memory, &region, &request("a", 4), &UNOBSERVED).unwrap();
    let both = set(2, 1).iter().chain(set(6, 1).iter()).collect::<SpanSet<_>>();
    assert_eq!((lease.holes(), lease.region().retired.spans().clone()), (set(2, 1), both.clone()));
    assert_eq!(touched(&file), set(0, 4).minus(&both));
    let states = ledger.states(&region).unwrap();
    assert_eq!((states.retired.spans(), states.dirty), (&both, set(4, 4).minus(&both)));
    // From now on, the ledger knows the list before the device is open, and after the next boot too.
    let next = Identity { boot: "next".to_owned(), ..identity() };
    let next = Ledger::open(Paths::below(folder.path()), next).unwrap();
    assert_eq!(next.states(&region).unwrap().retired.spans(), &both);
}

#[test]
fn a_page_that_went_bad_while_it_was_granted_is_not_touched_by_the_scrub() {
    let folder = tempfile::tempdir().unwrap();
    let (region, file) = egm(folder.path());
    let ledger = ledger(folder.path());
    let (device, memory) = device(file.clone());
    let lease = ledger.grant_from(&memory, &region, &request("a", 4), &UNOBSERVED).unwrap();
    assert_eq!((lease.holes(), touched(&file)), (SpanSet::default(), set(0, 4)));
    fill(&lease, u64::from_le_bytes([0xee; 8]));
    device.retire(1);
    lease.return_slice(&UNOBSERVED).unwrap();
    assert_eq!(touched(&file), set(0, 4).minus(&set(1, 1)));
    let states = ledger.states(&region).unwrap();
    assert_eq!((states.retired.spans(), states.clean), (&set(1, 1), set(0, 4).minus(&set(1, 1))));
}

#[test]
fn memory_with_unknown_bad_pages_is_not_handed_out() {
    let folder = tempfile::tempdir().unwrap();
    let (region, file) = egm(folder.path());
    let ledger = ledger(folder.path());
    // A plain file supports no request of an EGM device.
    let memory: Arc<dyn Memory> = Arc::new(PlainFile(file.clone()));
    let error = ledger.grant_from(&memory, &region, &request("a", 4), &UNOBSERVED).unwrap_err();
    assert!(matches!(error, GrantError::Retired(RetiredListError::Refused { .. })), "{error}");
    let states = ledger.states(&region).unwrap();
    assert_eq!((states.held.len(), states.dirty, touched(&file)), (0, set(0, PAGES), SpanSet::default()));
}
