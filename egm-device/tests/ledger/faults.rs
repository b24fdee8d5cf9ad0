//! Every write and every change of state fails once, or is the last thing that happens; then all memory is checked.
//!
//! For each n and variant of [`Break`], step n of one scenario breaks: a call to the disk or the memory, or a scrubbed
//! page. Then every byte is granted, in this boot and the next, and is zero. Each slice, or process, opens the memory.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use egm_address::{InRegion, Offset, SpanSet};
use egm_device::backing::{BackingError, RetiredListError};
use egm_device::carve::plan::Request;
use egm_device::free::{Question, Verdict};
use egm_device::ledger::{Disk, GrantError, Identity, Ledger, LedgerError, LedgerFile, Memory, Watch};
use egm_device::owner::Owner;
use egm_device::region::{Region, RegionKind, Slice};
use egm_device::retired::Retired;
use egm_device::scrub::{Cause, ScrubError};
use egm_device::{Backing, Lease};
use egm_report::Chain;

use crate::common::{PAGE, egm_region, fill, identity, is_full_of, is_zero, region, request, set};

const UNOBSERVED: Watch<'static> = Watch::unobserved();
const PAGES: u64 = 12;

/// Kinds of failure of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Break {
    /// The step fails, without effect. The next one works.
    Once,
    /// The step reports a failure, but all of it or half of it is done. The next one works.
    Half,
    /// As [`Break::Half`], and nothing works any more: the process is killed.
    Killed,
    /// As [`Break::Half`], and unsynced content is lost: the power fails.
    Power,
    /// From now on, no file grows.
    Full,
}

/// Counts steps, and breaks one.
struct World {
    breaks: Break,
    at: usize,
    step: AtomicUsize,
}

impl World {
    /// Outcome of the next step: `None` when it works, else whether half of it is done.
    fn next(&self, is_write: bool) -> Option<(bool, io::Error)> {
        let step = self.step.fetch_add(1, Ordering::Relaxed);
        let error = |half| Some((half, io::Error::other("broken by the test")));
        match (self.breaks, step.cmp(&self.at)) {
            (_, std::cmp::Ordering::Less) => None,
            (Break::Full, _) => is_write.then(|| (true, io::ErrorKind::StorageFull.into())),
            (Break::Once, std::cmp::Ordering::Equal) => error(false),
            (Break::Half | Break::Killed | Break::Power, std::cmp::Ordering::Equal) => error(true),
            (Break::Killed | Break::Power, _) => error(false),
            (Break::Once | Break::Half, _) => None,
        }
    }

    fn was_reached(&self) -> bool {
        self.step.load(Ordering::Relaxed) > self.at
    }
}

/// A file system: its content as a process sees it, and as a loss of power leaves it.
#[derive(Default)]
struct Files {
    names: BTreeMap<LedgerFile, usize>,
    durable_names: BTreeMap<LedgerFile, usize>,
    /// Content as seen, and as synced.
    content: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Files {
    fn lose_power(&mut self) {
        self.names = std::mem::take(&mut self.durable_names);
        self.names.remove(&LedgerFile::Newest);
        self.durable_names = self.names.clone();
        for (seen, synced) in &mut self.content {
            seen.clone_from(synced);
        }
    }
}

struct FakeDisk {
    files: Arc<Mutex<Files>>,
    world: Arc<World>,
}

impl FakeDisk {
    /// One step that changes names.
    fn rename_or_link(&self, from: LedgerFile, to: LedgerFile, keep: bool) -> io::Result<()> {
        let broken = self.world.next(false);
        if broken.as_ref().is_none_or(|(done, _)| *done) {
            let mut files = self.files.lock().unwrap();
            let file = *files.names.get(&from).ok_or(io::ErrorKind::NotFound)?;
            files.names.insert(to, file);
            if !keep {
                files.names.remove(&from);
            }
        }
        broken.map_or(Ok(()), |(_, error)| Err(error))
    }
}

impl Disk for FakeDisk {
    fn read(&self, name: LedgerFile) -> io::Result<Option<Vec<u8>>> {
        if let Some((_, error)) = self.world.next(false) {
            return Err(error);
        }
        let files = self.files.lock().unwrap();
        Ok(files.names.get(&name).map(|file| files.content[*file].0.clone()))
    }

    fn write(&self, name: LedgerFile, bytes: &[u8]) -> io::Result<()> {
        let broken = self.world.next(true);
        let written = match &broken {
            None => bytes,
            Some((true, _)) => &bytes[..bytes.len() / 2],
            Some((false, _)) => return broken.map_or(Ok(()), |(_, error)| Err(error)),
        };
        let mut files = self.files.lock().unwrap();
        // Written over from the start, as the host's disk does, and cut only when all is written.
        let old = files.names.get(&name).copied();
        let file = old.unwrap_or(files.content.len());
        if old.is_none() {
            files.content.push((Vec::new(), Vec::new()));
            files.names.insert(name, file);
        }
        let content = &mut files.content[file].0;
        let rest =
            if broken.is_none() { Vec::new() } else { content.split_off(written.len().min(content.len())) };
        *content = [written, &rest].concat();
        broken.map_or(Ok(()), |(_, error)| Err(error))
    }

    fn sync(&self, name: LedgerFile) -> io::Result<()> {
        if let Some((_, error)) = self.world.next(false) {
            return Err(error);
        }
        let mut files = self.files.lock().unwrap();
        let file = *files.names.get(&name).ok_or(io::ErrorKind::NotFound)?;
        let (seen, synced) = &mut files.content[file];
        synced.clone_from(seen);
        Ok(())
    }

    fn link(&self, from: LedgerFile, to: LedgerFile) -> io::Result<()> {
        self.rename_or_link(from, to, true)
    }

    fn rename(&self, from: LedgerFile, to: LedgerFile) -> io::Result<()> {
        self.rename_or_link(from, to, false)
    }

    fn sync_names(&self) -> io::Result<()> {
        let broken = self.world.next(false);
        if broken.as_ref().is_none_or(|(done, _)| *done) {
            let mut files = self.files.lock().unwrap();
            files.durable_names = files.names.clone();
        }
        broken.map_or(Ok(()), |(_, error)| Err(error))
    }
}

/// Makes the region's file where it is missing, and opens its memory as a process does.
type Open = fn(&Path, u64) -> (Region, Arc<dyn Memory>);

/// Memory in which each open, each list of retired pages and each scrubbed page is a step.
struct FakeMemory {
    memory: Arc<dyn Memory>,
    world: Arc<World>,
}

impl Memory for FakeMemory {
    fn open(
        &self,
        region: &Region,
        slice: &Slice,
        watch: &Watch<'_>,
    ) -> Result<Box<dyn Backing>, BackingError> {
        match self.world.next(false) {
            None => self.memory.open(region, slice, watch),
            Some((_, source)) => {
                Err(BackingError::Open { region: region.name.clone(), device: "memory".into(), source })
            }
        }
    }

    fn retired(&self, region: &Region, _: &dyn Backing) -> Result<Retired, RetiredListError> {
        match self.world.next(false) {
            None => Ok(Retired::default()),
            Some((_, source)) => Err(RetiredListError::Refused { region: region.name.clone(), source }),
        }
    }

    // No other process takes part, and thousands of scans of all processes take minutes.
    fn look(&self, _: &Question) -> Verdict {
        Verdict::Free
    }
    fn zero(
        &self,
        backing: &dyn Backing,
        at: Offset,
        spans: &SpanSet<InRegion>,
        watch: &Watch<'_>,
    ) -> Result<(), ScrubError> {
        let mut done = SpanSet::default();
        for page in spans.iter().flat_map(pages) {
            if let Some((_, error)) = self.world.next(false) {
                return Err(ScrubError { done, cause: Cause::Guard(error) });
            }
            self.memory.zero(backing, at, &page, watch)?;
            done = done.iter().chain(page.iter()).collect();
        }
        Ok(())
    }
}

fn pages(span: egm_address::Span<InRegion>) -> impl Iterator<Item = SpanSet<InRegion>> {
    (span.start().get() / PAGE..span.end().get() / PAGE).map(|page| set(page, 1))
}

/// Checks a slice as its owner would, and then writes to it.
fn take(lease: Result<Lease, GrantError>, word: u64) -> Option<Lease> {
    let lease = lease.ok()?;
    assert!(is_zero(&lease), "{:?} was handed out with bytes in it", lease.slice());
    fill(&lease, word);
    Some(lease)
}

/// Owners take and return slices. Returns the pages that are surely retired, and the leases at the end.
fn scenario(ledger: &Ledger, memory: &Arc<dyn Memory>, region: &Region) -> (SpanSet<InRegion>, Vec<Lease>) {
    let grant = |name: &str, pages, word| {
        take(ledger.grant_from(memory, region, &request(name, pages), &UNOBSERVED), word)
    };
    let back = |lease: Option<Lease>| lease.map(|lease| lease.return_slice(&UNOBSERVED));
    let mut ours = Vec::new();
    let a = grant("a", 3, 1);
    ours.extend(grant("b", 2, 2));
    back(a);
    drop(grant("c", 4, 3)); // its owner is killed
    let _ = ledger.scrub(memory, region, None, &UNOBSERVED);
    let mut retired = SpanSet::default();
    if ledger.retire(region, &set(9, 1), &Owner::this("test"), "a test says so").is_ok() {
        retired = set(9, 1);
    }
    ours.extend(grant("d", 2, 4));
    back(grant("e", 1, 5));
    let _ = ledger.repair(&[]);
    back(ours.pop());
    ours.extend(grant("f", 3, 6));
    no_overlap(&ours);
    (retired, ours)
}

fn no_overlap(leases: &[Lease]) {
    let all: SpanSet<InRegion> =
        leases.iter().flat_map(|lease| pages_of(lease).iter().collect::<Vec<_>>()).collect();
    assert_eq!(all.size(), leases.iter().map(|lease| lease.slice().size.get()).sum::<u64>(), "{leases:?}");
}

fn pages_of(lease: &Lease) -> SpanSet<InRegion> {
    set(lease.slice().offset / PAGE, lease.slice().size.get() / PAGE)
}

/// Checks that every page that is not held is granted and is zero, and that retired ones are never granted.
fn all_is_well(
    ledger: &Ledger,
    memory: &Arc<dyn Memory>,
    region: &Region,
    held: &[Lease],
    retired: &SpanSet<InRegion>,
) {
    let mut leases = Vec::new();
    let wanted = request("after", 1);
    while let Ok(lease) = ledger.grant_from(memory, region, &wanted, &UNOBSERVED) {
        assert!(is_zero(&lease), "{:?} was handed out with bytes in it", lease.slice());
        fill(&lease, 0x77);
        assert!(held.iter().all(|other| pages_of(other).minus(&pages_of(&lease)) == pages_of(other)));
        assert_eq!(retired.minus(&pages_of(&lease)), *retired);
        leases.push(lease);
    }
    no_overlap(&leases);
    let held: u64 = held.iter().map(|lease| lease.slice().size.get()).sum();
    let given: u64 = leases.iter().map(|lease| lease.slice().size.get()).sum();
    // A retirement that was reported as failed may have been recorded all the same.
    let left = PAGES * PAGE - held - given;
    assert!(left == retired.size() || left == PAGE, "{left:#x} bytes are lost");
}

/// Whether all bytes of the slice that its owner may touch are zero.
fn is_zero_but_for_holes(lease: &Lease) -> bool {
    pages_of(lease).minus(&lease.holes()).iter().all(|span| {
        let mut bytes = vec![0xff; usize::try_from(span.size()).unwrap()];
        lease.file().read_exact_at(&mut bytes, span.start().get()).unwrap();
        bytes.iter().all(|byte| *byte == 0)
    })
}

/// Runs the scenario with a break at step `at`; `false` when it ended before that step.
fn run_with_break(breaks: Break, at: usize, folder: &Path, open: Open) -> bool {
    let files = Arc::new(Mutex::new(Files::default()));
    let world = |breaks, at| Arc::new(World { breaks, at, step: AtomicUsize::new(0) });
    let (region, _) = open(folder, PAGES);
    let path = folder.join("memory");
    std::fs::write(&path, vec![0xee; usize::try_from(PAGES * PAGE).unwrap()]).unwrap();
    let party = |world: &Arc<World>, identity: Identity| {
        let disk = FakeDisk { files: files.clone(), world: world.clone() };
        let memory = FakeMemory { memory: open(folder, PAGES).1, world: world.clone() };
        (Ledger::with_disk(Box::new(disk), folder.to_owned(), identity), Arc::new(memory) as Arc<dyn Memory>)
    };
    // Another process, without faults, has a page throughout.
    let whole = world(Break::Once, usize::MAX);
    let (other, its_memory) = party(&whole, identity());
    let at_last = Request { at: Some((PAGES - 1) * PAGE), ..request("other", 1) };
    let keeper = take(other.grant_from(&its_memory, &region, &at_last, &UNOBSERVED), 0xaa).unwrap();

    let broken = world(breaks, at);
    let (ledger, memory) = party(&broken, identity());
    let (retired, ours) = scenario(&ledger, &memory, &region);
    let mut held = vec![keeper];
    // After a failure, a process may keep memory that it opens once until it ends.
    if matches!(breaks, Break::Killed | Break::Power) || matches!(region.kind, RegionKind::Egm { .. }) {
        drop((ours, memory));
    } else {
        held.extend(ours);
    }
    no_overlap(&held);
    if breaks == Break::Power && broken.was_reached() {
        held.clear();
        files.lock().unwrap().lose_power();
    } else {
        all_is_well(&other, &its_memory, &region, &held, &retired);
        assert!(is_full_of(&held[0], 0xaa));
        held.clear();
    }
    drop(its_memory);
    let next = Identity { boot: "next".to_owned(), ..identity() };
    let (ledger, memory) = party(&whole, next);
    let lease = ledger.grant_from(&memory, &region, &request("all", PAGES), &UNOBSERVED).unwrap();
    assert_eq!(retired.minus(&lease.holes()), SpanSet::default());
    assert!(is_zero_but_for_holes(&lease), "a boot later, there are bytes in {:?}", lease.slice());
    broken.was_reached()
}

/// Breaks the scenario at every one of its steps.
fn everywhere(breaks: Break) {
    for open in [region, egm_region] {
        let folder = tempfile::tempdir().unwrap();
        let steps = (0..).take_while(|at| run_with_break(breaks, *at, folder.path(), open)).count();
        assert!(steps > 100, "the scenario has only {steps} steps");
    }
}

#[test]
fn a_step_that_fails_gives_no_byte_two_owners_and_hands_out_none_unscrubbed() {
    everywhere(Break::Once);
}

#[test]
fn neither_does_one_that_is_half_done() {
    everywhere(Break::Half);
}

#[test]
fn neither_does_the_end_of_the_process() {
    everywhere(Break::Killed);
}

#[test]
fn neither_does_a_loss_of_power() {
    everywhere(Break::Power);
}

#[test]
fn neither_does_a_full_disk() {
    everywhere(Break::Full);
}

#[test]
fn a_full_disk_refuses_and_states_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let (region, memory) = region(folder.path(), PAGES);
    let world = Arc::new(World { breaks: Break::Full, at: 0, step: AtomicUsize::new(0) });
    let disk = FakeDisk { files: Arc::default(), world };
    let ledger = Ledger::with_disk(Box::new(disk), folder.path().to_owned(), identity());
    let error = ledger.grant_from(&memory, &region, &request("a", 1), &UNOBSERVED).unwrap_err();
    assert!(matches!(error, GrantError::Ledger(LedgerError::Record { .. })));
    let text = Chain(&error).to_string();
    assert!(text.contains("cannot replace the ledger's record"), "{text}");
    assert!(text.contains("help: free some space"), "{text}");
    assert!(ledger.states(&region).unwrap().held.is_empty());
}
