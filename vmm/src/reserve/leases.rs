//! Slices of the host's regions: taken before a machine is built, scrubbed and returned after its end.
//!
//! A kill of this process unlocks its slices and leaves them dirty: their next owner's grant scrubs them.

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

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
    fn new(backing: &BackingPlan, taken: Option<&Arc<Taken>>) -> Self {
        let owner = taken.and_then(|taken| match taken.as_ref() {
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
}

/// A slice that this process locked itself.
pub(crate) struct OwnSlice<'a> {
    /// Id of its backing.
    pub(crate) id: &'a str,
    pub(crate) lease: &'a Lease,
}

/// The slices of one machine.
#[derive(Debug, Default, Clone)]
pub struct Leases(Vec<Named>);

impl Leases {
    /// Takes the slices that `plan` names.
    ///
    /// # Errors
    /// [`ReserveError`]; nothing stays taken.
    pub(crate) fn take(
        spec: &Spec,
        plan: &Plan,
        facts: &Facts,
        progress: SliceProgress<'_>,
    ) -> Result<Self, ReserveError> {
        let mut leases = Self::default();
        if plan.backings.iter().all(|backing| backing.region.is_none()) {
            return Ok(leases);
        }
        let root = Path::new("/");
        let ledger = Ledger::open(Paths::below(root), Identity::read(root).map_err(ReserveError::Boot)?)?;
        let owner = Owner::this(&plan.name).in_domain(spec.trust_domain.clone());
        for backing in &plan.backings {
            let Some(host) = backing.region.as_ref().and_then(|name| facts.region(name)) else { continue };
            let (id, region) = (&backing.id, &host.region);
            let request = Request { at: Some(backing.offset), ..Request::new(backing.size, owner.clone()) };
            let (near, report) = (near(facts, region), |step| progress(id, step));
            let watch = Watch { progress: &report, near: near.as_ref(), ..Watch::unobserved() };
            let lease = ledger.grant(region, &request, &watch);
            let lease = lease.map_err(|source| ReserveError::Grant { id: id.clone(), source })?;
            leases.0.push(Named { id: id.clone(), taken: Arc::new(Taken::Own(Box::new(lease))) });
        }
        Ok(leases)
    }

    /// Adds the slice of backing `id` that a broker granted.
    ///
    /// # Errors
    /// [`ReserveError::Broker`] where its memory did not come with it.
    pub(super) fn add(&mut self, id: String, lease: Box<BrokerLease>) -> Result<(), ReserveError> {
        match lease.backing() {
            Ok(memory) => {
                let taken = Arc::new(Taken::Broker(lease, BrokerMemory(memory)));
                self.0.push(Named { id, taken });
                Ok(())
            }
            Err(source) => Err(ReserveError::Broker { id, source }),
        }
    }

    /// The slice behind backing `id`.
    pub(crate) fn get(&self, id: &str) -> Option<&Arc<Taken>> {
        self.0.iter().find(|named| named.id == id).map(|named| &named.taken)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Named> {
        self.0.iter()
    }

    /// Slices that this process locked itself.
    pub(crate) fn own(&self) -> impl Iterator<Item = OwnSlice<'_>> {
        self.0.iter().filter_map(|named| match named.taken.as_ref() {
            Taken::Own(lease) => Some(OwnSlice { id: &named.id, lease }),
            Taken::Broker(..) => None,
        })
    }

    /// The slices of `plan`, for the operator.
    pub(crate) fn records(&self, plan: &Plan) -> Vec<SliceRecord> {
        let is_egm = |index| {
            let egm = |piece: &MemoryPlan| piece.backing == index && piece.kind == MemoryKind::Egm;
            plan.memory.iter().any(egm)
        };
        let slices = plan.backings.iter().enumerate();
        let slices = slices.filter(|(index, backing)| backing.device || is_egm(*index));
        slices.map(|(_, backing)| SliceRecord::new(backing, self.get(&backing.id))).collect()
    }

    /// Records for each own slice that the machine runs as user `uid` with the VFIO devices that it has opened.
    ///
    /// # Errors
    /// [`ReserveError::Ledger`].
    pub(crate) fn record_process(&self, uid: u32) -> Result<(), ReserveError> {
        self.own().try_for_each(|own| Ok(own.lease.record_process(uid)?))
    }

    /// Keeps the broker's slices only; the others stay with the process that holds their locks.
    pub(crate) fn leave_own(mut self) -> Self {
        self.0.retain(|named| matches!(named.taken.as_ref(), Taken::Broker(..)));
        self
    }

    /// Whether a slice is of a broker.
    pub(crate) fn has_broker(&self) -> bool {
        self.0.iter().any(|named| named.taken.is_of_broker())
    }

    /// Whether a slice is of an EGM device: its list of retired pages is read while the guest runs.
    pub(crate) fn has_egm_device(&self) -> bool {
        self.0.iter().any(|named| matches!(named.taken.region().kind, RegionKind::Egm { .. }))
    }

    /// Adds to `facts` the retired pages that they lack; returns whether there were any.
    pub(crate) fn add_retired(&self, facts: &mut Facts) -> bool {
        let mut has_new = false;
        for named in &self.0 {
            let region = named.taken.region();
            let known = facts.regions.iter_mut().find(|host| host.region.name == region.name);
            if let Some(known) = known.filter(|host| host.region.retired != region.retired) {
                known.region.retired = region.retired.clone();
                has_new = true;
            }
        }
        has_new
    }

    /// Whether they lie where `plan` has them.
    pub(crate) fn are_those_of(&self, plan: &Plan) -> bool {
        let mut backings = plan.backings.iter().filter(|backing| backing.region.is_some());
        backings.all(|backing| self.get(&backing.id).is_some_and(|taken| taken.is_at(backing)))
    }

    /// Scrubs and returns all slices. A signal ends the scrub; the next owner's grant scrubs what is left. The result has
    /// the errors of slices that were not scrubbed or not returned.
    pub fn return_all(self, facts: &Facts, progress: SliceProgress<'_>) -> Vec<ReserveError> {
        let cancel = Arc::new(AtomicBool::new(false));
        if !self.0.is_empty() {
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
                // Without it no signal ends the scrub in order: no reason to keep a dirty slice.
                let _ = signal_hook::flag::register(signal, Arc::clone(&cancel));
            }
        }
        let given = self.0.into_iter().map(|named| named.return_slice(facts, progress, &cancel));
        given.filter_map(Result::err).collect()
    }
}

impl Named {
    fn return_slice(
        self,
        facts: &Facts,
        progress: SliceProgress<'_>,
        cancel: &AtomicBool,
    ) -> Result<(), ReserveError> {
        let id = self.id;
        match Arc::into_inner(self.taken) {
            None => Err(ReserveError::InUse { id }),
            Some(Taken::Broker(lease, memory)) => {
                drop(memory);
                lease.return_slice(cancel).map_err(|source| ReserveError::Broker { id, source })
            }
            Some(Taken::Own(lease)) => {
                let (near, report) = (near(facts, lease.region()), |step| progress(&id, step));
                let watch = Watch { progress: &report, cancel, near: near.as_ref(), pace: None };
                let given = lease.return_slice(&watch);
                given.map_err(|source| ReserveError::GiveBack { id: id.clone(), source })
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
            let records = Leases::default().records(&plan);
            records.into_iter().map(|record| (record.id, record.region.is_some())).collect::<Vec<_>>()
        };
        assert_eq!(records("grace-1gpu-egm.json", "grace.json"), [("egm0".to_owned(), true)]);
        assert_eq!(records("demo.json", "x86-server.json"), [("egm0".to_owned(), false)]);
        assert_eq!(records("smoke.json", "x86-server.json"), []);
    }
}
