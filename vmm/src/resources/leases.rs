//! Slices of the host's regions: taken before a machine is built, scrubbed and given back after its end.
//!
//! What kills this process unlocks its slices and leaves them dirty: their next owner's grant scrubs them.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use egm_address::CpuSet;
use egm_device::carve::plan::Request;
use egm_device::lease::Lease;
use egm_device::ledger::{GrantError, Identity, Ledger, LedgerError, Paths, Progress, Watch};
use egm_device::owner::Owner;
use egm_device::region::Region;

use crate::config::Spec;
use crate::error::{Blame, Report};
use crate::facts::{Facts, FactsError};
use crate::plan::{BackingPlan, Plan, PlanError, plan};

/// Others may take a planned place before this process does; whoever loses that often is told.
const ATTEMPTS: u32 = 4;

/// Why a machine does not have its slices.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The host cannot be looked at.
    #[error(transparent)]
    Facts(#[from] FactsError),
    /// There is no plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// This boot has no name.
    #[error("cannot read /proc/sys/kernel/random/boot_id")]
    Boot(#[source] io::Error),
    /// The host's ledger cannot be kept.
    #[error("cannot use the ledger of the host's slices")]
    Ledger(#[from] LedgerError),
    /// A slice is refused.
    #[error("cannot take slice \"{id}\"")]
    Grant {
        /// The backing.
        id: String,
        /// The reason.
        #[source]
        source: GrantError,
    },
    /// A slice could not be scrubbed at the end.
    #[error("slice \"{id}\" is free again, but not scrubbed: its next owner waits for that")]
    GiveBack {
        /// The backing.
        id: String,
        /// The reason.
        #[source]
        source: GrantError,
    },
    /// A slice is still in use at the end.
    #[error(
        "slice \"{id}\" is not given back before this process ends: storage that hangs may still write to it"
    )]
    InUse {
        /// The backing.
        id: String,
    },
}

impl Report for LeaseError {
    fn blame(&self) -> Blame {
        match self {
            Self::Facts(error) => error.blame(),
            Self::Plan(error) => error.blame(),
            Self::Ledger(error) => error.blame(),
            Self::Grant { source, .. } | Self::GiveBack { source, .. } => source.blame(),
            Self::Boot(_) | Self::InUse { .. } => Blame::Host,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Facts(error) => error.help(),
            Self::Plan(error) => error.help(),
            Self::Ledger(error) => error.help(),
            Self::Grant { source, .. } | Self::GiveBack { source, .. } => source.help(),
            Self::Boot(_) | Self::InUse { .. } => None,
        }
    }
}

/// Hears, from any thread, what is done for which slice.
pub type SliceProgress<'a> = &'a (dyn Fn(&str, Progress) + Sync);

/// The slices of one machine, by the id of their backing.
#[derive(Debug, Default)]
pub struct Leases(Vec<(String, Arc<Lease>)>);

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
            let leases = match Self::of(&planned, &facts, progress) {
                Err(LeaseError::Grant { source: GrantError::Short { .. }, .. }) if attempt < ATTEMPTS => None,
                other => Some(other?),
            };
            if let Some(leases) = leases {
                // Some kernels name retired pages only to whoever opens the region: holes of the guest's memory.
                if leases.tell_retired(&mut facts) {
                    planned = plan(spec, &facts)?;
                }
                if attempt >= ATTEMPTS || leases.are_those_of(&planned) {
                    return Ok((facts, planned, leases));
                }
            }
            attempt += 1;
        }
    }

    fn of(plan: &Plan, facts: &Facts, progress: SliceProgress<'_>) -> Result<Self, LeaseError> {
        let wanted: Vec<(&BackingPlan, &Region)> = plan
            .backings
            .iter()
            .filter_map(|backing| {
                let name = backing.region.as_ref()?;
                let host = facts.regions.iter().find(|host| host.region.name == *name)?;
                Some((backing, &host.region))
            })
            .collect();
        if wanted.is_empty() {
            return Ok(Self::default());
        }
        let root = Path::new("/");
        let ledger = Ledger::open(Paths::below(root), Identity::read(root).map_err(LeaseError::Boot)?)?;
        let owner = Owner::this(&plan.name);
        let take = |(backing, region): (&BackingPlan, &Region)| {
            let request = Request { at: Some(backing.offset), ..Request::new(backing.size, owner.clone()) };
            let (near, told) = (near(facts, region), |step| progress(&backing.id, step));
            let watch = Watch { progress: &told, near: near.as_ref(), ..Watch::nobody() };
            let lease = ledger.grant(region, &request, &watch);
            let lease = lease.map_err(|source| LeaseError::Grant { id: backing.id.clone(), source })?;
            Ok((backing.id.clone(), Arc::new(lease)))
        };
        wanted.into_iter().map(take).collect::<Result<_, _>>().map(Self)
    }

    /// The slice behind backing `id`.
    pub(crate) fn get(&self, id: &str) -> Option<&Arc<Lease>> {
        self.0.iter().find(|(other, _)| other == id).map(|(_, lease)| lease)
    }

    /// Puts retired pages that `facts` lack into them; whether there were any.
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

    /// Scrubs all slices and gives them back. A signal ends the scrub: what is then dirty, the next owner's grant cleans.
    /// What was not done is returned.
    pub fn give_back(self, facts: &Facts, progress: SliceProgress<'_>) -> Vec<LeaseError> {
        let cancel = Arc::new(AtomicBool::new(false));
        if !self.0.is_empty() {
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
                // Without it a signal is not heeded until the scrub is over: no reason to keep a dirty slice.
                let _ = signal_hook::flag::register(signal, Arc::clone(&cancel));
            }
        }
        let give = |(id, lease): (String, Arc<Lease>)| {
            let Some(lease) = Arc::into_inner(lease) else { return Some(LeaseError::InUse { id }) };
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
