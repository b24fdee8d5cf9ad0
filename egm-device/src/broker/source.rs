//! Source of the broker's slices: the ledger, with devices that are opened once.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{self, Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use egm_address::{CpuSet, InRegion, Offset, Span, SpanSet};
use egm_report::{Chain, Report};

use super::idle::IdleScrub;
use super::open_devices::OpenDevices;
use crate::audit::Log;
use crate::backing::Backing;
use crate::carve::plan::{Request, place};
use crate::lease::Lease;
use crate::ledger::record::GrantState;
use crate::ledger::{GpuLease, GrantError, Ledger, LedgerError, Memory, States, Watch};
use crate::owner::Owner;
use crate::policy::{Charge, OrphanedSlice, Supply};
use crate::region::{Node, Region, RegionKind, Slice};

/// Shortest time between two looks at quarantined memory.
const REVIEW: Duration = Duration::from_secs(1);

/// The broker's view of a ledger. The broker calls all of it on separate threads.
pub trait Source: Send + Sync {
    /// Supplies of every region, now. A region that cannot be read has none.
    fn supplies(&self) -> Vec<Supply>;

    /// Slices of pools that clients of earlier brokers may still have; `None` if the ledger cannot be read. The review of
    /// quarantined memory in [`Source::supplies`] comes first.
    fn orphaned(&self) -> Option<Vec<OrphanedSlice>> {
        Some(Vec::new())
    }

    /// Grants a slice of `region`. `cancel` is set when the slice is no longer wanted.
    fn grant(
        &self,
        region: &str,
        request: &Request,
        cancel: &AtomicBool,
    ) -> Result<Box<dyn GrantedSlice>, GrantFailure>;

    /// Cleans free memory, until all is clean or `scrub` is stopped. Meanwhile its bytes count as free, and slices of the
    /// region that it is in wait for it.
    fn scrub_idle(&self, scrub: &IdleScrub);

    /// The log for refusals.
    fn audit(&self) -> Log {
        Log::none()
    }
}

/// Why there is no slice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrantFailure {
    /// The region has enough bytes, but no place for the slice now: the broker tries again after a return.
    #[error("no free place is so large and so aligned")]
    Short,
    /// Any other failure: a text for operators.
    #[error("{0}")]
    Failed(String),
}

/// A slice that the broker holds for a client.
pub trait GrantedSlice: Send {
    /// The region, with all that is retired.
    fn region(&self) -> &Region;

    /// Offset and size in the region.
    fn slice(&self) -> &Slice;

    /// The memory of the slice.
    fn backing(&self) -> &dyn Backing;

    /// Records the account of the slice for the next broker, before [`GrantedSlice::hand_out`].
    fn charge(&self, _charge: &Charge) -> Result<(), GrantFailure> {
        Ok(())
    }

    /// An open file description of its memory, for its client.
    fn hand_out(&self) -> io::Result<File>;

    /// Cleans it for the next owner, as far as that succeeds. Its client found `bad` bytes, which no later owner gets:
    /// they are recorded even if the return fails.
    ///
    /// # Errors
    /// [`StillUsed`], which keeps it from other owners.
    fn return_slice(self: Box<Self>, bad: &SpanSet<InRegion>) -> Result<(), StillUsed>;
}

/// A return without effect: the memory is in use.
pub struct StillUsed {
    /// A text for operators.
    pub why: String,
    /// The slice, to be returned later.
    pub held: Box<dyn GrantedSlice>,
}

/// A lease for a client.
struct LedgerLease {
    lease: Lease,
    near: Option<CpuSet>,
    /// GPUs that the client's user may open.
    gpus: Option<GpuLease>,
}

impl GrantedSlice for LedgerLease {
    fn region(&self) -> &Region {
        self.lease.region()
    }
    fn slice(&self) -> &Slice {
        self.lease.slice()
    }
    fn backing(&self) -> &dyn Backing {
        &self.lease
    }

    fn charge(&self, charge: &Charge) -> Result<(), GrantFailure> {
        let failed = |error: LedgerError| GrantFailure::Failed(Chain(&error as &dyn Report).to_string());
        self.lease.charge(charge).map_err(failed)
    }

    fn hand_out(&self) -> io::Result<File> {
        self.lease.hand_out()
    }

    /// Bytes that were not scrubbed stay dirty in the ledger, and are scrubbed for their next owner.
    fn return_slice(mut self: Box<Self>, bad: &SpanSet<InRegion>) -> Result<(), StillUsed> {
        drop(self.gpus.take());
        recorded(self.lease.check_claims(bad), self.lease.region());
        let near = self.near.clone();
        match self.lease.release(&Watch { near: near.as_ref(), ..Watch::unobserved() }) {
            Err(error @ GrantError::StillUsed { .. }) => {
                Err(StillUsed { why: Chain(&error as &dyn Report).to_string(), held: self })
            }
            Err(error) => {
                let (region, error) = (self.lease.region(), Chain(&error as &dyn Report).one_line());
                tracing::info!("a returned slice of region {} stays dirty: {error}", region.name);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}

/// Prints a note for operators when the ledger did not record bad pages of `region`.
fn recorded(retired: Result<(), LedgerError>, region: &Region) {
    if let Err(error) = retired {
        tracing::info!("bad pages of region {} are not recorded: {error}", region.name);
    }
}

/// The host's regions and their ledger.
pub struct LedgerSource {
    ledger: Ledger,
    regions: Vec<Region>,
    near: BTreeMap<u32, CpuSet>,
    /// Rate of the scrub of idle memory, in bytes a second; without one there is no such scrub.
    pace: Option<NonZeroU64>,
    kept: Arc<OpenDevices>,
    memory: Arc<dyn Memory>,
    /// The last look at quarantined memory.
    reviewed: Mutex<Option<Instant>>,
    /// The last failed scrub of each region's idle memory.
    failures: Mutex<BTreeMap<String, String>>,
    /// Prints once that accounts of earlier brokers were lost.
    lost: sync::Once,
}

impl LedgerSource {
    /// `regions` and their `ledger`. guest_memfd is left out: its memory belongs to a VM of the process that makes it.
    #[must_use]
    pub fn new(ledger: Ledger, mut regions: Vec<Region>) -> Self {
        regions.retain(|region| region.kind != RegionKind::GuestMemfd);
        let kept = Arc::new(OpenDevices::new(ledger.memory()));
        Self {
            ledger,
            regions,
            near: BTreeMap::new(),
            pace: None,
            kept: kept.clone(),
            memory: kept,
            reviewed: Mutex::default(),
            failures: Mutex::default(),
            lost: sync::Once::new(),
        }
    }

    /// Reaches the memory of its regions by way of `memory`.
    #[must_use]
    pub fn reaching(mut self, memory: Arc<dyn Memory>) -> Self {
        self.memory = memory;
        self
    }

    /// Scrubs idle memory in the background, `rate` bytes a second at most; 0 for not at all.
    #[must_use]
    pub const fn scrubbing(mut self, rate: u64) -> Self {
        self.pace = NonZeroU64::new(rate);
        self
    }

    /// Scrubs a region on the processors of its own node among `nodes`.
    #[must_use]
    pub(crate) fn on_nodes(mut self, nodes: &[Node]) -> Self {
        let near = nodes.iter().filter(|node| !node.cpus.is_empty());
        self.near = near.map(|node| (node.id, node.cpus.clone())).collect();
        self
    }

    fn near(&self, region: &Region) -> Option<&CpuSet> {
        self.near.get(&region.node?)
    }

    /// Whether a look at quarantined memory is due: requests of clients do not make it more frequent.
    fn may_review(&self) -> bool {
        let mut reviewed = self.reviewed.lock().unwrap_or_else(PoisonError::into_inner);
        let is_time = reviewed.is_none_or(|last| last.elapsed() >= REVIEW);
        if is_time {
            *reviewed = Some(Instant::now());
        }
        is_time
    }

    /// Prints a note for operators when idle memory of `region` stays dirty for another reason than the last time. It is
    /// scrubbed for its next owner.
    fn note_failure(&self, region: &Region, error: Option<GrantError>) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(error) = error.map(|error| Chain(&error as &dyn Report).one_line()) else { return };
        if failures.get(&region.name) != Some(&error) {
            tracing::info!("idle memory of region {} stays dirty: {error}", region.name);
            failures.insert(region.name.clone(), error);
        }
    }

    /// The supply of `region`. The first region with quarantined memory decides whether this look reviews all of it, and
    /// keeps the decision in `reviews`.
    fn supply(&self, region: &Region, reviews: &mut Option<bool>) -> Supply {
        // Retired pages count as free: a slice spans them as holes.
        let whole: SpanSet<_> = Span::new(Offset::new(0), region.size.get()).into_iter().collect();
        let mut states = self.ledger.states(region);
        let is_quarantined =
            |states: &States| states.held.iter().any(|held| held.usage == GrantState::Quarantined);
        if states.as_ref().is_ok_and(is_quarantined) && *reviews.get_or_insert_with(|| self.may_review()) {
            states = self.ledger.review(region).and_then(|_| self.ledger.states(region));
        }
        let free = states.map(|states| whole.minus(&busy(&states))).unwrap_or_default();
        Supply {
            region: region.name.clone(),
            kind: region.kind.word().to_owned(),
            page_size: region.page_size.get().max(1),
            usable: region.size.get(),
            free: free.size(),
            largest: free.iter().map(|span| span.size()).max().unwrap_or(0),
            shares_file: region.kind.shares_file(),
        }
    }
}

/// Bytes that other owners hold. Bytes under this process's scrub do not count: a grant gets them at once.
fn busy(states: &States) -> SpanSet<InRegion> {
    let scrubbing = Owner::scrub();
    let others = states.held.iter().filter(|held| held.owner.as_ref() != Some(&scrubbing));
    others.map(|held| held.span).collect()
}

impl Source for LedgerSource {
    fn audit(&self) -> Log {
        self.ledger.audit().clone()
    }

    fn supplies(&self) -> Vec<Supply> {
        let mut reviews = None;
        self.regions.iter().map(|region| self.supply(region, &mut reviews)).collect()
    }

    fn orphaned(&self) -> Option<Vec<OrphanedSlice>> {
        let orphaned = self.ledger.orphaned_slices(&self.regions).ok()?;
        if orphaned.was_lost && self.regions.iter().any(|region| region.kind.is_pool()) {
            self.lost.call_once(|| {
                tracing::info!(
                    "a record of this boot was lost: memory of pools that clients of earlier brokers keep may count on no account"
                );
            });
        }
        Some(orphaned.slices)
    }

    fn grant(
        &self,
        region: &str,
        request: &Request,
        cancel: &AtomicBool,
    ) -> Result<Box<dyn GrantedSlice>, GrantFailure> {
        let found = self.regions.iter().find(|r| r.name == region);
        let found = found.ok_or_else(|| GrantFailure::Failed(format!("there is no region {region:?}")))?;
        let near = self.near(found);
        let watch = Watch { near, cancel, ..Watch::unobserved() };
        let failed = |error: &dyn Report| GrantFailure::Failed(Chain(error).to_string());
        match self.ledger.grant_from(&self.memory, found, request, &watch) {
            Ok(lease) => {
                let regions = std::slice::from_ref(found);
                let gpus: Vec<_> = self.ledger.open_gpus(found).iter().map(|open| open.function).collect();
                let gpus = self.ledger.claim_gpus(&self.memory, regions, &gpus, &request.owner, &watch);
                let gpus = gpus.map_err(|error| failed(&error))?;
                Ok(Box::new(LedgerLease { lease, near: near.cloned(), gpus }))
            }
            // A request that an empty region could serve waits; any other is refused.
            Err(GrantError::Short { .. })
                if place(found, &SpanSet::default(), &SpanSet::default(), request).is_ok() =>
            {
                Err(GrantFailure::Short)
            }
            Err(error) => Err(failed(&error)),
        }
    }

    /// Skips an EGM device that is not open yet: the kernel zeroes all of it when it is opened.
    fn scrub_idle(&self, scrub: &IdleScrub) {
        let Some(pace) = self.pace else { return };
        let kept =
            |region: &&Region| !matches!(region.kind, RegionKind::Egm { .. }) || self.kept.is_open(region);
        for region in self.regions.iter().filter(|region| region.kind.keeps_bytes()).filter(kept) {
            if !scrub.enter(&region.name) {
                return;
            }
            let cancel = scrub.stopped();
            let watch = Watch { near: self.near(region), pace: Some(pace), cancel, ..Watch::unobserved() };
            let outcome = self.ledger.scrub(&self.memory, region, None, &watch);
            scrub.exit();
            self.note_failure(region, outcome.err().filter(|_| !cancel.load(Ordering::Relaxed)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::backing::tests::region;
    use crate::backing::{OpenResult, RetiredListError};
    use crate::ledger::{Identity, Paths};
    use crate::mapping::Mapping;
    use crate::retired::Retired;

    const PAGE: u64 = 4096;
    static NEVER: AtomicBool = AtomicBool::new(false);

    /// A plain file in the place of `/dev/mem`.
    struct PlainFile(PathBuf);

    struct Window(File, u64, u64);

    impl Backing for Window {
        fn file(&self) -> &File {
            &self.0
        }
        fn offset(&self) -> u64 {
            self.1
        }
        fn size(&self) -> u64 {
            self.2
        }
        fn page_size(&self) -> u64 {
            PAGE
        }
        fn is_invisible(&self) -> bool {
            true
        }
        fn outlives_power(&self) -> bool {
            false
        }
    }

    impl Memory for PlainFile {
        fn open(&self, _: &Region, slice: &Slice, _: &Watch<'_>) -> OpenResult {
            let file = File::options().read(true).write(true).open(&self.0).unwrap();
            Ok(Box::new(Window(file, slice.offset, slice.size.get())))
        }
    }

    /// A plain file in the place of an EGM device, which its process opens once.
    struct Once(File);

    impl Memory for Once {
        fn open(&self, _: &Region, slice: &Slice, _: &Watch<'_>) -> OpenResult {
            Ok(Box::new(Window(self.0.try_clone().unwrap(), slice.offset, slice.size.get())))
        }
        fn retired(&self, _: &Region, _: &dyn Backing) -> Result<Retired, RetiredListError> {
            Ok(Retired::default())
        }
    }

    /// A region of some pages in `folder`, called `r`.
    fn source(folder: &tempfile::TempDir, pages: u64) -> LedgerSource {
        let identity = Identity { machine: Some("host".into()), boot: "boot".into() };
        let path = folder.path().join("memory");
        File::create(&path).unwrap().set_len(pages * PAGE).unwrap();
        let region = region(RegionKind::Reserved { device: path.clone() }, pages * PAGE, PAGE);
        let ledger = Ledger::open(Paths::below(folder.path()), identity).unwrap();
        LedgerSource {
            regions: vec![region],
            near: BTreeMap::new(),
            pace: NonZeroU64::new(1 << 30),
            kept: Arc::new(OpenDevices::new(ledger.memory())),
            ledger,
            memory: Arc::new(PlainFile(path)),
            reviewed: Mutex::default(),
            failures: Mutex::default(),
            lost: sync::Once::new(),
        }
    }

    fn request(pages: u64) -> Request {
        Request::new(pages * PAGE, Owner::this("vm"))
    }

    #[test]
    fn memory_that_a_process_has_goes_to_no_other_owner_and_is_named_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let source = source(&folder, 4);
        let granted = source.grant("r", &request(1), &NEVER).unwrap_or_else(|error| panic!("{error}"));
        let mut peer = std::process::Command::new("/bin/cat")
            .stdin(std::process::Stdio::piped())
            .stdout(granted.hand_out().unwrap())
            .spawn()
            .unwrap();
        let Err(used) = granted.return_slice(&SpanSet::default()) else { panic!("it was taken for free") };
        assert!(used.why.contains(&format!("a descriptor in process {} (cat)", peer.id())), "{}", used.why);
        assert_eq!(source.supplies()[0].free, 3 * PAGE);
        let Err(used) = used.held.return_slice(&SpanSet::default()) else { panic!("it was taken for free") };
        let held = source.ledger.states(&source.regions[0]).unwrap().held;
        assert_eq!((held[0].usage, held[0].evidence[0].pid), (GrantState::Quarantined, Some(peer.id())));
        let log =
            || std::fs::read_to_string(folder.path().join("var/log/egm-device/findings.jsonl")).unwrap();
        assert_eq!(log().matches("\"quarantine\"").count(), 1, "not once for each look");
        drop(peer.stdin.take());
        peer.wait().unwrap();
        assert!(used.held.return_slice(&SpanSet::default()).is_ok());
        assert_eq!(source.supplies()[0].free, 4 * PAGE);
    }

    #[test]
    fn a_quarantine_outlives_its_broker_and_ends_when_the_memory_is_free() {
        let folder = tempfile::tempdir().unwrap();
        let source = source(&folder, 4);
        let granted = source.grant("r", &request(1), &NEVER).unwrap_or_else(|error| panic!("{error}"));
        let left = Mapping::new(granted.backing(), 0, PAGE, 0).unwrap();
        drop(granted.return_slice(&SpanSet::default()));
        let source = LedgerSource { reviewed: Mutex::default(), ..source };
        let quarantined = source.ledger.states(&source.regions[0]).unwrap().held;
        assert_eq!(quarantined[0].usage, GrantState::Quarantined);
        assert_eq!(source.supplies()[0].free, 3 * PAGE);
        assert!(source.grant("r", &request(4), &NEVER).is_err());
        drop(left);
        assert!(source.grant("r", &request(4), &NEVER).is_ok(), "a grant that lacks room looks again");
    }

    #[test]
    fn a_slice_of_a_file_that_opens_once_is_granted_as_long_as_it_is_mapped() {
        let folder = tempfile::tempdir().unwrap();
        let mut source = source(&folder, 4);
        let path = folder.path().join("memory");
        source.memory = Arc::new(Once(File::options().read(true).write(true).open(&path).unwrap()));
        source.regions[0].kind = RegionKind::Egm { device: path };
        let [first, second] = [1, 2].map(|pages| {
            source.grant("r", &request(pages), &NEVER).unwrap_or_else(|error| panic!("{error}"))
        });
        // The VMM of a server that has ended.
        let [one, other] = [&first, &second].map(|granted| {
            let backing = granted.backing();
            Mapping::new(backing, 0, backing.size(), 0).unwrap()
        });
        let Err(used) = first.return_slice(&SpanSet::default()) else { panic!("it was taken for free") };
        drop(other);
        assert!(second.return_slice(&SpanSet::default()).is_ok(), "nobody maps that one");
        assert_eq!(source.supplies()[0].free, 3 * PAGE);
        let Err(used) = used.held.return_slice(&SpanSet::default()) else { panic!("it was taken for free") };
        drop(one);
        assert!(used.held.return_slice(&SpanSet::default()).is_ok());
        assert_eq!(source.supplies()[0].free, 4 * PAGE);
        // Nor is a slice granted again after its owner has gone without a return.
        let granted = source.grant("r", &request(4), &NEVER).unwrap_or_else(|error| panic!("{error}"));
        let left = Mapping::new(granted.backing(), 0, PAGE, 0).unwrap();
        drop(granted);
        assert!(source.grant("r", &request(4), &NEVER).is_err(), "a page of it is mapped");
        drop(left);
        assert!(source.grant("r", &request(4), &NEVER).is_ok());
    }

    #[test]
    fn one_look_reviews_the_quarantined_memory_of_every_region() {
        let folder = tempfile::tempdir().unwrap();
        let mut source = source(&folder, 4);
        source.regions.push(Region { name: "s".into(), ..source.regions[0].clone() });
        let slices = ["r", "s"]
            .map(|name| source.grant(name, &request(1), &NEVER).unwrap_or_else(|error| panic!("{error}")));
        let left = Mapping::new(slices[0].backing(), 0, PAGE, 0).unwrap();
        for slice in slices {
            drop(slice.return_slice(&SpanSet::default()));
        }
        let free =
            |source: &LedgerSource| source.supplies().iter().map(|s| s.free / PAGE).collect::<Vec<_>>();
        assert_eq!(free(&source), [3, 3]);
        drop(left);
        let source = LedgerSource { reviewed: Mutex::default(), ..source };
        assert_eq!(free(&source), [4, 4]);
    }

    #[test]
    fn bytes_that_a_client_found_bad_and_that_cannot_be_read_are_retired() {
        let folder = tempfile::tempdir().unwrap();
        let source = source(&folder, 4);
        let granted = source.grant("r", &request(2), &NEVER).unwrap_or_else(|error| panic!("{error}"));
        // The first can be read, the second not, and the last lies outside the client's slice.
        let claimed = [0, 1, 3].map(|page| Span::new(Offset::new(page * PAGE), PAGE).unwrap());
        let file = File::options().write(true).open(folder.path().join("memory")).unwrap();
        file.set_len(PAGE).unwrap();
        assert!(granted.return_slice(&claimed.into_iter().collect()).is_ok());
        file.set_len(4 * PAGE).unwrap();
        let next = source.grant("r", &request(4), &NEVER).unwrap_or_else(|error| panic!("{error}"));
        let retired: Vec<_> = next.region().retired.spans().iter().collect();
        assert_eq!(retired, [claimed[1]]);
    }

    #[test]
    fn what_an_empty_region_could_give_is_short_and_what_it_could_not_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let source = source(&folder, 3);
        let _held = source.grant("r", &request(1), &NEVER);
        let aligned = Request { align: 2 * PAGE, ..request(2) };
        assert!(matches!(source.grant("r", &aligned, &NEVER), Err(GrantFailure::Short)));
        let Err(GrantFailure::Failed(why)) = source.grant("r", &request(4), &NEVER) else { panic!() };
        assert!(why.contains("4 KiB too few"), "{why}");
    }

    #[test]
    fn idle_memory_becomes_clean_and_counts_as_free_meanwhile() {
        let folder = tempfile::tempdir().unwrap();
        let source = source(&folder, 4);
        let dirty = || source.ledger.states(&source.regions[0]).unwrap().dirty.size();
        let stopped = IdleScrub::default();
        stopped.stop();
        source.scrub_idle(&stopped);
        assert_eq!(dirty(), 4 * PAGE, "a stopped scrub cleans nothing");
        let scrub = Request::new(PAGE, Owner::scrub());
        let scrubbed =
            source.ledger.grant_from(&source.memory, &source.regions[0], &scrub, &Watch::unobserved());
        assert_eq!((source.supplies()[0].free, dirty()), (4 * PAGE, 3 * PAGE));
        drop(scrubbed);
        source.scrub_idle(&IdleScrub::default());
        assert_eq!(dirty(), 0);
    }

    #[test]
    fn a_device_that_was_not_opened_yet_is_not_opened_to_be_cleaned() {
        let folder = tempfile::tempdir().unwrap();
        let mut source = source(&folder, 4);
        source.regions[0].kind = RegionKind::Egm { device: "/dev/egm4".into() };
        source.scrub_idle(&IdleScrub::default());
        assert_eq!(source.ledger.states(&source.regions[0]).unwrap().dirty.size(), 4 * PAGE);
    }
}
