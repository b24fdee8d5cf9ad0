//! Slices of the host's regions: taken before a machine is built, scrubbed and returned after its end.
//!
//! A kill of this process unlocks its slices and leaves them dirty: their next owner's grant scrubs them.

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use egm_address::{CpuSet, InRegion, Offset, Span, SpanSet};
use egm_device::Backing;
use egm_device::broker::{BrokerLease, ReleasedSlice};
use egm_device::carve::plan::Request;
use egm_device::lease::Lease;
use egm_device::ledger::{Identity, Ledger, Paths, Progress, Watch};
use egm_device::owner::Owner;
use egm_device::region::{Region, RegionKind, Slice};

use super::error::ReserveError;
use super::record::SliceRecord;
use crate::config::Spec;
use crate::error::Report;
use crate::facts::Facts;
use crate::lock::lock;
use crate::plan::{BackingPlan, MemoryKind, MemoryPlan, Plan};

/// Attempts to take planned slices: another process may take one first. The error of the last attempt is final.
pub(crate) const ATTEMPTS: u32 = 4;

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

/// Called from any thread with a slice's id and each step of the work on it.
pub type SliceProgress<'a> = &'a (dyn Fn(&str, Progress) + Sync);

/// A slice, by the id of its backing.
#[derive(Debug, Clone)]
pub(super) struct Named {
    pub(super) id: String,
    pub(super) taken: Arc<Taken>,
    /// Host processors near it, where known.
    pub(super) near: Option<CpuSet>,
}

/// The slices of one machine, which come and go while it runs. Clones share them.
#[derive(Debug, Default, Clone)]
pub struct Leases {
    pub(super) table: Arc<Mutex<LeaseTable>>,
    /// The same slices and memory of the machine itself, for the operator. No thread waits while it has this.
    pub(super) records: Arc<Mutex<Vec<SliceRecord>>>,
    /// Ends the scrubs of returns.
    pub(super) cancel: Arc<AtomicBool>,
}

#[derive(Debug, Default)]
pub(super) struct LeaseTable {
    pub(super) named: Vec<Named>,
    /// Slices, by id, that left the guest and that the broker has not taken back.
    pub(super) refused: Vec<(String, ReleasedSlice)>,
    /// Threads that return slices.
    pub(super) returns: Vec<JoinHandle<()>>,
    /// Whether the keeper has the locks of this process's slices.
    pub(super) keeper_has_locks: bool,
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
        lock(&self.table).named.push(Named { id, taken, near });
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
        let taken = std::mem::take(&mut lock(&other.table).named);
        let named = taken.into_iter().map(|named| Named { id: id.to_owned(), ..named });
        lock(&self.table).named.extend(named);
    }

    /// The slice behind backing `id`.
    pub(crate) fn get(&self, id: &str) -> Option<Arc<Taken>> {
        lock(&self.table).named.iter().find(|named| named.id == id).map(|named| Arc::clone(&named.taken))
    }

    /// All slices that the machine has now.
    pub(super) fn all(&self) -> Vec<Named> {
        lock(&self.table).named.clone()
    }

    /// Results of `each` for the slices that this process locked itself, with the ids of their backings.
    pub(crate) fn map_own<T>(&self, mut each: impl FnMut(&str, &Lease) -> T) -> Vec<T> {
        let held = lock(&self.table);
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
        let owner = taken.as_ref().and_then(|taken| match taken.as_ref() {
            Taken::Own(lease) => Some(lease.owner().clone()),
            Taken::Broker(..) => None,
        });
        let span = Span::new(Offset::new(backing.offset), backing.size).ok();
        let retired = taken.zip(span).map(|(taken, span)| taken.region().retired.within(span));
        let record = SliceRecord::new(backing, owner, &retired.unwrap_or_default());
        lock(&self.records).push(record);
    }

    /// The slices that the machine has now, for the operator.
    pub(crate) fn records(&self) -> Vec<SliceRecord> {
        lock(&self.records).clone()
    }

    /// Records for each own slice that the machine runs as user `uid` with the VFIO devices that it has opened. Without effect
    /// where the keeper has the locks.
    ///
    /// # Errors
    /// [`ReserveError::Ledger`].
    pub(crate) fn record_process(&self, uid: u32) -> Result<(), ReserveError> {
        if lock(&self.table).keeper_has_locks {
            return Ok(());
        }
        let recorded = self.map_own(|_, lease| lease.record_process(uid));
        Ok(recorded.into_iter().collect::<Result<(), _>>()?)
    }

    /// Leaves this process's slices to the keeper, which has their locks.
    pub(crate) fn leave_own(&self) {
        lock(&self.table).keeper_has_locks = true;
    }

    /// Whether a slice is of a broker.
    pub(crate) fn has_broker(&self) -> bool {
        lock(&self.table).named.iter().any(|named| named.taken.is_of_broker())
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
}

#[cfg(test)]
impl From<Vec<SliceRecord>> for Leases {
    fn from(records: Vec<SliceRecord>) -> Self {
        Self { records: Arc::new(Mutex::new(records)), ..Self::default() }
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
