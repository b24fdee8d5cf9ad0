//! Slices of the host's regions: taken before a machine is built, scrubbed and given back after its end.
//!
//! A kill of this process unlocks its slices and leaves them dirty: their next owner's grant scrubs them.

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use egm_address::{CpuSet, InRegion, SpanSet};
use egm_device::Backing;
use egm_device::broker::BrokerLease;
use egm_device::carve::plan::Request;
use egm_device::lease::Lease;
use egm_device::ledger::{GrantError, Identity, Ledger, Paths, Progress, Watch};
use egm_device::owner::Owner;
use egm_device::region::{Region, Slice};

use super::lease_error::{ATTEMPTS, LeaseError};
use super::loans::{self, Broker};
use crate::config::Spec;
use crate::error::Report;
use crate::facts::{Facts, FactsError};
use crate::plan::{BackingPlan, Plan, plan};

/// A slice of this machine.
#[derive(Debug)]
pub(crate) enum Taken {
    /// Locked by this process.
    Own(Box<Lease>),
    /// Granted by a broker, which handed over the memory.
    Lent(Box<BrokerLease>, Passed),
}

/// Memory of a loan, as the broker handed it over.
pub(crate) struct Passed(Box<dyn Backing>);

impl fmt::Debug for Passed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Passed").field("offset", &self.0.offset()).field("size", &self.0.size()).finish()
    }
}

impl Taken {
    /// File and range of the slice.
    pub(crate) fn backing(&self) -> &dyn Backing {
        match self {
            Self::Own(lease) => lease.as_ref(),
            Self::Lent(_, Passed(backing)) => backing.as_ref(),
        }
    }

    /// The region, with every page that is retired so far.
    pub(crate) fn region(&self) -> &Region {
        match self {
            Self::Own(lease) => lease.region(),
            Self::Lent(loan, _) => loan.region(),
        }
    }

    /// Region, offset and size.
    pub(crate) fn slice(&self) -> &Slice {
        match self {
            Self::Own(lease) => lease.slice(),
            Self::Lent(loan, _) => loan.slice(),
        }
    }

    /// Keeps `bad` (bytes of the region) from later owners. A loan's broker records it when the slice is returned.
    pub(crate) fn retire(&self, bad: &SpanSet<InRegion>) -> Result<(), Box<dyn Report>> {
        match self {
            Self::Own(lease) => Ok(lease.retire(bad)?),
            Self::Lent(loan, _) => Ok(loan.retire(bad)?),
        }
    }
}

/// Delegates to the lease or the loan's memory.
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

/// The slices of one machine, by the id of their backing.
#[derive(Debug, Default, Clone)]
pub struct Leases(Vec<(String, Arc<Taken>)>);

impl Leases {
    /// The plan of `spec` and the slices that it names. `look` reads the host's facts, anew after each lost race.
    ///
    /// # Errors
    /// [`LeaseError`]; nothing stays taken.
    pub fn take(
        spec: &Spec,
        look: impl Fn() -> Result<Facts, FactsError>,
        progress: SliceProgress<'_>,
    ) -> Result<(Facts, Plan, Self), LeaseError> {
        let mut attempt = 1;
        loop {
            let mut facts = look()?;
            let mut planned = plan(spec, &facts)?;
            let leases = match Self::of(spec, &planned, &facts, progress) {
                Err(LeaseError::Grant { source: GrantError::Short { .. }, .. }) if attempt < ATTEMPTS => None,
                other => Some(other?),
            };
            if let Some(leases) = leases {
                // Some kernels report retired pages only through the open region: they become holes of guest memory.
                if leases.tell_retired(&mut facts) {
                    planned = plan(spec, &facts)?;
                }
                if leases.are_those_of(&planned) {
                    return Ok((facts, planned, leases));
                }
                if attempt >= ATTEMPTS {
                    return Err(LeaseError::Moved);
                }
            }
            attempt += 1;
        }
    }

    /// The slices of `spec` that `broker` grants, and the plan around them. `waiting` is called with a slice that must
    /// wait, and the reason.
    ///
    /// # Errors
    /// [`LeaseError`]; slices granted until then are returned.
    pub fn borrow(
        spec: &Spec,
        look: impl Fn() -> Result<Facts, FactsError>,
        broker: &Broker,
        waiting: &dyn Fn(&str, &str),
    ) -> Result<(Facts, Plan, Self), LeaseError> {
        let lent = broker.lend(spec, waiting)?;
        let (mut pinned, mut facts) = (spec.clone(), look()?);
        let notes = loans::pin(&mut pinned, &mut facts, &lent);
        let mut planned = plan(&pinned, &facts)?;
        planned.notes.extend(notes);
        let take = |(index, lent)| {
            let loans::Source::Loan(loan) = lent else { return None };
            let id = format!("egm{index}");
            Some(match loan.backing() {
                Ok(backing) => Ok((id, Arc::new(Taken::Lent(loan, Passed(backing))))),
                Err(source) => Err(LeaseError::Broker { id, source }),
            })
        };
        let taken = lent.into_iter().filter_map(take).collect::<Result<_, _>>()?;
        Ok((facts, planned, Self(taken)))
    }

    fn of(spec: &Spec, plan: &Plan, facts: &Facts, progress: SliceProgress<'_>) -> Result<Self, LeaseError> {
        let wanted: Vec<(&BackingPlan, &Region)> = plan
            .backings
            .iter()
            .filter_map(|backing| {
                let host = facts.region(backing.region.as_ref()?)?;
                Some((backing, &host.region))
            })
            .collect();
        if wanted.is_empty() {
            return Ok(Self::default());
        }
        let root = Path::new("/");
        let ledger = Ledger::open(Paths::below(root), Identity::read(root).map_err(LeaseError::Boot)?)?;
        let owner = Owner::this(&plan.name).in_domain(spec.trust_domain.clone());
        let take = |(backing, region): (&BackingPlan, &Region)| {
            let request = Request { at: Some(backing.offset), ..Request::new(backing.size, owner.clone()) };
            let (near, told) = (near(facts, region), |step| progress(&backing.id, step));
            let watch = Watch { progress: &told, near: near.as_ref(), ..Watch::unobserved() };
            let lease = ledger.grant(region, &request, &watch);
            let lease = lease.map_err(|source| LeaseError::Grant { id: backing.id.clone(), source })?;
            Ok((backing.id.clone(), Arc::new(Taken::Own(Box::new(lease)))))
        };
        wanted.into_iter().map(take).collect::<Result<_, _>>().map(Self)
    }

    /// The slice behind backing `id`.
    pub(crate) fn get(&self, id: &str) -> Option<&Arc<Taken>> {
        self.0.iter().find(|(other, _)| other == id).map(|(_, lease)| lease)
    }

    /// All slices, by the id of their backing.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Taken)> {
        self.0.iter().map(|(id, taken)| (id.as_str(), taken.as_ref()))
    }

    /// Slices that this process locked itself.
    pub(crate) fn own(&self) -> Vec<(&str, &Lease)> {
        let mut own = Vec::new();
        for (id, taken) in self.iter() {
            if let Taken::Own(lease) = taken {
                own.push((id, lease.as_ref()));
            }
        }
        own
    }

    /// Records for each own slice that the machine runs as user `uid` with the VFIO devices that it has opened.
    ///
    /// # Errors
    /// [`LeaseError::Ledger`].
    pub(crate) fn record_process(&self, uid: u32) -> Result<(), LeaseError> {
        self.own().into_iter().try_for_each(|(_, lease)| Ok(lease.record_process(uid)?))
    }

    /// Keeps the broker's slices only; the others stay with the process that holds their locks.
    pub(crate) fn leave_own(mut self) -> Self {
        self.0.retain(|(_, taken)| matches!(taken.as_ref(), Taken::Lent(..)));
        self
    }

    /// Adds to `facts` the retired pages that they lack; returns whether there were any.
    fn tell_retired(&self, facts: &mut Facts) -> bool {
        let mut news = false;
        for (_, lease) in &self.0 {
            let known = facts.regions.iter_mut().find(|host| host.region.name == lease.region().name);
            let Some(known) = known.filter(|host| host.region.retired != lease.region().retired) else {
                continue;
            };
            known.region.retired = lease.region().retired.clone();
            news = true;
        }
        news
    }

    fn are_those_of(&self, plan: &Plan) -> bool {
        plan.backings.iter().filter(|backing| backing.region.is_some()).all(|backing| {
            self.get(&backing.id).is_some_and(|lease| {
                let slice = lease.slice();
                (Some(&slice.region), slice.offset, slice.size.get())
                    == (backing.region.as_ref(), backing.offset, backing.size)
            })
        })
    }

    /// Scrubs all slices and gives them back. A signal ends the scrub; the next owner's grant scrubs what is left.
    /// Returns the errors of slices that were not scrubbed or not given back.
    pub fn give_back(self, facts: &Facts, progress: SliceProgress<'_>) -> Vec<LeaseError> {
        let cancel = Arc::new(AtomicBool::new(false));
        if !self.0.is_empty() {
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
                // Without it a signal is not heeded until the scrub is over: no reason to keep a dirty slice.
                let _ = signal_hook::flag::register(signal, Arc::clone(&cancel));
            }
        }
        let give = |(id, taken): (String, Arc<Taken>)| {
            let lease = match Arc::into_inner(taken) {
                None => return Some(LeaseError::InUse { id }),
                Some(Taken::Lent(loan, lent)) => {
                    drop(lent);
                    return loan.give_back(&cancel).err().map(|source| LeaseError::Broker { id, source });
                }
                Some(Taken::Own(lease)) => lease,
            };
            let (near, told) = (near(facts, lease.region()), |step| progress(&id, step));
            let watch = Watch { progress: &told, cancel: &cancel, near: near.as_ref(), pace: None };
            let given = lease.give_back(&watch);
            given.err().map(|source| LeaseError::GiveBack { id: id.clone(), source })
        };
        self.0.into_iter().filter_map(give).collect()
    }
}

/// The host processors at a region's node.
fn near(facts: &Facts, region: &Region) -> Option<CpuSet> {
    let node = facts.nodes.iter().find(|node| Some(node.id) == region.node)?;
    Some(node.cpus.clone()).filter(|cpus| !cpus.is_empty())
}
