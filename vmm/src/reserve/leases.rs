//! Slices of the host's regions: taken before a machine is built, scrubbed and returned after its end.
//!
//! A kill of this process unlocks its slices and leaves them dirty: their next owner's grant scrubs them.

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use egm_address::{CpuSet, InRegion, Offset, Span, SpanSet};
use egm_device::Backing;
use egm_device::broker::BrokerLease;
use egm_device::carve::plan::Request;
use egm_device::lease::Lease;
use egm_device::ledger::{Identity, Ledger, Paths, Progress, Watch};
use egm_device::owner::Owner;
use egm_device::region::{Region, RegionKind, Slice};
use schemars::JsonSchema;
use serde::Serialize;

use super::error::ReserveError;
use crate::config::Spec;
use crate::error::Report;
use crate::facts::Facts;
use crate::lock::lock;
use crate::plan::{BackingPlan, MemoryKind, MemoryPlan, Plan};

/// A slice of this machine.
#[derive(Debug)]
pub(crate) enum Taken {
    /// Locked by this process.
    Own(Box<Lease>),
    /// Granted by a broker, which handed over the memory.
    Broker(Box<BrokerLease>, BrokerMemory),
}

/// Memory of a slice, as a broker handed it over.
pub(crate) struct BrokerMemory(Box<dyn Backing>);

impl fmt::Debug for BrokerMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("BrokerMemory");
        debug.field("offset", &self.0.offset()).field("size", &self.0.size()).finish()
    }
}

impl Taken {
    /// File and range of the slice.
    pub(crate) fn backing(&self) -> &dyn Backing {
        match self {
            Self::Own(lease) => lease.as_ref(),
            Self::Broker(_, BrokerMemory(backing)) => backing.as_ref(),
        }
    }

    /// The region, with every page that is retired so far.
    pub(crate) fn region(&self) -> &Region {
        match self {
            Self::Own(lease) => lease.region(),
            Self::Broker(lease, _) => lease.region(),
        }
    }

    /// Region, offset and size.
    pub(crate) fn slice(&self) -> &Slice {
        match self {
            Self::Own(lease) => lease.slice(),
            Self::Broker(lease, _) => lease.slice(),
        }
    }

    /// Whether a broker granted it.
    pub(crate) const fn is_of_broker(&self) -> bool {
        matches!(self, Self::Broker(..))
    }

    /// Keeps `bad` (bytes of the region) from later owners. A broker records it when the slice is returned.
    pub(crate) fn retire(&self, bad: &SpanSet<InRegion>) -> Result<(), Box<dyn Report>> {
        match self {
            Self::Own(lease) => Ok(lease.retire(bad)?),
            Self::Broker(lease, _) => Ok(lease.retire(bad)?),
        }
    }

    /// Whether it lies where `backing` is planned.
    fn is_at(&self, backing: &BackingPlan) -> bool {
        let slice = self.slice();
        Some(&slice.region) == backing.region.as_ref()
            && slice.offset == backing.offset
            && slice.size.get() == backing.size
    }
}

/// Delegates to the lease, or to the memory that a broker handed over.
impl Backing for Taken {
    fn file(&self) -> &File {
        self.backing().file()
    }
    fn offset(&self) -> u64 {
        self.backing().offset()
    }
    fn size(&self) -> u64 {
        self.backing().size()
    }
    fn page_size(&self) -> u64 {
        self.backing().page_size()
    }
    fn is_invisible(&self) -> bool {
        self.backing().is_invisible()
    }
    fn outlives_power(&self) -> bool {
        self.backing().outlives_power()
    }
}

/// A slice as the operator sees it.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(crate) struct SliceRecord {
    /// Id of the backing.
    pub(crate) id: String,
    /// Name of the region; `None` for memory of the machine itself.
    pub(crate) region: Option<String>,
    /// First byte, counted in the region.
    pub(crate) offset: u64,
    /// Size of the slice, in bytes.
    pub(crate) size: u64,
    /// Owner as the ledger has it; `None` for a slice of a broker, and for memory of the machine itself.
    pub(crate) owner: Option<Owner>,
    /// Bytes of it that were retired when the machine was planned: offset in the region, and size.
    pub(crate) retired: Vec<RetiredSpan>,
}

impl SliceRecord {
    /// The record of `backing`, which is `taken` unless it is memory of the machine itself.
    fn new(backing: &BackingPlan, taken: Option<&Taken>) -> Self {
        let owner = taken.and_then(|taken| match taken {
            Taken::Own(lease) => Some(lease.owner().clone()),
            Taken::Broker(..) => None,
        });
        let span = Span::new(Offset::new(backing.offset), backing.size).ok();
        let retired = taken.zip(span).map(|(taken, span)| taken.region().retired.within(span));
        let retired = retired.unwrap_or_default();
        let retired = retired.iter().map(|bad| RetiredSpan { offset: bad.start().get(), size: bad.size() });
        Self {
            id: backing.id.clone(),
            region: backing.region.clone(),
            offset: backing.offset,
            size: backing.size,
            owner,
            retired: retired.collect(),
        }
    }
}

/// Bytes that must not be used.
#[derive(Debug, Clone, Copy, Serialize, JsonSchema)]
pub(crate) struct RetiredSpan {
    offset: u64,
    pub(crate) size: u64,
}

/// Called from any thread with a slice's id and each step of the work on it.
pub type SliceProgress<'a> = &'a (dyn Fn(&str, Progress) + Sync);

/// A slice, by the id of its backing.
#[derive(Debug, Clone)]
pub(super) struct Named {
    pub(super) id: String,
    pub(super) taken: Arc<Taken>,
    /// Host processors near it, where known.
    near: Option<CpuSet>,
}

/// What became of a slice that left the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Return {
    /// Its owner has it back, scrubbed where the region keeps bytes.
    Done,
    /// It was memory of the machine itself.
    Freed,
    /// The process that has its lock returns it when the machine ends.
    AtEnd,
}

/// Called once with the outcome of a return, from any thread.
pub(crate) type Returned = Box<dyn FnOnce(Result<Return, ReserveError>) + Send>;

/// The slices of one machine, which come and go while it runs. Clones share them.
#[derive(Debug, Default, Clone)]
pub struct Leases {
    held: Arc<Mutex<Held>>,
    /// Ends the scrubs of returns.
    cancel: Arc<AtomicBool>,
}

#[derive(Debug, Default)]
struct Held {
    named: Vec<Named>,
    /// The same and memory of the machine itself, for the operator.
    records: Vec<SliceRecord>,
    /// Threads that return slices.
    returns: Vec<JoinHandle<()>>,
    /// Whether another process has the locks of this one's slices.
    is_left: bool,
}

impl Leases {
    /// Takes the slices of `backings` for the machine of `spec`.
    ///
    /// # Errors
    /// [`ReserveError`]; nothing stays taken.
    pub(crate) fn take(
        spec: &Spec,
        backings: &[BackingPlan],
        facts: &Facts,
        progress: SliceProgress<'_>,
    ) -> Result<Self, ReserveError> {
        let leases = Self::default();
        if backings.iter().all(|backing| backing.region.is_none()) {
            return Ok(leases);
        }
        let root = Path::new("/");
        let ledger = Ledger::open(Paths::below(root), Identity::read(root).map_err(ReserveError::Boot)?)?;
        let owner = Owner::this(&spec.name).in_domain(spec.trust_domain.clone());
        for backing in backings {
            let Some(host) = backing.region.as_ref().and_then(|name| facts.region(name)) else { continue };
            let (id, region) = (&backing.id, &host.region);
            let request = Request { at: Some(backing.offset), ..Request::new(backing.size, owner.clone()) };
            let (near, report) = (near(facts, region), |step| progress(id, step));
            let watch = Watch { progress: &report, near: near.as_ref(), ..Watch::unobserved() };
            let lease = ledger.grant(region, &request, &watch);
            let lease = lease.map_err(|source| ReserveError::Grant { id: id.clone(), source })?;
            leases.add(id.clone(), Arc::new(Taken::Own(Box::new(lease))), near);
        }
        Ok(leases)
    }

    fn add(&self, id: String, taken: Arc<Taken>, near: Option<CpuSet>) {
        lock(&self.held).named.push(Named { id, taken, near });
    }

    /// Adds the slice of backing `id` that a broker granted.
    ///
    /// # Errors
    /// [`ReserveError::Broker`] where its memory did not come with it.
    pub(super) fn add_granted(&self, id: String, lease: Box<BrokerLease>) -> Result<(), ReserveError> {
        match lease.backing() {
            Ok(memory) => {
                self.add(id, Arc::new(Taken::Broker(lease, BrokerMemory(memory))), None);
                Ok(())
            }
            Err(source) => Err(ReserveError::Broker { id, source }),
        }
    }

    /// Adds the one slice of `other`, if there is one, as that of backing `id`.
    pub(super) fn adopt(&self, id: &str, other: &Self) {
        let taken = std::mem::take(&mut lock(&other.held).named);
        let named = taken.into_iter().map(|named| Named { id: id.to_owned(), ..named });
        lock(&self.held).named.extend(named);
    }

    /// The slice behind backing `id`.
    pub(crate) fn get(&self, id: &str) -> Option<Arc<Taken>> {
        lock(&self.held).named.iter().find(|named| named.id == id).map(|named| Arc::clone(&named.taken))
    }

    /// All slices now.
    pub(super) fn all(&self) -> Vec<Named> {
        lock(&self.held).named.clone()
    }

    /// Results of `each` for the slices that this process locked itself, with the ids of their backings.
    pub(crate) fn map_own<T>(&self, mut each: impl FnMut(&str, &Lease) -> T) -> Vec<T> {
        let held = lock(&self.held);
        let own = held.named.iter().filter_map(|named| match named.taken.as_ref() {
            Taken::Own(lease) => Some(each(&named.id, lease)),
            Taken::Broker(..) => None,
        });
        own.collect()
    }

    /// Records the slices of `plan` for the operator.
    pub(crate) fn publish(&self, plan: &Plan) {
        let is_egm = |index| {
            let egm = |piece: &MemoryPlan| piece.backing == index && piece.kind == MemoryKind::Egm;
            plan.memory.iter().any(egm)
        };
        let slices = plan.backings.iter().enumerate();
        let slices = slices.filter(|(index, backing)| backing.device || is_egm(*index));
        slices.for_each(|(_, backing)| self.publish_one(backing));
    }

    /// Records the slice of `backing` for the operator.
    pub(super) fn publish_one(&self, backing: &BackingPlan) {
        let taken = self.get(&backing.id);
        lock(&self.held).records.push(SliceRecord::new(backing, taken.as_deref()));
    }

    /// The slices that the machine has now, for the operator.
    pub(crate) fn records(&self) -> Vec<SliceRecord> {
        lock(&self.held).records.clone()
    }

    /// Records for each own slice that the machine runs as user `uid` with the VFIO devices that it has opened. Without effect
    /// where another process has the locks.
    ///
    /// # Errors
    /// [`ReserveError::Ledger`].
    pub(crate) fn record_process(&self, uid: u32) -> Result<(), ReserveError> {
        if lock(&self.held).is_left {
            return Ok(());
        }
        let recorded = self.map_own(|_, lease| lease.record_process(uid));
        Ok(recorded.into_iter().collect::<Result<(), _>>()?)
    }

    /// Leaves this process's slices to the one that has their locks.
    pub(crate) fn leave_own(&self) {
        lock(&self.held).is_left = true;
    }

    /// Whether a slice is of a broker.
    pub(crate) fn has_broker(&self) -> bool {
        lock(&self.held).named.iter().any(|named| named.taken.is_of_broker())
    }

    /// Whether a slice is of an EGM device: its list of retired pages is read while the guest runs.
    pub(crate) fn has_egm_device(&self) -> bool {
        self.all().iter().any(|named| matches!(named.taken.region().kind, RegionKind::Egm { .. }))
    }

    /// Adds to `facts` the retired pages that they lack; returns whether there were any.
    pub(crate) fn add_retired(&self, facts: &mut Facts) -> bool {
        let mut has_new = false;
        for named in self.all() {
            let region = named.taken.region();
            let known = facts.regions.iter_mut().find(|host| host.region.name == region.name);
            if let Some(known) = known.filter(|host| host.region.retired != region.retired) {
                known.region.retired = region.retired.clone();
                has_new = true;
            }
        }
        has_new
    }

    /// Whether they lie where `backings` has them.
    pub(crate) fn are_those_of(&self, backings: &[BackingPlan]) -> bool {
        let mut backings = backings.iter().filter(|backing| backing.region.is_some());
        backings.all(|backing| self.get(&backing.id).is_some_and(|taken| taken.is_at(backing)))
    }

    /// Scrubs and returns slice `id` on a thread of its own; nothing of the machine has its memory any more. `returned` is
    /// called with the outcome.
    pub(crate) fn return_one(&self, id: &str, returned: Returned) {
        let mut held = lock(&self.held);
        let position = held.named.iter().position(|named| named.id == id);
        let is_own = |named: &Named| !named.taken.is_of_broker();
        if held.is_left && position.and_then(|position| held.named.get(position)).is_some_and(is_own) {
            drop(held);
            return returned(Ok(Return::AtEnd));
        }
        held.records.retain(|record| record.id != id);
        let Some(position) = position else {
            drop(held);
            return returned(Ok(Return::Freed));
        };
        let (named, cancel) = (held.named.swap_remove(position), Arc::clone(&self.cancel));
        let work = move || returned(named.return_slice(&|_| (), &cancel).map(|()| Return::Done));
        held.returns.retain(|thread| !thread.is_finished());
        match thread::Builder::new().name("return".to_owned()).spawn(work) {
            Ok(thread) => held.returns.push(thread),
            // Its drop left it dirty: the next owner's grant scrubs it.
            Err(error) => tracing::warn!("slice \"{id}\" is returned without a scrub: {error}"),
        }
    }

    /// Scrubs and returns all slices. A signal ends the scrub; the next owner's grant scrubs what is left. The result has
    /// the errors of slices that were not scrubbed or not returned.
    pub fn return_all(&self, progress: SliceProgress<'_>) -> Vec<ReserveError> {
        let Held { named, returns, is_left, .. } = std::mem::take(&mut *lock(&self.held));
        if !named.is_empty() || !returns.is_empty() {
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
                // Without it no signal ends the scrub in order: no reason to keep a dirty slice.
                let _ = signal_hook::flag::register(signal, Arc::clone(&self.cancel));
            }
        }
        for thread in returns {
            let _ = thread.join(); // it has reported its outcome
        }
        let mine = named.into_iter().filter(|named| !is_left || named.taken.is_of_broker());
        let given = mine.map(|named| {
            let id = named.id.clone();
            named.return_slice(&|step| progress(&id, step), &self.cancel)
        });
        given.filter_map(Result::err).collect()
    }
}

#[cfg(test)]
impl From<Vec<SliceRecord>> for Leases {
    fn from(records: Vec<SliceRecord>) -> Self {
        let leases = Self::default();
        lock(&leases.held).records = records;
        leases
    }
}

impl Named {
    fn return_slice(
        self,
        progress: &(dyn Fn(Progress) + Sync),
        cancel: &AtomicBool,
    ) -> Result<(), ReserveError> {
        let Self { id, taken, near } = self;
        match Arc::into_inner(taken) {
            None => Err(ReserveError::InUse { id }),
            Some(Taken::Broker(lease, memory)) => {
                drop(memory);
                lease.return_slice(cancel).map_err(|source| ReserveError::Broker { id, source })
            }
            Some(Taken::Own(lease)) => {
                let watch = Watch { progress, cancel, near: near.as_ref(), pace: None };
                let given = lease.return_slice(&watch);
                given.map_err(|source| ReserveError::GiveBack { id, source })
            }
        }
    }
}

/// The host processors at a region's node.
fn near(facts: &Facts, region: &Region) -> Option<CpuSet> {
    let node = facts.nodes.iter().find(|node| Some(node.id) == region.node)?;
    Some(node.cpus.clone()).filter(|cpus| !cpus.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_of_each_slice_and_of_no_ordinary_memory() {
        let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
        let records = |config: &str, facts: &str| {
            let spec = crate::config::load(&configs.join(config)).unwrap();
            let facts = crate::facts::load(&configs.join("facts").join(facts)).unwrap();
            let plan = crate::plan::plan(&spec, &facts).unwrap();
            let leases = Leases::default();
            leases.publish(&plan);
            leases
                .records()
                .into_iter()
                .map(|record| (record.id, record.region.is_some()))
                .collect::<Vec<_>>()
        };
        assert_eq!(records("grace-1gpu-egm.json", "grace.json"), [("egm0".to_owned(), true)]);
        assert_eq!(records("demo.json", "x86-server.json"), [("egm0".to_owned(), false)]);
        assert_eq!(records("smoke.json", "x86-server.json"), []);
    }
}
